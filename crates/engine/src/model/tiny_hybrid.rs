//! The bundled model: a byte-level decoder with layers of four kinds. `models/tiny-hybrid/model.py`
//! defines it; this is the same arithmetic.

use super::{
    BUNDLED, LayerAttention, LoadedModel,
    decoder::{Decoder, Layer, Norm, Projections},
};
use crate::{
    error::{EngineError, Result},
    linear::Linear,
    ops::{Activation, Pairing, Rope},
    tokenizer::Tokenizer,
};
use attache_core::{
    Kind,
    plan::{LayerDescription, MlaDimensions, ModelDescription},
};
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use std::{path::Path, sync::Arc};

const CONFIG: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-hybrid/config.json"));
const WEIGHTS: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-hybrid/model.safetensors"));

/// `config.json`.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    layer_types: Vec<String>,
    num_attention_heads: u32,
    num_key_value_heads: u32,
    head_dim: u32,
    kv_lora_rank: u32,
    qk_nope_head_dim: u32,
    qk_rope_head_dim: u32,
    v_head_dim: u32,
    sliding_window: u32,
    rms_norm_eps: f32,
    rope_theta: f64,
    max_position_embeddings: usize,
    bos_token_id: u32,
    eos_token_id: u32,
}

const MODEL_TYPE: &str = "attache_tiny_hybrid";

/// The model that is part of the program.
pub(super) fn bundled() -> Result<LoadedModel> {
    from_bytes(BUNDLED, CONFIG, WEIGHTS)
}

/// The layers of the bundled model, or of a folder's `config.json`.
pub(super) fn describe(folder: Option<&Path>) -> Result<ModelDescription> {
    let (name, config) = match folder {
        None => (BUNDLED.to_owned(), Config::parse(CONFIG)),
        Some(folder) => (folder.display().to_string(), Config::parse(&read(folder, "config.json")?)),
    };
    let layers = config.and_then(|config| {
        config.layer_types.iter().enumerate().map(|(index, kind)| config.layer(index, kind)).collect()
    });
    let layers = layers.map_err(|reason| EngineError::Model { model: name, reason })?;
    Ok(ModelDescription { model_type: MODEL_TYPE.to_owned(), dtype: None, layers })
}

/// Loads `config.json` and `model.safetensors` of a folder.
pub(super) fn from_folder(folder: &Path) -> Result<LoadedModel> {
    from_bytes(&folder.display().to_string(), &read(folder, "config.json")?, &read(folder, "model.safetensors")?)
}

fn read(folder: &Path, name: &str) -> Result<Vec<u8>> {
    let path = folder.join(name);
    std::fs::read(&path).map_err(|source| EngineError::Io { path, source })
}

/// Makes a model from the bytes of its two files.
///
/// # Errors
/// When they are damaged or contradict each other.
pub fn from_bytes(name: &str, config: &[u8], weights: &[u8]) -> Result<LoadedModel> {
    let fail = |reason: String| EngineError::Model { model: name.to_owned(), reason };
    let config = Config::parse(config).map_err(fail)?;
    let tensors = SafeTensors::deserialize(weights).map_err(|error| fail(format!("model.safetensors: {error}")))?;
    let decoder = Loader { tensors, config: &config }.decoder().map_err(fail)?;
    let tokenizer = Tokenizer::bytes(config.bos_token_id, config.eos_token_id);
    Ok(LoadedModel { name: name.to_owned(), decoder, tokenizer })
}

