//! Errors of a backend's functions, as both sides see them.

use crate::abi::Status;
use std::fmt;

/// Why a call failed. An integer crosses the ABI; an unknown one stays what it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum ErrorCode {
    /// An argument breaks the contract; nothing was changed.
    InvalidArgument,
    /// The request is well formed, and this backend cannot do it.
    Unsupported,
    /// Memory (host, device or workspace) does not suffice.
    OutOfMemory,
    /// The device or its driver is missing or gone.
    DeviceUnavailable,
    /// An index (a block id, a slot) lies outside its tensor.
    OutOfRange,
    /// The plugin's code panicked; the panic was caught inside the plugin.
    Panic,
    /// Any other failure inside the plugin.
    Internal,
    /// The interface or generation asked for does not exist.
    NotFound,
    /// A code that this version does not know.
    Other(i32),
}

impl ErrorCode {
    /// The code as it crosses the ABI.
    #[must_use]
    pub fn status(self) -> Status {
        match self {
            Self::InvalidArgument => Status::INVALID_ARGUMENT,
            Self::Unsupported => Status::UNSUPPORTED,
            Self::OutOfMemory => Status::OUT_OF_MEMORY,
            Self::DeviceUnavailable => Status::DEVICE_UNAVAILABLE,
            Self::OutOfRange => Status::OUT_OF_RANGE,
            Self::Panic => Status::PANIC,
            Self::Internal => Status::INTERNAL,
            Self::NotFound => Status::NOT_FOUND,
            // 0 would read as success.
            Self::Other(0) => Status::INTERNAL,
            Self::Other(code) => Status(code),
        }
    }

    /// The code of a status that is not [`Status::OK`].
    #[must_use]
    pub fn from_status(status: Status) -> Self {
        match status {
            Status::INVALID_ARGUMENT => Self::InvalidArgument,
            Status::UNSUPPORTED => Self::Unsupported,
            Status::OUT_OF_MEMORY => Self::OutOfMemory,
            Status::DEVICE_UNAVAILABLE => Self::DeviceUnavailable,
            Status::OUT_OF_RANGE => Self::OutOfRange,
            Status::PANIC => Self::Panic,
            Status::INTERNAL => Self::Internal,
            Status::NOT_FOUND => Self::NotFound,
            Status(other) => Self::Other(other),
        }
    }

    /// The code's name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::InvalidArgument => "invalid argument",
            Self::Unsupported => "unsupported",
            Self::OutOfMemory => "out of memory",
            Self::DeviceUnavailable => "device unavailable",
            Self::OutOfRange => "out of range",
            Self::Panic => "panic in the plugin",
            Self::Internal => "internal error of the plugin",
            Self::NotFound => "not found",
            Self::Other(_) => "unknown error code",
        }
    }
}

/// A failed call to a backend: a code, one readable line, and details by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendError {
    /// What sort of failure.
    pub code: ErrorCode,
    /// What was asked, what was found, what to do.
    pub message: String,
    /// Details, for instance `("block_id", "17")`.
    pub attributes: Vec<(String, String)>,
}

impl BackendError {
    /// An error with a message and no details.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), attributes: Vec::new() }
    }

    /// [`ErrorCode::InvalidArgument`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidArgument, message)
    }

    /// [`ErrorCode::Unsupported`].
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Unsupported, message)
    }

    /// [`ErrorCode::OutOfRange`].
    pub fn out_of_range(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::OutOfRange, message)
    }

    /// Adds a detail.
    #[must_use]
    pub fn with(mut self, key: &str, value: impl fmt::Display) -> Self {
        self.attributes.push((key.to_owned(), value.to_string()));
        self
    }
}

impl fmt::Display for BackendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.name(), self.message)?;
        if !self.attributes.is_empty() {
            let details: Vec<String> = self.attributes.iter().map(|(k, v)| format!("{k}={v}")).collect();
            write!(f, " [{}]", details.join(", "))?;
        }
        Ok(())
    }
}

impl std::error::Error for BackendError {}

/// The result of a backend's function.
pub type Result<T> = std::result::Result<T, BackendError>;
