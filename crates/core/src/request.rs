//! What a layer needs, as the engine describes it.

use crate::{kind::Kind, kv_cache_dtype::KvCacheDtype};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// The compute dtype: of queries, new keys and values, and the output.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Dtype {
    /// IEEE binary32.
    #[serde(rename = "float32", alias = "f32")]
    F32,
    /// IEEE binary16.
    #[serde(rename = "float16", alias = "f16", alias = "half")]
    F16,
    /// bfloat16.
    #[serde(rename = "bfloat16", alias = "bf16")]
    BF16,
}

impl Dtype {
    /// All compute dtypes.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::BF16];

    /// The name used in configuration and output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::BF16 => "bfloat16",
        }
    }

    /// The dtype of that name; short names are accepted.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "float32" | "f32" => Some(Self::F32),
            "float16" | "f16" | "half" => Some(Self::F16),
            "bfloat16" | "bf16" => Some(Self::BF16),
            _ => None,
        }
    }

    /// The tensor element type.
    #[must_use]
    pub fn data_type(self) -> crate::DataType {
        match self {
            Self::F32 => crate::DataType::F32,
            Self::F16 => crate::DataType::F16,
            Self::BF16 => crate::DataType::BF16,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Which tokens attend to which. A name that Attaché does not know is kept: it gets verdicts
/// ("attention type … not supported"), not an error.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Default)]
pub enum AttentionType {
    /// Decoder self-attention.
    #[default]
    Decoder,
    /// The encoder half of an encoder-decoder model.
    Encoder,
    /// Self-attention of a model that is only an encoder.
    EncoderOnly,
    /// From a decoder to the encoder's output.
    EncoderDecoder,
    /// Any other name.
    Other(Box<str>),
}

impl AttentionType {
    /// The type of that name.
    #[must_use]
    pub fn parse(name: &str) -> Self {
        match name {
            "" | "decoder" => Self::Decoder,
            "encoder" => Self::Encoder,
            "encoder_only" => Self::EncoderOnly,
            "encoder_decoder" => Self::EncoderDecoder,
            other => Self::Other(other.into()),
        }
    }

    /// The name used in configuration and output.
    #[must_use]
    pub fn name(&self) -> &str {
        match self {
            Self::Decoder => "decoder",
            Self::Encoder => "encoder",
            Self::EncoderOnly => "encoder_only",
            Self::EncoderDecoder => "encoder_decoder",
            Self::Other(name) => name,
        }
    }
}

impl fmt::Display for AttentionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for AttentionType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for AttentionType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::parse(&String::deserialize(deserializer)?))
    }
}

/// The sort of a state-space or linear-attention layer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StateSpaceType {
    /// Mamba-1 selective scan.
    Mamba1,
    /// Mamba-2.
    Mamba2,
    /// Short convolution.
    ShortConv,
    /// Linear attention with decay.
    Linear,
    /// Gated delta rule.
    Gdn,
}

impl StateSpaceType {
    /// All sorts.
    pub const ALL: [Self; 5] = [Self::Mamba1, Self::Mamba2, Self::ShortConv, Self::Linear, Self::Gdn];

    /// The sort of that name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|sort| sort.name() == name)
    }

    /// The name used in configuration and output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mamba1 => "mamba1",
            Self::Mamba2 => "mamba2",
            Self::ShortConv => "short_conv",
            Self::Linear => "linear",
            Self::Gdn => "gdn",
        }
    }
}

/// What a layer needs. Every field takes part in selection; none is decoration.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LayerRequest {
    /// Elements of a query or key head. MLA: kv_lora_rank + qk_rope_head_dim.
    pub head_size: u32,
    /// Compute dtype.
    pub dtype: Dtype,
    /// Cache element format; absent = not stated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Tokens of a block: only when the user fixed it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<u32>,
    /// Multi-head latent attention.
    pub use_mla: bool,
    /// Attention sinks (one logit a head in the softmax's denominator).
    pub has_sink: bool,
    /// Sparse attention: each query names the rows that it sees.
    pub use_sparse: bool,
    /// Bidirectional attention inside multimodal spans of a prompt.
    pub use_mm_prefix: bool,
    /// One KV scale per head instead of one per tensor.
    pub use_per_head_quant_scales: bool,
    /// Who attends to whom.
    pub attn_type: AttentionType,
    /// Query heads, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_heads: Option<u32>,
    /// A sliding window.
    pub has_sliding_window: bool,
    /// Engine setting: decoder attention without the causal mask.
    pub use_non_causal: bool,
    /// Engine setting: results must not depend on the batch, bit for bit.
    pub use_batch_invariant: bool,
    /// Engine setting: a connector moves the cache between machines.
    pub use_kv_connector: bool,
    /// Engine setting: prefill context parallel size above 1.
    pub use_pcp: bool,
    /// Engine setting: decode context parallel size above 1.
    pub use_dcp: bool,
    /// Engine setting: speculative decoding verifies an adaptive number of tokens.
    pub use_adaptive_verification: bool,
    /// Engine setting: relaxed sliding-window attention.
    pub use_rswa: bool,
    /// Elements of a value head, where they differ from `head_size`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_size_v: Option<u32>,
    /// KV heads, where known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_kv_heads: Option<u32>,
    /// A soft-cap on logits.
    pub has_softcap: bool,
    /// ALiBi position bias.
    pub has_alibi: bool,
    /// Chunked-local attention.
    pub chunked_local: bool,
    /// The caller needs the log-sum-exp of each row.
    pub needs_lse: bool,
    /// The sort of a state-space or linear-attention layer. Such a layer asks for its type, a dtype and
    /// the engine's settings; what speaks of heads, blocks and masks does not count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_space: Option<StateSpaceType>,
}