impl Config {
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let config: Self = serde_json::from_slice(bytes).map_err(|error| format!("config.json: {error}"))?;
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        if self.model_type != MODEL_TYPE {
            return Err(format!("config.json: model_type '{}'; a folder must hold '{MODEL_TYPE}'", self.model_type));
        }
        if self.vocab_size != 256 {
            return Err(format!("config.json: vocab_size {}; the byte tokenizer has 256", self.vocab_size));
        }
        let positive = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads as usize),
            ("num_key_value_heads", self.num_key_value_heads as usize),
            ("head_dim", self.head_dim as usize),
            ("kv_lora_rank", self.kv_lora_rank as usize),
            ("qk_rope_head_dim", self.qk_rope_head_dim as usize),
            ("v_head_dim", self.v_head_dim as usize),
            ("sliding_window", self.sliding_window as usize),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(format!("config.json: {name} is 0; it must be above 0"));
        }
        if let Some((name, value)) = positive.iter().find(|(_, value)| *value > 1 << 20) {
            return Err(format!("config.json: {name} is {value}; at most {} is valid", 1 << 20));
        }
        if !self.num_attention_heads.is_multiple_of(self.num_key_value_heads) {
            return Err(format!(
                "config.json: num_attention_heads {} is no multiple of num_key_value_heads {}",
                self.num_attention_heads, self.num_key_value_heads
            ));
        }
        if !self.head_dim.is_multiple_of(2) || !self.qk_rope_head_dim.is_multiple_of(2) {
            return Err(format!(
                "config.json: head_dim {} and qk_rope_head_dim {} must be even: they are rotated in pairs",
                self.head_dim, self.qk_rope_head_dim
            ));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 0.0 && self.rms_norm_eps > 0.0) {
            return Err(format!(
                "config.json: rope_theta {} and rms_norm_eps {} must be above 0",
                self.rope_theta, self.rms_norm_eps
            ));
        }
        if self.layer_types.is_empty() {
            return Err("config.json: layer_types is empty".to_owned());
        }
        if let Some(id) = [self.bos_token_id, self.eos_token_id].iter().find(|id| **id as usize >= self.vocab_size) {
            return Err(format!("config.json: token {id}; the vocabulary has {}", self.vocab_size));
        }
        Ok(())
    }

    /// What a layer asks for.
    fn layer(&self, index: usize, layer_type: &str) -> Result<LayerDescription, String> {
        let (kind, has_latent, has_window) = match Kind::parse(layer_type) {
            Some(kind @ Kind::FullAttention) => (kind, false, false),
            Some(kind @ Kind::SlidingWindow) => (kind, false, true),
            Some(kind @ Kind::MlaAttention) => (kind, true, false),
            Some(kind @ Kind::SlidingWindowMla) => (kind, true, true),
            _ => {
                return Err(format!(
                    "config.json: layer_types[{index}] is '{layer_type}'; valid are full_attention, sliding_window, mla_attention and sliding_window_mla"
                ));
            }
        };
        let mut description = LayerDescription {
            name: format!("model.layers.{index}"),
            kind,
            sliding_window: has_window.then_some(self.sliding_window),
            ..LayerDescription::new(index, self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        };
        if has_latent {
            description.num_kv_heads = 1;
            description.head_size = self.kv_lora_rank + self.qk_rope_head_dim;
            description.head_size_v = self.kv_lora_rank;
            description.mla = Some(MlaDimensions {
                kv_lora_rank: self.kv_lora_rank,
                qk_nope_head_dim: self.qk_nope_head_dim,
                qk_rope_head_dim: self.qk_rope_head_dim,
                v_head_dim: self.v_head_dim,
            });
        }
        Ok(description)
    }
}

struct Loader<'a> {
    tensors: SafeTensors<'a>,
    config: &'a Config,
}

