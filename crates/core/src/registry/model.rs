//! A whole model's backends: planned together, then loaded; what refuses is planned around.

use super::Registry;
use crate::{
    kind::Kind,
    plan::{self, EngineConfig, ModelDescription, ModelPlan, PlanError},
    request::LayerRequest,
    runtime::Backend,
    selector::{Explanation, select},
    verdict::Reason,
};
use std::sync::Arc;

/// A planned model whose backends are loaded.
#[derive(Debug)]
pub struct LoadedPlan {
    /// The plan.
    pub plan: ModelPlan,
    /// The backend of each layer; absent where the plan has none.
    pub backends: Vec<Option<Arc<Backend>>>,
}

/// A backend that refused a request when it was asked.
struct Refused {
    request: LayerRequest,
    kind: Kind,
    name: String,
    reasons: Vec<Reason>,
}

impl Registry {
    /// Plans a model: one selection for each distinct layer, then one cache layout and block size.
    /// Opens nothing.
    ///
    /// # Errors
    /// When layers have no backend, or no common layout and block size exist.
    pub fn plan(&self, model: &ModelDescription, engine: &EngineConfig) -> Result<ModelPlan, PlanError> {
        plan::plan(model, engine, &self.device(), |request, kind| self.explain(request, Some(kind)))
    }

    /// Plans a model and loads its backends. One that cannot be loaded, or refuses when it is asked,
    /// gets its reasons and the model is planned again; with an override that is an error.
    ///
    /// # Errors
    /// As [`Registry::plan`].
    pub fn load_plan(&self, model: &ModelDescription, engine: &EngineConfig) -> Result<LoadedPlan, PlanError> {
        let mut refused: Vec<Refused> = Vec::new();
        loop {
            let explain = |request: &LayerRequest, kind| self.explain_without(request, kind, &refused);
            let plan = plan::plan(model, engine, &self.device(), explain)?;
            match self.load(&plan) {
                Ok(backends) => return Ok(LoadedPlan { plan, backends }),
                Err(new) => refused.push(*new),
            }
        }
    }

    fn load(&self, plan: &ModelPlan) -> Result<Vec<Option<Arc<Backend>>>, Box<Refused>> {
        let mut found: Vec<(&LayerRequest, Kind, &str, Arc<Backend>)> = Vec::new();
        let mut backends = Vec::with_capacity(plan.layers.len());
        for layer in &plan.layers {
            let (Some(name), request) = (&layer.backend, &layer.request) else {
                backends.push(None);
                continue;
            };
            let same = found.iter().find(|(r, k, n, _)| (*r, *k, *n) == (request, layer.kind, name.as_str()));
            let backend = match same {
                Some((.., backend)) => Arc::clone(backend),
                None => {
                    let resolved = self.backend_named(name, request, Some(layer.kind)).map_err(|error| {
                        let own = error.explanation.candidates.iter().find(|candidate| candidate.name() == name);
                        let reasons = own.map(|own| own.reasons.clone()).unwrap_or_default();
                        let reasons = if reasons.is_empty() { vec![error.to_string().into()] } else { reasons };
                        Box::new(Refused { request: request.clone(), kind: layer.kind, name: name.clone(), reasons })
                    })?;
                    found.push((request, layer.kind, name, Arc::clone(&resolved.backend)));
                    resolved.backend
                }
            };
            backends.push(Some(backend));
        }
        Ok(backends)
    }

    fn explain_without(&self, request: &LayerRequest, kind: Kind, refused: &[Refused]) -> Explanation {
        let mine = || refused.iter().filter(|refused| refused.request == *request && refused.kind == kind);
        if mine().next().is_none() {
            return self.explain(request, Some(kind));
        }
        let mut candidates = self.candidates();
        let mut warnings = Vec::new();
        for refused in mine() {
            for candidate in candidates.iter_mut().filter(|candidate| candidate.name() == refused.name) {
                let new = refused.reasons.iter().filter(|reason| !candidate.unavailable.contains(reason));
                let new: Vec<Reason> = new.cloned().collect();
                candidate.unavailable.extend(new);
            }
            let reasons = refused.reasons.join(", ");
            warnings.push(format!("{} was chosen first and cannot be used: {reasons}", refused.name));
        }
        let mut explanation = select(request, Some(kind), &self.device(), &self.policy(), &candidates);
        explanation.warnings.extend(warnings);
        explanation
    }
}
