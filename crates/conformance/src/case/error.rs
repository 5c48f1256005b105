//! What is wrong with a case. Must not know how a case is run.

use std::path::PathBuf;

/// A case, or a case's file, that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CaseError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// Not a safetensors file, or a broken one.
    #[error("not a readable safetensors file: {0}")]
    NotSafetensors(String),
    /// A metadata key that no case has.
    #[error("unknown metadata key '{found}'; valid: {}", valid.join(", "))]
    UnknownKey {
        /// What was found.
        found: String,
        /// What exists.
        valid: &'static [&'static str],
    },
    /// A tensor that no case has.
    #[error("unknown tensor '{found}'; valid: {}", valid.join(", "))]
    UnknownTensor {
        /// What was found.
        found: String,
        /// What exists.
        valid: &'static [&'static str],
    },
    /// A tensor that a case needs.
    #[error("the tensor '{name}' is missing")]
    MissingTensor {
        /// Its name.
        name: &'static str,
    },
    /// A metadata value that cannot be used.
    #[error("metadata {key} = '{found}': expected {expected}")]
    Metadata {
        /// The key.
        key: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A tensor of the wrong element type.
    #[error("the tensor '{tensor}' has element type {found}; expected {expected}")]
    Dtype {
        /// Its name.
        tensor: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A tensor of the wrong shape.
    #[error("the tensor '{tensor}' has shape {found:?}; expected {expected}")]
    Shape {
        /// Its name.
        tensor: String,
        /// What was found.
        found: Vec<usize>,
        /// What was expected.
        expected: String,
    },
    /// Sizes or values that do not fit each other.
    #[error("{0}")]
    Inconsistent(String),
}

impl CaseError {
    pub(crate) fn lengths(text: impl Into<String>) -> Self {
        Self::Inconsistent(text.into())
    }

    pub(crate) fn metadata(key: &str, found: &str, expected: impl Into<String>) -> Self {
        Self::Metadata { key: key.to_owned(), found: found.to_owned(), expected: expected.into() }
    }
}
