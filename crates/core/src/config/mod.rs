//! What the operator configures, from a file, the environment and flags, in that order of increasing
//! precedence. Every value remembers where it came from; an unknown key or variable is an error.
//!
//! Must not know: what backends exist, how plugins are loaded.

mod error;
mod file;
mod resolve;
mod variables;

pub use error::{BadValue, ConfigError};
pub use resolve::{Config, Overrides, PluginSettings, Trust};
pub use variables::{VARIABLES, Variable};

#[cfg(test)]
mod tests;