impl Loader<'_> {
    fn values(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, String> {
        let tensor = self.tensors.tensor(name).map_err(|error| format!("tensor '{name}': {error}"))?;
        if tensor.shape() != shape {
            return Err(format!("tensor '{name}' has shape {:?}; config.json needs {shape:?}", tensor.shape()));
        }
        let data = tensor.data();
        match tensor.dtype() {
            Dtype::F32 => Ok(data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()),
            Dtype::BF16 => Ok(data.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect()),
            Dtype::F16 => Ok(data.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect()),
            other => Err(format!("tensor '{name}' is in {other:?}; expected F32, BF16 or F16")),
        }
    }

    fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Linear, String> {
        Ok(Linear::from_f32(self.values(name, &[rows, cols])?, rows, cols))
    }

    fn norm(&self, name: &str, len: usize) -> Result<Norm, String> {
        Ok(Norm { weight: self.values(name, &[len])?, eps: self.config.rms_norm_eps })
    }

    fn decoder(&self) -> Result<Decoder, String> {
        let config = self.config;
        let rope = |dims: u32| Rope::new(Pairing::Halves, dims as usize, config.rope_theta, 1.0);
        let layers: Result<Vec<_>, String> =
            config.layer_types.iter().enumerate().map(|(index, kind)| self.layer(index, kind)).collect();
        let layers = layers?;
        Ok(Decoder {
            model_type: MODEL_TYPE.to_owned(),
            embedding: self.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size)?,
            embedding_scale: 1.0,
            layers,
            ropes: vec![rope(config.head_dim), rope(config.qk_rope_head_dim)],
            activation: Activation::Silu,
            norm: self.norm("model.norm.weight", config.hidden_size)?,
            output: None,
            final_softcap: None,
            max_context: config.max_position_embeddings,
        })
    }

    fn layer(&self, index: usize, layer_type: &str) -> Result<Layer, String> {
        let config = self.config;
        let description = config.layer(index, layer_type)?;
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        let prefix = description.name.clone();
        let at = |name: &str| format!("{prefix}.{name}.weight");
        let heads = config.num_attention_heads as usize;
        let mla = description.mla;
        let (attention, projections, output) = if let Some(mla) = mla {
            let sizes = [mla.kv_lora_rank, mla.qk_rope_head_dim, mla.qk_nope_head_dim, mla.v_head_dim];
            let [latent, rope, nope, value] = sizes.map(|size| size as usize);
            let projections = Projections::Mla {
                q: self.matrix(&at("self_attn.q_proj"), heads * (nope + rope), hidden)?,
                kv_a: self.matrix(&at("self_attn.kv_a_proj_with_mqa"), latent + rope, hidden)?,
                kv_a_norm: self.norm(&at("self_attn.kv_a_layernorm"), latent)?,
            };
            let kv_b = self.values(&at("self_attn.kv_b_proj"), &[heads * (nope + value), latent])?;
            let scale = ((nope + rope) as f64).powf(-0.5);
            let attention = LayerAttention { description, scale, kv_b_proj: Some(Arc::new(kv_b)) };
            (attention, projections, self.matrix(&at("self_attn.o_proj"), hidden, heads * value)?)
        } else {
            let (size, kv) = (config.head_dim as usize, config.num_key_value_heads as usize);
            let projections = Projections::Gqa {
                q: self.matrix(&at("self_attn.q_proj"), heads * size, hidden)?,
                k: self.matrix(&at("self_attn.k_proj"), kv * size, hidden)?,
                v: self.matrix(&at("self_attn.v_proj"), kv * size, hidden)?,
                q_norm: None,
                k_norm: None,
            };
            let attention = LayerAttention { description, scale: (size as f64).powf(-0.5), kv_b_proj: None };
            (attention, projections, self.matrix(&at("self_attn.o_proj"), hidden, heads * size)?)
        };
        Ok(Layer {
            attention,
            attn_norm: self.norm(&at("input_layernorm"), hidden)?,
            projections,
            rope: usize::from(mla.is_some()),
            output,
            post_attn_norm: None,
            ffn_norm: self.norm(&at("post_attention_layernorm"), hidden)?,
            gate: self.matrix(&at("mlp.gate_proj"), inter, hidden)?,
            up: self.matrix(&at("mlp.up_proj"), inter, hidden)?,
            down: self.matrix(&at("mlp.down_proj"), hidden, inter)?,
            post_ffn_norm: None,
        })
    }
}
