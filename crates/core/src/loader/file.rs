//! A library as a file: read, hashed, and not opened as a library.

use super::{
    elf::{self, ElfProblem},
    error::LoadError,
    linux::FileId,
};
use crate::plugin::PluginMetadata;
use object::ReadCache;
use sha2::{Digest, Sha256};
use std::{
    fmt::Write as _,
    fs::File,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
};

/// No library is larger: its own code could not reach all of it.
const MAX_BYTES: u64 = 1 << 32;

/// A regular file that may be a library.
pub(super) struct LibraryFile {
    path: PathBuf,
    file: File,
    id: FileId,
}

impl LibraryFile {
    /// Opens the file at `real` for reading; errors call it `path`. Only regular files: reading
    /// anything else might never end.
    pub fn open(path: &Path, real: &Path) -> Result<Self, LoadError> {
        let unreadable = |reason: String| LoadError::Unreadable { path: path.to_owned(), reason };
        // Looked at before it is opened, since opening a pipe waits for its other end.
        let is_file = std::fs::metadata(real).map_err(|error| unreadable(error.to_string()))?.is_file();
        if !is_file {
            return Err(unreadable("not a regular file".to_owned()));
        }
        let file = File::open(real).map_err(|error| unreadable(error.to_string()))?;
        let metadata = file.metadata().map_err(|error| unreadable(error.to_string()))?;
        if metadata.len() > MAX_BYTES {
            let problem = ElfProblem::TooLarge { size: metadata.len() };
            return Err(LoadError::Elf { path: path.to_owned(), problem });
        }
        Ok(Self { path: path.to_owned(), file, id: FileId::of(&metadata) })
    }

    pub fn id(&self) -> FileId {
        self.id
    }

    /// Checks that it is a complete library for this machine, and reads its metadata section.
    pub fn metadata(&self) -> Result<PluginMetadata, LoadError> {
        elf::metadata(&ReadCache::new(&self.file))
            .map_err(|problem| LoadError::Elf { path: self.path.clone(), problem })
    }

    /// Its SHA-256 in hexadecimal digits.
    pub fn sha256(&self) -> Result<String, LoadError> {
        let mut hash = Sha256::new();
        let mut part = vec![0; 1 << 16];
        let mut file = &self.file;
        let mut read = || -> std::io::Result<()> {
            file.seek(SeekFrom::Start(0))?;
            loop {
                match file.read(&mut part)? {
                    0 => return Ok(()),
                    length => hash.update(&part[..length]),
                }
            }
        };
        read().map_err(|error| LoadError::Unreadable { path: self.path.clone(), reason: error.to_string() })?;
        Ok(hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
            // Writing to a string cannot fail.
            let _ = write!(text, "{byte:02x}");
            text
        }))
    }
}
