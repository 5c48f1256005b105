//! What can go wrong in the engine, as types: each says what was asked, what was found, what to do.
//!
//! Owns the error types only.

use attache_core::{BackendError, runtime::KvCacheError};
use std::path::PathBuf;

/// Why a GGUF file cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// Not a GGUF file, or a damaged one.
    #[error("not a readable GGUF file: {reason}; download or convert it again")]
    Unreadable {
        /// What the reader met.
        reason: String,
    },
    /// An architecture that the engine has no code for.
    #[error("architecture '{found}' is not supported; the engine runs {supported}")]
    Architecture {
        /// The file's.
        found: String,
        /// What would work.
        supported: &'static str,
    },
    /// A key that the model cannot do without.
    #[error("metadata key '{key}' is missing; the file is incomplete, convert it again")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A key whose value makes no sense.
    #[error("metadata key '{key}' is {found}; expected {expected}")]
    BadValue {
        /// The key.
        key: String,
        /// Its value, shortened.
        found: String,
        /// What is valid.
        expected: String,
    },
    /// A tensor that the model cannot do without.
    #[error("tensor '{name}' is missing; the file is incomplete, convert it again")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor whose shape contradicts the metadata.
    #[error("tensor '{name}' has shape {found:?} (rows, columns); the metadata ({because}) needs {expected:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// The shape that follows from the metadata.
        expected: Vec<usize>,
        /// Which metadata.
        because: String,
    },
    /// A tensor that cannot be read.
    #[error("tensor '{name}' cannot be read: {reason}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What the reader met.
        reason: String,
    },
}

/// Why a tokenizer cannot be made or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// A tokenizer of a kind that the engine has no code for.
    #[error("tokenizer model '{found}' is not supported; the engine reads gpt2 and llama")]
    Unsupported {
        /// The file's `tokenizer.ggml.model`.
        found: String,
    },
    /// A pre-tokenizer of a kind that the engine has no code for: another one would give other tokens.
    #[error("pre-tokenizer '{found}' is not supported; the engine knows {supported}")]
    UnsupportedPre {
        /// The file's `tokenizer.ggml.pre`.
        found: String,
        /// What would work.
        supported: &'static str,
    },
    /// The vocabulary contradicts itself.
    #[error("the vocabulary cannot be used: {reason}")]
    Vocabulary {
        /// What is wrong.
        reason: String,
    },
    /// A text that cannot be encoded.
    #[error("the text cannot be encoded: {reason}")]
    Encode {
        /// What is wrong.
        reason: String,
    },
}

/// Why a prompt was not run. The other prompts go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RefusedRequest {
    /// It would not fit even if it were alone.
    #[error(
        "the request may grow to {tokens} tokens and needs {needed} blocks of {block_size}; the cache has {available}: lower max_tokens, shorten the prompt or give the cache more blocks"
    )]
    NeverFits {
        /// Prompt and new tokens.
        tokens: usize,
        /// Blocks for them.
        needed: usize,
        /// Blocks of the whole cache.
        available: usize,
        /// Tokens of a block.
        block_size: usize,
    },
    /// The prompt fills the context by itself.
    #[error("the prompt has {tokens} tokens; the context holds {max_context}, one of them new: shorten the prompt")]
    PromptTooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Most tokens of a sequence.
        max_context: usize,
    },
    /// No token to start from.
    #[error("the prompt has no tokens, and the model adds none: give at least one")]
    EmptyPrompt,
    /// A token that the model does not have.
    #[error("the prompt holds token {token}; the vocabulary has {vocab_size}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab_size: usize,
    },
}

/// A failed call of a backend, and why that backend had been chosen.
#[derive(Debug, thiserror::Error)]
#[error("backend {backend} ({source_of}, chosen because {why}), layer {layer}, {call}: {error}")]
pub struct BackendFailure {
    /// The backend.
    pub backend: String,
    /// Where its plugin comes from.
    pub source_of: String,
    /// Why it was chosen.
    pub why: String,
    /// The layer's name.
    pub layer: String,
    /// What was called.
    pub call: &'static str,
    /// The backend's answer.
    pub error: BackendError,
}

/// Any failure of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A file that cannot be opened or read.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A GGUF file that cannot be used.
    #[error("{path}: {source}")]
    Gguf {
        /// The file.
        path: PathBuf,
        /// Why.
        source: GgufError,
    },
    /// A tokenizer that cannot be made or used.
    #[error("tokenizer: {0}")]
    Tokenizer(#[from] TokenizerError),
    /// A model of another form that cannot be used.
    #[error("model {model}: {reason}")]
    Model {
        /// Which.
        model: String,
        /// What is wrong and what is expected.
        reason: String,
    },
    /// An option that makes no sense.
    #[error("option {name} = {found}: expected {expected}")]
    Option {
        /// The option.
        name: &'static str,
        /// Its value.
        found: String,
        /// What is valid.
        expected: String,
    },
    /// The layers have no backends that work together.
    #[error("{0}")]
    NoBackend(Box<dyn std::error::Error + Send + Sync>),
    /// A backend's call failed.
    #[error(transparent)]
    Backend(#[from] Box<BackendFailure>),
    /// The cache cannot be allocated.
    #[error("layer {layer}: {source}")]
    Cache {
        /// The layer's name.
        layer: String,
        /// Why.
        source: KvCacheError,
    },
    /// A fault of the engine itself: its bookkeeping contradicts itself.
    #[error("internal error of the engine: {0}; please report it")]
    Internal(String),
}

/// The result of the engine's functions.
pub type Result<T, E = EngineError> = std::result::Result<T, E>;
