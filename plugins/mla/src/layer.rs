//! An MLA layer: the checks of each call, and which form it takes.
//!
//! Must not know how either form is computed.

use crate::{
    absorbed,
    choice::{Dimensions, Form, Rule, Window},
    expanded,
    options::Settings,
    plan::{Batch, MlaPlan, PlanShape, Request},
    views::{Part, Target},
    weights::Weights,
};
use attache_cpu_kernels::{Packed, Partition, Rows};
use attache_cpu_plugin::{CacheRows, as_f32, block_pairs, call_error};
use attache_sdk::prelude::*;
use std::borrow::Cow;

/// What the kernels of a layer work with.
pub struct Parameters {
    pub dimensions: Dimensions,
    pub settings: Settings,
    pub scale: f64,
    /// 0 or less = off.
    pub softcap: f64,
    pub window: Window,
    /// One a head, or empty.
    pub sinks: Vec<f32>,
    /// Threads that work is cut for; any number may run it.
    pub cut_for: usize,
    /// Projected rows are held in bf16, because the kernels have dot products of it.
    pub uses_pairs: bool,
    weights: Option<Weights>,
}

impl Parameters {
    /// The up-projection.
    ///
    /// # Errors
    /// When the layer was made without one.
    pub fn weights(&self) -> Result<&Weights> {
        self.weights.as_ref().ok_or_else(|| {
            BackendError::unsupported("the layer was made without kv_b_proj: only forward_decode works; pass kv_b_proj in the layer's configuration")
        })
    }

    /// `rows` rows of `x` times a matrix.
    ///
    /// # Errors
    /// When rows reach outside their buffers.
    pub fn multiply(&self, matrix: &Packed, rows: usize, x: Strided<&[f32]>, out: Strided<&mut [f32]>) -> Result<()> {
        matrix.multiply(self.settings.isa, rows, x, out).map_err(|error| call_error(&error))
    }
}

/// Rows of f32: all values, and how many from row to row.
pub type Strided<S> = (S, usize);

/// A checked call.
pub struct Call<'a, 'c> {
    pub parameters: &'a Parameters,
    pub context: &'a ExecContext<'c>,
    /// Threads that may run it.
    pub workers: usize,
    pub batch: &'a Batch,
    /// `[tokens, num_heads, …]`; at least one token.
    pub q: TensorView<'a>,
    /// The cache as rows of one head.
    pub cache: Rows<'a>,
    /// The cache.
    pub latent: TensorView<'a>,
    /// How attention of all tokens over the latent rows is cut.
    pub partition: Cow<'a, Partition>,
}

/// An MLA layer.
pub struct MlaLayer {
    parameters: Parameters,
    rows: CacheRows,
    /// Of q and out.
    dtype: Dtype,
    rule: Rule,
}

impl MlaLayer {
    /// Makes a layer of a configuration that the backend has accepted.
    ///
    /// # Errors
    /// When the up-projection is not usable.
    pub fn new(config: &LayerConfig<'_>, dimensions: Dimensions, rows: CacheRows, settings: Settings) -> Result<Self> {
        let projection = config.mla.as_ref().and_then(|mla| mla.kv_b_proj);
        if projection.is_some() && (dimensions.qk_nope_head_dim == 0 || dimensions.v_head_dim == 0) {
            return Err(BackendError::invalid(format!(
                "kv_b_proj needs qk_nope_head_dim and v_head_dim above 0; found {} and {}",
                dimensions.qk_nope_head_dim, dimensions.v_head_dim
            )));
        }
        let is_bf16 = config.dtype == Dtype::BF16 && rows.dtype == DataType::BF16;
        let parameters = Parameters {
            dimensions,
            settings,
            scale: config.scale,
            softcap: config.softcap,
            window: Window {
                size: u64::try_from(config.sliding_window).ok().filter(|size| *size > 0),
                right: u64::try_from(config.window_right).ok(),
            },
            sinks: config.sinks.clone(),
            cut_for: std::thread::available_parallelism().map_or(1, usize::from),
            uses_pairs: is_bf16 && settings.isa.has_bf16_dot(),
            weights: projection.map(|projection| Weights::pack(&projection, &dimensions, settings.isa)).transpose()?,
        };
        let rule = Rule::new(settings.path, config.request.use_batch_invariant);
        Ok(Self { parameters, rows, dtype: config.dtype, rule })
    }

    fn plan_shape(&self) -> PlanShape {
        PlanShape {
            block_size: self.rows.block_size,
            heads: absorbed::heads(&self.parameters).shape(),
            window: self.parameters.window,
            cut_for: self.parameters.cut_for,
        }
    }

