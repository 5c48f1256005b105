//! From a file to a checked function table.
//!
//! Everything that can be checked without opening a library is checked before `dlopen`: a static
//! constructor runs inside it, and a truncated file kills the process there. A library is opened
//! once per file, with immediate and local binding, and never unloaded: threads, thread-locals and
//! `tracing` call sites of a plugin may outlive every object it made.
//!
//! Must not know: policy, requests, where files are searched.

mod elf;
mod error;
mod file;
pub(crate) mod linux;
mod open;

pub use elf::ElfProblem;
pub use error::LoadError;
pub use linux::WritableBy;
pub use open::{OpenPlugin, link, open};

pub(crate) use elf::{HEADER_BYTES, header_problem};
pub(crate) use open::check_generation;

use crate::plugin::PluginMetadata;
use std::path::Path;

/// What the operator allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub struct LoadOptions {
    /// Open libraries that others may write to, or whose directory others may write to. Off: whoever
    /// can write there can run code in this process.
    pub allow_writable_by_others: bool,
}

/// What a library says of itself in its metadata section, read without opening it.
///
/// # Errors
/// When the file cannot be read, is no complete library for this machine, or has no such section.
pub fn read_metadata(path: &Path) -> Result<PluginMetadata, LoadError> {
    file::LibraryFile::open(path, path)?.metadata()
}
