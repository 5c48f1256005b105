//! Directories of plugins that are found and never opened: a manifest, and a file that begins as a
//! library does.

use attache_core::{BackendDescriptor, manifest::Manifest};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A descriptor that claims enough to be chosen for a layer of 64 elements a head in f32.
pub fn descriptor(name: &str, rank: i32) -> BackendDescriptor {
    BackendDescriptor::builder(name)
        .platform("cpu")
        .architectures(["*"])
        .head_sizes([64])
        .dtypes(attache_core::Dtype::ALL)
        .kv_cache_dtypes(["auto"])
        .layouts(["head_major"])
        .attn_types([attache_core::AttentionType::Decoder])
        .rank(rank)
        .build()
}

/// A manifest of a plugin with one backend.
pub fn manifest(name: &str, version: &str, backend: &str) -> Manifest {
    Manifest {
        name: name.to_owned(),
        vendor: "tests".to_owned(),
        version: version.parse().expect("a version"),
        sdk_version: env!("CARGO_PKG_VERSION").parse().expect("a version"),
        abi_generation_min: 1,
        abi_generation_max: 1,
        library: format!("lib{name}-{version}.so"),
        sha256: sha256_of(&format!("{name} {version}")),
        backends: vec![descriptor(backend, 0)],
    }
}

/// Some digits that differ for each text.
fn sha256_of(text: &str) -> String {
    let digits: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
    format!("{digits:0>64}").chars().take(64).collect()
}

/// The header of the program that runs this test: a library's, for this machine, with nothing behind.
pub fn header() -> Vec<u8> {
    let program = std::fs::read(std::env::current_exe().expect("a path")).expect("readable");
    program[..64].to_vec()
}

/// A directory of plugins.
pub struct Plugins(TempDir);

impl Plugins {
    pub fn new() -> Self {
        Self(TempDir::new().expect("a directory"))
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Writes a file.
    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, content).expect("written");
        path
    }

    /// Adds a manifest and the beginning of its library; gives the manifest's path.
    pub fn add(&self, manifest: &Manifest) -> PathBuf {
        self.write(&manifest.library, header());
        self.add_manifest(manifest)
    }

    /// Adds a manifest alone.
    pub fn add_manifest(&self, manifest: &Manifest) -> PathBuf {
        let name = format!("{}-{}.attache.toml", manifest.name, manifest.version);
        self.write(&name, manifest.to_toml().expect("TOML"))
    }
}
