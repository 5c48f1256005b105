//! Catalogues: descriptors without kernels, and priority lists, as data.
//!
//! With one, an operator asks what would be chosen on a machine that is not here. Backends of a
//! catalogue can be selected and never run.
//!
//! Must not know: how a selection is made, any kernel.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

use attache_core::{
    BackendDescriptor, Device, PluginMetadata,
    policy::{Origin, PriorityRule},
    selector::{Candidate, Source},
};
use serde::Deserialize;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The published abilities and priority lists of a widely used engine.
pub const PUBLISHED: &str = include_str!("../data/published.toml");

/// A catalogue.
#[derive(Clone, Debug)]
pub struct Catalogue {
    /// Its backends.
    pub candidates: Vec<Candidate>,
    /// Its priority rules, to stand behind the operator's own.
    pub priority: Vec<PriorityRule>,
    /// Machines with what is usually installed on them, by name.
    pub devices: Vec<Device>,
}

/// Why a catalogue cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CatalogueError {
    /// The file cannot be read.
    #[error("{}: cannot read the catalogue: {reason}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the operating system says.
        reason: String,
    },
    /// The file is no catalogue.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    name: String,
    vendor: String,
    version: semver::Version,
    #[serde(default)]
    backend: Vec<BackendDescriptor>,
    #[serde(default)]
    priority: Vec<PriorityRule>,
    #[serde(default)]
    device: Vec<Device>,
}

impl Catalogue {
    /// Reads a catalogue.
    ///
    /// # Errors
    /// When the file cannot be read, a key is unknown, or a descriptor contradicts itself.
    pub fn load(path: &Path) -> Result<Self, CatalogueError> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| CatalogueError::Unreadable { path: path.to_owned(), reason: error.to_string() })?;
        Self::parse(&text, path)
    }

    /// Reads the text of a catalogue; `path` is for messages.
    ///
    /// # Errors
    /// As [`Catalogue::load`].
    pub fn parse(text: &str, path: &Path) -> Result<Self, CatalogueError> {
        let invalid = |reason: String| CatalogueError::Invalid { path: path.to_owned(), reason };
        let file: File = toml::from_str(text).map_err(|error| {
            let before = error.span().and_then(|span| text.get(..span.start));
            let line = before.map_or(1, |before| before.matches('\n').count() + 1);
            invalid(format!("line {line}: {}", error.message().replace('\n', " ")))
        })?;
        let plugin = Arc::new(PluginMetadata {
            name: file.name,
            vendor: file.vendor,
            version: file.version.clone(),
            sdk_version: file.version,
            abi_generation_min: 0,
            abi_generation_max: 0,
        });
        let mut candidates = Vec::with_capacity(file.backend.len());
        for descriptor in file.backend {
            descriptor.check().map_err(|error| invalid(error.to_string()))?;
            candidates.push(Candidate {
                descriptor: Arc::new(descriptor),
                plugin: Arc::clone(&plugin),
                source: Source::Catalogue(path.to_owned()),
                unavailable: Vec::new(),
            });
        }
        let mut priority = file.priority;
        priority.iter_mut().for_each(|rule| rule.origin = Origin::File(path.to_owned()));
        Ok(Self { candidates, priority, devices: file.device })
    }

    /// The device of that name, or the first of that platform and capability or architecture
    /// (`cuda:9.0`, `rocm:gfx942`).
    #[must_use]
    pub fn device(&self, asked: &str) -> Option<&Device> {
        let is_named = |device: &&Device| device.name.eq_ignore_ascii_case(asked);
        let is_such = |device: &&Device| {
            asked.split_once(':').is_some_and(|(platform, detail)| {
                let capability = device.compute_capability.map(|capability| capability.to_string());
                device.platform.0 == platform
                    && [capability.as_deref(), device.architecture.as_deref()].contains(&Some(detail))
            })
        };
        self.devices.iter().find(is_named).or_else(|| self.devices.iter().find(is_such))
    }

    /// The published catalogue.
    ///
    /// # Errors
    /// Only when the program was built from a damaged source tree.
    pub fn published() -> Result<Self, CatalogueError> {
        Self::parse(PUBLISHED, Path::new("published.toml"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_published_catalogue_is_whole() {
        let catalogue = Catalogue::published().expect("it parses");
        let names: Vec<&str> = catalogue.candidates.iter().map(Candidate::name).collect();
        assert!(names.len() > 45, "{}", names.len());
        for rule in &catalogue.priority {
            for name in &rule.order {
                assert!(names.contains(&name.as_str()), "{name} is in a list and not in the catalogue");
            }
        }
    }

    #[test]
    fn devices_are_found_by_name_and_by_what_they_are() {
        let catalogue = Catalogue::published().expect("it parses");
        let h100 = catalogue.device("h100").expect("by name");
        assert_eq!(catalogue.device("cuda:9.0"), Some(h100));
        assert!(catalogue.device("rocm:gfx942").is_some_and(|device| device.features.contains("aiter.mha")));
        assert_eq!((catalogue.device("cuda:3.5"), catalogue.device("")), (None, None));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let text = "name = \"x\"\nvendor = \"x\"\nversion = \"1.0.0\"\ncolour = 3\n";
        let error = Catalogue::parse(text, Path::new("c.toml")).expect_err("an unknown key").to_string();
        assert!(error.starts_with("c.toml: line 4: unknown field `colour`"), "{error}");
    }
}
