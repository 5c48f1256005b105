//! The manifest `NAME.attache.toml`: what a plugin says of itself, readable without opening it.
//!
//! Owns the file's format and its checks. Must not know: where manifests are searched, policy.

use crate::{
    descriptor::BackendDescriptor,
    loader::{LoadError, LoadOptions, OpenPlugin},
    plugin::PluginMetadata,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeSet,
    path::{Component, Path, PathBuf},
};

/// What the name of a manifest ends with.
pub const MANIFEST_SUFFIX: &str = ".attache.toml";

/// A manifest.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The plugin's name.
    pub name: String,
    /// Who made it.
    pub vendor: String,
    /// Its version.
    pub version: semver::Version,
    /// Version of the SDK that it was built with.
    pub sdk_version: semver::Version,
    /// Oldest ABI generation that it speaks.
    pub abi_generation_min: u32,
    /// Newest ABI generation that it speaks.
    pub abi_generation_max: u32,
    /// File name of the library, which stands beside the manifest.
    pub library: String,
    /// SHA-256 of the library: 64 hexadecimal digits, in lower case.
    pub sha256: String,
    /// Its backends, in the plugin's order.
    #[serde(rename = "backend")]
    pub backends: Vec<BackendDescriptor>,
}

/// A manifest that cannot be used, or made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ManifestError {
    /// The file cannot be read.
    #[error("{}: cannot read the manifest: {reason}", path.display())]
    Unreadable {
        /// The manifest.
        path: PathBuf,
        /// What the operating system says.
        reason: String,
    },
    /// The text is not TOML, or its keys and values are not a manifest's.
    #[error("{}: line {line}, column {column}: {reason}", path.display())]
    Syntax {
        /// The manifest.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
        /// The parser's words, whole.
        reason: String,
    },
    /// A value that cannot be meant.
    #[error("{}: {reason}", path.display())]
    Value {
        /// The manifest.
        path: PathBuf,
        /// Which key, what was found, what would be right.
        reason: String,
    },
    /// The library that a manifest is to be made for cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The manifest cannot be written as TOML.
    #[error("the manifest cannot be written as TOML: {0}")]
    Write(String),
}

impl Manifest {
    /// Reads a manifest; `path` is where the text is from.
    ///
    /// # Errors
    /// When it is not TOML, has unknown or missing keys, or a value that cannot be meant.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ManifestError> {
        let manifest: Self = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
            ManifestError::Syntax {
                path: path.to_owned(),
                line: before.matches('\n').count() + 1,
                column: before.rsplit('\n').next().unwrap_or_default().chars().count() + 1,
                reason: error.message().to_owned(),
            }
        })?;
        match manifest.check() {
            Ok(()) => Ok(manifest),
            Err(reason) => Err(ManifestError::Value { path: path.to_owned(), reason }),
        }
    }

    /// Reads the manifest at `path`.
    ///
    /// # Errors
    /// As [`Manifest::parse`], and when the file cannot be read.
    pub fn read(path: &Path) -> Result<Self, ManifestError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| ManifestError::Unreadable { path: path.to_owned(), reason: error.to_string() })?;
        Self::parse(&text, path)
    }

    /// Opens a library and writes down what it says of itself.
    ///
    /// # Errors
    /// When the library cannot be loaded, or its file name is not UTF-8.
    pub fn for_library(path: &Path) -> Result<Self, ManifestError> {
        let plugin = crate::loader::open(path, None, &LoadOptions::default())?;
        Self::for_plugin(path, &plugin)
    }

    fn for_plugin(path: &Path, plugin: &OpenPlugin) -> Result<Self, ManifestError> {
        let library = path.file_name().and_then(|name| name.to_str()).map(str::to_owned);
        let metadata = plugin.metadata();
        let manifest = Self {
            name: metadata.name.clone(),
            vendor: metadata.vendor.clone(),
            version: metadata.version.clone(),
            sdk_version: metadata.sdk_version.clone(),
            abi_generation_min: metadata.abi_generation_min,
            abi_generation_max: metadata.abi_generation_max,
            library: library.unwrap_or_default(),
            sha256: plugin.sha256().to_owned(),
            backends: plugin.descriptors().iter().map(|backend| BackendDescriptor::clone(backend)).collect(),
        };
        match manifest.check() {
            Ok(()) => Ok(manifest),
            Err(reason) => Err(ManifestError::Value { path: path.to_owned(), reason }),
        }
    }

    /// The manifest as TOML.
    ///
    /// # Errors
    /// When a descriptor holds what TOML cannot express.
    pub fn to_toml(&self) -> Result<String, ManifestError> {
        toml::to_string(self).map_err(|error| ManifestError::Write(error.to_string()))
    }

    /// The plugin's identity, as its library states it too.
    #[must_use]
    pub fn metadata(&self) -> PluginMetadata {
        PluginMetadata {
            name: self.name.clone(),
            vendor: self.vendor.clone(),
            version: self.version.clone(),
            sdk_version: self.sdk_version.clone(),
            abi_generation_min: self.abi_generation_min,
            abi_generation_max: self.abi_generation_max,
        }
    }

    /// Where the library is, for a manifest that was read from `manifest_path`.
    #[must_use]
    pub fn library_path(&self, manifest_path: &Path) -> PathBuf {
        manifest_path.with_file_name(&self.library)
    }

    fn check(&self) -> Result<(), String> {
        check_metadata(&self.metadata())?;
        let mut parts = Path::new(&self.library).components();
        if !matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == self.library.as_str())
        {
            return Err(format!(
                "library = '{}': must be the name of a file beside the manifest, without a path",
                self.library
            ));
        }
        if self.sha256.len() != 64 || !self.sha256.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(format!("sha256 = '{}': must be 64 hexadecimal digits in lower case", self.sha256));
        }
        check_descriptors(&self.backends)
    }
}

/// Whether a plugin's identity makes sense: what a manifest, a library or a linked-in plugin states.
pub(crate) fn check_metadata(metadata: &PluginMetadata) -> Result<(), String> {
    let name = &metadata.name;
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
    if name.is_empty() || name.len() > 64 || !name.bytes().all(plain) {
        return Err(format!("name = '{}': must be 1 to 64 letters, digits, '_', '-' or '.'", name.escape_debug()));
    }
    if metadata.vendor.is_empty() || metadata.vendor.chars().any(char::is_control) {
        return Err(format!("vendor = '{}': must be one line of text", metadata.vendor.escape_debug()));
    }
    let zero = semver::Version::new(0, 0, 0);
    for (key, version) in [("version", &metadata.version), ("sdk_version", &metadata.sdk_version)] {
        if *version == zero {
            return Err(format!("{key} = '0.0.0': not set; the SDK's export macro takes it from Cargo.toml"));
        }
    }
    let (min, max) = (metadata.abi_generation_min, metadata.abi_generation_max);
    if min == 0 || max < min {
        return Err(format!(
            "abi_generation_min = {min}, abi_generation_max = {max}: generations count from 1 upwards"
        ));
    }
    Ok(())
}

/// Whether a plugin's backends make sense, alone and together.
pub(crate) fn check_descriptors<'a>(backends: impl IntoIterator<Item = &'a BackendDescriptor>) -> Result<(), String> {
    let mut names = BTreeSet::new();
    for backend in backends {
        backend.check().map_err(|error| error.to_string())?;
        if !names.insert(backend.name.as_str()) {
            return Err(format!("backend {}: the name stands twice", backend.name));
        }
    }
    if names.is_empty() {
        return Err("no backend: a plugin has at least one".to_owned());
    }
    Ok(())
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
