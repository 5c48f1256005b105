//! Models: from token ids to logits, with attention left to whoever calls.
//!
//! Owns the order of operations of the supported families. Must not know: caches, blocks, batches
//! of requests, backends. A model sees tokens with positions; the caller's [`Attention`] sees their
//! queries, keys and values.

mod decoder;
pub mod gemma3;
pub mod llama;
pub mod tiny_hybrid;

pub use decoder::Decoder;

use crate::{
    error::{EngineError, Result},
    gguf::{GgufFile, Weights},
    tokenizer::Tokenizer,
};
use attache_core::plan::{LayerDescription, MlaDimensions, ModelDescription};
use std::{path::Path, sync::Arc};

/// The name of the model that is part of the program.
pub const BUNDLED: &str = "tiny-hybrid";

/// A layer's queries, new keys and new values, as rows of tokens.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    /// `[tokens, num_heads, head_size]`; MLA: `[tokens, num_heads, qk_nope_head_dim + qk_rope_head_dim]`.
    pub q: &'a [f32],
    /// `[tokens, num_kv_heads, head_size]`; MLA: rows `[tokens, kv_lora_rank + qk_rope_head_dim]`.
    pub k: &'a [f32],
    /// `[tokens, num_kv_heads, head_size_v]`; MLA: none.
    pub v: Option<&'a [f32]>,
}

/// Whoever runs attention.
pub trait Attention {
    /// Attention of layer `layer`; `out` is `[tokens, num_heads, head_size_v]`, for MLA
    /// `[tokens, num_heads, v_head_dim]`.
    ///
    /// # Errors
    /// What the kernels report.
    fn attend(&mut self, layer: usize, input: AttentionInput<'_>, out: &mut [f32]) -> Result<()>;
}

/// What a model says of one of its layers, beyond what selection needs.
#[derive(Clone, Debug)]
pub struct LayerAttention {
    /// What selection needs.
    pub description: LayerDescription,
    /// Softmax scale.
    pub scale: f64,
    /// MLA: the up-projection `[num_heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank]`.
    pub kv_b_proj: Option<Arc<Vec<f32>>>,
}

impl LayerAttention {
    /// Elements of an output head, as the layer gives it.
    #[must_use]
    pub fn out_size(&self) -> usize {
        self.description.mla.map_or(self.description.head_size_v, |mla| mla.v_head_dim) as usize
    }

    /// Elements of a query head, as the layer takes it.
    #[must_use]
    pub fn query_size(&self) -> usize {
        let whole = |mla: MlaDimensions| mla.qk_nope_head_dim + mla.qk_rope_head_dim;
        self.description.mla.map_or(self.description.head_size, whole) as usize
    }

    /// Elements of a token's key (MLA: of its row).
    #[must_use]
    pub fn key_size(&self) -> usize {
        self.description.num_kv_heads as usize * self.description.head_size as usize
    }

    /// Elements of a token's value, 0 for MLA.
    #[must_use]
    pub fn value_size(&self) -> usize {
        if self.description.mla.is_some() {
            return 0;
        }
        self.description.num_kv_heads as usize * self.description.head_size_v as usize
    }
}

/// A model with its tokenizer, ready for an engine.
#[derive(Debug)]
pub struct LoadedModel {
    /// What it was loaded as: `tiny-hybrid` or the file's name.
    pub name: String,
    /// The weights.
    pub decoder: Decoder,
    /// The tokenizer.
    pub tokenizer: Tokenizer,
}

impl LoadedModel {
    /// The model that is part of the program.
    ///
    /// # Errors
    /// Only when the program was built from a damaged source tree.
    pub fn bundled() -> Result<Self> {
        tiny_hybrid::bundled()
    }

    /// What the layers of a model ask for, from its metadata: no weights are read.
    ///
    /// # Errors
    /// As [`LoadedModel::load`], but for what only the weights would show.
    pub fn describe(model: &str) -> Result<ModelDescription> {
        let path = Path::new(model);
        if model == BUNDLED || path.is_dir() {
            return tiny_hybrid::describe((model != BUNDLED).then_some(path));
        }
        let file = GgufFile::open(path)?;
        let gguf = |source| EngineError::Gguf { path: path.to_owned(), source };
        let architecture = file.architecture().map_err(gguf)?;
        let layers = match architecture {
            gemma3::ARCHITECTURE => gemma3::layers(&file),
            // `architecture` gives supported names only.
            _ => llama::layers(&file),
        };
        Ok(ModelDescription { model_type: architecture.to_owned(), dtype: None, layers: layers.map_err(gguf)? })
    }

    /// Loads `tiny-hybrid`, a GGUF file, or a folder with a model of the bundled form.
    ///
    /// # Errors
    /// When the file cannot be read or its model is not supported.
    pub fn load(model: &str) -> Result<Self> {
        Self::load_as(model, Weights::Auto)
    }

    /// As [`LoadedModel::load`], with a say in how a GGUF file's matrices are kept.
    ///
    /// # Errors
    /// As [`LoadedModel::load`].
    pub fn load_as(model: &str, weights: Weights) -> Result<Self> {
        if model == BUNDLED {
            return Self::bundled();
        }
        let path = Path::new(model);
        if path.is_dir() {
            return tiny_hybrid::from_folder(path);
        }
        let mut file = GgufFile::open(path)?;
        file.set_weights(weights);
        let gguf = |source| EngineError::Gguf { path: path.to_owned(), source };
        let decoder = match file.architecture().map_err(gguf)? {
            gemma3::ARCHITECTURE => gemma3::load(&mut file),
            // `architecture` gives supported names only.
            _ => llama::load(&mut file),
        }
        .map_err(gguf)?;
        let tokenizer = Tokenizer::from_gguf(file.metadata())?;
        if tokenizer.vocab_size() > decoder.vocab_size() {
            return Err(EngineError::Model {
                model: model.to_owned(),
                reason: format!(
                    "the tokenizer has {} tokens and token_embd.weight {} rows: the file contradicts itself",
                    tokenizer.vocab_size(),
                    decoder.vocab_size()
                ),
            });
        }
        let name = path.file_name().map_or_else(|| model.to_owned(), |name| name.to_string_lossy().into_owned());
        Ok(Self { name, decoder, tokenizer })
    }
}
