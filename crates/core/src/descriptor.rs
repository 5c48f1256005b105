//! What a backend says of itself, as data: a manifest can state it, and the selector decides by it
//! without loading code.
//!
//! What is not claimed is refused; no default means "supported". Must not know: policy, files,
//! how verdicts are reached.

use crate::{
    condition::{CapabilityRange, Condition, NumberRule},
    kv_cache_dtype::KvCacheDtype,
    request::{AttentionType, Dtype, StateSpaceType},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// Names of what a backend can claim beyond sizes and types.
pub mod feature {
    /// Attention sinks.
    pub const SINK: &str = "sink";
    /// A sliding window.
    pub const SLIDING_WINDOW: &str = "sliding_window";
    /// A soft-cap on logits.
    pub const SOFTCAP: &str = "softcap";
    /// ALiBi position bias.
    pub const ALIBI: &str = "alibi";
    /// The log-sum-exp of each row.
    pub const LSE: &str = "lse";
    /// Bidirectional attention inside multimodal spans.
    pub const MM_PREFIX: &str = "mm_prefix";
    /// One KV scale per head.
    pub const PER_HEAD_QUANT_SCALES: &str = "per_head_quant_scales";
    /// No causal mask.
    pub const NON_CAUSAL: &str = "non_causal";
    /// Multi-head latent attention without the causal mask under decode context parallelism.
    pub const NON_CAUSAL_MLA_DCP: &str = "non_causal_mla_dcp";
    /// Results that do not depend on the batch.
    pub const BATCH_INVARIANCE: &str = "batch_invariance";
    /// A connector that moves the cache between machines.
    pub const KV_CONNECTOR: &str = "kv_connector";
    /// Prefill context parallelism.
    pub const PCP: &str = "pcp";
    /// Decode context parallelism.
    pub const DCP: &str = "dcp";
    /// Query lengths on the device that differ from those on the host.
    pub const ADAPTIVE_VERIFICATION: &str = "adaptive_verification";
    /// Relaxed sliding-window attention.
    pub const RSWA: &str = "rswa";
    /// Chunked-local attention.
    pub const CHUNKED_LOCAL: &str = "chunked_local";

    /// All of them.
    pub const ALL: [&str; 16] = [
        SINK,
        SLIDING_WINDOW,
        SOFTCAP,
        ALIBI,
        LSE,
        MM_PREFIX,
        PER_HEAD_QUANT_SCALES,
        NON_CAUSAL,
        NON_CAUSAL_MLA_DCP,
        BATCH_INVARIANCE,
        KV_CONNECTOR,
        PCP,
        DCP,
        ADAPTIVE_VERIFICATION,
        RSWA,
        CHUNKED_LOCAL,
    ];
}

/// How a backend stands to an ability that divides backends, such as latent attention.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Support {
    /// Only layers without it.
    #[default]
    No,
    /// Only layers with it.
    Only,
    /// Layers with and without it.
    Both,
}

/// Block sizes that a backend takes. Empty = it takes none that a user fixes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BlockSizes {
    /// Multiples of any of these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub multiples_of: Vec<u32>,
    /// Exactly these.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub exact: Vec<u32>,
    /// None above this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
}

impl BlockSizes {
    /// Multiples of `step`.
    #[must_use]
    pub fn multiples_of(step: u32) -> Self {
        Self { multiples_of: vec![step], ..Self::default() }
    }

    /// Only these sizes.
    #[must_use]
    pub fn exact(sizes: impl IntoIterator<Item = u32>) -> Self {
        Self { exact: sizes.into_iter().collect(), ..Self::default() }
    }

    /// Whether blocks of `size` tokens are taken.
    #[must_use]
    pub fn contains(&self, size: u32) -> bool {
        size != 0
            && self.max.is_none_or(|max| size <= max)
            && (self.exact.contains(&size)
                || self.multiples_of.iter().any(|step| *step != 0 && size.is_multiple_of(*step)))
    }
}

impl fmt::Display for BlockSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let multiples = self.multiples_of.iter().map(|step| format!("multiples of {step}"));
        let all: Vec<String> = multiples.chain(self.exact.iter().map(u32::to_string)).collect();
        f.write_str(if all.is_empty() { "none" } else { "" })?;
        f.write_str(&all.join(", "))?;
        self.max.map_or(Ok(()), |max| write!(f, " up to {max}"))
    }
}

