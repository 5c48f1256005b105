//! Running a case on a backend, through the ABI alone.
//!
//! The paged cache is filled through `write_kv` in pieces, over blocks in random order; slots that
//! no token owns keep NaN patterns, and table entries beyond the used blocks hold garbage. A kernel
//! that reads what it must not read is found out.
//!
//! Must not know: the right answer; how the backend was chosen.

use crate::{
    case::{Case, DEFAULT_BLOCK_SIZE, MlaForm},
    rng::Rng,
    values::Values,
};
use attache_core::{
    AttentionType, BackendDescriptor, BackendError, BatchLimits, BatchView, Causality, KvCacheSpec, TensorView,
    TensorViewMut,
    runtime::{Backend, ExecContext, Forward, HostServices, KvCache, KvCacheError, Layer, Plan},
};
use std::sync::Arc;

/// The largest cache that a case may make, in bytes.
pub const MAX_CACHE_BYTES: u64 = 8 << 30;

/// What a backend made of a case.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// `[tokens, num_heads, out_head_size]` in the compute dtype.
    pub out: Values,
    /// `[num_heads, tokens]`, natural logarithm; absent when the case does not ask for it.
    pub lse: Option<Vec<f32>>,
    /// Query heads.
    pub num_heads: usize,
    /// Elements of an output head.
    pub head_size: usize,
    /// The cache layout that was used; empty for a layer without a cache.
    pub layout: String,
    /// The tokens of a block that were used.
    pub block_size: u32,
}

impl Output {
    /// Query tokens.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.out.len() / (self.num_heads * self.head_size).max(1)
    }

    /// Whether every bit is the same as in `other`, NaN and signs of zeros included.
    #[must_use]
    pub fn same_bits(&self, other: &Self) -> bool {
        let lse = |output: &Self| {
            output.lse.as_ref().map(|lse| lse.iter().map(|number| number.to_bits()).collect::<Vec<_>>())
        };
        self.out.to_le_bytes() == other.out.to_le_bytes() && lse(self) == lse(other)
    }
}

/// Why a case did not run.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// The backend refused or failed.
    #[error("{backend}: {step}: {source}")]
    Backend {
        /// The backend.
        backend: String,
        /// What was asked of it.
        step: &'static str,
        /// What it said.
        source: BackendError,
    },
    /// The cache cannot be made.
    #[error(transparent)]
    Cache(#[from] KvCacheError),
    /// The cache would be larger than a case may make it.
    #[error(
        "the cache of this case would take {bytes} bytes; at most {MAX_CACHE_BYTES} are made: use a smaller block_size or fewer tokens"
    )]
    TooLarge {
        /// What it would take.
        bytes: u64,
    },
}

/// Layout and block size of a case on a backend: what the case states, else what the backend
/// prefers.
#[must_use]
pub fn cache_form(case: &Case, descriptor: &BackendDescriptor) -> (String, u32) {
    let capability = &descriptor.capability;
    let layout = case.layout.clone().or_else(|| capability.layouts.first().cloned()).unwrap_or_default();
    let sizes = &capability.block_sizes;
    let block_size = case.block_size.unwrap_or_else(|| {
        let stated = sizes.exact.iter().chain(&sizes.multiples_of).copied();
        std::iter::once(DEFAULT_BLOCK_SIZE)
            .chain(stated)
            .find(|size| sizes.contains(*size))
            .unwrap_or(DEFAULT_BLOCK_SIZE)
    });
    (layout, block_size)
}

/// Runs a case.
///
/// # Errors
/// When the backend refuses or fails; the step is named.
pub fn execute(backend: &Arc<Backend>, host: HostServices, case: &Case) -> Result<Output, ExecuteError> {
    let mut session = Session::new(backend, host, case)?;
    let plan = session.plan()?;
    session.run(&plan)
}

/// A case's layer with its filled cache.
pub(crate) struct Session<'a> {
    pub(crate) case: &'a Case,
    pub(crate) layer: Layer,
    pub(crate) context: ExecContext,
    pub(crate) cache: Option<KvCache>,
    pub(crate) spec: KvCacheSpec,
    pub(crate) paging: Paging,
    layout: String,
    block_size: u32,
}

