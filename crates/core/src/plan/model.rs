//! A whole model at once: one selection for each distinct layer, then one layout and block size.
//!
//! Pure: asks whoever answers selections. Must not know: how a backend is loaded or run.

use super::{
    EngineConfig, LayerDescription, ModelDescription, StateSpaceType,
    joint::{CacheFamily, Group, GroupOption, LayoutConflict, resolve},
};
use crate::{
    device::Device,
    kind::Kind,
    request::{AttentionType, LayerRequest},
    selector::{CandidateVerdict, Explanation, SelectionError},
    verdict::Effective,
};
use serde::{Serialize, Serializer};
use std::collections::BTreeSet;

/// A layer of a planned model.
#[derive(Clone, Debug, Serialize)]
pub struct PlannedLayer {
    /// Position in the model.
    pub index: usize,
    /// The KV-cache group that it belongs to.
    pub kind: Kind,
    /// The backend; absent for a state-space layer that no backend claims, see the warnings.
    pub backend: Option<String>,
    /// What the layer asks for.
    pub request: LayerRequest,
    /// The sort of recurrent state.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_space: Option<StateSpaceType>,
    /// The layer's name.
    pub name: String,
    /// Where the backend's plugin comes from.
    pub source: Option<String>,
    /// Why it was chosen.
    pub why: String,
    /// The cache's layout; absent without a cache.
    pub layout: Option<String>,
    /// Tokens of its window.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sliding_window: Option<u32>,
    /// The selection that led to it, as a position in [`ModelPlan::selections`].
    #[serde(skip)]
    pub selection: Option<usize>,
}

/// A planned model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelPlan {
    /// The model's family.
    pub model: String,
    /// The device that it was planned for.
    #[serde(serialize_with = "as_text")]
    pub device: Device,
    /// Its layers.
    pub layers: Vec<PlannedLayer>,
    /// Layouts of the cache, `heads` first where there are two families.
    pub kv_layout: Option<String>,
    /// Tokens of a block; absent when no layer has a cache.
    pub block_size: Option<u32>,
    /// What the operator should know.
    pub warnings: Vec<String>,
    /// The distinct selections.
    #[serde(skip)]
    pub selections: Vec<Explanation>,
}

fn as_text<S: Serializer>(device: &Device, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(device)
}

/// Why a model cannot be planned.
#[derive(Clone, Debug, thiserror::Error)]
pub enum PlanError {
    /// Layers without a backend.
    #[error("{}", .0.iter().map(|(label, error)| format!("{label}: {error}")).collect::<Vec<_>>().join("; "))]
    NoBackend(Vec<(String, SelectionError)>),
    /// Backends that do not meet.
    #[error(transparent)]
    Layout(#[from] LayoutConflict),
}

/// Layers that ask for the same.
struct Members<'a> {
    layers: Vec<&'a LayerDescription>,
    request: LayerRequest,
    explanation: Explanation,
}

impl Members<'_> {
    fn label(&self) -> String {
        let indices: Vec<usize> = self.layers.iter().map(|layer| layer.index).collect();
        let kind = self.layers.first().map_or("", |layer| layer.kind.name());
        format!("{} ({kind})", ranges(&indices))
    }

    /// The sort of state-space layers that no backend at all claims: the plan shows them without one.
    fn unclaimed(&self) -> Option<StateSpaceType> {
        let claims =
            |sort| move |candidate: &CandidateVerdict| candidate.descriptor.capability.state_space.contains(&sort);
        let sort = self.request.state_space?;
        let is_open = self.explanation.wanted.is_none() && self.explanation.result().is_err();
        (is_open && !self.explanation.candidates.iter().any(claims(sort))).then_some(sort)
    }

    fn planned(&self, layer: &LayerDescription) -> PlannedLayer {
        PlannedLayer {
            index: layer.index,
            kind: layer.kind,
            backend: None,
            request: self.request.clone(),
            state_space: layer.state_space,
            name: layer.name.clone(),
            source: None,
            why: String::new(),
            layout: None,
            sliding_window: layer.sliding_window,
            selection: None,
        }
    }

    fn family(&self) -> Option<CacheFamily> {
        match (&self.request.attn_type, self.request.use_mla) {
            _ if self.request.state_space.is_some() => None,
            (AttentionType::Encoder | AttentionType::EncoderOnly, _) => None,
            (_, true) => Some(CacheFamily::Latent),
            (_, false) => Some(CacheFamily::Heads),
        }
    }

    /// Candidates that may serve the layers, the first choice first.
    fn options(&self) -> impl Iterator<Item = &CandidateVerdict> {
        self.explanation.candidates.iter().filter(|candidate| candidate.is_valid())
    }
}

