//! What a file is to the operating system: its identity, and who may write to it. Linux only.

use super::error::LoadError;
use std::{fmt, fs::Metadata, os::unix::fs::MetadataExt, path::Path};

/// A file's identity: a link to it has the same one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// Who may write to a file besides its owner.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WritableBy {
    /// Its group.
    Group,
    /// Everyone.
    Everyone,
}

impl fmt::Display for WritableBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Group => "its group",
            Self::Everyone => "everyone",
        })
    }
}

/// Where each user has a group of the same number, files are group-writable by default (umask 002)
/// and that group is the user alone: it is not "others".
fn writable_by_others(mode: u32, uid: u32, gid: u32) -> Option<WritableBy> {
    match mode {
        mode if mode & 0o002 != 0 => Some(WritableBy::Everyone),
        mode if mode & 0o020 != 0 && uid != gid => Some(WritableBy::Group),
        _ => None,
    }
}

/// Refuses a library that others may replace or change.
pub(super) fn check_not_writable_by_others(path: &Path) -> Result<(), LoadError> {
    let unreadable = |error: std::io::Error| LoadError::Unreadable { path: path.to_owned(), reason: error.to_string() };
    let directory = path.parent().unwrap_or(Path::new("/"));
    for (what, target) in [("the file", path), ("its directory", directory)] {
        let metadata = std::fs::metadata(target).map_err(unreadable)?;
        let mode = metadata.mode() & 0o7777;
        if let Some(by) = writable_by_others(mode, metadata.uid(), metadata.gid()) {
            return Err(LoadError::WritableByOthers { path: path.to_owned(), what, by, mode });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_own_group_is_not_others() {
        for (mode, uid, gid, expected) in [
            (0o755, 0, 0, None),
            (0o775, 1000, 1000, None),
            (0o775, 1000, 100, Some(WritableBy::Group)),
            (0o757, 1000, 1000, Some(WritableBy::Everyone)),
            (0o777, 0, 0, Some(WritableBy::Everyone)),
        ] {
            assert_eq!(writable_by_others(mode, uid, gid), expected, "{mode:o} {uid} {gid}");
        }
    }
}