/// What a backend can do.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Capability {
    /// Elements of a query or key head.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub head_sizes: Vec<NumberRule>,
    /// Elements of a value head; absent = only as many as of a key head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_sizes_v: Option<Vec<NumberRule>>,
    /// Query heads per KV head; absent = only 1. A latent cache has one row for all heads and
    /// needs no claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gqa_ratios: Option<Vec<NumberRule>>,
    /// Compute dtypes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dtypes: Vec<Dtype>,
    /// KV-cache formats by name. One that is not stated is taken by every backend.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kv_cache_dtypes: Vec<String>,
    /// Refuse a request that states no KV-cache format.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub kv_cache_dtype_required: bool,
    /// Tokens of a block.
    #[serde(skip_serializing_if = "is_default")]
    pub block_sizes: BlockSizes,
    /// Cache layouts by name, the preferred one first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layouts: Vec<String>,
    /// Attention types.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub attn_types: Vec<AttentionType>,
    /// Multi-head latent attention.
    pub mla: Support,
    /// Sparse attention.
    pub sparse: Support,
    /// Sorts of state-space and linear-attention layers.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub state_space: Vec<StateSpaceType>,
    /// What else it can do, see [`feature`].
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub features: BTreeSet<String>,
    /// Compute capabilities. A device that states a capability or an architecture is taken when the
    /// backend claims one of the two and every claimed one holds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub compute_capability: Vec<CapabilityRange>,
    /// Architectures; a trailing `*` stands for any ending.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub architectures: Vec<String>,
    /// Features that a device must have.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub device_features: BTreeSet<String>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// A part of a [`Capability`] that replaces the same part under a condition.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CapabilityOverride {
    /// When it replaces. Of several that apply and speak of the same part, the last one counts.
    pub when: Condition,
    /// Replaces [`Capability::head_sizes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_sizes: Option<Vec<NumberRule>>,
    /// Replaces [`Capability::head_sizes_v`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_sizes_v: Option<Vec<NumberRule>>,
    /// Replaces [`Capability::gqa_ratios`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gqa_ratios: Option<Vec<NumberRule>>,
    /// Replaces [`Capability::dtypes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtypes: Option<Vec<Dtype>>,
    /// Replaces [`Capability::kv_cache_dtypes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtypes: Option<Vec<String>>,
    /// Replaces [`Capability::block_sizes`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_sizes: Option<BlockSizes>,
    /// Replaces [`Capability::layouts`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layouts: Option<Vec<String>>,
    /// Replaces [`Capability::attn_types`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attn_types: Option<Vec<AttentionType>>,
    /// Features that are added.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub add_features: BTreeSet<String>,
    /// Features that are taken away.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub remove_features: BTreeSet<String>,
}

/// A combination that a backend refuses although it claims each part.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// When it is refused.
    #[serde(default)]
    pub when: Condition,
    /// Why, in the words that are shown.
    pub reason: String,
    /// Of the refusals of one group only the first that applies is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Give the reason only when nothing else speaks against the backend.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub only_alone: bool,
}

/// A backend's place among others.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rank {
    /// The place when no rule applies; lower comes first.
    pub base: i32,
    /// The first rule that applies gives the place.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<RankRule>,
}

/// A place under a condition.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankRule {
    /// When it applies.
    #[serde(default)]
    pub when: Condition,
    /// The place; lower comes first.
    pub rank: i32,
}

/// The type of a plugin option.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptionType {
    /// `true` or `false`.
    Bool,
    /// A whole number.
    Integer,
    /// A number.
    Number,
    /// Text.
    #[default]
    String,
}

/// An option that an operator may set in `[plugin.NAME]`.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct OptionSpec {
    /// Its type.
    #[serde(rename = "type")]
    pub option_type: OptionType,
    /// What it does.
    pub description: String,
    /// What holds when it is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
    /// The only values that are taken; empty = all of the type.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
}

