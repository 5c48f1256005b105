//! From a request to a backend that runs: select, open, make, probe, ask it; on a refusal the next.

use super::{
    Registry, Selection, Snapshot,
    cache::KeyHash,
    entry::{Entry, Stage},
    item::Owner,
    slot::{How, NO_KERNELS},
};
use crate::{
    kind::Kind,
    policy::{OnInvalidOverride, Origin, Policy, Sourced, Wanted},
    request::LayerRequest,
    runtime::Backend,
    selector::{self, Candidate, Explanation, SelectionError},
    verdict::Reason,
};
use std::{
    borrow::Cow,
    collections::BTreeMap,
    sync::{Arc, PoisonError},
};

/// A backend that serves a request, and why it was chosen.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// The backend.
    pub backend: Arc<Backend>,
    /// Why it was chosen; what was tried before it is among the reasons and warnings.
    pub selection: Arc<Selection>,
}

/// No backend for a request.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{error}{hints}")]
pub struct RegistryError {
    /// Why, with every reason; backends that were tried and failed are among them.
    #[source]
    pub error: Box<SelectionError>,
    /// Everything that led to it.
    pub explanation: Arc<Explanation>,
    /// Where was searched, and what cannot be used, where that may be the cause; else empty.
    pub hints: String,
}

/// A backend that was chosen and then could not be used.
struct Tried {
    owner: Owner,
    name: String,
    reasons: Vec<Reason>,
}

/// Why a chosen backend is not used.
enum Refusal {
    /// It says no to this request on this device.
    Request(Vec<Reason>),
    /// It failed, and will for every request.
    Failure(String),
}

impl Registry {
    /// A backend that serves a request: selected, loaded if it was not, probed and asked. When it
    /// refuses, or cannot be loaded, its reasons join the explanation and the next one is tried;
    /// with an override that is an error instead. Of several callers at once, one loads.
    ///
    /// # Errors
    /// When the request is not valid, the wanted backend cannot serve it, or none can.
    pub fn backend(&self, request: &LayerRequest, kind: Option<Kind>) -> Result<Resolved, RegistryError> {
        let hash = KeyHash::of(request, kind);
        {
            let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
            if let Some(answer) = state.resolved.get(hash, request, kind) {
                return Ok(answer.clone());
            }
        }
        let (resolved, generation) = self.resolve(request, kind, |policy| policy)?;
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        if state.snapshot.generation != generation {
            return Ok(resolved);
        }
        state.selections.replace(hash, request, kind, Ok(Arc::clone(&resolved.selection)));
        Ok(state.resolved.keep(hash, request, kind, resolved))
    }

    /// As [`Registry::backend`], for a layer whose backend was settled elsewhere, for instance by
    /// the plan of a whole model: this one or an error.
    ///
    /// # Errors
    /// When the backend does not exist, or cannot serve the request.
    pub fn backend_named(
        &self,
        name: &str,
        request: &LayerRequest,
        kind: Option<Kind>,
    ) -> Result<Resolved, RegistryError> {
        let settled = |policy: Policy| Policy {
            backend: Some(Wanted { name: name.to_ascii_uppercase(), origin: Origin::Api }),
            per_kind: BTreeMap::new(),
            on_invalid_override: Sourced::new(OnInvalidOverride::Error, Origin::Api),
            ..policy
        };
        self.resolve(request, kind, settled).map(|(resolved, _)| resolved)
    }

