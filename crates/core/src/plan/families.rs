//! Model configurations in the Hugging Face form (`config.json`), family by family.
//!
//! A family that is not listed here is refused by name: a guess would plan the wrong kernels.

use super::{
    StateSpaceType,
    description::{LayerDescription, MlaDimensions, ModelDescription},
};
use crate::{
    kind::Kind,
    request::{AttentionType, Dtype},
};
use serde_json::Value;
use std::borrow::Cow;

/// A configuration that cannot be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelConfigError {
    /// Not JSON, or not an object.
    #[error("the model configuration cannot be read: {0}")]
    NotJson(String),
    /// The family is not known.
    #[error("model_type '{found}' is not known; known: {}", known.join(", "))]
    UnknownFamily {
        /// What the configuration says.
        found: String,
        /// What is known.
        known: Vec<&'static str>,
    },
    /// A field is missing.
    #[error("model_type '{family}' needs the field '{field}', which is missing")]
    Missing {
        /// The family.
        family: String,
        /// The field, or the alternatives.
        field: String,
    },
    /// A field holds something else than it should.
    #[error("{field} = {found}: {expected}")]
    Invalid {
        /// The field.
        field: String,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
}

type Result<T> = std::result::Result<T, ModelConfigError>;

const LLAMA_LIKE: &[&str] = &["llama", "mistral", "qwen2", "qwen3", "gemma", "smollm3", "olmo2", "granite", "phi3"];
const FAMILIES: &[&str] = &[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "smollm3",
    "olmo2",
    "granite",
    "phi3",
    "gemma2",
    "gemma3_text",
    "gemma3",
    "gpt_oss",
    "llama4_text",
    "llama4",
    "gpt2",
    "bloom",
    "mpt",
    "bert",
    "whisper",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "jamba",
    "qwen3_next",
    "minimax",
    "mamba",
    "falcon_mamba",
    "mamba2",
    "lfm2",
    "attache_tiny_hybrid",
];

/// Python writes `Infinity` and `NaN` where JSON has no word; no field that is read holds one, so
/// that they may stand as null.
fn without_infinities(text: &str) -> Cow<'_, str> {
    if !text.contains("Infinity") && !text.contains("NaN") {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    for (index, part) in text.split('"').enumerate() {
        if index > 0 {
            out.push('"');
        }
        // Every other part is a string; one with an escaped quote comes out of step and is refused.
        if index % 2 == 0 {
            out.push_str(&part.replace("-Infinity", "null").replace("Infinity", "null").replace("NaN", "null"));
        } else {
            out.push_str(part);
        }
    }
    Cow::Owned(out)
}

/// Reads a `config.json`.
///
/// # Errors
/// For text that is not JSON, a family that is not known, and fields that are missing or wrong.
pub fn describe(text: &str) -> Result<ModelDescription> {
    let value: Value = serde_json::from_str(&without_infinities(text))
        .map_err(|error| ModelConfigError::NotJson(error.to_string()))?;
    let Value::Object(_) = &value else {
        return Err(ModelConfigError::NotJson("it is not an object".to_owned()));
    };
    // A multimodal model's text half stands in `text_config`.
    let config = match value.get("text_config") {
        Some(text) if text.get("model_type").is_some() => text,
        _ => &value,
    };
    let family = config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
    let reader = Reader { config, family: &family };
    let layers = match family.as_str() {
        "gemma2" | "gemma3_text" | "gemma3" | "gpt_oss" | "llama4_text" | "llama4" | "qwen3_next" | "minimax" => {
            reader.decoder()?
        }
        "gpt2" | "bloom" | "mpt" => reader.classic()?,
        "bert" => reader.encoder_only()?,
        "whisper" => reader.whisper()?,
        "deepseek_v2" | "deepseek_v3" | "deepseek_v32" => reader.deepseek()?,
        "jamba" => reader.jamba()?,
        "mamba" | "falcon_mamba" => reader.state_space(StateSpaceType::Mamba1)?,
        "mamba2" => reader.state_space(StateSpaceType::Mamba2)?,
        "lfm2" | "attache_tiny_hybrid" => reader.decoder()?,
        name if LLAMA_LIKE.contains(&name) => reader.decoder()?,
        _ => return Err(ModelConfigError::UnknownFamily { found: family, known: FAMILIES.to_vec() }),
    };
    let dtype = ["dtype", "torch_dtype"].iter().find_map(|key| config.get(key)?.as_str()).and_then(Dtype::parse);
    Ok(ModelDescription { model_type: family, dtype, layers })
}