/// What a backend says of itself.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendDescriptor {
    /// Its name, in capitals, for instance `CPU_ATTN`.
    pub name: String,
    /// One line for people.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub summary: String,
    /// Platforms that it runs on.
    pub platforms: Vec<String>,
    /// KV-cache formats that it brings beyond those known to the core.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub registers_kv_cache_dtypes: Vec<String>,
    /// What it can do.
    pub capability: Capability,
    /// Its place among others.
    #[serde(default, skip_serializing_if = "is_default")]
    pub rank: Rank,
    /// Parts of the capability that are other under a condition.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<CapabilityOverride>,
    /// Combinations that it refuses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refusals: Vec<Refusal>,
    /// Options that it takes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, OptionSpec>,
}

/// A descriptor that contradicts itself.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("backend {backend}: {problem}")]
pub struct DescriptorError {
    /// The backend's name as found.
    pub backend: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

/// Most overrides of one descriptor.
pub const MAX_OVERRIDES: usize = 64;

impl BackendDescriptor {
    /// Starts a descriptor that claims nothing.
    pub fn builder(name: &str) -> DescriptorBuilder {
        DescriptorBuilder(Self {
            name: name.to_owned(),
            summary: String::new(),
            platforms: Vec::new(),
            registers_kv_cache_dtypes: Vec::new(),
            capability: Capability::default(),
            rank: Rank::default(),
            overrides: Vec::new(),
            refusals: Vec::new(),
            options: BTreeMap::new(),
        })
    }

    /// Whether the descriptor makes sense.
    ///
    /// # Errors
    /// For a name that cannot be asked for, for no platform, for an unknown feature or KV-cache
    /// format, and for a refusal without a reason.
    pub fn check(&self) -> Result<(), DescriptorError> {
        let error = |problem: String| Err(DescriptorError { backend: self.name.clone(), problem });
        let well_formed = |name: &str| {
            !name.is_empty() && name.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
        };
        if !well_formed(&self.name) || self.name == "AUTO" {
            return error("the name must be of A-Z, 0-9 and _, and not AUTO".to_owned());
        }
        if self.platforms.is_empty() || self.platforms.iter().any(String::is_empty) {
            return error("platforms must name at least one platform".to_owned());
        }
        if self.overrides.len() > MAX_OVERRIDES {
            return error(format!("{} overrides; at most {MAX_OVERRIDES}", self.overrides.len()));
        }
        let overrides = self.overrides.iter();
        let claimed = overrides
            .clone()
            .flat_map(|o| o.add_features.iter().chain(&o.remove_features))
            .chain(&self.capability.features);
        for name in claimed {
            if !feature::ALL.contains(&name.as_str()) {
                return error(format!("unknown feature '{name}'; valid: {}", feature::ALL.join(", ")));
            }
        }
        let formats =
            overrides.flat_map(|o| o.kv_cache_dtypes.iter().flatten()).chain(&self.capability.kv_cache_dtypes);
        for name in formats {
            if !self.registers_kv_cache_dtypes.contains(name)
                && let Err(unknown) = KvCacheDtype::parse(name)
            {
                return error(format!("{unknown}; a new one must stand in registers_kv_cache_dtypes"));
            }
        }
        if self.refusals.iter().any(|refusal| refusal.reason.is_empty()) {
            return error("a refusal has an empty reason".to_owned());
        }
        Ok(())
    }
}

/// Writes a [`BackendDescriptor`]; see [`BackendDescriptor::builder`].
#[derive(Clone, Debug)]
#[must_use]
pub struct DescriptorBuilder(BackendDescriptor);

fn texts(items: impl IntoIterator<Item = impl Into<String>>) -> impl Iterator<Item = String> {
    items.into_iter().map(Into::into)
}

impl DescriptorBuilder {
    /// One line for people.
    pub fn summary(mut self, text: &str) -> Self {
        text.clone_into(&mut self.0.summary);
        self
    }

    /// Adds a platform.
    pub fn platform(mut self, name: &str) -> Self {
        self.0.platforms.push(name.to_owned());
        self
    }

    /// Adds head sizes: numbers, ranges, or [`NumberRule::multiples`].
    pub fn head_sizes(mut self, rules: impl IntoIterator<Item = impl Into<NumberRule>>) -> Self {
        self.0.capability.head_sizes.extend(rules.into_iter().map(Into::into));
        self
    }