    /// Checks the tensors of a call against the layer and the plan; `None` = there is nothing to do.
    fn check<'a, 'c>(
        &'a self,
        context: &'a ExecContext<'c>,
        args: ForwardArgs<'a>,
        [q_size, out_size]: [usize; 2],
    ) -> Result<Option<(Call<'a, 'c>, Target<'a>)>> {
        let plan = args.plan::<MlaPlan>()?;
        let batch = plan.batch();
        if batch.block_size != self.rows.block_size {
            return Err(BackendError::invalid(format!(
                "the plan was made for blocks of {} tokens, the layer for {}: make it with a layer of the same shape",
                batch.block_size, self.rows.block_size
            )));
        }
        if args.k.is_some() || args.v.is_some() {
            return Err(BackendError::unsupported("CPU_MLA reads keys and values from its cache; pass no k or v"));
        }
        if args.topk_indices.is_some() {
            return Err(BackendError::unsupported("CPU_MLA has no sparse attention; pass no topk_indices"));
        }
        let (tokens, heads) = (batch.num_tokens as i64, self.parameters.dimensions.num_heads as i64);
        let out = args.out.as_view();
        for (name, tensor, size) in [("q", &args.q, q_size), ("out", &out, out_size)] {
            tensor.expect_shape(name, &[tokens, heads, size as i64])?;
            let found = tensor.dtype();
            if found != self.dtype.data_type() {
                return Err(BackendError::invalid(format!(
                    "{name} holds {found}; the layer computes in {}",
                    self.dtype
                )));
            }
            if size > 1 && tensor.strides()[2] != 1 {
                return Err(BackendError::unsupported(format!("the elements of a row of {name} must be contiguous")));
            }
        }
        if let Some(lse) = &args.lse {
            lse.as_view().expect_shape("lse", &[heads, tokens])?;
        }
        let latent = args.cache.get(TensorRole::LATENT)?;
        let cache = self.rows.rows(&latent)?;
        if latent.dim(0) < batch.num_blocks {
            return Err(BackendError::out_of_range(format!(
                "the plan was made for a cache of {} blocks; this one has {}",
                batch.num_blocks,
                latent.dim(0)
            )));
        }
        if batch.num_tokens == 0 {
            return Ok(None);
        }
        let shape = self.plan_shape();
        let partition = match plan.partition(&shape) {
            Some(partition) => Cow::Borrowed(partition),
            None => Cow::Owned(shape.partition(batch)),
        };
        let parameters = &self.parameters;
        let call =
            Call { parameters, context, workers: context.parallelism(), batch, q: args.q, cache, latent, partition };
        let mut target = Target { out: args.out, lse: args.lse };
        // Rows that overlap are refused before anything is written.
        target.output(&Part { tokens: 0..batch.num_tokens, heads: 0..parameters.dimensions.num_heads })?;
        Ok(Some((call, target)))
    }

    /// Sizes of q and out where neither is absorbed.
    fn expanded_sizes(&self) -> [usize; 2] {
        [self.parameters.dimensions.qk_head_dim(), self.parameters.dimensions.v_head_dim]
    }

    /// Runs a call that is not absorbed by `rule`.
    fn run(&self, context: &ExecContext<'_>, args: ForwardArgs<'_>, rule: Rule) -> Result<()> {
        let parameters = &self.parameters;
        parameters.weights()?;
        let Some((call, mut target)) = self.check(context, args, self.expanded_sizes())? else { return Ok(()) };
        let form = |request: &&Request| rule.form(&parameters.dimensions, request, parameters.window);
        let with_tokens = call.batch.requests.iter().filter(|request| !request.tokens.is_empty());
        let (absorbed, expanded): (Vec<_>, Vec<_>) = with_tokens.partition(|request| form(request) == Form::Absorbed);
        let limits = |requests: &[&Request]| {
            let max = |of: fn(&Request) -> usize| requests.iter().map(|request| of(request)).max().unwrap_or(0);
            (requests.iter().map(|r| r.tokens.len()).sum(), max(|r| r.tokens.len()), max(|r| r.seq_len))
        };
        if !absorbed.is_empty() {
            let (tokens, _, max_seq_len): (usize, _, _) = limits(&absorbed);
            let memory = take(context, absorbed::forward_len(parameters, call.workers, tokens, max_seq_len))?;
            absorbed::forward(&call, &mut target, &absorbed, memory)?;
        }
        if !expanded.is_empty() {
            let (_, max_query_len, max_seq_len): (usize, _, _) = limits(&expanded);
            let memory = take(context, expanded::forward_len(parameters, call.workers, max_query_len, max_seq_len))?;
            expanded::forward(&call, &mut target, &expanded, memory)?;
        }
        Ok(())
    }
}

