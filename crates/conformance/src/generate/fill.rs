//! From the values of the axes to a case.
//!
//! Owns batch shapes, masks, numbers and dimensions. Must not know the covering.

use super::{Axis, Row, Space};
use crate::{
    case::{Case, Mla, MlaForm, TopK},
    rng::Rng,
    stored::Storage,
    values::Values,
};
use attache_core::{AttentionType, cache::LAYOUT_LATENT, descriptor::feature};

/// Sizes of a layer's heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dims {
    Plain { head_size: u32, head_size_v: u32 },
    Latent { rank: usize, rope: usize, nope: usize, v: usize },
}

impl Dims {
    pub(super) fn head_size(self) -> usize {
        match self {
            Self::Plain { head_size, .. } => head_size as usize,
            Self::Latent { rank, rope, .. } => rank + rope,
        }
    }
}

/// DeepSeek's, a small one, and one in which nothing is a multiple of anything.
pub(super) const MLA_DIMS: [Dims; 3] = [
    Dims::Latent { rank: 512, rope: 64, nope: 128, v: 128 },
    Dims::Latent { rank: 48, rope: 16, nope: 32, v: 32 },
    Dims::Latent { rank: 37, rope: 7, nope: 19, v: 23 },
];

/// Which part of the keys a query sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mask {
    All,
    Window(i64),
    WindowRight(i64, i64),
    Chunked(i64),
}

/// Windows of one token, of less and more than a block, and of more than most sequences.
pub(super) const MASKS: [Mask; 8] = [
    Mask::All,
    Mask::Window(1),
    Mask::Window(5),
    Mask::Window(33),
    Mask::Window(1000),
    Mask::WindowRight(7, 2),
    Mask::Chunked(8),
    Mask::Chunked(100),
];

impl Mask {
    pub(super) fn feature(self) -> Option<&'static str> {
        match self {
            Self::All => None,
            Self::Window(_) | Self::WindowRight(..) => Some(feature::SLIDING_WINDOW),
            Self::Chunked(_) => Some(feature::CHUNKED_LOCAL),
        }
    }
}

/// Who is in the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Batch {
    Decode,
    Prefill,
    /// Some tokens of each request are in the cache already.
    Continued,
    /// All kinds at once, among them requests without tokens and one with more queries than keys.
    Mixed,
    /// One sequence of several tiles and splits beside a short one.
    Long,
    OneToken,
    /// Requests, but no token.
    NoTokens,
    NoRequests,
}

impl Batch {
    pub(super) const ALL: [Self; 8] = [
        Self::Mixed,
        Self::Decode,
        Self::Prefill,
        Self::Continued,
        Self::Long,
        Self::OneToken,
        Self::NoTokens,
        Self::NoRequests,
    ];

    /// New tokens and all tokens of each request.
    fn lengths(self, long: usize, rng: &mut Rng) -> Vec<(usize, usize)> {
        let mut some = |most: usize| 1 + rng.below(most);
        match self {
            // At the borders of blocks and tiles, among others.
            Self::Decode => vec![(1, 64), (1, some(70)), (1, 65), (1, 128), (1, some(16))],
            Self::Prefill => (0..3).map(|_| some(40)).map(|len| (len, len)).collect(),
            Self::Continued => (0..3).map(|_| (some(20), some(50))).map(|(new, old)| (new, new + old)).collect(),
            Self::Mixed => {
                let prefill = some(35);
                let mut lens =
                    vec![(1, some(60)), (prefill, prefill), (0, 0), (3, 3 + some(40)), (0, some(20)), (4, 2)];
                rng.shuffle(&mut lens);
                lens
            }
            Self::Long => vec![(3, long + some(50)), (1, some(9))],
            Self::OneToken => vec![(1, 1)],
            Self::NoTokens => vec![(0, some(20)), (0, 0)],
            Self::NoRequests => Vec::new(),
        }
    }
}

/// What the numbers are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Numbers {
    Normal,
    /// Logits so large that the softmax has one or two winners.
    Peaked,
    /// Queries of zero: the output is the mean of the visible values.
    ZeroQueries,
}

impl Numbers {
    pub(super) const ALL: [Self; 3] = [Self::Normal, Self::Peaked, Self::ZeroQueries];
}