    /// Adds sizes of value heads.
    pub fn head_sizes_v(mut self, rules: impl IntoIterator<Item = impl Into<NumberRule>>) -> Self {
        self.0.capability.head_sizes_v.get_or_insert_default().extend(rules.into_iter().map(Into::into));
        self
    }

    /// Adds numbers of query heads per KV head.
    pub fn gqa_ratios(mut self, rules: impl IntoIterator<Item = impl Into<NumberRule>>) -> Self {
        self.0.capability.gqa_ratios.get_or_insert_default().extend(rules.into_iter().map(Into::into));
        self
    }

    /// Adds compute dtypes.
    pub fn dtypes(mut self, dtypes: impl IntoIterator<Item = Dtype>) -> Self {
        self.0.capability.dtypes.extend(dtypes);
        self
    }

    /// Adds KV-cache formats by name.
    pub fn kv_cache_dtypes(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.0.capability.kv_cache_dtypes.extend(texts(names));
        self
    }

    /// Refuses requests that state no KV-cache format.
    pub fn kv_cache_dtype_required(mut self) -> Self {
        self.0.capability.kv_cache_dtype_required = true;
        self
    }

    /// Adds a KV-cache format that the core does not know, and claims it.
    pub fn registers_kv_cache_dtype(mut self, name: &str) -> Self {
        self.0.registers_kv_cache_dtypes.push(name.to_owned());
        self.0.capability.kv_cache_dtypes.push(name.to_owned());
        self
    }

    /// Sets the block sizes.
    pub fn block_sizes(mut self, sizes: BlockSizes) -> Self {
        self.0.capability.block_sizes = sizes;
        self
    }

    /// Adds cache layouts, the preferred one first.
    pub fn layouts(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.0.capability.layouts.extend(texts(names));
        self
    }

    /// Adds attention types.
    pub fn attn_types(mut self, types: impl IntoIterator<Item = AttentionType>) -> Self {
        self.0.capability.attn_types.extend(types);
        self
    }

    /// States how it stands to multi-head latent attention.
    pub fn mla(mut self, support: Support) -> Self {
        self.0.capability.mla = support;
        self
    }

    /// States how it stands to sparse attention.
    pub fn sparse(mut self, support: Support) -> Self {
        self.0.capability.sparse = support;
        self
    }

    /// Adds sorts of state-space layers.
    pub fn state_space(mut self, sorts: impl IntoIterator<Item = StateSpaceType>) -> Self {
        self.0.capability.state_space.extend(sorts);
        self
    }

    /// Adds features, see [`feature`].
    pub fn features(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.0.capability.features.extend(texts(names));
        self
    }

    /// Adds a range of compute capabilities.
    pub fn compute_capability(mut self, range: CapabilityRange) -> Self {
        self.0.capability.compute_capability.push(range);
        self
    }

    /// Adds architectures by name; a trailing `*` stands for any ending.
    pub fn architectures(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.0.capability.architectures.extend(texts(names));
        self
    }

    /// Adds features that a device must have.
    pub fn device_features(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.0.capability.device_features.extend(texts(names));
        self
    }

    /// Replaces parts of the capability under a condition.
    pub fn override_with(mut self, part: CapabilityOverride) -> Self {
        self.0.overrides.push(part);
        self
    }

    /// Refuses a combination.
    pub fn refuse(mut self, when: Condition, reason: &str) -> Self {
        self.0.refusals.push(Refusal { when, reason: reason.to_owned(), group: None, only_alone: false });
        self
    }

    /// Sets the place among other backends; lower comes first.
    pub fn rank(mut self, base: i32) -> Self {
        self.0.rank.base = base;
        self
    }

    /// Sets the place under a condition; the first rule that applies counts.
    pub fn rank_when(mut self, when: Condition, rank: i32) -> Self {
        self.0.rank.rules.push(RankRule { when, rank });
        self
    }

    /// Adds an option for `[plugin.NAME]`.
    pub fn option(mut self, name: &str, spec: OptionSpec) -> Self {
        self.0.options.insert(name.to_owned(), spec);
        self
    }

    /// The descriptor.
    #[must_use]
    pub fn build(self) -> BackendDescriptor {
        self.0
    }
}

#[cfg(test)]
#[path = "descriptor_tests.rs"]
mod tests;
