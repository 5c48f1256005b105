//! Why a configuration cannot be used.

use crate::policy::{Origin, did_you_mean};
use std::path::PathBuf;

/// Why a configuration cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the configuration: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        reason: String,
    },
    /// The file is no TOML of the known form.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Where and why, in one line.
        reason: String,
    },
    /// There is no such variable.
    #[error("unknown environment variable {found}{}", did_you_mean(nearest.as_deref()))]
    UnknownVariable {
        /// What was found.
        found: String,
        /// A known one that may be meant.
        nearest: Option<String>,
    },
    /// A value that makes no sense.
    #[error(transparent)]
    Value(Box<BadValue>),
}

/// A value that makes no sense.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} ({origin}) is '{value}'; valid: {valid}{}", did_you_mean(nearest.as_deref()))]
pub struct BadValue {
    /// The key.
    pub what: String,
    /// Where it came from.
    pub origin: Origin,
    /// What was found.
    pub value: String,
    /// What is valid.
    pub valid: String,
    /// A valid one that may be meant.
    pub nearest: Option<String>,
}
