//! `NULL_ATTN`: gives zeros, and an LSE of −∞, as a row without keys would have.
//!
//! The smallest backend that keeps the contract: tests see by it what crosses the boundary.

use attache_sdk::{core::descriptor::BlockSizes, prelude::*};

/// Gives zeros.
pub struct Null;

/// A descriptor that claims what [`NullLayer`] does, under a name.
#[must_use]
pub fn descriptor(name: &str) -> BackendDescriptor {
    BackendDescriptor::builder(name)
        .summary("gives zeros")
        .platform("cpu")
        .architectures(["*"])
        .head_sizes([8_u32, 64])
        .dtypes([Dtype::F32])
        .kv_cache_dtypes(["auto"])
        .block_sizes(BlockSizes::multiples_of(1))
        .layouts([LAYOUT_HEAD_MAJOR])
        .attn_types([AttentionType::Decoder])
        .features(["lse", "batch_invariance"])
        .rank(1000)
        .build()
}

/// One tensor of keys.
///
/// # Errors
/// When a block would be larger than memory.
pub fn kv_cache_spec(config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
    let (block_size, head_size) = (u64::from(config.block_size), u64::from(config.head_size));
    let bytes_per_block = block_size
        .checked_mul(head_size * 4)
        .ok_or_else(|| BackendError::invalid(format!("a block of {block_size} tokens is too large")))?;
    Ok(KvCacheSpec {
        tensors: vec![CacheTensorSpec {
            role: TensorRole::K,
            dtype: DataType::F32,
            shape: vec![-1, i64::from(config.block_size), i64::from(config.head_size)],
            alignment: 64,
            bytes_per_block,
        }],
    })
}

impl Backend for Null {
    fn descriptor() -> BackendDescriptor {
        descriptor("NULL_ATTN")
    }
    fn create(_host: HostServices, options: &Options) -> Result<Self> {
        if let Some((name, _)) = options.iter().next() {
            return Err(BackendError::invalid(format!("unknown option '{name}'; this plugin has none")));
        }
        tracing::info!(backend = "NULL_ATTN", threads = 1, "made");
        Ok(Self)
    }
    fn probe(&self) -> Result<Vec<Device>> {
        Ok(vec![Device::host_cpu()])
    }
    fn validate(&self, _request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
        Ok(Vec::new())
    }
    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        kv_cache_spec(config)
    }
    fn create_layer(&self, _config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
        Ok(Box::new(NullLayer))
    }
}

/// A layer that gives zeros.
pub struct NullLayer;

struct NullPlan;

impl Plan for NullPlan {
    fn update(&mut self, _batch: &BatchView<'_>) -> Result<()> {
        Ok(())
    }
}

impl Layer for NullLayer {
    fn workspace_size(&self, _limits: &BatchLimits) -> Result<usize> {
        Ok(0)
    }
    fn plan(&self, _batch: &BatchView<'_>) -> Result<Box<dyn Plan>> {
        Ok(Box::new(NullPlan))
    }
    fn write_kv(
        &self,
        _context: &ExecContext<'_>,
        _k: &TensorView<'_>,
        _v: Option<&TensorView<'_>>,
        _slot_mapping: &TensorView<'_>,
        _cache: &CacheViewMut<'_>,
    ) -> Result<()> {
        Ok(())
    }
    fn forward(&self, context: &ExecContext<'_>, mut args: ForwardArgs<'_>) -> Result<()> {
        args.plan::<NullPlan>()?;
        context.parallel_for(2, |_task, _worker| Ok(()))?;
        args.out.span_mut::<f32>()?.fill(0.0);
        if let Some(lse) = &mut args.lse {
            lse.span_mut::<f32>()?.fill(f32::NEG_INFINITY);
        }
        Ok(())
    }
    fn copy_blocks(&self, _: &ExecContext<'_>, _: &CacheViewMut<'_>, _: &TensorView<'_>) -> Result<()> {
        Ok(())
    }
    fn swap_blocks(
        &self,
        _: &ExecContext<'_>,
        _: &CacheView<'_>,
        _: &CacheViewMut<'_>,
        _: &TensorView<'_>,
    ) -> Result<()> {
        Ok(())
    }
}

attache_sdk::export_backends! { name: "null", vendor: "Attaché tests", backends: [Null] }
