//! Whether one backend can serve one request on one device: valid, or every reason why not.
//!
//! A pure function of data. Must not know: other backends, policy, libraries.

use crate::{
    condition::{CapabilityRange, NumberRule, any_contains, architecture_matches},
    descriptor::{BackendDescriptor, BlockSizes, CapabilityOverride, Support, feature},
    device::{ComputeCapability, Device},
    request::{AttentionType, Dtype, LayerRequest, StateSpaceType},
};
use std::borrow::Cow;

/// One reason why a backend is refused.
pub type Reason = Cow<'static, str>;

/// The reason that a block size of the user's gives; selection warns when it is the only one.
pub const BLOCK_SIZE_REASON: &str = "block_size not supported";

/// All reasons against a backend; none = it is valid.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Verdict {
    /// In a fixed order; one may stand twice when two rules give it.
    pub reasons: Vec<Reason>,
}

impl Verdict {
    /// Whether nothing speaks against the backend.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.reasons.is_empty()
    }
}

/// A descriptor's capability for one request and device: with its overrides applied.
#[derive(Clone, Copy, Debug)]
pub struct Effective<'a> {
    descriptor: &'a BackendDescriptor,
    active: u64,
}

impl<'a> Effective<'a> {
    /// Finds the overrides that apply.
    #[must_use]
    pub fn new(descriptor: &'a BackendDescriptor, request: &LayerRequest, device: &Device) -> Self {
        let mut active = 0;
        for (index, part) in descriptor.overrides.iter().enumerate().take(64) {
            if part.when.matches(request, device) {
                active |= 1 << index;
            }
        }
        Self { descriptor, active }
    }

    fn overrides(&self) -> impl DoubleEndedIterator<Item = &'a CapabilityOverride> {
        let active = self.active;
        let all = if active == 0 { &[] } else { self.descriptor.overrides.as_slice() };
        all.iter().enumerate().filter(move |(index, _)| *index < 64 && active >> index & 1 == 1).map(|(_, part)| part)
    }

    fn part<T: ?Sized>(&self, base: &'a T, get: impl Fn(&'a CapabilityOverride) -> Option<&'a T>) -> &'a T {
        self.overrides().rev().find_map(get).unwrap_or(base)
    }

    /// Sizes of query and key heads.
    #[must_use]
    pub fn head_sizes(&self) -> &'a [NumberRule] {
        self.part(self.descriptor.capability.head_sizes.as_slice(), |part| part.head_sizes.as_deref())
    }

    /// Sizes of value heads; `None` = that of the key heads.
    #[must_use]
    pub fn head_sizes_v(&self) -> Option<&'a [NumberRule]> {
        let base = self.descriptor.capability.head_sizes_v.as_deref();
        self.overrides().rev().find_map(|part| part.head_sizes_v.as_deref()).or(base)
    }

    /// Query heads per KV head; `None` = 1.
    #[must_use]
    pub fn gqa_ratios(&self) -> Option<&'a [NumberRule]> {
        let base = self.descriptor.capability.gqa_ratios.as_deref();
        self.overrides().rev().find_map(|part| part.gqa_ratios.as_deref()).or(base)
    }

    /// Compute dtypes.
    #[must_use]
    pub fn dtypes(&self) -> &'a [Dtype] {
        self.part(self.descriptor.capability.dtypes.as_slice(), |part| part.dtypes.as_deref())
    }

    /// KV-cache formats by name.
    #[must_use]
    pub fn kv_cache_dtypes(&self) -> &'a [String] {
        self.part(self.descriptor.capability.kv_cache_dtypes.as_slice(), |part| part.kv_cache_dtypes.as_deref())
    }

    /// Block sizes.
    #[must_use]
    pub fn block_sizes(&self) -> &'a BlockSizes {
        self.part(&self.descriptor.capability.block_sizes, |part| part.block_sizes.as_ref())
    }

    /// Cache layouts, the preferred one first.
    #[must_use]
    pub fn layouts(&self) -> &'a [String] {
        self.part(self.descriptor.capability.layouts.as_slice(), |part| part.layouts.as_deref())
    }

    /// Attention types.
    #[must_use]
    pub fn attn_types(&self) -> &'a [AttentionType] {
        self.part(self.descriptor.capability.attn_types.as_slice(), |part| part.attn_types.as_deref())
    }

    /// Whether a feature is claimed.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        let mut claimed = self.descriptor.capability.features.contains(name);
        for part in self.overrides() {
            claimed = (claimed || part.add_features.contains(name)) && !part.remove_features.contains(name);
        }
        claimed
    }
}

fn refused(support: Support, asked: bool) -> bool {
    match support {
        Support::No => asked,
        Support::Only => !asked,
        Support::Both => false,
    }
}