impl<'a> Session<'a> {
    pub(crate) fn new(backend: &Arc<Backend>, host: HostServices, case: &'a Case) -> Result<Self, ExecuteError> {
        let at = |step: &'static str| move |source| failed(backend, step, source);
        let (layout, block_size) = cache_form(case, backend.descriptor());
        let config = case.layer_config(&layout, block_size).map_err(at("layer configuration"))?;
        let layer = backend.create_layer(&config).map_err(at("create_layer"))?;
        let spec = if case.has_cache() {
            backend.kv_cache_spec(&config).map_err(at("kv_cache_spec"))?
        } else {
            KvCacheSpec::default()
        };
        let mut paging = Paging::new(case, block_size as usize, case.seed);
        let mut context = ExecContext::new(host);
        let limits = limits(case, context.parallelism());
        context.reserve_workspace(layer.workspace_size(&limits).map_err(at("workspace_size"))?);
        let cache = if case.has_cache() {
            check_size(&spec, paging.num_blocks)?;
            let mut cache = KvCache::allocate(&spec, paging.num_blocks)?;
            fill(case, &layer, &mut context, &mut paging, &mut cache).map_err(at("write_kv"))?;
            Some(cache)
        } else {
            None
        };
        let layout = if case.has_cache() { layout } else { String::new() };
        Ok(Self { case, layer, context, cache, spec, paging, layout, block_size })
    }

    fn failed(&self, step: &'static str, source: BackendError) -> ExecuteError {
        failed(self.layer.backend(), step, source)
    }

    /// The plan of the case's batch.
    pub(crate) fn plan(&self) -> Result<Plan, ExecuteError> {
        let lists = Lists::of(self.case, &self.paging);
        lists.with_batch(self.case, |batch| self.layer.plan(batch)).map_err(|error| self.failed("plan", error))
    }

    /// Runs the case.
    pub(crate) fn run(&mut self, plan: &Plan) -> Result<Output, ExecuteError> {
        let case = self.case;
        let (tokens, heads, head_size) = (case.num_tokens(), case.num_heads, case.out_head_size());
        let mut out = Values::nan(case.dtype(), tokens * heads * head_size);
        let mut lse = case.lse.then(|| vec![f32::NAN; heads * tokens]);
        let mut call = || -> Result<(), BackendError> {
            let lse = match &mut lse {
                Some(lse) => Some(TensorViewMut::from_slice(lse, &[heads, tokens])?),
                None => None,
            };
            let q = case.q.view(&[tokens, heads, case.q_head_size()])?;
            self.forward(plan, q, out.view_mut(&[tokens, heads, head_size])?, lse)
        };
        let called = call();
        called.map_err(|error| self.failed(forward_name(case), error))?;
        Ok(Output { out, lse, num_heads: heads, head_size, layout: self.layout.clone(), block_size: self.block_size })
    }

    /// One call with these tensors.
    pub(crate) fn forward(
        &mut self,
        plan: &Plan,
        q: TensorView<'_>,
        out: TensorViewMut<'_>,
        lse: Option<TensorViewMut<'_>>,
    ) -> Result<(), BackendError> {
        let case = self.case;
        let rows = case.num_kv_tokens();
        // Layers without a cache take the dense keys and values.
        let (k, v) = match &case.v {
            Some(v) if !case.has_cache() => (
                Some(case.k.view(&[rows, case.num_kv_heads, case.head_size])?),
                Some(v.view(&[rows, case.num_kv_heads, case.head_size_v])?),
            ),
            _ => (None, None),
        };
        let topk_indices = match &case.topk {
            Some(topk) => Some(TensorView::from_slice(&topk.indices, &[case.num_tokens(), topk.width])?),
            None => None,
        };
        let forward = Forward { q, k, v, cache: self.cache.as_ref(), plan, out, lse, topk_indices };
        match case.mla.as_ref().map(|mla| mla.form) {
            Some(MlaForm::Absorbed) => self.layer.forward_decode(&mut self.context, forward),
            Some(MlaForm::Expanded) => self.layer.forward_prefill(&mut self.context, forward),
            Some(MlaForm::Auto) | None => self.layer.forward(&mut self.context, forward),
        }
    }
}

