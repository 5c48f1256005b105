//! What the selector chooses from.

use crate::{descriptor::BackendDescriptor, plugin::PluginMetadata, verdict::Reason};
use serde::{Serialize, Serializer};
use std::{fmt, path::PathBuf, sync::Arc};

/// Where a backend comes from.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Source {
    /// Linked into the program.
    Linked,
    /// A library, opened when it is needed.
    File(PathBuf),
    /// A descriptor without kernels, from a catalogue file: can be selected, never run.
    Catalogue(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linked => f.write_str("linked in"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Catalogue(path) => write!(f, "catalogue {}", path.display()),
        }
    }
}

impl Serialize for Source {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// A backend that may be chosen.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// What it can do.
    pub descriptor: Arc<BackendDescriptor>,
    /// The plugin that it is from.
    pub plugin: Arc<PluginMetadata>,
    /// Where the plugin comes from.
    pub source: Source,
    /// Reasons that are known before any request: the plugin is broken, or refused by the operator's
    /// versions; and after loading: what the backend's own `validate` said. They join the verdict.
    pub unavailable: Vec<Reason>,
}

impl Candidate {
    /// The backend's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.descriptor.name
    }
}
