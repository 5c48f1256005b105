//! What `CPU_ATTN` claims, and the refusal of everything else.
//!
//! Must not know kernels.

use crate::{layer::CpuLayer, plan::MaskRule};
use attache_cpu_kernels::{HeadShape, Isa};
use attache_cpu_plugin::{CacheRows, Layout, element_type, isa, isa_option};
use attache_sdk::{
    core::{
        condition::NumberRule,
        descriptor::{BlockSizes, feature},
    },
    prelude::*,
};

/// The largest head that is taken, in elements.
const MAX_HEAD_SIZE: u32 = 1024;

/// Attention over a paged cache on the CPU.
pub struct CpuAttention {
    isa: Isa,
    workers: usize,
}

/// What the kernels of a layer work with.
#[derive(Clone, Debug)]
pub(crate) struct Parameters {
    pub isa: Isa,
    /// Threads that a batch is cut for.
    pub workers: usize,
    /// Element type of q and out.
    pub dtype: DataType,
    pub num_heads: usize,
    pub heads: HeadShape,
    pub head_size: usize,
    pub scale: f64,
    pub softcap: f64,
    pub sinks: Vec<f32>,
    pub alibi_slopes: Vec<f32>,
    pub mask: MaskRule,
    /// Keys and values in the cache.
    pub cache: [CacheRows; 2],
}

fn refuse<T>(what: String) -> Result<T> {
    Err(BackendError::unsupported(format!("CPU_ATTN: {what}")))
}

impl CpuAttention {
    /// Checks a layer against what is claimed; what is not claimed is refused here too.
    fn read(&self, config: &LayerConfig<'_>) -> Result<Parameters> {
        if config.mla.is_some() || config.request.use_mla {
            return refuse("multi-head latent attention is not supported; use CPU_MLA".to_owned());
        }
        if config.head_size > MAX_HEAD_SIZE || config.head_size_v > MAX_HEAD_SIZE {
            return refuse(format!(
                "heads of {} and {} elements; at most {MAX_HEAD_SIZE}",
                config.head_size, config.head_size_v
            ));
        }
        let Some(layout) = Layout::named(&config.layout).filter(|layout| *layout != Layout::Latent) else {
            return refuse(format!(
                "cache layout '{}'; '{LAYOUT_HEAD_MAJOR}' and '{LAYOUT_TOKEN_MAJOR}' are supported",
                config.layout
            ));
        };
        let Some(dtype) = element_type(config.kv_cache_dtype, config.dtype) else {
            return refuse(format!(
                "kv_cache_dtype {}; auto, float32, float16 and bfloat16 are supported",
                config.kv_cache_dtype
            ));
        };
        if let AttentionType::Other(name) = &config.attn_type {
            return refuse(format!("attention type {name}"));
        }
        let is_cross = config.attn_type == AttentionType::EncoderDecoder;
        let unsupported = [
            ("scales of stored keys and values", !config.k_scales.is_empty() || !config.v_scales.is_empty()),
            ("sparse attention", config.request.use_sparse),
            ("decode context parallelism", config.request.use_dcp),
            ("prefill context parallelism", config.request.use_pcp),
            ("relaxed sliding-window attention", config.request.use_rswa),
            ("a window in cross attention", is_cross && (config.sliding_window > 0 || config.window_right >= 0)),
            ("chunked-local attention in cross attention", is_cross && config.chunked_local > 0),
            ("ALiBi in cross attention", is_cross && !config.alibi_slopes.is_empty()),
        ];
        if let Some((what, _)) = unsupported.iter().find(|(_, asked)| *asked) {
            return refuse(format!("{what} is not supported"));
        }
        let mut chosen = self.isa;
        for (name, value) in &config.options {
            match name.as_str() {
                "isa" => chosen = isa(value)?,
                _ => return Err(BackendError::invalid(format!("unknown option '{name}' of a layer; valid: isa"))),
            }
        }
        let num_kv_heads = config.num_kv_heads as usize;
        let rows = |role, size: u32| CacheRows {
            role,
            dtype,
            layout,
            num_heads: num_kv_heads,
            block_size: config.block_size as usize,
            size: size as usize,
        };
        Ok(Parameters {
            isa: chosen,
            workers: self.workers,
            dtype: config.dtype.data_type(),
            num_heads: config.num_heads as usize,
            heads: HeadShape {
                num_kv_heads,
                group: config.num_heads as usize / num_kv_heads,
                head_size_v: config.head_size_v as usize,
            },
            head_size: config.head_size as usize,
            scale: config.scale,
            softcap: config.softcap,
            sinks: config.sinks.clone(),
            alibi_slopes: config.alibi_slopes.clone(),
            mask: MaskRule::new(config),
            cache: [rows(TensorRole::K, config.head_size), rows(TensorRole::V, config.head_size_v)],
        })
    }
}

