//! What `CPU_MLA` claims, and the refusal of everything else.
//!
//! Must not know kernels.

use crate::{
    choice::Dimensions,
    layer::MlaLayer,
    options::{self, Settings},
};
use attache_cpu_plugin::{CacheRows, Layout, element_type};
use attache_sdk::{
    core::descriptor::{BlockSizes, Support, feature},
    prelude::*,
};

/// The largest row of a latent cache, in elements.
const MAX_ROW: u32 = 4096;

/// Multi-head latent attention on the CPU.
pub struct CpuMla {
    settings: Settings,
}

impl CpuMla {
    /// Checks a layer against what is claimed; what is not claimed is refused here too.
    fn read(&self, config: &LayerConfig<'_>) -> Result<(Dimensions, CacheRows)> {
        let refuse = |what: String| Err(BackendError::unsupported(format!("CPU_MLA: {what}")));
        let Some(mla) = &config.mla else {
            return refuse("the layer is not one of multi-head latent attention; use CPU_ATTN".to_owned());
        };
        if config.head_size > MAX_ROW {
            return refuse(format!("a latent row of {} elements; at most {MAX_ROW}", config.head_size));
        }
        if config.attn_type != AttentionType::Decoder {
            return refuse(format!("attention type {}; decoder is supported", config.attn_type));
        }
        if config.layout != LAYOUT_LATENT {
            return refuse(format!("cache layout '{}'; '{LAYOUT_LATENT}' is supported", config.layout));
        }
        let Some(dtype) = element_type(config.kv_cache_dtype, config.dtype) else {
            return refuse(format!(
                "kv_cache_dtype {}; auto, float32, float16 and bfloat16 are supported",
                config.kv_cache_dtype
            ));
        };
        let unsupported = [
            ("ALiBi", !config.alibi_slopes.is_empty()),
            ("chunked-local attention", config.chunked_local > 0),
            ("scales of stored values", !config.k_scales.is_empty() || !config.v_scales.is_empty()),
            ("sparse attention", config.request.use_sparse),
            ("decode context parallelism", config.request.use_dcp),
            ("prefill context parallelism", config.request.use_pcp),
            ("a multimodal prefix", config.request.use_mm_prefix),
            ("relaxed sliding-window attention", config.request.use_rswa),
            ("adaptive verification", config.request.use_adaptive_verification),
            ("a KV connector", config.request.use_kv_connector),
        ];
        if let Some((what, _)) = unsupported.iter().find(|(_, asked)| *asked) {
            return refuse(format!("{what} is not supported"));
        }
        let dimensions = Dimensions {
            num_heads: config.num_heads as usize,
            kv_lora_rank: mla.kv_lora_rank as usize,
            qk_rope_head_dim: mla.qk_rope_head_dim as usize,
            qk_nope_head_dim: mla.qk_nope_head_dim as usize,
            v_head_dim: mla.v_head_dim as usize,
        };
        let rows = CacheRows {
            role: TensorRole::LATENT,
            dtype,
            layout: Layout::Latent,
            num_heads: 1,
            block_size: config.block_size as usize,
            size: dimensions.row(),
        };
        Ok((dimensions, rows))
    }
}

impl Backend for CpuMla {
    fn descriptor() -> BackendDescriptor {
        let builder = BackendDescriptor::builder("CPU_MLA")
            .summary("multi-head latent attention on the CPU")
            .platform("cpu")
            .architectures(["*"])
            .head_sizes([1..=MAX_ROW])
            .head_sizes_v([1..=MAX_ROW])
            .dtypes(Dtype::ALL)
            .kv_cache_dtypes(["auto", "float32", "float16", "bfloat16"])
            .block_sizes(BlockSizes::multiples_of(1))
            .layouts([LAYOUT_LATENT])
            .attn_types([AttentionType::Decoder])
            .mla(Support::Only)
            .features([
                feature::SINK,
                feature::SLIDING_WINDOW,
                feature::SOFTCAP,
                feature::LSE,
                feature::NON_CAUSAL,
                feature::BATCH_INVARIANCE,
            ])
            .rank(100);
        options::declare(builder).build()
    }

    fn create(_host: HostServices, options: &Options) -> Result<Self> {
        let settings = Settings::new()?.with(options.iter())?;
        tracing::debug!(isa = settings.isa.name(), "CPU_MLA made");
        Ok(Self { settings })
    }

    fn probe(&self) -> Result<Vec<Device>> {
        Ok(vec![Device::host_cpu()])
    }

    fn validate(&self, request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
        let mut reasons = Vec::new();
        if request.head_size_v.is_some_and(|latent| latent > request.head_size) {
            reasons.push("head_size_v (kv_lora_rank) is larger than head_size, of which it is a part".to_owned());
        }
        Ok(reasons)
    }

    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        Ok(KvCacheSpec { tensors: vec![self.read(config)?.1.spec()?] })
    }

    fn create_layer(&self, config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
        let (dimensions, rows) = self.read(config)?;
        let own = config.options.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let settings = self.settings.with(own)?;
        Ok(Box::new(MlaLayer::new(config, dimensions, rows, settings)?))
    }
}
