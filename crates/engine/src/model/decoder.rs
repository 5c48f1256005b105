//! The decoder that all supported families are forms of: a family's loader fills in its parts.

use super::{Attention, AttentionInput, LayerAttention};
use crate::{
    error::Result,
    linear::Linear,
    ops::{self, Activation, Rope},
    pool::Pool,
};
use attache_core::plan::ModelDescription;

/// A norm before or after attention or the feed-forward network.
#[derive(Debug)]
pub(crate) struct Norm {
    pub(crate) weight: Vec<f32>,
    pub(crate) eps: f32,
}

impl Norm {
    fn apply(&self, pool: &Pool, x: &[f32], out: &mut [f32]) {
        ops::rms_norm(pool, x, &self.weight, self.eps, out);
    }

    fn apply_in_place(&self, pool: &Pool, x: &mut [f32]) {
        ops::rms_norm_in_place(pool, x, &self.weight, self.eps);
    }
}

/// How a layer makes queries, keys and values.
#[derive(Debug)]
pub(crate) enum Projections {
    /// Grouped-query attention.
    Gqa {
        q: Linear,
        k: Linear,
        v: Linear,
        /// Norms of each query and key head, before the rotation.
        q_norm: Option<Norm>,
        k_norm: Option<Norm>,
    },
    /// Multi-head latent attention without a query LoRA.
    Mla {
        q: Linear,
        /// To the latent row and the rope key.
        kv_a: Linear,
        /// Norm of the latent row.
        kv_a_norm: Norm,
    },
}

/// A layer's weights.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) attention: LayerAttention,
    pub(crate) attn_norm: Norm,
    pub(crate) projections: Projections,
    /// Index into [`Decoder::ropes`].
    pub(crate) rope: usize,
    pub(crate) output: Linear,
    pub(crate) post_attn_norm: Option<Norm>,
    pub(crate) ffn_norm: Norm,
    pub(crate) gate: Linear,
    pub(crate) up: Linear,
    pub(crate) down: Linear,
    pub(crate) post_ffn_norm: Option<Norm>,
}

/// A decoder-only model.
#[derive(Debug)]
pub struct Decoder {
    pub(crate) model_type: String,
    pub(crate) embedding: Linear,
    /// Factor of the embeddings.
    pub(crate) embedding_scale: f32,
    pub(crate) layers: Vec<Layer>,
    /// The rotations in use; most models have one, gemma3 two.
    pub(crate) ropes: Vec<Rope>,
    pub(crate) activation: Activation,
    pub(crate) norm: Norm,
    /// Absent: the embedding's matrix serves as output too.
    pub(crate) output: Option<Linear>,
    /// Soft-cap of the logits.
    pub(crate) final_softcap: Option<f32>,
    pub(crate) max_context: usize,
}

