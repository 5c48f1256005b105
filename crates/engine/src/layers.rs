//! The model's attention layers on their backends.
//!
//! Owns the layers, their caches and plans, and every call into the ABI. Must not know: how a
//! backend is found (a [`LayerProvider`] says), what the model does around attention.

use crate::{
    block_manager::BlockId,
    error::{BackendFailure, EngineError, Result},
    model::{Attention, AttentionInput, LayerAttention},
};
use attache_core::{
    BackendError, BatchLimits, BatchView, Dtype, Element, Kind, KvCacheDtype, LayerConfig, LayerRequest, MlaConfig,
    TensorView, TensorViewMut,
    plan::{EngineConfig, ModelDescription},
    registry::Registry,
    runtime::{Backend, ExecContext, Forward, HostServices, KvCache, Layer, Plan},
};
use half::{bf16, f16};
use std::sync::Arc;

/// The backend that a layer shall run on.
#[derive(Debug, Clone)]
pub struct LayerChoice {
    /// The backend.
    pub backend: Arc<Backend>,
    /// Why it was chosen, for people.
    pub why: String,
    /// The cache's layout, by name.
    pub layout: String,
}

/// The backends of all layers, in their order, and the block size that they share.
#[derive(Debug, Clone)]
pub struct ModelChoice {
    /// One a layer.
    pub layers: Vec<LayerChoice>,
    /// Tokens of a block.
    pub block_size: u32,
}

/// Whoever selects and loads backends.
pub trait LayerProvider {
    /// The backends of a model's layers.
    ///
    /// # Errors
    /// When a layer has none, or they do not meet: with the reasons of each.
    fn backends(
        &self,
        model: &ModelDescription,
        engine: &EngineConfig,
    ) -> Result<ModelChoice, Box<dyn std::error::Error + Send + Sync>>;
}

impl LayerProvider for Registry {
    fn backends(
        &self,
        model: &ModelDescription,
        engine: &EngineConfig,
    ) -> Result<ModelChoice, Box<dyn std::error::Error + Send + Sync>> {
        let loaded = self.load_plan(model, engine)?;
        for warning in &loaded.plan.warnings {
            tracing::warn!("{warning}");
        }
        let layers = loaded.plan.layers.into_iter().zip(loaded.backends).map(|(layer, backend)| {
            let backend = backend.ok_or_else(|| format!("{}: {}", layer.name, layer.why))?;
            Ok(LayerChoice { backend, why: layer.why, layout: layer.layout.unwrap_or_default() })
        });
        let block_size = loaded.plan.block_size.unwrap_or(DEFAULT_BLOCK_SIZE);
        Ok(ModelChoice { layers: layers.collect::<Result<_, String>>()?, block_size })
    }
}

/// What runs a layer, for people.
#[derive(Debug, Clone)]
pub struct LayerPlan {
    /// Position in the model.
    pub index: usize,
    /// The layer's name.
    pub name: String,
    /// Its kind.
    pub kind: Kind,
    /// What it asks for.
    pub request: LayerRequest,
    /// The backend.
    pub backend: String,
    /// Where its plugin comes from.
    pub source: String,
    /// Why it was chosen.
    pub why: String,
    /// The cache's layout.
    pub layout: String,
    /// Tokens of a block.
    pub block_size: u32,
}

/// Tokens of a block where no layer has a cache.
const DEFAULT_BLOCK_SIZE: u32 = 16;

struct OneLayer {
    layer: Layer,
    cache: KvCache,
    /// Index into [`Layers::plans`].
    group: usize,
    num_heads: usize,
    num_kv_heads: usize,
    query_size: usize,
    key_size: usize,
    value_size: usize,
    out_size: usize,
}

/// All layers, ready to run.
pub(crate) struct Layers {
    layers: Vec<OneLayer>,
    plan: Vec<LayerPlan>,
    /// One plan for each group of layers of one backend and shape.
    plans: Vec<Option<Plan>>,
    context: ExecContext,
    dtype: Dtype,
    block_size: usize,
    num_blocks: usize,
    bytes_per_block: u64,
}