    /// Gives the generation of the answer too.
    fn resolve(
        &self,
        request: &LayerRequest,
        kind: Option<Kind>,
        adapt: impl Fn(Policy) -> Policy,
    ) -> Result<(Resolved, u64), RegistryError> {
        let span = tracing::debug_span!("backend", kind = kind.map(Kind::name));
        let _entered = span.enter();
        let mut tried: Vec<Tried> = Vec::new();
        loop {
            let snapshot = self.snapshot();
            let policy = adapt(Policy::clone(&snapshot.policy));
            let candidates = without(&snapshot, &tried);
            let mut explanation = selector::select(request, kind, &snapshot.device, &policy, &candidates);
            for tried in &tried {
                let reasons = tried.reasons.join(", ");
                explanation.warnings.push(format!("{} was chosen first and cannot be used: {reasons}", tried.name));
            }
            let selection = match Selection::new(explanation) {
                Ok(selection) => Arc::new(selection),
                Err(explanation) => {
                    let error = Box::new(error_of(&explanation));
                    let hints = self.hints(&error);
                    return Err(RegistryError { error, explanation: Arc::new(*explanation), hints });
                }
            };
            let chosen = selection.chosen();
            let owner = &snapshot.owners[chosen.index];
            let reasons = match self.use_backend(owner, request, &snapshot) {
                Ok(backend) => return Ok((Resolved { backend, selection }, snapshot.generation)),
                Err(Refusal::Request(reasons)) => reasons,
                Err(Refusal::Failure(reason)) => {
                    self.set_aside(owner);
                    vec![reason.into()]
                }
            };
            let name = chosen.name().to_owned();
            tracing::warn!(backend = name, ?reasons, "the chosen backend cannot be used");
            tried.push(Tried { owner: owner.clone(), name, reasons });
        }
    }

    fn use_backend(&self, owner: &Owner, request: &LayerRequest, snapshot: &Snapshot) -> Result<Arc<Backend>, Refusal> {
        if matches!(owner.slot.how, How::Catalogue(_)) {
            return Err(Refusal::Request(vec![NO_KERNELS.into()]));
        }
        let made = owner.slot.make(owner.index, &self.load).map_err(|failure| Refusal::Failure(failure.reason))?;
        if let Some(reason) = made.no_device(&snapshot.device.platform) {
            return Err(Refusal::Request(vec![reason.into()]));
        }
        match made.backend.validate(request, &snapshot.device) {
            Ok(reasons) if reasons.is_empty() => Ok(Arc::clone(&made.backend)),
            Ok(reasons) => Err(Refusal::Request(reasons.into_iter().map(Into::into).collect())),
            Err(error) => Err(Refusal::Request(vec![format!("its validation failed: {error}").into()])),
        }
    }

    /// Starts a generation in which a backend that failed is refused with its reason.
    fn set_aside(&self, owner: &Owner) {
        self.change(|old| {
            let known = old.owners.iter().zip(&old.candidates).find(|(other, _)| other.is(owner));
            // Another thread may have been faster.
            let done = known.is_none_or(|(_, candidate)| owner.failure_is_in(&candidate.unavailable));
            (!done).then(|| (Arc::clone(&old.items), old.searched.clone(), Arc::clone(&old.policy)))
        });
    }

    /// What may explain an error beyond its own words: where was searched, and what was found there
    /// and cannot be used. Empty when every backend was known.
    #[must_use]
    pub fn hints(&self, error: &SelectionError) -> String {
        if !matches!(error, SelectionError::NoBackends | SelectionError::UnknownBackend { .. }) {
            return String::new();
        }
        let searched: Vec<String> = self.searched().iter().map(|place| place.path.display().to_string()).collect();
        let searched = if searched.is_empty() { "nowhere".to_owned() } else { searched.join(", ") };
        let unusable = |entry: &Entry| matches!(entry.stage, Stage::Invalid | Stage::Failed);
        let unusable: String = self
            .report()
            .iter()
            .filter(|entry| unusable(entry))
            .map(|entry| format!("; not usable: {}: {}", entry.source, entry.reason.as_deref().unwrap_or_default()))
            .collect();
        format!("; searched: {searched}{unusable}")
    }
}

/// Why an explanation chose nothing.
pub(super) fn error_of(explanation: &Explanation) -> SelectionError {
    explanation.result().err().unwrap_or(SelectionError::NoBackends)
}

/// The candidates, with what was tried in vain refused.
fn without<'a>(snapshot: &'a Snapshot, tried: &[Tried]) -> Cow<'a, [Candidate]> {
    let mut candidates = Cow::Borrowed(snapshot.candidates.as_slice());
    for tried in tried {
        let Some(at) = snapshot.owners.iter().position(|owner| owner.is(&tried.owner)) else { continue };
        let unavailable = &mut candidates.to_mut()[at].unavailable;
        for reason in &tried.reasons {
            // One that failed has its reason from the registry already.
            if !unavailable.contains(reason) {
                unavailable.push(reason.clone());
            }
        }
    }
    candidates
}