/// The case without its tensors; `None` when the row's values do not go together.
pub(super) fn outline(space: &Space, row: &Row, rng: &mut Rng) -> Option<Case> {
    let value = |axis: Axis| row[axis as usize];
    let dims = space.dims[value(Axis::Dims)];
    let is_mla = matches!(dims, Dims::Latent { .. });
    let attn_type = space.attn_types[value(Axis::AttnType)].clone();
    let is_cross = attn_type == AttentionType::EncoderDecoder;
    let has_cache = !matches!(attn_type, AttentionType::Encoder | AttentionType::EncoderOnly);
    let mask = space.masks[value(Axis::Mask)];
    let layout = space.layouts[value(Axis::Layout)].clone();
    let kv_cache_dtype = space.kv_cache_dtypes[value(Axis::KvCacheDtype)];
    let dtype = space.dtypes[value(Axis::Dtype)];
    let storage = Storage::of(kv_cache_dtype, dtype)?;
    let block_size = space.block_sizes[value(Axis::BlockSize)];
    let (scales, form) = (value(Axis::Scales), MlaForm::ALL[value(Axis::MlaForm)]);
    let sparse = value(Axis::TopK) == 1;
    let no_positions = mask == Mask::All && value(Axis::Alibi) == 0 && value(Axis::PrefixSpans) == 0;
    let possible = [
        layout.as_deref().is_none_or(|layout| (layout == LAYOUT_LATENT) == is_mla),
        scales == 0 || storage.takes_scales(),
        is_mla || (form == MlaForm::Absorbed && !sparse),
        !is_mla || attn_type == AttentionType::Decoder,
        // Cross attention has no positions, and an encoder sees everything.
        !is_cross || (no_positions && value(Axis::Causality) == 1),
        has_cache || (layout.is_none() && block_size.is_none() && kv_cache_dtype.is_none()),
        has_cache || value(Axis::Causality) == 1,
    ];
    if possible.contains(&false) {
        return None;
    }
    let ratio = space.gqa_ratios[value(Axis::GqaRatio)];
    let num_kv_heads = if is_mla { 1 } else { 1 + rng.below(3) };
    let num_heads = num_kv_heads * ratio;
    let is_large = matches!(dims, Dims::Latent { rank, .. } if rank > 64);
    let batch = Batch::ALL[value(Axis::Batch)];
    let mut lens = batch.lengths(if is_large { 150 } else { 700 }, rng);
    for (new, all) in &mut lens {
        if !has_cache {
            *new = *all;
        } else if is_cross {
            // A decoder may have more tokens than the encoder, and the encoder none.
            *all = rng.below(*all + 1);
        }
    }
    if !has_cache && batch == Batch::Long {
        // All queries of a long sequence would take the reference long.
        lens = vec![(260, 260), (5, 5)];
    }
    let mut query_start_loc = vec![0];
    query_start_loc.extend(lens.iter().scan(0, |sum, (new, _)| {
        *sum += *new as i32;
        Some(*sum)
    }));
    let (mla, head_size_v, scale_size) = match dims {
        Dims::Plain { head_size, head_size_v } => (None, head_size_v as usize, head_size as usize),
        Dims::Latent { rank, rope, nope, v } => {
            let mla = Mla {
                kv_lora_rank: rank,
                qk_rope_head_dim: rope,
                qk_nope_head_dim: nope,
                v_head_dim: v,
                kv_b_proj: None,
                form,
            };
            (Some(mla), rank, nope + rope)
        }
    };
    let (sliding_window, window_right, chunked_local) = match mask {
        Mask::All => (0, -1, 0),
        Mask::Window(window) => (window, -1, 0),
        Mask::WindowRight(window, right) => (window, right, 0),
        Mask::Chunked(chunk) => (0, -1, chunk),
    };
    let one_per = |count: usize, of: &dyn Fn(&mut Rng) -> f32, rng: &mut Rng| (0..count).map(|_| of(rng)).collect();
    let scale_of = |rng: &mut Rng| (0.01 + 0.05 * rng.unit()) as f32;
    let scale_count = [0, 1, num_kv_heads][scales];
    let mut sinks: Vec<f32> = Vec::new();
    if value(Axis::Sinks) > 0 {
        sinks = one_per(num_heads, &|rng| rng.normal() as f32, rng);
    }
    if value(Axis::Sinks) == 2 {
        // Heads with no sink, and with one that takes nearly all.
        for (head, sink) in sinks.iter_mut().enumerate() {
            *sink = if head % 2 == 0 { f32::NEG_INFINITY } else { 20.0 };
        }
    }
    let alibi = value(Axis::Alibi) == 1;
    let nothing = Values::from_f64(dtype, []);
    let mut case = Case {
        q: nothing.clone(),
        k: nothing.clone(),
        v: (!is_mla).then_some(nothing),
        num_heads,
        num_kv_heads,
        head_size: dims.head_size(),
        head_size_v,
        seq_lens: lens.iter().map(|(_, all)| *all as i32).collect(),
        query_start_loc,
        scale: (scale_size as f64).powf(-0.5),
        causal: value(Axis::Causality) != 1,
        causal_per_request: (value(Axis::Causality) == 2)
            .then(|| (0..lens.len()).map(|request| request % 2 == 1).collect()),
        sliding_window,
        window_right,
        chunked_local,
        softcap: if value(Axis::Softcap) == 1 { 1.5 + 3.0 * rng.unit() } else { 0.0 },
        sinks,
        alibi_slopes: if alibi { one_per(num_heads, &|rng| (0.01 + 0.5 * rng.unit()) as f32, rng) } else { Vec::new() },
        k_scales: one_per(scale_count, &scale_of, rng),
        v_scales: one_per(scale_count, &scale_of, rng),
        prefix_spans: Vec::new(),
        topk: sparse.then(|| TopK { indices: Vec::new(), width: 1 + rng.below(24) }),
        attn_type,
        block_size,
        layout,
        kv_cache_dtype,
        mla,
        lse: value(Axis::Lse) == 1,
        seed: rng.next_u64(),
    };
    if value(Axis::PrefixSpans) == 1 {
        for request in 0..case.num_requests() {
            let len = case.kv_range(request).len();
            let start = rng.below(len);
            case.prefix_spans.push([request as i32, start as i32, (start + rng.below(len - start + 1)) as i32]);
        }
        if case.prefix_spans.is_empty() {
            return None;
        }
    }
    Some(case)
}

