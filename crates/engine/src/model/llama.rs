//! The `llama` architecture in GGUF: Llama, SmolLM and others of that form.

use super::{
    LayerAttention,
    decoder::{Decoder, Layer, Norm, Projections},
};
use crate::{
    error::GgufError,
    gguf::{Geometry, GgufFile},
    linear::Linear,
    ops::{Activation, Pairing, Rope},
};
use attache_core::{Kind, plan::LayerDescription};

/// The architecture's name in a file.
pub const ARCHITECTURE: &str = "llama";

/// Llama's rotation base where a file states none.
const ROPE_BASE: f64 = 10_000.0;

pub(super) fn layers(file: &GgufFile) -> Result<Vec<LayerDescription>, GgufError> {
    let geometry = file.geometry()?;
    Ok((0..geometry.block_count).map(|index| description(&geometry, index, geometry.sliding_window)).collect())
}

/// A layer with grouped-query attention, as the metadata describes it.
pub(super) fn description(geometry: &Geometry, index: usize, window: Option<u32>) -> LayerDescription {
    LayerDescription {
        kind: if window.is_some() { Kind::SlidingWindow } else { Kind::FullAttention },
        name: format!("blk.{index}"),
        head_size_v: geometry.value_length,
        sliding_window: window,
        softcap: geometry.attn_softcap,
        ..LayerDescription::new(index, geometry.head_count[index], geometry.head_count_kv[index], geometry.key_length)
    }
}

pub(super) fn load(file: &mut GgufFile) -> Result<Decoder, GgufError> {
    let geometry = file.geometry()?;
    // The converter has permuted the rows of q and k, so that neighbours are rotated together.
    let mut rope = Rope::new(
        Pairing::Interleaved,
        geometry.rope_dimensions,
        geometry.rope_base.unwrap_or(ROPE_BASE),
        geometry.rope_scale,
    );
    if file.has("rope_freqs.weight") {
        let len = geometry.rope_dimensions / 2;
        let factors = file.vector("rope_freqs.weight", len, "llama.rope.dimension_count / 2")?;
        if factors.iter().any(|factor| !(factor.is_finite() && *factor > 0.0)) {
            return Err(GgufError::Tensor {
                name: "rope_freqs.weight".to_owned(),
                reason: "it holds a factor that is not above 0".to_owned(),
            });
        }
        rope = rope.with_factors(&factors);
    }
    let mut parts = Parts::new(file, &geometry)?;
    let mut layers = Vec::with_capacity(geometry.block_count);
    for index in 0..geometry.block_count {
        let description = description(&geometry, index, geometry.sliding_window);
        let scale = f64::from(geometry.key_length).powf(-0.5);
        layers.push(Layer {
            attention: LayerAttention { description, scale, kv_b_proj: None },
            attn_norm: parts.norm(index, "attn_norm")?,
            projections: parts.projections(index, false)?,
            rope: 0,
            output: parts.attention_output(index)?,
            post_attn_norm: None,
            ffn_norm: parts.norm(index, "ffn_norm")?,
            gate: parts.feed_forward(index, "ffn_gate")?,
            up: parts.feed_forward(index, "ffn_up")?,
            down: parts.feed_forward_down(index)?,
            post_ffn_norm: None,
        });
    }
    parts.finish(layers, vec![rope], Activation::Silu, 1.0)
}

/// The parts that `llama` and `gemma3` have in common, held against the geometry.
pub(super) struct Parts<'a> {
    file: &'a mut GgufFile,
    geometry: &'a Geometry,
    embedding: Linear,
}

impl<'a> Parts<'a> {
    pub(super) fn new(file: &'a mut GgufFile, geometry: &'a Geometry) -> Result<Self, GgufError> {
        // The vocabulary's size is the tensor's own; its columns are not.
        let rows = file.shape("token_embd.weight")?.first().copied().unwrap_or(0);
        let because = format!("{}.embedding_length = {}", geometry.architecture, geometry.embedding_length);
        let embedding = file.matrix("token_embd.weight", rows, geometry.embedding_length, &because)?;
        Ok(Self { file, geometry, embedding })
    }