fn forward_name(case: &Case) -> &'static str {
    match case.mla.as_ref().map(|mla| mla.form) {
        Some(MlaForm::Absorbed) => "forward_decode",
        Some(MlaForm::Expanded) => "forward_prefill",
        Some(MlaForm::Auto) | None => "forward",
    }
}

fn failed(backend: &Backend, step: &'static str, source: BackendError) -> ExecuteError {
    ExecuteError::Backend { backend: backend.name().to_owned(), step, source }
}

/// A batch as lists, to be changed before they are lent.
#[derive(Debug, Clone)]
pub(crate) struct Lists {
    pub(crate) query_start_loc: Vec<i32>,
    /// Of cross attention the decoder's.
    pub(crate) seq_lens: Vec<i32>,
    encoder_seq_lens: Option<Vec<i32>>,
    /// Absent for layers without a cache.
    pub(crate) table: Option<Vec<i32>>,
    pub(crate) width: usize,
    pub(crate) num_blocks: usize,
    causal_flags: Option<Vec<u8>>,
}

impl Lists {
    pub(crate) fn of(case: &Case, paging: &Paging) -> Self {
        let is_cross = case.attn_type == AttentionType::EncoderDecoder;
        let queries = || case.query_start_loc.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let flags = case.causal_per_request.as_ref();
        Self {
            query_start_loc: case.query_start_loc.clone(),
            // Cross attention: the cache holds the encoder's tokens, `seq_lens` counts the decoder's.
            seq_lens: if is_cross { queries() } else { case.seq_lens.clone() },
            encoder_seq_lens: is_cross.then(|| case.seq_lens.clone()),
            table: case.has_cache().then(|| paging.table.clone()),
            width: paging.width,
            num_blocks: paging.num_blocks,
            causal_flags: flags.map(|flags| flags.iter().map(|flag| u8::from(*flag)).collect()),
        }
    }

    pub(crate) fn with_batch<T>(
        &self,
        case: &Case,
        function: impl FnOnce(&BatchView<'_>) -> Result<T, BackendError>,
    ) -> Result<T, BackendError> {
        let n = self.seq_lens.len();
        let table = self.table.as_ref().map(|table| (table.as_slice(), self.width));
        let mut batch = BatchView::from_host(&self.query_start_loc, &self.seq_lens, table, self.num_blocks)?;
        if let Some(lens) = &self.encoder_seq_lens {
            batch.encoder_seq_lens = Some(TensorView::from_slice(lens, &[n])?);
        }
        batch.causality = match &self.causal_flags {
            Some(flags) => Causality::PerRequest(TensorView::from_slice(flags, &[n])?),
            None if case.causal => Causality::Causal,
            None => Causality::NonCausal,
        };
        let spans = case.prefix_spans.as_flattened();
        if !spans.is_empty() {
            batch.prefix_spans = Some(TensorView::from_slice(spans, &[case.prefix_spans.len(), 3])?);
        }
        function(&batch)
    }
}

fn limits(case: &Case, parallelism: usize) -> BatchLimits {
    let longest = |lens: &mut dyn Iterator<Item = i32>| usize::try_from(lens.max().unwrap_or(0)).unwrap_or(0);
    BatchLimits {
        max_num_requests: case.seq_lens.len(),
        max_num_tokens: case.num_tokens(),
        max_query_len: longest(&mut case.query_start_loc.windows(2).map(|pair| pair[1] - pair[0])),
        max_seq_len: longest(&mut case.seq_lens.iter().copied()),
        parallelism,
    }
}

fn check_size(spec: &KvCacheSpec, num_blocks: usize) -> Result<(), ExecuteError> {
    let bytes = spec.tensors.iter().try_fold(0_u64, |sum, tensor| {
        let one = tensor.shape.iter().try_fold(tensor.dtype.size() as u64, |bytes, size| {
            bytes.checked_mul(if *size == -1 { num_blocks as u64 } else { u64::try_from(*size).ok()? })
        });
        // What overflows or is negative is refused by `KvCache::allocate`.
        sum.checked_add(one.unwrap_or(0))
    });
    let bytes = bytes.unwrap_or(u64::MAX);
    if bytes > MAX_CACHE_BYTES { Err(ExecuteError::TooLarge { bytes }) } else { Ok(()) }
}

/// Who has which blocks.
pub(crate) struct Paging {
    pub(crate) block_size: usize,
    pub(crate) num_blocks: usize,
    pub(crate) table: Vec<i32>,
    width: usize,
    rng: Rng,
}

impl Paging {
    /// Gives each sequence its blocks, in random order among more blocks than are needed.
    fn new(case: &Case, block_size: usize, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        if !case.has_cache() {
            return Self { block_size, num_blocks: 0, table: Vec::new(), width: 0, rng };
        }
        let used: Vec<usize> =
            case.seq_lens.iter().map(|len| usize::try_from(*len).unwrap_or(0).div_ceil(block_size)).collect();
        let num_blocks = used.iter().sum::<usize>() + 3;
        let mut ids: Vec<i32> = (0..num_blocks).map(|id| id as i32).collect();
        rng.shuffle(&mut ids);
        let width = used.iter().copied().max().unwrap_or(0) + 2;
        let mut table = Vec::with_capacity(width * used.len());
        let mut free = ids.into_iter();
        for blocks in used {
            table.extend(free.by_ref().take(blocks));
            // Beyond the used blocks a table may hold anything.
            let garbage = [-1, i32::MAX, num_blocks as i32, i32::MIN];
            table.extend((blocks..width).map(|_| garbage[rng.below(garbage.len())]));
        }
        Self { block_size, num_blocks, table, width, rng }
    }