fn gqa_refused(request: &LayerRequest, ratios: Option<&[NumberRule]>) -> bool {
    let Some(kv_heads) = request.num_kv_heads else { return false };
    if request.use_mla && kv_heads == 1 {
        return false;
    }
    match request.num_heads {
        None => kv_heads == 0 || ratios.is_none(),
        Some(heads) => {
            kv_heads == 0
                || heads % kv_heads != 0
                || match ratios {
                    None => heads != kv_heads,
                    Some(ratios) => !any_contains(ratios, heads / kv_heads),
                }
        }
    }
}

fn device_reasons(descriptor: &BackendDescriptor, device: &Device, reasons: &mut Vec<Reason>) {
    let capability = &descriptor.capability;
    let ranges = &capability.compute_capability;
    let unclaimed = ranges.is_empty() && capability.architectures.is_empty();
    let inside = |found| ranges.iter().any(|range| range.contains(found));
    let claims_all = || ranges.contains(&CapabilityRange::default());
    let outside = !ranges.is_empty() && !device.compute_capability.map_or_else(claims_all, inside);
    if outside || (unclaimed && device.compute_capability.is_some()) {
        reasons.push("compute capability not supported".into());
    }
    let name = device.architecture.as_deref();
    let foreign = !capability.architectures.is_empty()
        && !name.is_some_and(|name| capability.architectures.iter().any(|p| architecture_matches(p, name)));
    if foreign || (unclaimed && device.compute_capability.is_none() && name.is_some()) {
        reasons.push(format!("architecture {} not supported", name.unwrap_or("(not stated)")).into());
    }
    for feature in &capability.device_features {
        if !device.features.contains(feature) {
            reasons.push(format!("device feature {feature} missing").into());
        }
    }
}

/// Every reason why the backend cannot serve the request on the device, in a fixed order.
#[must_use]
pub fn verdict(descriptor: &BackendDescriptor, request: &LayerRequest, device: &Device) -> Verdict {
    if let Some(sort) = request.state_space {
        return state_space_verdict(descriptor, sort, request, device);
    }
    let capability = &descriptor.capability;
    let effective = Effective::new(descriptor, request, device);
    let mut reasons: Vec<Reason> = Vec::new();
    let mut refuse = |refused: bool, reason: &'static str| {
        if refused {
            reasons.push(Cow::Borrowed(reason));
        }
    };
    let lacks = |asked: bool, name: &str| asked && !effective.has(name);

    refuse(!any_contains(effective.head_sizes(), request.head_size), "head_size not supported");
    refuse(!effective.dtypes().contains(&request.dtype), "dtype not supported");
    let format_refused = match request.kv_cache_dtype {
        None => capability.kv_cache_dtype_required,
        Some(dtype) => !effective.kv_cache_dtypes().iter().any(|name| name == dtype.name()),
    };
    refuse(format_refused, "kv_cache_dtype not supported");
    refuse(request.block_size.is_some_and(|size| !effective.block_sizes().contains(size)), BLOCK_SIZE_REASON);
    refuse(lacks(request.use_mm_prefix, feature::MM_PREFIX), "partial multimodal token full attention not supported");
    let mla = if request.use_mla { "MLA not supported" } else { "non-MLA not supported" };
    refuse(refused(capability.mla, request.use_mla), mla);
    refuse(lacks(request.has_sink, feature::SINK), "attention sinks not supported");
    let sparse = if request.use_sparse { "sparse not supported" } else { "non-sparse not supported" };
    refuse(refused(capability.sparse, request.use_sparse), sparse);
    refuse(
        lacks(request.use_per_head_quant_scales, feature::PER_HEAD_QUANT_SCALES),
        "per-head quant scales not supported",
    );
    device_reasons(descriptor, device, &mut reasons);
    if !effective.attn_types().contains(&request.attn_type) {
        reasons.push(match &request.attn_type {
            AttentionType::Decoder => Cow::Borrowed("attention type decoder not supported"),
            other => format!("attention type {other} not supported").into(),
        });
    }
    let mut refuse = |refused: bool, reason: &'static str| {
        if refused {
            reasons.push(Cow::Borrowed(reason));
        }
    };
    refuse(lacks(request.has_sliding_window, feature::SLIDING_WINDOW), "sliding window not supported");
    refuse(lacks(request.use_rswa, feature::RSWA), "R-SWA not supported");
    refuse(lacks(request.use_non_causal, feature::NON_CAUSAL), "non-causal attention not supported");
    refuse(
        lacks(request.use_mla && request.use_non_causal && request.use_dcp, feature::NON_CAUSAL_MLA_DCP),
        "non-causal MLA attention with DCP not supported",
    );
    refuse(lacks(request.use_batch_invariant, feature::BATCH_INVARIANCE), "batch invariance not supported");
    refuse(lacks(request.use_kv_connector, feature::KV_CONNECTOR), "KV connector not supported");
    refuse(lacks(request.use_pcp, feature::PCP), "PCP not supported");
    refuse(lacks(request.use_dcp, feature::DCP), "DCP not supported");
    refuse(
        lacks(request.use_adaptive_verification, feature::ADAPTIVE_VERIFICATION),
        "device-cpu query lens mismatch not supported, this is needed for adaptive verification",
    );
    let head_size_v_refused = request.head_size_v.is_some_and(|size| match effective.head_sizes_v() {
        None => size != request.head_size,
        Some(rules) => !any_contains(rules, size),
    });
    refuse(head_size_v_refused, "head_size_v not supported");
    refuse(gqa_refused(request, effective.gqa_ratios()), "num_kv_heads not supported");
    refuse(lacks(request.has_softcap, feature::SOFTCAP), "softcap not supported");
    refuse(lacks(request.has_alibi, feature::ALIBI), "ALiBi not supported");
    refuse(lacks(request.chunked_local, feature::CHUNKED_LOCAL), "chunked-local attention not supported");
    refuse(lacks(request.needs_lse, feature::LSE), "LSE output not supported");
    combination_reasons(descriptor, request, device, &mut reasons);
    if !descriptor.platforms.contains(&device.platform.0) {
        reasons.push(format!("platform {} not supported", device.platform).into());
    }
    Verdict { reasons }
}

