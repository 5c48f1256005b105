//! Plugins as libraries with manifests.

use crate::cargo;
use anyhow::{Context, Result, bail};
use attache_core::manifest::{MANIFEST_SUFFIX, Manifest};
use std::path::{Path, PathBuf};

/// The packages under `plugins/`, sorted.
pub fn packages() -> Result<Vec<String>> {
    let folder = cargo::root().join("plugins");
    let mut packages: Vec<String> = std::fs::read_dir(&folder)
        .with_context(|| format!("{}", folder.display()))?
        .filter_map(|entry| cargo::package_of(&entry.ok()?.path().join("Cargo.toml")))
        .collect();
    packages.sort_unstable();
    Ok(packages)
}

/// Where libraries go unless somebody says otherwise.
pub fn default_folder() -> PathBuf {
    target().join("plugins")
}

fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| cargo::root().join("target"), PathBuf::from)
}

/// Builds every plugin as a library, with its manifest beside it; gives the folder.
pub fn build(release: bool, out: Option<&Path>) -> Result<PathBuf> {
    let folder = out.map_or_else(default_folder, Path::to_owned);
    std::fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    for package in packages()? {
        let mut arguments = vec!["--lib", "--features", "dylib"];
        if release {
            arguments.push("--release");
        }
        let files = cargo::build(&arguments, &package, "cdylib")?;
        let Some(library) = files.iter().find(|file| file.extension().is_some_and(|extension| extension == "so"))
        else {
            bail!("{package} built no library");
        };
        let name = package.trim_start_matches("attache-plugin-").replace('-', "_");
        let target = folder.join(format!("libattache_{name}.so"));
        // A new file: the old one may be open in a running program.
        let fresh = folder.join(format!(".{name}.new"));
        std::fs::copy(library, &fresh).with_context(|| format!("{}", fresh.display()))?;
        std::fs::rename(&fresh, &target).with_context(|| format!("{}", target.display()))?;
        let manifest = Manifest::for_library(&target)?;
        let path = folder.join(format!("{}{MANIFEST_SUFFIX}", manifest.name));
        std::fs::write(&path, manifest.to_toml()?).with_context(|| format!("{}", path.display()))?;
        println!("{} {} -> {}", manifest.name, manifest.version, path.display());
    }
    Ok(folder)
}