/// Layers of one group share a plan: same backend, and same in everything that a plan may depend on.
#[derive(PartialEq, Debug)]
struct GroupKey {
    backend: usize,
    request: LayerRequest,
    shape: [u32; 4],
    scale: u64,
    window: i64,
    layout: String,
}

fn config<'a>(
    attention: &'a LayerAttention,
    request: LayerRequest,
    engine: &EngineConfig,
    choice: &LayerChoice,
    block_size: u32,
) -> Result<LayerConfig<'a>, BackendError> {
    let layer = &attention.description;
    let mla = match (&layer.mla, &attention.kv_b_proj) {
        (Some(mla), projection) => {
            let rows = layer.num_heads as usize * (mla.qk_nope_head_dim + mla.v_head_dim) as usize;
            let projection = projection
                .as_ref()
                .map(|values| TensorView::from_slice(values.as_slice(), &[rows, mla.kv_lora_rank as usize]));
            Some(MlaConfig {
                kv_lora_rank: mla.kv_lora_rank,
                qk_nope_head_dim: mla.qk_nope_head_dim,
                qk_rope_head_dim: mla.qk_rope_head_dim,
                v_head_dim: mla.v_head_dim,
                kv_b_proj: projection.transpose()?,
            })
        }
        (None, _) => None,
    };
    Ok(LayerConfig {
        request,
        name: layer.name.clone(),
        num_heads: layer.num_heads,
        num_kv_heads: layer.num_kv_heads,
        head_size: layer.head_size,
        head_size_v: layer.head_size_v,
        dtype: engine.dtype,
        kv_cache_dtype: engine.kv_cache_dtype.unwrap_or(KvCacheDtype::AUTO),
        layout: choice.layout.clone(),
        block_size,
        attn_type: layer.attn_type.clone(),
        scale: attention.scale,
        softcap: layer.softcap.unwrap_or(0.0),
        sliding_window: layer.sliding_window.map_or(0, i64::from),
        mla,
        ..LayerConfig::new(layer.num_heads, layer.num_kv_heads, layer.head_size, engine.dtype)
    })
}