impl Default for LayerRequest {
    fn default() -> Self {
        Self {
            head_size: 128,
            dtype: Dtype::BF16,
            kv_cache_dtype: None,
            block_size: None,
            use_mla: false,
            has_sink: false,
            use_sparse: false,
            use_mm_prefix: false,
            use_per_head_quant_scales: false,
            attn_type: AttentionType::Decoder,
            num_heads: None,
            has_sliding_window: false,
            use_non_causal: false,
            use_batch_invariant: false,
            use_kv_connector: false,
            use_pcp: false,
            use_dcp: false,
            use_adaptive_verification: false,
            use_rswa: false,
            head_size_v: None,
            num_kv_heads: None,
            has_softcap: false,
            has_alibi: false,
            chunked_local: false,
            needs_lse: false,
            state_space: None,
        }
    }
}

/// A request that cannot cross as attributes, or attributes that are no request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// A key that this version does not know: it may be a need, so it is not skipped.
    #[error("unknown requirement '{0}': this plugin's SDK is older than the engine")]
    UnknownKey(String),
    /// A value that does not parse.
    #[error("{key} = '{value}': {reason}")]
    BadValue {
        /// The field.
        key: String,
        /// What was found.
        value: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl LayerRequest {
    /// The kind that is derived from the request.
    #[must_use]
    pub fn kind(&self) -> Kind {
        Kind::of(self)
    }

    /// The request as text by name: how it crosses the ABI. Fields at their default are left out,
    /// except `head_size` and `dtype`.
    #[must_use]
    pub fn to_attributes(&self) -> Vec<(String, String)> {
        let default = Self::default();
        let (serde_json::Value::Object(mine), serde_json::Value::Object(theirs)) =
            (serde_json::to_value(self).unwrap_or_default(), serde_json::to_value(&default).unwrap_or_default())
        else {
            return Vec::new();
        };
        mine.into_iter()
            .filter(|(key, value)| key == "head_size" || key == "dtype" || theirs.get(key) != Some(value))
            .map(|(key, value)| {
                let text = match value {
                    serde_json::Value::String(text) => text,
                    other => other.to_string(),
                };
                (key, text)
            })
            .collect()
    }

    /// Reads what [`LayerRequest::to_attributes`] wrote.
    ///
    /// # Errors
    /// For an unknown key or a value that does not parse. A KV-cache format that is not known yet
    /// is registered: its verdict is the backend's.
    pub fn from_attributes<'a>(attributes: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, RequestError> {
        let template = match serde_json::to_value(Self {
            kv_cache_dtype: Some(KvCacheDtype::AUTO),
            block_size: Some(1),
            num_heads: Some(1),
            head_size_v: Some(1),
            num_kv_heads: Some(1),
            state_space: Some(StateSpaceType::Mamba1),
            ..Self::default()
        }) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        let mut found = serde_json::Map::new();
        for (key, value) in attributes {
            let shape = template.get(key).ok_or_else(|| RequestError::UnknownKey(key.to_owned()))?;
            if key == "kv_cache_dtype" {
                KvCacheDtype::register(value);
            }
            let bad = |reason: String| RequestError::BadValue { key: key.to_owned(), value: value.to_owned(), reason };
            let parsed = if shape.is_string() {
                serde_json::Value::String(value.to_owned())
            } else {
                serde_json::from_str(value).map_err(|error| bad(error.to_string()))?
            };
            found.insert(key.to_owned(), parsed);
        }
        serde_json::from_value(serde_json::Value::Object(found)).map_err(|error| RequestError::BadValue {
            key: "request".to_owned(),
            value: String::new(),
            reason: error.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_round_trip() {
        let request = LayerRequest {
            head_size: 96,
            kv_cache_dtype: Some(KvCacheDtype::AUTO),
            use_mla: true,
            num_heads: Some(12),
            attn_type: AttentionType::Other("bogus".into()),
            ..LayerRequest::default()
        };
        let attributes = request.to_attributes();
        let back = LayerRequest::from_attributes(attributes.iter().map(|(k, v)| (k.as_str(), v.as_str())));
        assert_eq!(back, Ok(request));
    }

    #[test]
    fn unknown_needs_are_not_skipped() {
        let error = LayerRequest::from_attributes([("head_size", "64"), ("use_quantum", "true")]).unwrap_err();
        assert_eq!(error, RequestError::UnknownKey("use_quantum".into()));
        assert!(LayerRequest::from_attributes([("head_size", "-3")]).is_err());
    }

    #[test]
    fn kinds_follow_the_stated_order() {
        let mut request = LayerRequest { use_mla: true, has_sliding_window: true, ..LayerRequest::default() };
        assert_eq!(request.kind(), Kind::SlidingWindowMla);
        request.attn_type = AttentionType::EncoderDecoder;
        assert_eq!(request.kind(), Kind::CrossAttention);
        request.attn_type = AttentionType::Encoder;
        assert_eq!(request.kind(), Kind::SlidingWindowMla);
        let sinks = LayerRequest { has_sink: true, ..LayerRequest::default() };
        assert_eq!(sinks.kind(), Kind::FullAttention);
    }
}