/// `layer 3` or `layers 0-2, 5`.
fn ranges(indices: &[usize]) -> String {
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for index in indices {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == *index => *last = *index,
            _ => parts.push((*index, *index)),
        }
    }
    let text: Vec<String> =
        parts.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}-{b}") }).collect();
    format!("layer{} {}", if indices.len() == 1 { "" } else { "s" }, text.join(", "))
}

/// Plans a model. `explain` answers a selection, as [`crate::selector::select`] does.
///
/// # Errors
/// When layers have no backend, or no common layout and block size exist: names the layers.
pub fn plan(
    model: &ModelDescription,
    engine: &EngineConfig,
    device: &Device,
    explain: impl Fn(&LayerRequest, Kind) -> Explanation,
) -> Result<ModelPlan, PlanError> {
    let mut all: Vec<Members<'_>> = Vec::new();
    for layer in &model.layers {
        let request = layer.request(engine);
        let same = |members: &&mut Members<'_>| members.request == request && members.layers[0].kind == layer.kind;
        if let Some(members) = all.iter_mut().find(same) {
            members.layers.push(layer);
        } else {
            let explanation = explain(&request, layer.kind);
            all.push(Members { layers: vec![layer], request, explanation });
        }
    }
    let failed: Vec<(String, SelectionError)> = all
        .iter()
        .filter(|members| members.unclaimed().is_none())
        .filter_map(|members| members.explanation.result().err().map(|error| (members.label(), error)))
        .collect();
    if !failed.is_empty() {
        return Err(PlanError::NoBackend(failed));
    }
    let (unclaimed, all): (Vec<Members<'_>>, Vec<Members<'_>>) =
        all.into_iter().partition(|members| members.unclaimed().is_some());
    let groups: Vec<Group<'_>> = all.iter().map(|members| group(members, device)).collect();
    let resolution = resolve(&groups, engine.block_size)?;

    let mut warnings: BTreeSet<String> = all.iter().flat_map(|members| members.explanation.warnings.clone()).collect();
    let mut layers: Vec<PlannedLayer> = Vec::with_capacity(model.layers.len());
    for (selection, (members, chosen)) in all.iter().zip(&resolution.chosen).enumerate() {
        let Some(candidate) = members.options().nth(*chosen) else { continue };
        let mut why = members.explanation.why.clone();
        if *chosen > 0 {
            let first = members.options().next().map_or("", CandidateVerdict::name);
            why = format!("{first} is preferred, but shares no cache layout and block size with the other layers");
            warnings.insert(format!("{}: {} is taken: {why}", members.label(), candidate.name()));
        }
        let family = members.family();
        let layout = resolution.layouts.iter().find(|(of, _)| Some(*of) == family).map(|(_, name)| name.clone());
        layers.extend(members.layers.iter().map(|layer| PlannedLayer {
            backend: Some(candidate.name().to_owned()),
            source: Some(candidate.source.to_string()),
            why: why.clone(),
            layout: layout.clone(),
            selection: Some(selection),
            ..members.planned(layer)
        }));
    }
    for members in &unclaimed {
        let Some(sort) = members.unclaimed() else { continue };
        let why = format!("no backend here claims state-space layers of type {}", sort.name());
        warnings.insert(why.clone());
        layers.extend(members.layers.iter().map(|layer| PlannedLayer { why: why.clone(), ..members.planned(layer) }));
    }
    layers.sort_by_key(|layer| layer.index);
    let layouts: Vec<&str> = resolution.layouts.iter().map(|(_, name)| name.as_str()).collect();
    Ok(ModelPlan {
        model: model.model_type.clone(),
        device: device.clone(),
        layers,
        kv_layout: (!layouts.is_empty()).then(|| layouts.join(", ")),
        block_size: resolution.block_size,
        warnings: warnings.into_iter().collect(),
        selections: all.into_iter().map(|members| members.explanation).collect(),
    })
}

