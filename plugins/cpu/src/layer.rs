//! A layer: the checks of each call, and the call.
//!
//! Must not know how the kernels work.

use crate::{backend::Parameters, plan::CpuPlan};
use attache_cpu_kernels::{Attention, Output, Partition, Parts, workspace_len};
use attache_cpu_plugin::{as_f32, block_pairs, call_error, dense, lse, output, queries};
use attache_sdk::prelude::*;

/// An attention layer on the CPU.
pub(crate) struct CpuLayer {
    parameters: Parameters,
}

impl CpuLayer {
    pub fn new(parameters: Parameters) -> Self {
        Self { parameters }
    }

    fn expect(&self, name: &str, tensor: &TensorView<'_>, rows: usize, heads: usize, size: usize) -> Result<()> {
        tensor.expect_shape(name, &[rows as i64, heads as i64, size as i64])?;
        if tensor.dtype() != self.parameters.dtype {
            return Err(BackendError::invalid(format!(
                "{name} holds {}; the layer computes in {}",
                tensor.dtype(),
                self.parameters.dtype
            )));
        }
        Ok(())
    }

    /// Checks the tensors of a call against the layer and the plan.
    fn check<'a>(&self, args: &ForwardArgs<'a>) -> Result<&'a CpuPlan> {
        let plan = args.plan::<CpuPlan>()?;
        let Parameters { heads, mask, num_heads, head_size, cache, .. } = &self.parameters;
        if !plan.serves(mask, heads, cache[0].block_size) {
            return Err(BackendError::invalid(
                "the plan was made by a layer of another shape or window; make one for each group of equal layers",
            ));
        }
        if args.topk_indices.is_some() {
            return Err(BackendError::unsupported("CPU_ATTN has no sparse attention; pass no topk_indices"));
        }
        self.expect("q", &args.q, plan.num_tokens, *num_heads, *head_size)?;
        self.expect("out", &args.out.as_view(), plan.num_tokens, *num_heads, heads.head_size_v)?;
        if let Some(lse) = &args.lse {
            lse.as_view().expect_shape("lse", &[*num_heads as i64, plan.num_tokens as i64])?;
        }
        match (mask.has_cache, &args.k, &args.v) {
            (true, None, None) => {}
            (true, ..) => {
                return Err(BackendError::invalid("this layer reads keys and values from its cache; pass no k or v"));
            }
            (false, Some(k), Some(v)) => {
                self.expect("k", k, plan.num_keys, heads.num_kv_heads, *head_size)?;
                self.expect("v", v, plan.num_keys, heads.num_kv_heads, heads.head_size_v)?;
            }
            (false, ..) => return Err(BackendError::invalid("this layer has no cache; pass k and v")),
        }
        Ok(plan)
    }
}

impl Layer for CpuLayer {
    fn workspace_size(&self, limits: &BatchLimits) -> Result<usize> {
        let Parameters { heads, head_size, workers, .. } = &self.parameters;
        let partial = Partition::max_partial_len(*heads, limits.max_seq_len, *workers);
        let len = workspace_len(*head_size, heads.head_size_v, limits.parallelism, partial);
        // Room to align it.
        len.checked_mul(4)
            .and_then(|bytes| bytes.checked_add(128))
            .ok_or_else(|| BackendError::invalid(format!("limits {limits:?} need more workspace than there is memory")))
    }

    fn plan(&self, batch: &BatchView<'_>) -> Result<Box<dyn Plan>> {
        let Parameters { heads, mask, cache, workers, .. } = &self.parameters;
        Ok(Box::new(CpuPlan::new(batch, *mask, *heads, cache[0].block_size, *workers)?))
    }