/// A state-space layer has no heads, no blocks of keys and values and no mask: what it asks for is its
/// type, a dtype, the engine's settings, and the device.
fn state_space_verdict(
    descriptor: &BackendDescriptor,
    sort: StateSpaceType,
    request: &LayerRequest,
    device: &Device,
) -> Verdict {
    let effective = Effective::new(descriptor, request, device);
    let mut reasons: Vec<Reason> = Vec::new();
    if !descriptor.capability.state_space.contains(&sort) {
        reasons.push(format!("state-space type {} not supported", sort.name()).into());
    }
    let mut refuse = |refused: bool, reason: &'static str| {
        if refused {
            reasons.push(Cow::Borrowed(reason));
        }
    };
    let lacks = |asked: bool, name: &str| asked && !effective.has(name);
    refuse(!effective.dtypes().contains(&request.dtype), "dtype not supported");
    refuse(lacks(request.use_batch_invariant, feature::BATCH_INVARIANCE), "batch invariance not supported");
    refuse(lacks(request.use_kv_connector, feature::KV_CONNECTOR), "KV connector not supported");
    refuse(lacks(request.use_pcp, feature::PCP), "PCP not supported");
    device_reasons(descriptor, device, &mut reasons);
    combination_reasons(descriptor, request, device, &mut reasons);
    if !descriptor.platforms.contains(&device.platform.0) {
        reasons.push(format!("platform {} not supported", device.platform).into());
    }
    Verdict { reasons }
}

fn combination_reasons(
    descriptor: &BackendDescriptor,
    request: &LayerRequest,
    device: &Device,
    reasons: &mut Vec<Reason>,
) {
    let mut done: Vec<&str> = Vec::new();
    for refusal in &descriptor.refusals {
        let group = refusal.group.as_deref();
        let is_late = refusal.only_alone && !reasons.is_empty();
        if is_late || group.is_some_and(|group| done.contains(&group)) || !refusal.when.matches(request, device) {
            continue;
        }
        done.extend(group);
        reasons.push(filled(&refusal.reason, request, device).into());
    }
}

/// A reason with its fields: `{kv_cache_dtype}`, `{major}` and `{minor}` of the compute capability, and
/// `{fact:NAME|ELSE}`, the value of the device feature `NAME=…`.
fn filled(reason: &str, request: &LayerRequest, device: &Device) -> String {
    let mut out = String::with_capacity(reason.len());
    let mut rest = reason;
    while let Some((before, after)) = rest.split_once('{') {
        out.push_str(before);
        let Some((field, behind)) = after.split_once('}') else {
            out.push('{');
            rest = after;
            continue;
        };
        let capability = |part: fn(ComputeCapability) -> u32| {
            device.compute_capability.map_or_else(|| "None".to_owned(), |found| part(found).to_string())
        };
        match field {
            "kv_cache_dtype" => out.push_str(request.kv_cache_dtype.map_or("None", |dtype| dtype.name())),
            "major" => out.push_str(&capability(|found| found.major)),
            "minor" => out.push_str(&capability(|found| found.minor)),
            _ => match field.strip_prefix("fact:") {
                Some(fact) => {
                    let (name, default) = fact.split_once('|').unwrap_or((fact, ""));
                    let value = |feature: &String| Some(feature.strip_prefix(name)?.strip_prefix('=')?.to_owned());
                    out.push_str(&device.features.iter().find_map(value).unwrap_or_else(|| default.to_owned()));
                }
                None => {
                    out.push('{');
                    out.push_str(field);
                    out.push('}');
                }
            },
        }
        rest = behind;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
#[path = "verdict_tests.rs"]
mod tests;
