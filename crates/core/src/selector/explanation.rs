//! A selection with everything that led to it, for people and for programs.

use super::{
    candidate::Source,
    change::{Change, Scope, smallest_changes},
    error::SelectionError,
};
use crate::{
    descriptor::BackendDescriptor,
    device::Device,
    kind::Kind,
    plugin::PluginMetadata,
    policy::{Origin, Wanted},
    request::LayerRequest,
    verdict::Reason,
};
use serde::{Serialize, Serializer, ser::SerializeMap};
use std::{fmt, sync::Arc};

/// A candidate's part in a selection.
#[derive(Clone, Debug)]
pub struct CandidateVerdict {
    /// Position in the candidates that were handed in.
    pub index: usize,
    /// What it can do.
    pub descriptor: Arc<BackendDescriptor>,
    /// The plugin that it is from.
    pub plugin: Arc<PluginMetadata>,
    /// Where the plugin comes from.
    pub source: Source,
    /// Place among the valid ones, 1 = first; absent when it is refused.
    pub rank: Option<usize>,
    /// Every reason against it.
    pub reasons: Vec<Reason>,
}

impl CandidateVerdict {
    /// The backend's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.descriptor.name
    }

    /// Whether nothing speaks against it.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.reasons.is_empty()
    }
}

impl Serialize for CandidateVerdict {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(7))?;
        map.serialize_entry("name", self.name())?;
        map.serialize_entry("platform", &self.descriptor.platforms.join(","))?;
        map.serialize_entry("version", &self.plugin.version)?;
        map.serialize_entry("source", &self.source)?;
        map.serialize_entry("rank", &self.rank)?;
        map.serialize_entry("valid", &self.is_valid())?;
        map.serialize_entry("reasons", &self.reasons)?;
        map.end()
    }
}

/// A selection with everything that led to it.
#[derive(Clone, Debug)]
pub struct Explanation {
    /// What the layer needs.
    pub request: LayerRequest,
    /// The layer's kind; absent when the request makes no sense.
    pub kind: Option<Kind>,
    /// The device.
    pub device: Device,
    /// The override that applies.
    pub wanted: Option<Wanted>,
    /// Every candidate: the valid ones first, by rank. With an override, that backend alone.
    pub candidates: Vec<CandidateVerdict>,
    /// The chosen one, as a position in `candidates`.
    pub chosen: Option<usize>,
    /// Why nothing was chosen.
    pub error: Option<SelectionError>,
    /// Why the chosen one.
    pub why: String,
    /// What the operator should know.
    pub warnings: Vec<String>,
}

impl Explanation {
    /// The chosen candidate.
    ///
    /// # Errors
    /// Why nothing was chosen.
    pub fn result(&self) -> Result<&CandidateVerdict, SelectionError> {
        match (self.chosen, &self.error) {
            (Some(chosen), _) => Ok(&self.candidates[chosen]),
            (None, Some(error)) => Err(error.clone()),
            (None, None) => Err(SelectionError::NoBackends),
        }
    }

    /// For each refused backend the smallest changes that would admit it.
    #[must_use]
    pub fn what_if(&self) -> Vec<(&CandidateVerdict, Vec<Change>)> {
        let refused = self.candidates.iter().filter(|candidate| !candidate.is_valid());
        let changes = |candidate: &CandidateVerdict| {
            smallest_changes(&candidate.descriptor, &self.request, &self.device, Scope::Model, 4)
        };
        refused.filter_map(|candidate| Some((candidate, changes(candidate)?.0))).collect()
    }

    /// Emits the text as `tracing` events: the choice as info, refusals as debug.
    pub fn trace(&self) {
        let kind = self.kind.map(Kind::name);
        match self.result() {
            Ok(chosen) => {
                tracing::info!(backend = chosen.name(), kind, source = %chosen.source, why = self.why, "backend chosen");
            }
            Err(error) => tracing::info!(kind, %error, "no backend chosen"),
        }
        for candidate in self.candidates.iter().filter(|candidate| !candidate.is_valid()) {
            tracing::debug!(backend = candidate.name(), kind, reasons = ?candidate.reasons, "backend refused");
        }
        for warning in &self.warnings {
            tracing::warn!(kind, "{warning}");
        }
    }
}

impl Serialize for Explanation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Named<'a> {
            name: &'a str,
            source: &'a Origin,
        }
        let wanted = self.wanted.as_ref().map(|wanted| Named { name: &wanted.name, source: &wanted.origin });
        let chosen = self.chosen.map(|chosen| self.candidates[chosen].name());
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("request", &self.request)?;
        map.serialize_entry("kind", &self.kind)?;
        map.serialize_entry("wanted", &wanted)?;
        map.serialize_entry("chosen", &chosen)?;
        map.serialize_entry("error", &self.error.as_ref().map(ToString::to_string))?;
        map.serialize_entry("candidates", &self.candidates)?;
        map.serialize_entry("warnings", &self.warnings)?;
        map.serialize_entry("why", &self.why)?;
        map.serialize_entry("device", &self.device.to_string())?;
        map.end()
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind.map_or("unknown", Kind::name);
        match self.result() {
            Ok(chosen) => writeln!(f, "{} for {kind} on {}: {}", chosen.name(), self.device, self.why)?,
            Err(error) => writeln!(f, "no backend for {kind} on {}: {error}", self.device)?,
        }
        let width = self.candidates.iter().map(|candidate| candidate.name().len()).max().unwrap_or(0);
        for candidate in &self.candidates {
            let rank = candidate.rank.map_or_else(|| "-".to_owned(), |rank| rank.to_string());
            let verdict = if candidate.is_valid() { "valid".to_owned() } else { candidate.reasons.join(", ") };
            writeln!(f, "  {rank:>3}  {:width$}  {verdict}", candidate.name())?;
        }
        for warning in &self.warnings {
            writeln!(f, "warning: {warning}")?;
        }
        Ok(())
    }
}