/// Puts numbers into an outline.
pub(super) fn fill(mut case: Case, row: &Row, rng: &mut Rng) -> Case {
    let dtype = case.dtype();
    let numbers = Numbers::ALL[row[Axis::Numbers as usize]];
    // Where the backend rounds keys once more, an error grows with the logit: the tolerance covers
    // logits of ordinary size.
    let is_converted = Storage::of(case.kv_cache_dtype, dtype) != Storage::of(None, dtype)
        || case.mla.as_ref().is_some_and(|mla| mla.form != MlaForm::Absorbed);
    let spread = match numbers {
        Numbers::ZeroQueries => 0.0,
        Numbers::Peaked if !is_converted => 4.0,
        Numbers::Peaked | Numbers::Normal => 1.0,
    };
    let mut normal = |count: usize, spread: f64| {
        let numbers: Vec<f64> = (0..count).map(|_| spread * rng.normal()).collect();
        Values::from_f64(dtype, numbers)
    };
    let rows = case.num_kv_tokens() * case.num_kv_heads;
    case.q = normal(case.num_tokens() * case.num_heads * case.q_head_size(), spread);
    case.k = normal(rows * case.head_size, 1.0);
    if case.v.is_some() {
        case.v = Some(normal(rows * case.head_size_v, 1.0));
    }
    if let Some(mla) = &mut case.mla {
        let rank = mla.kv_lora_rank;
        let projection = case.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) * rank;
        mla.kv_b_proj = Some(normal(projection, (rank as f64).powf(-0.5)));
    }
    if let Some(width) = case.topk.as_ref().map(|topk| topk.width) {
        let mut indices = Vec::with_capacity(case.num_tokens() * width);
        for request in 0..case.num_requests() {
            let len = case.kv_range(request).len();
            for _ in case.query_range(request) {
                let mut positions: Vec<i32> = (0..len as i32).collect();
                rng.shuffle(&mut positions);
                positions.truncate(rng.below(width + 1));
                positions.resize(width, -1);
                rng.shuffle(&mut positions);
                indices.extend(positions);
            }
        }
        case.topk = Some(TopK { indices, width });
    }
    case
}
