//! The command line of Attaché