impl Decoder {
    /// Tokens of the vocabulary.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.embedding.rows()
    }

    /// Most tokens of a sequence.
    #[must_use]
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// The model as selection sees it.
    #[must_use]
    pub fn description(&self) -> ModelDescription {
        ModelDescription {
            model_type: self.model_type.clone(),
            dtype: None,
            layers: self.layers.iter().map(|layer| layer.attention.description.clone()).collect(),
        }
    }

    /// The layers' attention.
    pub fn attention_layers(&self) -> impl ExactSizeIterator<Item = &LayerAttention> {
        self.layers.iter().map(|layer| &layer.attention)
    }

    /// Runs `tokens`, each at its position, and gives the logits `[rows, vocab_size]` of the tokens
    /// whose indices are in `rows`.
    ///
    /// # Errors
    /// What attention reports.
    ///
    /// # Panics
    /// When there is not one position a token, a token is not in the vocabulary, or a row is out of
    /// range: the engine checks prompts before.
    pub fn forward(
        &self,
        pool: &Pool,
        tokens: &[u32],
        positions: &[u32],
        rows: &[usize],
        attention: &mut dyn Attention,
    ) -> Result<Vec<f32>> {
        assert_eq!(tokens.len(), positions.len(), "one position a token");
        let (count, hidden) = (tokens.len(), self.embedding.cols());
        let mut x = vec![0.0; count * hidden];
        for (token, row) in tokens.iter().zip(x.chunks_exact_mut(hidden)) {
            self.embedding.row(*token as usize, row);
        }
        if self.embedding_scale != 1.0 {
            ops::scale(&mut x, self.embedding_scale);
        }
        let tables: Vec<_> = self.ropes.iter().map(|rope| rope.table(positions)).collect();
        let mut normed = vec![0.0; x.len()];
        let mut delta = vec![0.0; x.len()];
        for (index, layer) in self.layers.iter().enumerate() {
            layer.attn_norm.apply(pool, &x, &mut normed);
            let out = layer.attend(index, pool, &normed, count, &tables[layer.rope], attention)?;
            layer.output.forward(pool, &out, count, &mut delta);
            if let Some(norm) = &layer.post_attn_norm {
                norm.apply_in_place(pool, &mut delta);
            }
            ops::add(&mut x, &delta);

            layer.ffn_norm.apply(pool, &x, &mut normed);
            let width = layer.gate.rows();
            let (mut gate, mut up) = (vec![0.0; count * width], vec![0.0; count * width]);
            layer.gate.forward(pool, &normed, count, &mut gate);
            layer.up.forward(pool, &normed, count, &mut up);
            ops::gate(pool, self.activation, &mut gate, &up, width);
            layer.down.forward(pool, &gate, count, &mut delta);
            if let Some(norm) = &layer.post_ffn_norm {
                norm.apply_in_place(pool, &mut delta);
            }
            ops::add(&mut x, &delta);
        }
        let mut last = Vec::with_capacity(rows.len() * hidden);
        for row in rows {
            last.extend_from_slice(&x[row * hidden..(row + 1) * hidden]);
        }
        self.norm.apply_in_place(pool, &mut last);
        let output = self.output.as_ref().unwrap_or(&self.embedding);
        let mut logits = vec![0.0; rows.len() * output.rows()];
        output.forward(pool, &last, rows.len(), &mut logits);
        if let Some(cap) = self.final_softcap {
            logits.iter_mut().for_each(|logit| *logit = (*logit / cap).tanh() * cap);
        }
        Ok(logits)
    }
}

impl Layer {
    fn attend(
        &self,
        index: usize,
        pool: &Pool,
        x: &[f32],
        count: usize,
        rope: &ops::RopeTable<'_>,
        attention: &mut dyn Attention,
    ) -> Result<Vec<f32>> {
        let shape = &self.attention;
        let heads = shape.description.num_heads as usize;
        let mut out = vec![0.0; count * heads * shape.out_size()];
        match &self.projections {
            Projections::Gqa { q: q_proj, k: k_proj, v: v_proj, q_norm, k_norm } => {
                let (size, kv_heads) = (shape.query_size(), shape.description.num_kv_heads as usize);
                let mut q = vec![0.0; count * q_proj.rows()];
                let mut k = vec![0.0; count * k_proj.rows()];
                let mut v = vec![0.0; count * v_proj.rows()];
                q_proj.forward(pool, x, count, &mut q);
                k_proj.forward(pool, x, count, &mut k);
                v_proj.forward(pool, x, count, &mut v);
                for (norm, values) in [(q_norm, &mut q), (k_norm, &mut k)] {
                    if let Some(norm) = norm {
                        norm.apply_in_place(pool, values);
                    }
                }
                rope.apply(pool, &mut q, heads, size, 0);
                rope.apply(pool, &mut k, kv_heads, size, 0);
                attention.attend(index, AttentionInput { q: &q, k: &k, v: Some(&v) }, &mut out)?;
            }
            Projections::Mla { q: q_proj, kv_a, kv_a_norm } => {
                let (size, row, latent) = (shape.query_size(), kv_a.rows(), kv_a_norm.weight.len());
                let mut q = vec![0.0; count * q_proj.rows()];
                let mut rows = vec![0.0; count * row];
                q_proj.forward(pool, x, count, &mut q);
                kv_a.forward(pool, x, count, &mut rows);
                for row in rows.chunks_exact_mut(row) {
                    kv_a_norm.apply_in_place(pool, &mut row[..latent]);
                }
                rope.apply(pool, &mut q, heads, size, size - (row - latent));
                rope.apply(pool, &mut rows, 1, row, latent);
                attention.attend(index, AttentionInput { q: &q, k: &rows, v: None }, &mut out)?;
            }
        }
        Ok(out)
    }
}