/// Takes f32 values of the engine's workspace.
fn take<'c>(context: &ExecContext<'c>, len: usize) -> Result<&'c mut [f32]> {
    let bytes = len.checked_mul(size_of::<f32>()).ok_or_else(|| too_large(len))?;
    Ok(&mut as_f32(context.take_workspace(bytes)?)?[..len])
}

fn too_large(len: usize) -> BackendError {
    BackendError::new(ErrorCode::OutOfMemory, format!("a workspace of {len} f32 values is too large"))
}

impl Layer for MlaLayer {
    fn workspace_size(&self, limits: &BatchLimits) -> Result<usize> {
        let (parameters, workers) = (&self.parameters, limits.parallelism);
        let decode = absorbed::decode_len(parameters, workers, limits.max_seq_len);
        let (mut absorbed, mut expanded) = (0, 0);
        if parameters.weights.is_some() {
            absorbed = absorbed::forward_len(parameters, workers, limits.max_num_tokens, limits.max_seq_len);
            expanded = expanded::forward_len(parameters, workers, limits.max_query_len, limits.max_seq_len);
        }
        // `forward` may do one after the other. Each piece begins at a multiple of 64 bytes.
        let len = decode.max(absorbed.saturating_add(expanded));
        len.checked_mul(size_of::<f32>()).and_then(|bytes| bytes.checked_add(3 * 64)).ok_or_else(|| too_large(len))
    }

    fn plan(&self, batch: &BatchView<'_>) -> Result<Box<dyn Plan>> {
        Ok(Box::new(MlaPlan::new(batch, self.plan_shape())?))
    }

    fn write_kv(
        &self,
        _context: &ExecContext<'_>,
        k: &TensorView<'_>,
        v: Option<&TensorView<'_>>,
        slot_mapping: &TensorView<'_>,
        cache: &CacheViewMut<'_>,
    ) -> Result<()> {
        if v.is_some() {
            return Err(BackendError::invalid("MLA layers take latent rows as k and no v"));
        }
        if k.dtype() != self.dtype.data_type() {
            return Err(BackendError::invalid(format!("k holds {}; the layer computes in {}", k.dtype(), self.dtype)));
        }
        let mut tensor = cache.take(TensorRole::LATENT)?;
        let slots = self.rows.check_write("k (latent rows)", k, slot_mapping, &tensor.as_view())?;
        self.rows.write(k, slots, &mut tensor)
    }

    fn forward(&self, context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()> {
        self.run(context, args, self.rule)
    }

    fn forward_prefill(&self, context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()> {
        self.run(context, args, Rule::Always(Form::Expanded))
    }

    fn forward_decode(&self, context: &ExecContext<'_>, args: ForwardArgs<'_>) -> Result<()> {
        let sizes = [self.parameters.dimensions.row(), self.parameters.dimensions.kv_lora_rank];
        let Some((call, mut target)) = self.check(context, args, sizes)? else { return Ok(()) };
        let max_seq_len = call.batch.requests.iter().map(|request| request.seq_len).max().unwrap_or(0);
        let memory = take(context, absorbed::decode_len(&self.parameters, call.workers, max_seq_len))?;
        absorbed::decode(&call, &mut target, memory)
    }

    fn copy_blocks(&self, _context: &ExecContext<'_>, cache: &CacheViewMut<'_>, pairs: &TensorView<'_>) -> Result<()> {
        let mut tensor = cache.take(TensorRole::LATENT)?;
        let num_blocks = tensor.as_view().dim(0);
        self.rows.copy_blocks(&block_pairs(pairs, num_blocks, num_blocks)?, &mut tensor)
    }

    fn swap_blocks(
        &self,
        _context: &ExecContext<'_>,
        source: &CacheView<'_>,
        destination: &CacheViewMut<'_>,
        pairs: &TensorView<'_>,
    ) -> Result<()> {
        let (from, mut to) = (source.get(TensorRole::LATENT)?, destination.take(TensorRole::LATENT)?);
        let pairs = block_pairs(pairs, from.dim(0), to.as_view().dim(0))?;
        self.rows.swap_blocks(&pairs, &from, &mut to)
    }
}