struct Reader<'a> {
    config: &'a Value,
    family: &'a str,
}

/// More layers than any model has; beyond it a configuration is taken for broken.
const MAX_LAYERS: u32 = 10_000;

impl Reader<'_> {
    fn optional(&self, field: &str) -> Result<Option<u32>> {
        match self.config.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_u64().and_then(|number| u32::try_from(number).ok()).map(Some).ok_or_else(|| {
                ModelConfigError::Invalid {
                    field: field.to_owned(),
                    found: value.to_string(),
                    expected: "a whole number, 0 or more".to_owned(),
                }
            }),
        }
    }

    fn first_of(&self, fields: &[&str]) -> Result<Option<u32>> {
        for field in fields {
            if let Some(value) = self.optional(field)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }

    fn required(&self, fields: &[&str]) -> Result<u32> {
        let value = self.first_of(fields)?.ok_or_else(|| ModelConfigError::Missing {
            family: self.family.to_owned(),
            field: fields.join("' or '"),
        })?;
        if value == 0 {
            return Err(ModelConfigError::Invalid {
                field: fields.join(" / "),
                found: "0".to_owned(),
                expected: "above 0".to_owned(),
            });
        }
        Ok(value)
    }

    fn num_layers(&self, fields: &[&str]) -> Result<usize> {
        let layers = self.required(fields)?;
        if layers > MAX_LAYERS {
            return Err(ModelConfigError::Invalid {
                field: fields.join(" / "),
                found: layers.to_string(),
                expected: format!("at most {MAX_LAYERS}"),
            });
        }
        Ok(layers as usize)
    }

    fn flag(&self, field: &str) -> Option<bool> {
        self.config.get(field).and_then(Value::as_bool)
    }

    /// Heads, KV heads and head size of a decoder.
    fn heads(&self) -> Result<(u32, u32, u32)> {
        let heads = self.required(&["num_attention_heads", "n_head", "n_heads"])?;
        let kv_heads = self.first_of(&["num_key_value_heads"])?.unwrap_or(heads);
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(ModelConfigError::Invalid {
                field: "num_key_value_heads".to_owned(),
                found: kv_heads.to_string(),
                expected: format!("a divisor of num_attention_heads = {heads}"),
            });
        }
        let size = match self.first_of(&["head_dim"])? {
            Some(0) => {
                return Err(ModelConfigError::Invalid {
                    field: "head_dim".to_owned(),
                    found: "0".to_owned(),
                    expected: "above 0".to_owned(),
                });
            }
            Some(size) => size,
            None => {
                let hidden = self.required(&["hidden_size", "n_embd", "d_model"])?;
                if !hidden.is_multiple_of(heads) {
                    return Err(ModelConfigError::Invalid {
                        field: "hidden_size".to_owned(),
                        found: hidden.to_string(),
                        expected: format!("a multiple of num_attention_heads = {heads}, or a head_dim"),
                    });
                }
                hidden / heads
            }
        };
        Ok((heads, kv_heads, size))
    }

    /// The window of the layers that have one; some families state it and do not use it.
    fn window(&self) -> Result<Option<u32>> {
        if self.flag("use_sliding_window") == Some(false) {
            return Ok(None);
        }
        Ok(self.optional("sliding_window")?.filter(|window| *window > 0))
    }

    fn layer_types(&self, layers: usize) -> Result<Option<Vec<String>>> {
        let Some(value) = self.config.get("layer_types").filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let invalid = |expected: String| ModelConfigError::Invalid {
            field: "layer_types".to_owned(),
            found: value.to_string().chars().take(80).collect(),
            expected,
        };
        let types: Vec<String> = value
            .as_array()
            .and_then(|types| types.iter().map(|name| name.as_str().map(str::to_owned)).collect())
            .ok_or_else(|| invalid("a list of names".to_owned()))?;
        if types.len() != layers {
            return Err(invalid(format!("one name for each of the {layers} layers, found {}", types.len())));
        }
        Ok(Some(types))
    }

    /// Whether layer `index` slides, for families that state a pattern: every `pattern`-th is full.
    fn slides_by_pattern(&self, index: usize) -> Result<bool> {
        let pattern = self.first_of(&["sliding_window_pattern", "_sliding_window_pattern"])?;
        let default = match self.family {
            "gemma2" => Some(2),
            "gemma3" | "gemma3_text" => Some(6),
            _ => None,
        };
        Ok(pattern.or(default).is_none_or(|pattern| pattern == 0 || !(index as u32 + 1).is_multiple_of(pattern)))
    }

    fn mla_dimensions(&self) -> Result<MlaDimensions> {
        Ok(MlaDimensions {
            kv_lora_rank: self.required(&["kv_lora_rank"])?,
            qk_nope_head_dim: self.required(&["qk_nope_head_dim"])?,
            qk_rope_head_dim: self.required(&["qk_rope_head_dim"])?,
            v_head_dim: self.required(&["v_head_dim"])?,
        })
    }

    fn make_mla(&self, layer: &mut LayerDescription) -> Result<()> {
        let mla = self.mla_dimensions()?;
        layer.kind = Kind::MlaAttention;
        layer.num_kv_heads = 1;
        layer.head_size = mla.kv_lora_rank.saturating_add(mla.qk_rope_head_dim);
        layer.head_size_v = mla.kv_lora_rank;
        layer.mla = Some(mla);
        Ok(())
    }

    /// A decoder whose layers differ by `layer_types`, a window pattern, or not at all.
    fn decoder(&self) -> Result<Vec<LayerDescription>> {
        let layers = self.num_layers(&["num_hidden_layers"])?;
        let (heads, kv_heads, size) = self.heads()?;
        let window = self.window()?;
        let types = self.layer_types(layers)?;
        let softcap = self.config.get("attn_logit_softcapping").and_then(Value::as_f64).filter(|cap| *cap > 0.0);
        (0..layers)
            .map(|index| {
                let mut layer = LayerDescription::new(index, heads, kv_heads, size);
                layer.softcap = softcap;
                layer.has_sink = self.family == "gpt_oss";
                let by_pattern = window.is_some() && self.slides_by_pattern(index)?;
                let name =
                    types.as_ref().map_or(if by_pattern { "sliding_attention" } else { "full_attention" }, |types| {
                        types[index].as_str()
                    });
                self.apply_type(&mut layer, name, window)?;
                Ok(layer)
            })
            .collect()
    }

    fn apply_type(&self, layer: &mut LayerDescription, name: &str, window: Option<u32>) -> Result<()> {
        let window_or_error = || {
            window.ok_or_else(|| ModelConfigError::Missing {
                family: self.family.to_owned(),
                field: "sliding_window".to_owned(),
            })
        };
        match name {
            "full_attention" | "attention" => {}
            "sliding_attention" | "sliding_window" => {
                layer.sliding_window = Some(window_or_error()?);
                layer.kind = Kind::SlidingWindow;
            }
            "chunked_attention" => {
                layer.chunked_local = Some(self.required(&["attention_chunk_size"])?);
                layer.kind = Kind::ChunkedLocalAttention;
            }
            "linear_attention" => {
                layer.state_space =
                    Some(if self.family == "qwen3_next" { StateSpaceType::Gdn } else { StateSpaceType::Linear });
                layer.kind = Kind::Mamba;
            }
            "conv" => {
                layer.state_space = Some(StateSpaceType::ShortConv);
                layer.kind = Kind::Mamba;
            }
            "mamba2" => {
                layer.state_space = Some(StateSpaceType::Mamba2);
                layer.kind = Kind::Mamba;
            }
            "gdn" => {
                layer.state_space = Some(StateSpaceType::Gdn);
                layer.kind = Kind::Mamba;
            }
            "mla_attention" => self.make_mla(layer)?,
            "sliding_window_mla" => {
                self.make_mla(layer)?;
                layer.sliding_window = Some(window_or_error()?);
                layer.kind = Kind::SlidingWindowMla;
            }
            other => {
                return Err(ModelConfigError::Invalid {
                    field: format!("layer_types[{}]", layer.index),
                    found: format!("'{other}'"),
                    expected: format!("a type of layer that is known for {}", self.family),
                });
            }
        }
        Ok(())
    }

    /// GPT-2, BLOOM and MPT: one kind of layer, two of them with ALiBi.
    fn classic(&self) -> Result<Vec<LayerDescription>> {
        let layers = self.num_layers(&["n_layer", "n_layers", "num_hidden_layers"])?;
        let (heads, kv_heads, size) = self.heads()?;
        let attention = self.config.get("attn_config");
        let alibi = match self.family {
            "bloom" => true,
            "mpt" => attention.and_then(|a| a.get("alibi")).and_then(Value::as_bool).unwrap_or(false),
            _ => false,
        };
        Ok((0..layers)
            .map(|index| LayerDescription { has_alibi: alibi, ..LayerDescription::new(index, heads, kv_heads, size) })
            .collect())
    }

    fn encoder_only(&self) -> Result<Vec<LayerDescription>> {
        let layers = self.num_layers(&["num_hidden_layers"])?;
        let (heads, kv_heads, size) = self.heads()?;
        let decoder = self.flag("is_decoder") == Some(true);
        Ok((0..layers)
            .map(|index| {
                let mut layer = LayerDescription::new(index, heads, kv_heads, size);
                if !decoder {
                    layer.attn_type = AttentionType::EncoderOnly;
                    layer.kind = Kind::EncoderOnlyAttention;
                }
                layer
            })
            .collect())
    }

    fn whisper(&self) -> Result<Vec<LayerDescription>> {
        let hidden = self.required(&["d_model"])?;
        let mut layers = Vec::new();
        let halves = [
            ("encoder", "encoder_layers", "encoder_attention_heads"),
            ("decoder", "decoder_layers", "decoder_attention_heads"),
        ];
        for (half, count, heads) in halves {
            let heads_in = self.required(&[heads])?;
            if !hidden.is_multiple_of(heads_in) {
                return Err(ModelConfigError::Invalid {
                    field: heads.to_owned(),
                    found: heads_in.to_string(),
                    expected: format!("a divisor of d_model = {hidden}"),
                });
            }
            for number in 0..self.num_layers(&[count])? {
                let mut layer = LayerDescription::new(layers.len(), heads_in, heads_in, hidden / heads_in);
                layer.name = format!("{half}.layers.{number}.self_attn");
                if half == "encoder" {
                    layer.attn_type = AttentionType::Encoder;
                }
                layers.push(layer.clone());
                if half == "decoder" {
                    layer.index = layers.len();
                    layer.name = format!("decoder.layers.{number}.encoder_attn");
                    layer.attn_type = AttentionType::EncoderDecoder;
                    layer.kind = Kind::CrossAttention;
                    layers.push(layer);
                }
            }
        }
        Ok(layers)
    }

    fn deepseek(&self) -> Result<Vec<LayerDescription>> {
        let layers = self.num_layers(&["num_hidden_layers"])?;
        let heads = self.required(&["num_attention_heads"])?;
        let sparse = self.optional("index_topk")?.is_some();
        (0..layers)
            .map(|index| {
                let mut layer = LayerDescription::new(index, heads, 1, 1);
                self.make_mla(&mut layer)?;
                layer.use_sparse = sparse;
                Ok(layer)
            })
            .collect()
    }

    fn jamba(&self) -> Result<Vec<LayerDescription>> {
        let layers = self.num_layers(&["num_hidden_layers"])?;
        let (heads, kv_heads, size) = self.heads()?;
        let period = self.required(&["attn_layer_period"])? as usize;
        let offset = self.first_of(&["attn_layer_offset"])?.unwrap_or(0) as usize;
        Ok((0..layers)
            .map(|index| {
                let mut layer = LayerDescription::new(index, heads, kv_heads, size);
                if index % period != offset {
                    layer.kind = Kind::Mamba;
                    layer.state_space = Some(StateSpaceType::Mamba1);
                }
                layer
            })
            .collect())
    }

    fn state_space(&self, sort: StateSpaceType) -> Result<Vec<LayerDescription>> {
        let layers = self.num_layers(&["num_hidden_layers", "n_layer"])?;
        let hidden = self.required(&["hidden_size", "d_model"])?;
        let heads = self.first_of(&["num_heads"])?.unwrap_or(1).max(1);
        let size = self.first_of(&["head_dim"])?.unwrap_or(hidden);
        Ok((0..layers)
            .map(|index| LayerDescription {
                kind: Kind::Mamba,
                state_space: Some(sort),
                ..LayerDescription::new(index, heads, heads, size)
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(text: &str) -> Vec<Kind> {
        describe(text).expect("a known family").layers.iter().map(|layer| layer.kind).collect()
    }

    #[test]
    fn pythons_infinities_are_read() {
        let text = r#"{"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64, "time_step_limit": [0.0, Infinity], "x": "NaN"}"#;
        assert_eq!(describe(text).expect("a model").layers.len(), 2);
    }

    #[test]
    fn unknown_families_are_refused_by_name() {
        let error = describe(r#"{"model_type": "frobnicate", "num_hidden_layers": 2}"#).unwrap_err();
        assert!(error.to_string().contains("'frobnicate'"), "{error}");
        assert!(describe("[1]").is_err());
        assert!(describe("{").is_err());
        assert!(describe("{}").is_err());
    }

    #[test]
    fn windows_come_from_types_patterns_or_everywhere() {
        let gemma = r#"{"model_type":"gemma3_text","num_hidden_layers":7,"num_attention_heads":4,"num_key_value_heads":1,
            "head_dim":256,"hidden_size":640,"sliding_window":512}"#;
        let found = kinds(gemma);
        assert_eq!(found[4..6], [Kind::SlidingWindow, Kind::FullAttention]);
        let mistral = r#"{"model_type":"mistral","num_hidden_layers":2,"num_attention_heads":8,"hidden_size":64,
            "sliding_window":16}"#;
        assert_eq!(kinds(mistral), [Kind::SlidingWindow; 2]);
        let qwen = r#"{"model_type":"qwen3","num_hidden_layers":2,"num_attention_heads":8,"hidden_size":64,
            "use_sliding_window":false,"sliding_window":16}"#;
        assert_eq!(kinds(qwen), [Kind::FullAttention; 2]);
    }

    #[test]
    fn latent_rows_are_rank_plus_rope() {
        let text = r#"{"model_type":"deepseek_v3","num_hidden_layers":1,"num_attention_heads":128,"kv_lora_rank":512,
            "qk_nope_head_dim":128,"qk_rope_head_dim":64,"v_head_dim":128}"#;
        let layer = describe(text).unwrap().layers.remove(0);
        assert_eq!((layer.head_size, layer.head_size_v, layer.kind), (576, 512, Kind::MlaAttention));
        let request = layer.request(&EngineConfigForTest::default());
        assert!(request.use_mla && request.head_size_v.is_none());
    }
    use super::super::EngineConfig as EngineConfigForTest;

    #[test]
    fn broken_numbers_are_named() {
        for (field, value) in [
            ("num_attention_heads", "0"),
            ("num_attention_heads", "-1"),
            ("head_dim", "0"),
            ("num_hidden_layers", "4000000000"),
        ] {
            let mut config = serde_json::json!({"model_type":"llama","num_hidden_layers":2,"num_attention_heads":8,"hidden_size":64});
            config[field] = serde_json::from_str(value).unwrap();
            let error = describe(&config.to_string()).unwrap_err();
            assert!(error.to_string().contains(field), "{error}");
        }
    }
}
