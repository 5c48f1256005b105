//! Why a library cannot be used: one readable line each.

use super::{elf::ElfProblem, linux::WritableBy};
use crate::{plugin::PluginMetadata, runtime::InterfaceError};
use std::path::{Path, PathBuf};

/// Why a library cannot be used. The long words of layout checks are in [`LoadError::detail`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// The file is not there, or cannot be read.
    #[error("{}: cannot read the library: {reason}", path.display())]
    Unreadable {
        /// The library.
        path: PathBuf,
        /// What the operating system says.
        reason: String,
    },
    /// Others may replace it.
    #[error(
        "{}: refused: {what} is writable by {by} (mode {mode:03o}); run 'chmod go-w' on it, or allow it in the configuration",
        path.display()
    )]
    WritableByOthers {
        /// The library.
        path: PathBuf,
        /// The file or its directory.
        what: &'static str,
        /// Who may write.
        by: WritableBy,
        /// Permission bits.
        mode: u32,
    },
    /// It is no complete library for this machine, or no plugin.
    #[error("{}: {problem}", path.display())]
    Elf {
        /// The library.
        path: PathBuf,
        /// What is wrong.
        problem: ElfProblem,
    },
    /// It is not the file that the manifest was written for.
    #[error(
        "{}: its sha256 is {found}, the manifest says {expected}; reinstall the plugin, or rewrite its manifest if the file is the right one",
        path.display()
    )]
    Sha256 {
        /// The library.
        path: PathBuf,
        /// By the manifest.
        expected: String,
        /// Of the file.
        found: String,
    },
    /// Manifest, metadata section and root module do not say the same.
    #[error("{}: {first} says {}, {second} says {}; reinstall the plugin", path.display(), said(left), said(right))]
    Identity {
        /// The library.
        path: PathBuf,
        /// Where the first statement stands.
        first: &'static str,
        /// The first statement.
        left: Box<PluginMetadata>,
        /// Where the second statement stands.
        second: &'static str,
        /// The second statement.
        right: Box<PluginMetadata>,
    },
    /// Its identity makes no sense.
    #[error("{}: {reason}", path.display())]
    Metadata {
        /// The library.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// No common ABI generation.
    #[error(
        "{}: the plugin speaks ABI generations {}, this host {}; {}",
        path.display(), range(*found), range(*expected),
        if found.0 > expected.1 { "update the host" } else { "update the plugin" }
    )]
    Generation {
        /// The library.
        path: PathBuf,
        /// Oldest and newest of the plugin.
        found: (u32, u32),
        /// Oldest and newest of this host.
        expected: (u32, u32),
    },
    /// Built with an SDK of another major version.
    #[error("{}: built with SDK {found}, this host takes {expected}.x; rebuild the plugin", path.display())]
    SdkVersion {
        /// The library.
        path: PathBuf,
        /// The SDK's version.
        found: semver::Version,
        /// The major version that this host takes.
        expected: u64,
    },
    /// The system's loader refuses it, for instance because a library that it needs is missing.
    #[error("{}: cannot be opened: {reason}", path.display())]
    Open {
        /// The library.
        path: PathBuf,
        /// The loader's words.
        reason: String,
    },
    /// It has no root symbol.
    #[error(
        "{}: not a plugin: it does not export the root symbol {symbol}; build it with the feature 'dylib' of its crate",
        path.display()
    )]
    NoRoot {
        /// The library.
        path: PathBuf,
        /// The symbol that is missing.
        symbol: String,
    },
    /// The root module has another layout, or its header is not the one expected.
    #[error("{}: its root module has another layout than this host's; rebuild the plugin with this host's SDK", path.display())]
    RootLayout {
        /// The library.
        path: PathBuf,
        /// The checker's own words; long.
        detail: String,
    },
    /// The function that makes the root module failed or panicked.
    #[error("{}: the plugin failed to start: {reason}", path.display())]
    Init {
        /// The library.
        path: PathBuf,
        /// What it says.
        reason: String,
    },
    /// Its interface cannot be used.
    #[error("{}: {error}", path.display())]
    Interface {
        /// The library.
        path: PathBuf,
        /// Why.
        error: InterfaceError,
    },
    /// It cannot say what its backends are.
    #[error("{}: {reason}", path.display())]
    Descriptors {
        /// The library.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Its backends are not those that the manifest states.
    #[error("{}: {difference}; reinstall the plugin, or rewrite its manifest", path.display())]
    ManifestDiffers {
        /// The library.
        path: PathBuf,
        /// What the two say.
        difference: String,
    },
}

fn said(metadata: &PluginMetadata) -> String {
    format!(
        "'{}' {} of '{}' (SDK {}, ABI generations {})",
        metadata.name,
        metadata.version,
        metadata.vendor,
        metadata.sdk_version,
        range((metadata.abi_generation_min, metadata.abi_generation_max))
    )
}

fn range((min, max): (u32, u32)) -> String {
    if min == max { min.to_string() } else { format!("{min} to {max}") }
}

impl LoadError {
    /// The library.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Unreadable { path, .. }
            | Self::WritableByOthers { path, .. }
            | Self::Elf { path, .. }
            | Self::Sha256 { path, .. }
            | Self::Identity { path, .. }
            | Self::Metadata { path, .. }
            | Self::Generation { path, .. }
            | Self::SdkVersion { path, .. }
            | Self::Open { path, .. }
            | Self::NoRoot { path, .. }
            | Self::RootLayout { path, .. }
            | Self::Init { path, .. }
            | Self::Interface { path, .. }
            | Self::Descriptors { path, .. }
            | Self::ManifestDiffers { path, .. } => path,
        }
    }

    /// The line without the path, for where the path is shown beside it.
    #[must_use]
    pub fn reason(&self) -> String {
        let line = self.to_string();
        line.strip_prefix(&format!("{}: ", self.path().display())).map(str::to_owned).unwrap_or(line)
    }

    /// The long words of a layout check, for those who ask for them.
    #[must_use]
    pub fn detail(&self) -> Option<&str> {
        match self {
            Self::RootLayout { detail, .. } | Self::Interface { error: InterfaceError::Layout { detail, .. }, .. } => {
                Some(detail)
            }
            _ => None,
        }
    }
}
