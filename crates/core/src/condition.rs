//! Conditions as data: when a rule of a descriptor, or of the operator, applies.
//!
//! Owns the vocabulary of conditions and their evaluation, a pure function of a request and a
//! device. Must not know: backends, policy, files.

use crate::{
    device::{ComputeCapability, Device},
    kind::Kind,
    request::{AttentionType, Dtype, LayerRequest},
};
use serde::{Deserialize, Serialize};
use std::ops::RangeInclusive;

/// One rule for numbers: a single number, or a range with a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum NumberRule {
    /// Exactly this number.
    Exact(u32),
    /// All numbers of a range.
    Range(NumberRange),
}

/// A range of numbers, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct NumberRange {
    /// Least number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<u32>,
    /// Greatest number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// Only multiples of this.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multiple_of: Option<u32>,
}

impl NumberRule {
    /// Every number from 1 on.
    pub const ANY: Self = Self::Range(NumberRange { min: Some(1), max: None, multiple_of: None });

    /// The multiples of `step` in a range.
    #[must_use]
    pub fn multiples(step: u32, range: RangeInclusive<u32>) -> Self {
        Self::Range(NumberRange { min: Some(*range.start()), max: Some(*range.end()), multiple_of: Some(step) })
    }

    /// The numbers from `min` on.
    #[must_use]
    pub fn at_least(min: u32) -> Self {
        Self::Range(NumberRange { min: Some(min), ..NumberRange::default() })
    }

    /// The numbers up to `max`.
    #[must_use]
    pub fn at_most(max: u32) -> Self {
        Self::Range(NumberRange { max: Some(max), ..NumberRange::default() })
    }

    /// Whether the rule holds for `number`.
    #[must_use]
    pub fn contains(self, number: u32) -> bool {
        match self {
            Self::Exact(exact) => exact == number,
            Self::Range(range) => {
                range.min.is_none_or(|min| number >= min)
                    && range.max.is_none_or(|max| number <= max)
                    && range.multiple_of.is_none_or(|step| step != 0 && number.is_multiple_of(step))
            }
        }
    }

    /// The number nearest to `wanted` for which the rule holds, if there is one.
    #[must_use]
    pub fn nearest(self, wanted: u32) -> Option<u32> {
        let range = match self {
            Self::Exact(exact) => return Some(exact),
            Self::Range(range) => range,
        };
        let (min, max) = (range.min.unwrap_or(0), range.max.unwrap_or(u32::MAX));
        if min > max {
            return None;
        }
        let step = range.multiple_of.unwrap_or(1);
        let inside = wanted.clamp(min, max);
        let below = inside.checked_div(step)? * step;
        let candidates = [Some(below), below.checked_add(step)];
        let nearest = candidates.into_iter().flatten().filter(|number| self.contains(*number));
        nearest.min_by_key(|number| number.abs_diff(wanted))
    }
}

impl From<u32> for NumberRule {
    fn from(number: u32) -> Self {
        Self::Exact(number)
    }
}

impl From<RangeInclusive<u32>> for NumberRule {
    fn from(range: RangeInclusive<u32>) -> Self {
        Self::Range(NumberRange { min: Some(*range.start()), max: Some(*range.end()), multiple_of: None })
    }
}

/// Whether any rule holds for `number`.
#[must_use]
pub fn any_contains(rules: &[NumberRule], number: u32) -> bool {
    rules.iter().any(|rule| rule.contains(number))
}

/// A range of compute capabilities, both ends included; `{}` is every one, and a device without one.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CapabilityRange {
    /// Least capability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min: Option<ComputeCapability>,
    /// Greatest capability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<ComputeCapability>,
    /// Any capability of this generation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major: Option<u32>,
}

impl CapabilityRange {
    /// Whether the range holds `capability`.
    #[must_use]
    pub fn contains(self, capability: ComputeCapability) -> bool {
        self.min.is_none_or(|min| capability >= min)
            && self.max.is_none_or(|max| capability <= max)
            && self.major.is_none_or(|major| capability.major == major)
    }
}