    /// A norm over the residual stream.
    pub(super) fn norm(&mut self, layer: usize, name: &str) -> Result<Norm, GgufError> {
        let because = format!("{}.embedding_length", self.geometry.architecture);
        self.norm_of(&format!("blk.{layer}.{name}.weight"), self.geometry.embedding_length, &because)
    }

    fn norm_of(&mut self, name: &str, len: usize, because: &str) -> Result<Norm, GgufError> {
        Ok(Norm { weight: self.file.vector(name, len, because)?, eps: self.geometry.rms_epsilon })
    }

    /// Queries, keys and values; with `head_norms` also the norms of each query and key head.
    pub(super) fn projections(&mut self, layer: usize, head_norms: bool) -> Result<Projections, GgufError> {
        let geometry = self.geometry;
        let because = geometry.because(layer);
        let (heads, kv_heads) = (geometry.head_count[layer] as usize, geometry.head_count_kv[layer] as usize);
        let (key, value) = (geometry.key_length as usize, geometry.value_length as usize);
        let mut matrix = |name: &str, rows: usize| {
            self.file.matrix(&format!("blk.{layer}.{name}.weight"), rows, geometry.embedding_length, &because)
        };
        let (q, k, v) =
            (matrix("attn_q", heads * key)?, matrix("attn_k", kv_heads * key)?, matrix("attn_v", kv_heads * value)?);
        let (mut q_norm, mut k_norm) = (None, None);
        if head_norms {
            q_norm = Some(self.norm_of(&format!("blk.{layer}.attn_q_norm.weight"), key, &because)?);
            k_norm = Some(self.norm_of(&format!("blk.{layer}.attn_k_norm.weight"), key, &because)?);
        }
        Ok(Projections::Gqa { q, k, v, q_norm, k_norm })
    }

    pub(super) fn attention_output(&mut self, layer: usize) -> Result<Linear, GgufError> {
        let geometry = self.geometry;
        let cols = geometry.head_count[layer] as usize * geometry.value_length as usize;
        let name = format!("blk.{layer}.attn_output.weight");
        self.file.matrix(&name, geometry.embedding_length, cols, &geometry.because(layer))
    }

    pub(super) fn feed_forward(&mut self, layer: usize, name: &str) -> Result<Linear, GgufError> {
        let geometry = self.geometry;
        let rows = geometry.feed_forward_length[layer] as usize;
        let name = format!("blk.{layer}.{name}.weight");
        self.file.matrix(&name, rows, geometry.embedding_length, &geometry.because_ffn(layer))
    }

    pub(super) fn feed_forward_down(&mut self, layer: usize) -> Result<Linear, GgufError> {
        let geometry = self.geometry;
        let cols = geometry.feed_forward_length[layer] as usize;
        let name = format!("blk.{layer}.ffn_down.weight");
        self.file.matrix(&name, geometry.embedding_length, cols, &geometry.because_ffn(layer))
    }

    pub(super) fn finish(
        mut self,
        layers: Vec<Layer>,
        ropes: Vec<Rope>,
        activation: Activation,
        embedding_scale: f32,
    ) -> Result<Decoder, GgufError> {
        let geometry = self.geometry;
        let because = format!("{}.embedding_length", geometry.architecture);
        let norm = self.norm_of("output_norm.weight", geometry.embedding_length, &because)?;
        let output = if self.file.has("output.weight") {
            let rows = self.embedding.rows();
            Some(self.file.matrix("output.weight", rows, geometry.embedding_length, "token_embd.weight's rows")?)
        } else {
            None
        };
        self.file.finish()?;
        Ok(Decoder {
            model_type: geometry.architecture.to_owned(),
            embedding: self.embedding,
            embedding_scale,
            layers,
            ropes,
            activation,
            norm,
            output,
            final_softcap: geometry.final_softcap.map(|cap| cap as f32),
            max_context: geometry.context_length,
        })
    }
}
