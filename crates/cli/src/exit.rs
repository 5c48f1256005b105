//! Errors as one line each, and exit codes.

use attache_conformance::{CheckError, ExecuteError};
use attache_core::{
    ErrorCode,
    config::ConfigError,
    plan::PlanError,
    registry::RegistryError,
    selector::{SelectionError, Source},
};
use attache_engine::EngineError;
use std::{io, path::Path, process::ExitCode};

/// Exit codes, as `--help` documents them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Code {
    Other = 1,
    Usage = 2,
    NothingSuitable = 3,
    PluginUnusable = 4,
    WrongResult = 5,
}

impl From<Code> for ExitCode {
    fn from(code: Code) -> Self {
        Self::from(code as u8)
    }
}

/// A failed command.
#[derive(Debug)]
pub struct Failure {
    code: Code,
    message: String,
    detail: Option<String>,
    /// The reader of stdout is gone: not worth a word.
    is_quiet: bool,
}

pub type Outcome = Result<(), Failure>;

/// A reason that says what it is about.
pub fn about(source: &Source, reason: &str) -> String {
    let path = source.to_string();
    if reason.contains(&path) { reason.to_owned() } else { format!("{path}: {reason}") }
}

impl Failure {
    pub fn new(code: Code, message: impl ToString) -> Self {
        Self { code, message: message.to_string(), detail: None, is_quiet: false }
    }

    pub fn usage(message: impl ToString) -> Self {
        Self::new(Code::Usage, message)
    }

    /// A plugin that was named and cannot be used.
    pub fn plugin(source: &Source, reason: &str, detail: Option<String>) -> Self {
        Self { detail, ..Self::new(Code::PluginUnusable, about(source, reason)) }
    }

    pub fn file(path: &Path, error: impl std::fmt::Display) -> Self {
        Self::new(Code::Other, format!("{}: {error}", path.display()))
    }
}

/// Prints what failed and gives the exit code.
pub fn report(outcome: Outcome, verbose: bool) -> ExitCode {
    let Err(failure) = outcome else { return ExitCode::SUCCESS };
    if failure.is_quiet {
        return ExitCode::SUCCESS;
    }
    eprintln!("error: {}", failure.message);
    match failure.detail {
        Some(detail) if verbose => eprintln!("{detail}"),
        Some(_) => eprintln!("hint: --verbose prints the details"),
        None => {}
    }
    failure.code.into()
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::usage(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let is_quiet = error.kind() == io::ErrorKind::BrokenPipe;
        Self { is_quiet, ..Self::new(Code::Other, format!("cannot write to stdout: {error}")) }
    }
}

impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        match error.io_error_kind() {
            Some(kind) => io::Error::from(kind).into(),
            None => Self::new(Code::Other, error),
        }
    }
}

impl From<SelectionError> for Failure {
    fn from(error: SelectionError) -> Self {
        let code = if matches!(error, SelectionError::Request { .. }) { Code::Usage } else { Code::NothingSuitable };
        Self::new(code, error)
    }
}

impl From<RegistryError> for Failure {
    fn from(error: RegistryError) -> Self {
        Self { message: error.to_string(), ..Self::from(*error.error) }
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        Self::new(Code::NothingSuitable, error)
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let code = match &error {
            EngineError::NoBackend(_) => Code::NothingSuitable,
            EngineError::Option { .. } => Code::Usage,
            EngineError::Backend(_) => Code::PluginUnusable,
            _ => Code::Other,
        };
        Self::new(code, error)
    }
}

impl From<ExecuteError> for Failure {
    fn from(error: ExecuteError) -> Self {
        let code = match &error {
            ExecuteError::TooLarge { .. } => Code::Usage,
            ExecuteError::Backend { source, .. } if source.code == ErrorCode::Unsupported => Code::NothingSuitable,
            _ => Code::PluginUnusable,
        };
        Self::new(code, error)
    }
}

impl From<CheckError> for Failure {
    fn from(error: CheckError) -> Self {
        let code = match &error {
            CheckError::Nan { .. } | CheckError::Wrong { .. } | CheckError::Size { .. } | CheckError::NoLse => {
                Code::WrongResult
            }
            // The reference cannot judge: it is the case that is at fault, not the result.
            _ => Code::Usage,
        };
        Self::new(code, error)
    }
}
