//! The report: everything that was looked at, how far it came, and why it stopped there.

use crate::{policy::Origin, selector::Source};
use serde::Serialize;
use std::{fmt, path::PathBuf};

/// How far a plugin came.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Known, and not opened: nothing needed it yet.
    Found,
    /// Another of the same name and version, or the same file, comes first.
    Shadowed,
    /// Not taken, and no error.
    Skipped,
    /// Its manifest or its file cannot be used; it was not opened.
    Invalid,
    /// Refused by the operator; it was not opened.
    Policy,
    /// Opened and checked; no backend was made yet.
    Opened,
    /// Opening it, or making a backend, failed; the others go on.
    Failed,
    /// At least one of its backends was made and found a device.
    Ready,
}

impl Stage {
    /// The name used in output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Found => "found",
            Self::Shadowed => "shadowed",
            Self::Skipped => "skipped",
            Self::Invalid => "invalid",
            Self::Policy => "policy",
            Self::Opened => "opened",
            Self::Failed => "failed",
            Self::Ready => "ready",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One thing that was looked at.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Entry {
    /// The plugin's name, where it is known.
    pub name: Option<String>,
    /// The plugin's version, where it is known.
    pub version: Option<semver::Version>,
    /// Who made it, where that is known.
    pub vendor: Option<String>,
    /// Its backends by name, where they are known.
    pub backends: Vec<String>,
    /// Where it comes from.
    pub source: Source,
    /// Its manifest, where it has one.
    pub manifest: Option<PathBuf>,
    /// Who named the place.
    pub origin: Origin,
    /// How far it came.
    pub stage: Stage,
    /// Why it stopped there; or, without being refused, what is remarkable.
    pub reason: Option<String>,
    /// The long words of a layout check, for those who ask for them.
    #[serde(skip)]
    pub detail: Option<String>,
}