    /// Whether a request has the block.
    pub(crate) fn uses(&self, id: i64) -> bool {
        self.table.iter().any(|entry| i64::from(*entry) == id)
    }

    pub(crate) fn slot(&self, request: usize, position: usize) -> i64 {
        let block = self.table[request * self.width + position / self.block_size];
        i64::from(block) * self.block_size as i64 + (position % self.block_size) as i64
    }
}

/// Writes all tokens, in a few pieces, each with a row of NaN that belongs to no slot.
fn fill(
    case: &Case,
    layer: &Layer,
    context: &mut ExecContext,
    paging: &mut Paging,
    cache: &mut KvCache,
) -> Result<(), BackendError> {
    let mut slots = Vec::with_capacity(case.num_kv_tokens());
    for (request, len) in case.seq_lens.iter().enumerate() {
        slots.extend((0..usize::try_from(*len).unwrap_or(0)).map(|position| paging.slot(request, position)));
    }
    let (k_row, v_row) = (case.num_kv_heads * case.head_size, case.num_kv_heads * case.head_size_v);
    let outside = || BackendError::invalid("a piece lies outside the case's tokens");
    let mut first = 0;
    while first < slots.len() {
        let rest = slots.len() - first;
        let count = if rest > 4 { 1 + paging.rng.below(rest) } else { rest };
        let k = case.k.part(first * k_row..(first + count) * k_row, k_row).ok_or_else(outside)?;
        let k_shape: &[usize] = if case.mla.is_some() {
            &[count + 1, case.head_size]
        } else {
            &[count + 1, case.num_kv_heads, case.head_size]
        };
        let v = match &case.v {
            Some(v) => Some(v.part(first * v_row..(first + count) * v_row, v_row).ok_or_else(outside)?),
            None => None,
        };
        let v = match &v {
            Some(v) => Some(v.view(&[count + 1, case.num_kv_heads, case.head_size_v])?),
            None => None,
        };
        let mut mapping = slots[first..first + count].to_vec();
        mapping.push(-1);
        let mapping = TensorView::from_slice(&mapping, &[count + 1])?;
        layer.write_kv(context, &k.view(k_shape)?, v.as_ref(), &mapping, cache)?;
        first += count;
    }
    Ok(())
}
