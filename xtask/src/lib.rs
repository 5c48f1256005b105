//! Everything around the build
