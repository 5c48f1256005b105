//! Cases and the suite that any plugin must pass