/// Whether an architecture's name fits a pattern: the name itself, or its beginning and `*`.
#[must_use]
pub fn architecture_matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => pattern == name,
    }
}

macro_rules! conditions {
    ($($(#[$doc:meta])* $flag:ident),* $(,)?) => {
        /// When a rule applies. Everything that is stated must hold; what is absent does not count,
        /// and the empty condition always holds. A list holds when one of its members does. A
        /// number or name that the request or device does not state matches no list.
        #[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
        #[serde(default, deny_unknown_fields)]
        pub struct Condition {
            /// The layer's kind.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub kinds: Vec<Kind>,
            /// Elements of a query or key head.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub head_sizes: Vec<NumberRule>,
            /// Elements of a value head, where stated.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub head_sizes_v: Vec<NumberRule>,
            /// The user's block size.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub block_sizes: Vec<NumberRule>,
            /// Whether the user fixed a block size.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub block_size_stated: Option<bool>,
            /// Query heads.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub num_heads: Vec<NumberRule>,
            /// KV heads.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub num_kv_heads: Vec<NumberRule>,
            /// Compute dtypes.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub dtypes: Vec<Dtype>,
            /// Names of KV-cache formats; a trailing `*` stands for any ending.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub kv_cache_dtypes: Vec<String>,
            /// Whether the request states a KV-cache format.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub kv_cache_dtype_stated: Option<bool>,
            /// Whether the KV-cache format has fewer bits than 16; one not stated has not.
            #[serde(skip_serializing_if = "Option::is_none")]
            pub kv_cache_quantized: Option<bool>,
            /// Attention types.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub attn_types: Vec<AttentionType>,
            $(
                $(#[$doc])*
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $flag: Option<bool>,
            )*
            /// Platforms.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub platforms: Vec<String>,
            /// Compute capabilities.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub compute_capability: Vec<CapabilityRange>,
            /// Architectures; a trailing `*` stands for any ending.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub architectures: Vec<String>,
            /// Device features that must all be present.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub device_features: Vec<String>,
            /// Device features of which none may be present.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub device_features_absent: Vec<String>,
            /// All of these must hold.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub all: Vec<Condition>,
            /// One of these must hold.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub any: Vec<Condition>,
            /// None of these may hold.
            #[serde(skip_serializing_if = "Vec::is_empty")]
            pub not: Vec<Condition>,
        }

        impl Condition {
            fn flags_match(&self, request: &LayerRequest) -> bool {
                $(self.$flag.is_none_or(|wanted| wanted == request.$flag))&&*
            }
        }
    };
}

conditions! {
    /// Multi-head latent attention.
    use_mla,
    /// Attention sinks.
    has_sink,
    /// Sparse attention.
    use_sparse,
    /// Multimodal prefixes.
    use_mm_prefix,
    /// KV scales per head.
    use_per_head_quant_scales,
    /// A sliding window.
    has_sliding_window,
    /// No causal mask.
    use_non_causal,
    /// Batch-invariant results.
    use_batch_invariant,
    /// A KV connector.
    use_kv_connector,
    /// Prefill context parallelism.
    use_pcp,
    /// Decode context parallelism.
    use_dcp,
    /// Adaptive verification of speculative tokens.
    use_adaptive_verification,
    /// Relaxed sliding-window attention.
    use_rswa,
    /// A soft-cap.
    has_softcap,
    /// ALiBi.
    has_alibi,
    /// Chunked-local attention.
    chunked_local,
    /// The log-sum-exp is wanted.
    needs_lse,
}

fn number_matches(rules: &[NumberRule], number: Option<u32>) -> bool {
    rules.is_empty() || number.is_some_and(|number| any_contains(rules, number))
}

impl Condition {
    /// Whether the condition holds.
    #[must_use]
    pub fn matches(&self, request: &LayerRequest, device: &Device) -> bool {
        self.flags_match(request)
            && self.request_matches(request)
            && self.device_matches(device)
            && self.all.iter().all(|condition| condition.matches(request, device))
            && (self.any.is_empty() || self.any.iter().any(|condition| condition.matches(request, device)))
            && !self.not.iter().any(|condition| condition.matches(request, device))
    }

    fn request_matches(&self, request: &LayerRequest) -> bool {
        let dtype = request.kv_cache_dtype;
        number_matches(&self.head_sizes, Some(request.head_size))
            && number_matches(&self.head_sizes_v, request.head_size_v)
            && number_matches(&self.block_sizes, request.block_size)
            && number_matches(&self.num_heads, request.num_heads)
            && number_matches(&self.num_kv_heads, request.num_kv_heads)
            && self.block_size_stated.is_none_or(|wanted| wanted == request.block_size.is_some())
            && (self.kinds.is_empty() || self.kinds.contains(&request.kind()))
            && (self.dtypes.is_empty() || self.dtypes.contains(&request.dtype))
            && self.kv_cache_dtype_stated.is_none_or(|wanted| wanted == dtype.is_some())
            && self
                .kv_cache_quantized
                .is_none_or(|wanted| wanted == dtype.is_some_and(super::kv_cache_dtype::KvCacheDtype::is_quantized))
            && (self.kv_cache_dtypes.is_empty()
                || dtype.is_some_and(|dtype| {
                    self.kv_cache_dtypes.iter().any(|pattern| architecture_matches(pattern, dtype.name()))
                }))
            && (self.attn_types.is_empty() || self.attn_types.contains(&request.attn_type))
    }

    fn device_matches(&self, device: &Device) -> bool {
        (self.platforms.is_empty() || self.platforms.contains(&device.platform.0))
            && (self.compute_capability.is_empty()
                || device
                    .compute_capability
                    .is_some_and(|capability| self.compute_capability.iter().any(|range| range.contains(capability))))
            && (self.architectures.is_empty()
                || device
                    .architecture
                    .as_ref()
                    .is_some_and(|name| self.architectures.iter().any(|pattern| architecture_matches(pattern, name))))
            && self.device_features.iter().all(|feature| device.features.contains(feature))
            && !self.device_features_absent.iter().any(|feature| device.features.contains(feature))
    }

    /// A condition that holds when this one does not.
    #[must_use]
    pub fn negated(self) -> Self {
        Self { not: vec![self], ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_stated_must_hold() -> Result<(), Box<dyn std::error::Error>> {
        let condition: Condition = serde_json::from_str(
            r#"{"head_sizes": [64, {"min": 128, "max": 256, "multiple_of": 32}], "platforms": ["cuda"],
                "compute_capability": [{"major": 9}], "use_mla": false, "not": [{"num_heads": [{"max": 16}]}]}"#,
        )?;
        let mut device = Device::new("cuda");
        device.compute_capability = Some("9.0".parse()?);
        let mut request = LayerRequest { head_size: 160, ..LayerRequest::default() };
        assert!(condition.matches(&request, &device), "num_heads not stated counts as many");
        request.num_heads = Some(16);
        assert!(!condition.matches(&request, &device));
        request.num_heads = Some(17);
        assert!(condition.matches(&request, &device));
        request.head_size = 144;
        assert!(!condition.matches(&request, &device));
        request.head_size = 64;
        assert!(condition.matches(&request, &device));
        assert!(!condition.matches(&request, &Device::new("cuda")), "a capability that is not stated matches no range");
        assert!(Condition::default().matches(&request, &device));
        assert!(!Condition::default().negated().matches(&request, &device));
        Ok(())
    }

    #[test]
    fn unknown_words_are_errors() {
        assert!(serde_json::from_str::<Condition>(r#"{"head_size": 64}"#).is_err());
        assert!(serde_json::from_str::<Condition>(r#"{"head_sizes": [{"least": 64}]}"#).is_err());
    }

    #[test]
    fn a_step_of_zero_matches_nothing() {
        assert!(!NumberRule::multiples(0, 0..=10).contains(0));
    }
}