fn group<'a>(members: &'a Members<'_>, device: &Device) -> Group<'a> {
    let option = |candidate: &'a CandidateVerdict| {
        let effective = Effective::new(&candidate.descriptor, &members.request, device);
        GroupOption { name: candidate.name(), layouts: effective.layouts(), block_sizes: effective.block_sizes() }
    };
    let options = members.options().map(option).collect();
    Group { label: members.label(), num_layers: members.layers.len(), family: members.family(), options }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        BackendDescriptor, BlockSizes, Dtype, NumberRule, PluginMetadata, Support,
        policy::{Origin, Policy, Wanted},
        selector::{Candidate, Source, select},
    };
    use std::sync::Arc;

    fn candidate(name: &str, layout: &str, sizes: BlockSizes, mla: Support, rank: i32) -> Candidate {
        let descriptor = BackendDescriptor::builder(name)
            .platform("cpu")
            .head_sizes([NumberRule::ANY])
            .gqa_ratios([NumberRule::ANY])
            .dtypes([Dtype::BF16])
            .block_sizes(sizes)
            .layouts([layout])
            .attn_types([AttentionType::Decoder])
            .features(["sliding_window"])
            .mla(mla)
            .rank(rank)
            .build();
        let plugin = PluginMetadata {
            name: name.to_lowercase(),
            vendor: "tests".into(),
            version: "1.0.0".parse().unwrap(),
            sdk_version: "1.0.0".parse().unwrap(),
            abi_generation_min: 1,
            abi_generation_max: 1,
        };
        Candidate {
            descriptor: Arc::new(descriptor),
            plugin: Arc::new(plugin),
            source: Source::Linked,
            unavailable: Vec::new(),
        }
    }

    fn model() -> ModelDescription {
        let layer = |index: usize| match index % 3 {
            0 => LayerDescription {
                kind: Kind::SlidingWindow,
                sliding_window: Some(64),
                ..LayerDescription::new(index, 8, 2, 64)
            },
            _ => LayerDescription::new(index, 8, 2, 128),
        };
        ModelDescription { model_type: "test".into(), dtype: None, layers: (0..9).map(layer).collect() }
    }

    fn planned(candidates: &[Candidate], policy: &Policy) -> Result<ModelPlan, PlanError> {
        let device = Device::new("cpu");
        plan(&model(), &EngineConfig::default(), &device, |request, kind| {
            select(request, Some(kind), &device, policy, candidates)
        })
    }

    #[test]
    fn automatic_choices_move_and_overrides_do_not() {
        let any = candidate("ANY", "x", BlockSizes::multiples_of(16), Support::No, 5);
        let mut only_full = candidate("ONLY_FULL", "y", BlockSizes::exact([64]), Support::No, 1);
        Arc::make_mut(&mut only_full.descriptor).capability.features.clear();
        let both = [any, only_full];
        let found = planned(&both, &Policy::default()).unwrap();
        assert!(found.layers.iter().all(|layer| layer.backend.as_deref() == Some("ANY")), "{found:?}");
        assert_eq!((found.kv_layout.as_deref(), found.block_size), (Some("x"), Some(16)));
        assert!(found.warnings[0].contains("layers 1-2, 4-5, 7-8 (full_attention)"), "{:?}", found.warnings);

        let mut policy = Policy::default();
        policy.per_kind.insert(Kind::FullAttention, Wanted { name: "ONLY_FULL".into(), origin: Origin::Api });
        let error = planned(&both, &policy).unwrap_err().to_string();
        for part in ["ONLY_FULL takes layout y, block size 64", "ANY takes layout x", "layers 0, 3, 6 (sliding_window)"]
        {
            assert!(error.contains(part), "{error}");
        }
        let error = planned(&both[1..], &Policy::default()).unwrap_err().to_string();
        assert!(error.starts_with("layers 0, 3, 6 (sliding_window): no backend can serve"), "{error}");
    }
}