impl Layers {
    /// Makes the layers on their backends, and their caches once the number of blocks is known.
    pub(crate) fn create<'a>(
        choice: ModelChoice,
        attention: impl Iterator<Item = &'a LayerAttention>,
        engine: &EngineConfig,
        services: HostServices,
        limits: &BatchLimits,
        num_blocks: impl FnOnce(u64, usize) -> Result<usize>,
    ) -> Result<Self> {
        let attention: Vec<&LayerAttention> = attention.collect();
        if choice.layers.len() != attention.len() {
            return Err(EngineError::Internal(format!(
                "{} backends were given for {} layers",
                choice.layers.len(),
                attention.len()
            )));
        }
        let block_size = choice.block_size;
        let mut made = Vec::new();
        let mut plan = Vec::new();
        let mut keys: Vec<GroupKey> = Vec::new();
        let (mut workspace, mut bytes_per_block) = (0, 0);
        for (choice, attention) in choice.layers.into_iter().zip(attention) {
            let description = &attention.description;
            let request = description.request(engine);
            let fail = |call| {
                let (backend, why, layer) = (&choice.backend, choice.why.clone(), description.name.clone());
                let (backend, source_of) = (backend.name().to_owned(), backend.source().to_owned());
                move |error| EngineError::from(Box::new(BackendFailure { backend, source_of, why, layer, call, error }))
            };
            let config = config(attention, request.clone(), engine, &choice, block_size).map_err(fail("kv_b_proj"))?;
            let spec = choice.backend.kv_cache_spec(&config).map_err(fail("kv_cache_spec"))?;
            let layer = choice.backend.create_layer(&config).map_err(fail("create_layer"))?;
            workspace = workspace.max(layer.workspace_size(limits).map_err(fail("workspace_size"))?);
            bytes_per_block += spec.bytes_per_block();
            let key = GroupKey {
                backend: Arc::as_ptr(&choice.backend).addr(),
                request: request.clone(),
                shape: [config.num_heads, config.num_kv_heads, config.head_size, config.head_size_v],
                scale: config.scale.to_bits(),
                window: config.sliding_window,
                layout: config.layout.clone(),
            };
            let group = keys.iter().position(|other| *other == key).unwrap_or_else(|| {
                keys.push(key);
                keys.len() - 1
            });
            plan.push(LayerPlan {
                index: description.index,
                name: description.name.clone(),
                kind: description.kind,
                request,
                backend: choice.backend.name().to_owned(),
                source: choice.backend.source().to_owned(),
                why: choice.why.clone(),
                layout: config.layout.clone(),
                block_size,
            });
            made.push((layer, spec, group, attention));
        }
        let num_blocks = num_blocks(bytes_per_block, block_size as usize)?;
        let mut layers = Vec::new();
        for (layer, spec, group, attention) in made {
            let cache = KvCache::allocate(&spec, num_blocks)
                .map_err(|source| EngineError::Cache { layer: attention.description.name.clone(), source })?;
            layers.push(OneLayer {
                layer,
                cache,
                group,
                num_heads: attention.description.num_heads as usize,
                num_kv_heads: attention.description.num_kv_heads as usize,
                query_size: attention.query_size(),
                key_size: attention.key_size(),
                value_size: attention.value_size(),
                out_size: attention.out_size(),
            });
        }
        let mut context = ExecContext::new(services);
        context.reserve_workspace(workspace);
        let plans = keys.iter().map(|_| None).collect();
        let block_size = block_size as usize;
        Ok(Self { layers, plan, plans, context, dtype: engine.dtype, block_size, num_blocks, bytes_per_block })
    }

    /// What runs each layer.
    pub(crate) fn plan(&self) -> &[LayerPlan] {
        &self.plan
    }

    /// Tokens of a block.
    pub(crate) fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks of each cache.
    pub(crate) fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Bytes of all caches.
    pub(crate) fn cache_bytes(&self) -> u64 {
        self.bytes_per_block * self.num_blocks as u64
    }

    fn failure(&self, layer: usize, call: &'static str, error: BackendError) -> EngineError {
        let plan = &self.plan[layer];
        EngineError::from(Box::new(BackendFailure {
            backend: plan.backend.clone(),
            source_of: plan.source.clone(),
            why: plan.why.clone(),
            layer: plan.name.clone(),
            call,
            error,
        }))
    }

    /// Makes the groups' plans for a step, once for all layers of a group.
    pub(crate) fn begin(&mut self, batch: &StepBatch) -> Result<()> {
        let width = batch.width.max(1);
        let table = Some((batch.block_table.as_slice(), width));
        for group in 0..self.plans.len() {
            let Some(index) = self.layers.iter().position(|layer| layer.group == group) else { continue };
            let view = BatchView::from_host(&batch.query_start_loc, &batch.seq_lens, table, self.num_blocks)
                .map_err(|error| self.failure(index, "plan", error))?;
            let outcome = match &mut self.plans[group] {
                Some(plan) => plan.update(&view),
                slot => self.layers[index].layer.plan(&view).map(|plan| *slot = Some(plan)),
            };
            outcome.map_err(|error| self.failure(index, "plan", error))?;
        }
        Ok(())
    }
}

/// A step's batch as the ABI takes it.
#[derive(Debug, Default, Clone)]
pub(crate) struct StepBatch {
    pub(crate) query_start_loc: Vec<i32>,
    pub(crate) seq_lens: Vec<i32>,
    block_table: Vec<i32>,
    width: usize,
    slot_mapping: Vec<i64>,
}

