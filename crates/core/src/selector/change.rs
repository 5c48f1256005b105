//! What would have to change for a refused backend to be admitted.

use crate::{
    condition::NumberRule,
    descriptor::{BackendDescriptor, Support},
    device::Device,
    kv_cache_dtype::KvCacheDtype,
    request::{AttentionType, LayerRequest},
    verdict::{Effective, verdict},
};
use serde::Serialize;
use std::fmt;

/// Another value of one field.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Change {
    /// The field of the request.
    pub field: &'static str,
    /// Its new value.
    pub value: String,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.field, self.value)
    }
}

/// Who can make a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// The operator: formats, block size and the engine's settings.
    Settings,
    /// Also another model: head size, latent attention, and so on.
    Model,
}

/// Most changes that are tried together.
const MAX_CHANGES: usize = 4;

type Apply = Box<dyn Fn(&mut LayerRequest)>;

/// The smallest set of changes that admits the backend, and the request with them; `None` when no
/// set of up to four does, or nothing needs to change.
#[must_use]
pub fn smallest_changes(
    descriptor: &BackendDescriptor,
    request: &LayerRequest,
    device: &Device,
    scope: Scope,
    at_most: usize,
) -> Option<(Vec<Change>, LayerRequest)> {
    let found = verdict(descriptor, request, device).reasons.len();
    if found == 0 {
        return None;
    }
    // Only what removes a reason by itself can be part of a smallest set, since each reason speaks
    // of its own fields; combinations that a backend refuses are tried with each of theirs.
    let mut helpful: Vec<(Change, Apply)> = Vec::new();
    for (change, apply) in possible(descriptor, request, device, scope) {
        let mut changed = request.clone();
        apply(&mut changed);
        if verdict(descriptor, &changed, device).reasons.len() < found {
            helpful.push((change, apply));
        }
    }
    for size in 1..=at_most.min(MAX_CHANGES).min(helpful.len()) {
        let mut picked: Vec<usize> = (0..size).collect();
        loop {
            let fields: Vec<&str> = picked.iter().map(|index| helpful[*index].0.field).collect();
            let distinct = fields.iter().enumerate().all(|(at, field)| !fields[..at].contains(field));
            if distinct {
                let mut changed = request.clone();
                picked.iter().for_each(|index| (helpful[*index].1)(&mut changed));
                if verdict(descriptor, &changed, device).is_valid() {
                    return Some((picked.iter().map(|index| helpful[*index].0.clone()).collect(), changed));
                }
            }
            if !next_subset(&mut picked, helpful.len()) {
                break;
            }
        }
    }
    None
}

/// The next subset of the same size in lexicographic order.
fn next_subset(picked: &mut [usize], total: usize) -> bool {
    let size = picked.len();
    let Some(at) = (0..size).rfind(|at| picked[*at] < total - size + at) else { return false };
    picked[at] += 1;
    for next in at + 1..size {
        picked[next] = picked[next - 1] + 1;
    }
    true
}

/// Numbers that a rule takes, near `wanted` first.
fn examples(rules: &[NumberRule], wanted: u32) -> Vec<u32> {
    let mut all: Vec<u32> = rules.iter().filter_map(|rule| rule.nearest(wanted)).collect();
    all.sort_by_key(|number| (number.abs_diff(wanted), *number));
    all.dedup();
    all
}

fn possible(
    descriptor: &BackendDescriptor,
    request: &LayerRequest,
    device: &Device,
    scope: Scope,
) -> Vec<(Change, Apply)> {
    let effective = Effective::new(descriptor, request, device);
    let mut all: Vec<(Change, Apply)> = Vec::new();
    let mut add = |field: &'static str, value: String, apply: Apply| all.push((Change { field, value }, apply));

    let sizes = effective.block_sizes();
    let mut blocks: Vec<u32> = sizes.exact.iter().chain(&sizes.multiples_of).copied().collect();
    if let Some(asked) = request.block_size {
        let above = sizes
            .multiples_of
            .iter()
            .filter(|step| **step != 0)
            .filter_map(|step| asked.checked_next_multiple_of(*step));
        blocks.extend(above.collect::<Vec<_>>());
        blocks.sort_by_key(|size| (size.abs_diff(asked), *size));
        blocks.dedup();
        for size in blocks {
            add("block_size", size.to_string(), Box::new(move |request| request.block_size = Some(size)));
        }
        add("block_size", "auto".to_owned(), Box::new(|request| request.block_size = None));
    }
    for name in effective.kv_cache_dtypes() {
        if let Ok(dtype) = KvCacheDtype::parse(name) {
            add("kv_cache_dtype", name.clone(), Box::new(move |request| request.kv_cache_dtype = Some(dtype)));
        }
    }
    for dtype in effective.dtypes().iter().copied() {
        add("dtype", dtype.to_string(), Box::new(move |request| request.dtype = dtype));
    }
    macro_rules! switch_off {
        ($($field:ident),*) => {
            $(if request.$field {
                add(stringify!($field), "false".to_owned(), Box::new(|request| request.$field = false));
            })*
        };
    }
    switch_off!(
        use_per_head_quant_scales,
        use_non_causal,
        use_batch_invariant,
        use_kv_connector,
        use_pcp,
        use_dcp,
        use_adaptive_verification,
        use_rswa,
        needs_lse
    );
    if scope == Scope::Settings {
        return all;
    }
    switch_off!(has_sink, use_mm_prefix, has_sliding_window, has_softcap, has_alibi, chunked_local);
    for size in examples(effective.head_sizes(), request.head_size) {
        add("head_size", size.to_string(), Box::new(move |request| request.head_size = size));
    }
    if request.head_size_v.is_some() {
        add("head_size_v", "head_size".to_owned(), Box::new(|request| request.head_size_v = None));
    }
    if let Some(heads) = request.num_heads.filter(|_| request.num_kv_heads.is_some()) {
        add("num_kv_heads", heads.to_string(), Box::new(move |request| request.num_kv_heads = Some(heads)));
    }
    for (support, field, asked) in [
        (descriptor.capability.mla, "use_mla", request.use_mla),
        (descriptor.capability.sparse, "use_sparse", request.use_sparse),
    ] {
        if (support == Support::Only) != asked && support != Support::Both {
            let apply: Apply = match field {
                "use_mla" => Box::new(move |request| request.use_mla = !asked),
                _ => Box::new(move |request| request.use_sparse = !asked),
            };
            add(field, (!asked).to_string(), apply);
        }
    }
    for attn_type in effective.attn_types() {
        let value: AttentionType = attn_type.clone();
        add("attn_type", value.to_string(), Box::new(move |request| request.attn_type = value.clone()));
    }
    all
}