    fn write_kv(
        &self,
        _context: &ExecContext<'_>,
        k: &TensorView<'_>,
        v: Option<&TensorView<'_>>,
        slot_mapping: &TensorView<'_>,
        cache: &CacheViewMut<'_>,
    ) -> Result<()> {
        let Some(v) = v else { return Err(BackendError::invalid("write_kv needs v; only MLA layers go without")) };
        for (name, tensor) in [("k", k), ("v", v)] {
            if tensor.dtype() != self.parameters.dtype {
                return Err(BackendError::invalid(format!(
                    "{name} holds {}; the layer computes in {}",
                    tensor.dtype(),
                    self.parameters.dtype
                )));
            }
        }
        let [keys, values] = &self.parameters.cache;
        let (mut k_cache, mut v_cache) = (cache.take(TensorRole::K)?, cache.take(TensorRole::V)?);
        // All is checked before anything is written.
        let slots = keys.check_write("k", k, slot_mapping, &k_cache.as_view())?;
        values.check_write("v", v, slot_mapping, &v_cache.as_view())?;
        keys.write(k, slots, &mut k_cache)?;
        values.write(v, slots, &mut v_cache)
    }

    fn forward(&self, context: &ExecContext<'_>, mut args: ForwardArgs<'_>) -> Result<()> {
        let plan = self.check(&args)?;
        let Parameters { isa, heads, head_size, scale, softcap, sinks, alibi_slopes, mask, cache, .. } =
            &self.parameters;
        let (k, v) = match (&args.k, &args.v) {
            (Some(k), Some(v)) if !mask.has_cache => (dense("k", k)?, dense("v", v)?),
            _ => (cache[0].rows(&args.cache.get(TensorRole::K)?)?, cache[1].rows(&args.cache.get(TensorRole::V)?)?),
        };
        let sequences = plan.sequences();
        let parts = Parts {
            isa: *isa,
            q: queries("q", &args.q)?,
            k,
            v,
            scale: *scale,
            softcap: *softcap,
            alibi_slopes,
            sinks,
            sequences: &sequences,
            partition: &plan.partition,
            output: Output { out: output("out", &mut args.out)?, lse: args.lse.as_mut().map(lse).transpose()? },
        };
        let workers = context.parallelism();
        let len = workspace_len(*head_size, heads.head_size_v, workers, plan.partition.partial_len());
        let workspace = as_f32(context.take_workspace(len * 4)?)?;
        let attention = Attention::new(parts, workspace, workers).map_err(|error| call_error(&error))?;
        context.parallel_for(attention.num_units(), |unit, worker| {
            attention.unit(unit, worker).map_err(|error| call_error(&error))
        })?;
        if attention.num_merges() == 0 {
            return Ok(());
        }
        context.parallel_for(attention.num_merges(), |unit, worker| {
            attention.merge(unit, worker).map_err(|error| call_error(&error))
        })
    }

    fn copy_blocks(&self, _context: &ExecContext<'_>, cache: &CacheViewMut<'_>, pairs: &TensorView<'_>) -> Result<()> {
        let mut tensors = [cache.take(TensorRole::K)?, cache.take(TensorRole::V)?];
        let blocks = tensors[0].as_view().dim(0).min(tensors[1].as_view().dim(0));
        let pairs = block_pairs(pairs, blocks, blocks)?;
        self.parameters.cache.iter().zip(&mut tensors).try_for_each(|(rows, tensor)| rows.copy_blocks(&pairs, tensor))
    }

    fn swap_blocks(
        &self,
        _context: &ExecContext<'_>,
        source: &CacheView<'_>,
        destination: &CacheViewMut<'_>,
        pairs: &TensorView<'_>,
    ) -> Result<()> {
        let from = [source.get(TensorRole::K)?, source.get(TensorRole::V)?];
        let mut to = [destination.take(TensorRole::K)?, destination.take(TensorRole::V)?];
        let sources = from[0].dim(0).min(from[1].dim(0));
        let destinations = to[0].as_view().dim(0).min(to[1].as_view().dim(0));
        let pairs = block_pairs(pairs, sources, destinations)?;
        let all = self.parameters.cache.iter().zip(&from).zip(&mut to);
        all.into_iter().try_for_each(|((rows, from), to)| rows.swap_blocks(&pairs, from, to))
    }
}