impl StepBatch {
    /// A batch of pieces: first token, tokens, blocks of the sequence.
    pub(crate) fn new<'a>(
        pieces: impl Iterator<Item = (usize, usize, &'a [BlockId])> + Clone,
        block_size: usize,
    ) -> Self {
        let width = pieces.clone().map(|(.., blocks)| blocks.len()).max().unwrap_or(0);
        let mut batch = Self { query_start_loc: vec![0], width, ..Self::default() };
        let mut total = 0;
        for (start, count, blocks) in pieces {
            total += count;
            batch.query_start_loc.push(total as i32);
            batch.seq_lens.push((start + count) as i32);
            let row = blocks.iter().map(|id| *id as i32);
            batch.block_table.extend(row.chain(std::iter::repeat(-1)).take(width.max(1)));
            batch.slot_mapping.extend((start..start + count).map(|position| {
                let block = i64::from(blocks[position / block_size]);
                block * block_size as i64 + (position % block_size) as i64
            }));
        }
        batch
    }
}

/// Attention of one step: what the model calls.
pub(crate) struct StepAttention<'a> {
    pub(crate) layers: &'a mut Layers,
    pub(crate) batch: &'a StepBatch,
}

impl Attention for StepAttention<'_> {
    fn attend(&mut self, index: usize, input: AttentionInput<'_>, out: &mut [f32]) -> Result<()> {
        match self.layers.dtype {
            Dtype::F32 => self.run(index, input.q, input.k, input.v, out),
            Dtype::F16 => self.run_as(index, input, out, f16::from_f32, f16::to_f32),
            Dtype::BF16 => self.run_as(index, input, out, bf16::from_f32, bf16::to_f32),
        }
    }
}

impl StepAttention<'_> {
    fn run_as<T: Element>(
        &mut self,
        index: usize,
        input: AttentionInput<'_>,
        out: &mut [f32],
        from: fn(f32) -> T,
        to: fn(T) -> f32,
    ) -> Result<()> {
        let convert = |values: &[f32]| values.iter().map(|value| from(*value)).collect::<Vec<T>>();
        let (q, k, v) = (convert(input.q), convert(input.k), input.v.map(convert));
        let mut result = vec![from(0.0); out.len()];
        self.run(index, &q, &k, v.as_deref(), &mut result)?;
        out.iter_mut().zip(result).for_each(|(out, value)| *out = to(value));
        Ok(())
    }

    fn run<T: Element>(&mut self, index: usize, q: &[T], k: &[T], v: Option<&[T]>, out: &mut [T]) -> Result<()> {
        let tokens = self.batch.slot_mapping.len();
        let written = self.write(index, tokens, k, v);
        written.map_err(|error| self.layers.failure(index, "write_kv", error))?;
        let ran = self.forward(index, tokens, q, out);
        ran.map_err(|error| self.layers.failure(index, "forward", error))
    }

    fn write<T: Element>(&mut self, index: usize, tokens: usize, k: &[T], v: Option<&[T]>) -> Result<(), BackendError> {
        let Layers { layers, context, .. } = &mut *self.layers;
        let layer = &mut layers[index];
        let slots = TensorView::from_slice(&self.batch.slot_mapping, &[tokens])?;
        let (k, v) = match v {
            Some(v) => {
                let heads = layer.num_kv_heads;
                let k = TensorView::from_slice(k, &[tokens, heads, layer.key_size / heads])?;
                (k, Some(TensorView::from_slice(v, &[tokens, heads, layer.value_size / heads])?))
            }
            None => (TensorView::from_slice(k, &[tokens, layer.key_size])?, None),
        };
        layer.layer.write_kv(context, &k, v.as_ref(), &slots, &mut layer.cache)
    }

    fn forward<T: Element>(&mut self, index: usize, tokens: usize, q: &[T], out: &mut [T]) -> Result<(), BackendError> {
        let Layers { layers, plans, context, .. } = &mut *self.layers;
        let layer = &layers[index];
        let Some(plan) = &plans[layer.group] else {
            return Err(BackendError::invalid("no plan was made for the step"));
        };
        let forward = Forward {
            q: TensorView::from_slice(q, &[tokens, layer.num_heads, layer.query_size])?,
            k: None,
            v: None,
            cache: Some(&layer.cache),
            plan,
            out: TensorViewMut::from_slice(out, &[tokens, layer.num_heads, layer.out_size])?,
            lse: None,
            topk_indices: None,
        };
        layer.layer.forward(context, forward)
    }
}