impl Backend for CpuAttention {
    fn descriptor() -> BackendDescriptor {
        BackendDescriptor::builder("CPU_ATTN")
            .summary("attention on the CPU")
            .platform("cpu")
            .architectures(["*"])
            .head_sizes([1..=MAX_HEAD_SIZE])
            .head_sizes_v([1..=MAX_HEAD_SIZE])
            .gqa_ratios([NumberRule::ANY])
            .dtypes(Dtype::ALL)
            .kv_cache_dtypes(["auto", "float32", "float16", "bfloat16"])
            .block_sizes(BlockSizes::multiples_of(1))
            .layouts([LAYOUT_HEAD_MAJOR, LAYOUT_TOKEN_MAJOR])
            .attn_types([
                AttentionType::Decoder,
                AttentionType::Encoder,
                AttentionType::EncoderOnly,
                AttentionType::EncoderDecoder,
            ])
            .features([
                feature::SINK,
                feature::SLIDING_WINDOW,
                feature::SOFTCAP,
                feature::ALIBI,
                feature::LSE,
                feature::MM_PREFIX,
                feature::NON_CAUSAL,
                feature::BATCH_INVARIANCE,
                feature::CHUNKED_LOCAL,
            ])
            .rank(100)
            .option("isa", isa_option())
            .build()
    }

    fn create(_host: HostServices, options: &Options) -> Result<Self> {
        let mut chosen = isa("auto")?;
        for (name, value) in options.iter() {
            match name {
                "isa" => chosen = isa(value)?,
                _ => return Err(BackendError::invalid(format!("unknown option '{name}'; valid: isa"))),
            }
        }
        tracing::debug!(isa = chosen.name(), bf16_dot = chosen.has_bf16_dot(), "CPU_ATTN made");
        // What the affinity mask and the quota allow: the engine's pool will not be larger.
        let workers = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Ok(Self { isa: chosen, workers })
    }

    fn probe(&self) -> Result<Vec<Device>> {
        Ok(vec![Device::host_cpu()])
    }

    fn validate(&self, request: &LayerRequest, _device: &Device) -> Result<Vec<String>> {
        let is_cross = request.attn_type == AttentionType::EncoderDecoder;
        let refused = [
            ("a sliding window in cross attention is not supported", is_cross && request.has_sliding_window),
            ("chunked-local cross attention is not supported", is_cross && request.chunked_local),
            ("ALiBi in cross attention is not supported", is_cross && request.has_alibi),
        ];
        Ok(refused.iter().filter(|(_, asked)| *asked).map(|(reason, _)| (*reason).to_owned()).collect())
    }

    fn kv_cache_spec(&self, config: &LayerConfig<'_>) -> Result<KvCacheSpec> {
        let parameters = self.read(config)?;
        if !parameters.mask.has_cache {
            return Ok(KvCacheSpec::default());
        }
        let tensors = parameters.cache.iter().map(CacheRows::spec).collect::<Result<_>>()?;
        Ok(KvCacheSpec { tensors })
    }

    fn create_layer(&self, config: &LayerConfig<'_>) -> Result<Box<dyn Layer>> {
        Ok(Box::new(CpuLayer::new(self.read(config)?)))
    }
}
