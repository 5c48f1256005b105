//! A model's dimensions as a GGUF file states them.

use super::Metadata;
use crate::error::GgufError;

/// Dimensions; one entry a layer where a file may state them by layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Geometry {
    /// The architecture, which prefixes the keys.
    pub architecture: &'static str,
    /// Layers.
    pub block_count: usize,
    /// Elements of the residual stream.
    pub embedding_length: usize,
    /// Elements between the feed-forward matrices.
    pub feed_forward_length: Vec<u32>,
    /// Query heads.
    pub head_count: Vec<u32>,
    /// KV heads.
    pub head_count_kv: Vec<u32>,
    /// Elements of a query or key head: stated, not derived, where the file states it.
    pub key_length: u32,
    /// Elements of a value head.
    pub value_length: u32,
    /// Epsilon of the norms.
    pub rms_epsilon: f32,
    /// Most tokens of a sequence.
    pub context_length: usize,
    /// Rotated elements of a head.
    pub rope_dimensions: usize,
    /// Base of the rotation, where stated.
    pub rope_base: Option<f64>,
    /// Divisor of positions ("linear" scaling); 1 = none.
    pub rope_scale: f64,
    /// Window in tokens, where stated.
    pub sliding_window: Option<u32>,
    /// Soft-cap of attention logits, where stated.
    pub attn_softcap: Option<f64>,
    /// Soft-cap of the output logits, where stated.
    pub final_softcap: Option<f64>,
}

impl Geometry {
    /// Reads and checks the dimensions. `tensors` bounds the layers that a file can hold.
    pub(super) fn read(architecture: &'static str, metadata: &Metadata, tensors: usize) -> Result<Self, GgufError> {
        let key = |name: &str| format!("{architecture}.{name}");
        let optional = |name: &str| Some(key(name)).filter(|key| metadata.has(key));
        let block_count = metadata.positive(&key("block_count"))? as usize;
        if block_count > tensors {
            let expected = format!("at most the file's {tensors} tensors");
            return Err(metadata.bad_value(&key("block_count"), &expected));
        }
        let embedding_length = metadata.positive(&key("embedding_length"))?;
        let head_count = metadata.positive_for_each(&key("attention.head_count"), block_count)?;
        let head_count_kv = match optional("attention.head_count_kv") {
            Some(key) => metadata.positive_for_each(&key, block_count)?,
            None => head_count.clone(),
        };
        if let Some(layer) = (0..block_count).find(|layer| !head_count[*layer].is_multiple_of(head_count_kv[*layer])) {
            let expected =
                format!("a divisor of {} = {} (layer {layer})", key("attention.head_count"), head_count[layer]);
            return Err(metadata.bad_value(&key("attention.head_count_kv"), &expected));
        }
        let lengths = [("attention.key_length", "key"), ("attention.value_length", "value")].map(|(name, _)| {
            match optional(name) {
                Some(key) => metadata.positive(&key),
                // Only without the key does the usual rule hold.
                None if embedding_length.is_multiple_of(head_count[0]) => Ok(embedding_length / head_count[0]),
                None => Err(GgufError::MissingKey { key: key(name) }),
            }
        });
        let [key_length, value_length] = lengths;
        let (key_length, value_length) = (key_length?, value_length?);
        if let Some(key) = optional("expert_count")
            && metadata.u32(&key)? > 0
        {
            return Err(metadata.bad_value(&key, "0: mixtures of experts are not supported"));
        }
        let rope_dimensions = match optional("rope.dimension_count") {
            Some(key) => {
                let dimensions = metadata.positive(&key)?;
                if dimensions > key_length || !dimensions.is_multiple_of(2) {
                    let expected = format!("an even number up to the key length {key_length}");
                    return Err(metadata.bad_value(&key, &expected));
                }
                dimensions
            }
            None => key_length,
        };
        if !key_length.is_multiple_of(2) {
            return Err(metadata.bad_value(&key("attention.key_length"), "an even number: it is rotated in pairs"));
        }
        let float = |name: &str| optional(name).map(|key| metadata.positive_float(&key)).transpose();
        Ok(Self {
            architecture,
            block_count,
            embedding_length: embedding_length as usize,
            feed_forward_length: metadata.positive_for_each(&key("feed_forward_length"), block_count)?,
            head_count,
            head_count_kv,
            key_length,
            value_length,
            rms_epsilon: metadata.positive_float(&key("attention.layer_norm_rms_epsilon"))? as f32,
            context_length: metadata.positive(&key("context_length"))? as usize,
            rope_dimensions: rope_dimensions as usize,
            rope_base: float("rope.freq_base")?,
            rope_scale: rope_scale(architecture, metadata)?,
            sliding_window: optional("attention.sliding_window")
                .map(|key| metadata.u32(&key))
                .transpose()?
                .filter(|w| *w > 0),
            attn_softcap: float("attn_logit_softcapping")?,
            final_softcap: float("final_logit_softcapping")?,
        })
    }

    /// Which metadata a layer's attention tensors follow from.
    pub(crate) fn because(&self, layer: usize) -> String {
        format!(
            "{a}.attention.head_count = {}, head_count_kv = {}, key_length = {}, value_length = {}, {a}.embedding_length = {}",
            self.head_count[layer],
            self.head_count_kv[layer],
            self.key_length,
            self.value_length,
            self.embedding_length,
            a = self.architecture,
        )
    }

    /// Which metadata a layer's feed-forward tensors follow from.
    pub(crate) fn because_ffn(&self, layer: usize) -> String {
        format!(
            "{a}.feed_forward_length = {}, {a}.embedding_length = {}",
            self.feed_forward_length[layer],
            self.embedding_length,
            a = self.architecture,
        )
    }
}

fn rope_scale(architecture: &str, metadata: &Metadata) -> Result<f64, GgufError> {
    let key = format!("{architecture}.rope.scaling.type");
    let linear = match metadata.has(&key) {
        false => false,
        true => match metadata.string(&key)? {
            "none" => return Ok(1.0),
            "linear" => true,
            _ => return Err(metadata.bad_value(&key, "'none' or 'linear': the engine has no other scaling")),
        },
    };
    for name in ["rope.scaling.factor", "rope.scale_linear"] {
        let key = format!("{architecture}.{name}");
        if metadata.has(&key) && (linear || name == "rope.scale_linear") {
            return metadata.positive_float(&key);
        }
    }
    Ok(1.0)
}
