//! What the workspace tests share: libraries that are really built, and directories of plugins.
//!
//! Libraries are built by the `cargo` that runs the test, into its own target directory.

use attache_core::manifest::Manifest;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
    sync::Mutex,
};
use tempfile::TempDir;

/// The library of a plugin crate, built with its feature `dylib`; once a process and crate.
///
/// # Panics
/// When it does not build: then the test has nothing to say.
#[must_use]
pub fn library(package: &str) -> PathBuf {
    static BUILT: Mutex<BTreeMap<String, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut built = BUILT.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    built.entry(package.to_owned()).or_insert_with(|| build(package)).clone()
}

fn build(package: &str) -> PathBuf {
    let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--lib", "--package", package, "--features", "dylib"])
        .arg("--message-format=json-render-diagnostics")
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{package} does not build:\n{}", String::from_utf8_lossy(&output.stderr));
    let file_name = format!("lib{}.so", package.replace('-', "_"));
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .flat_map(|message| message["filenames"].as_array().cloned().unwrap_or_default())
        .filter_map(|name| name.as_str().map(PathBuf::from))
        .find(|path| path.file_name().is_some_and(|name| name == file_name.as_str()))
        .unwrap_or_else(|| panic!("cargo built no {file_name}"))
}

/// A directory of plugins that a test may break.
pub struct Plugins {
    directory: TempDir,
}

impl Default for Plugins {
    fn default() -> Self {
        Self::new()
    }
}

impl Plugins {
    /// An empty one.
    ///
    /// # Panics
    /// When there is no room for it.
    #[must_use]
    pub fn new() -> Self {
        Self { directory: TempDir::new().expect("a directory") }
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Adds a plugin's library with its manifest, and gives the library's path.
    ///
    /// # Panics
    /// When it cannot be built or written.
    pub fn add(&self, package: &str) -> PathBuf {
        let path = self.add_library(package);
        let manifest = Manifest::for_library(&path).expect("a manifest");
        std::fs::write(self.manifest(package), manifest.to_toml().expect("a manifest")).expect("written");
        path
    }

    /// Adds a plugin's library alone.
    ///
    /// # Panics
    /// When it cannot be built or written.
    pub fn add_library(&self, package: &str) -> PathBuf {
        let path = self.path().join(format!("{package}.so"));
        std::fs::copy(library(package), &path).expect("copied");
        path
    }

    /// The path of a plugin's manifest.
    #[must_use]
    pub fn manifest(&self, package: &str) -> PathBuf {
        self.path().join(format!("{package}.attache.toml"))
    }
}

/// The SHA-256 of a file, in hexadecimal digits.
///
/// # Panics
/// When it cannot be read.
#[must_use]
pub fn sha256(path: &Path) -> String {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(std::fs::read(path).expect("bytes"));
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Checks that a document shows each example of a test's source, which stand between the lines
/// `// example begins` and `// example ends`.
///
/// # Panics
/// When it does not, or the source has none.
pub fn assert_shows_examples(document: &str, source: &str) {
    let blocks = source.split("\n// example begins\n").skip(1);
    let examples: Vec<&str> = blocks.filter_map(|rest| rest.split("\n// example ends\n").next()).collect();
    assert!(!examples.is_empty(), "the source has no examples");
    for example in examples {
        assert!(document.contains(example), "the document lacks:\n{example}");
    }
}
