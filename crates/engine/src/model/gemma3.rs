//! The `gemma3` architecture in GGUF. The converter has already added 1 to the norms' weights.

use super::{
    LayerAttention,
    decoder::{Decoder, Layer},
    llama::{Parts, description},
};
use crate::{
    error::GgufError,
    gguf::{Geometry, GgufFile},
    ops::{Activation, Pairing, Rope},
};
use attache_core::plan::LayerDescription;

/// The architecture's name in a file.
pub const ARCHITECTURE: &str = "gemma3";

/// Rotation base of the layers that see everything, where a file states none.
const ROPE_BASE: f64 = 1_000_000.0;
/// Rotation base of the layers with a window, where a file states none.
const ROPE_BASE_LOCAL: f64 = 10_000.0;
/// Every sixth layer sees everything, where a file states no pattern.
const PATTERN: usize = 6;
/// The 27B model scales by its embedding's share of a head and not by the head; files do not say so.
const BLOCKS_OF_27B: usize = 62;

pub(super) fn layers(file: &GgufFile) -> Result<Vec<LayerDescription>, GgufError> {
    let geometry = file.geometry()?;
    let windows = windows(file, &geometry)?;
    Ok(windows.into_iter().enumerate().map(|(index, window)| description(&geometry, index, window)).collect())
}

/// Each layer's window.
fn windows(file: &GgufFile, geometry: &Geometry) -> Result<Vec<Option<u32>>, GgufError> {
    let metadata = file.metadata();
    let window = geometry
        .sliding_window
        .ok_or_else(|| GgufError::MissingKey { key: "gemma3.attention.sliding_window".to_owned() })?;
    let pattern_key = "gemma3.attention.sliding_window_pattern";
    let windowed: Vec<bool> = if metadata.has(pattern_key) {
        metadata.window_pattern(pattern_key, geometry.block_count)?
    } else {
        (0..geometry.block_count).map(|layer| layer % PATTERN < PATTERN - 1).collect()
    };
    Ok(windowed.into_iter().map(|windowed| windowed.then_some(window)).collect())
}

pub(super) fn load(file: &mut GgufFile) -> Result<Decoder, GgufError> {
    let geometry = file.geometry()?;
    let windows = windows(file, &geometry)?;
    let metadata = file.metadata();
    let local_key = "gemma3.rope.freq_base_swa";
    let local_base = if metadata.has(local_key) { metadata.positive_float(local_key)? } else { ROPE_BASE_LOCAL };
    let global_base = geometry.rope_base.unwrap_or(ROPE_BASE);
    let dims = geometry.rope_dimensions;
    // Only the layers that see everything have scaled positions.
    let ropes = vec![
        Rope::new(Pairing::Halves, dims, global_base, geometry.rope_scale),
        Rope::new(Pairing::Halves, dims, local_base, 1.0),
    ];
    let mut parts = Parts::new(file, &geometry)?;
    let mut layers = Vec::with_capacity(geometry.block_count);
    for (index, window) in windows.into_iter().enumerate() {
        let description = description(&geometry, index, window);
        let per_head = if geometry.block_count == BLOCKS_OF_27B {
            geometry.embedding_length as f64 / f64::from(geometry.head_count[index])
        } else {
            f64::from(geometry.key_length)
        };
        layers.push(Layer {
            attention: LayerAttention { description, scale: per_head.powf(-0.5), kv_b_proj: None },
            attn_norm: parts.norm(index, "attn_norm")?,
            projections: parts.projections(index, true)?,
            rope: usize::from(window.is_some()),
            output: parts.attention_output(index)?,
            post_attn_norm: Some(parts.norm(index, "post_attention_norm")?),
            ffn_norm: parts.norm(index, "ffn_norm")?,
            gate: parts.feed_forward(index, "ffn_gate")?,
            up: parts.feed_forward(index, "ffn_up")?,
            down: parts.feed_forward_down(index)?,
            post_ffn_norm: Some(parts.norm(index, "post_ffw_norm")?),
        });
    }
    let scale = (geometry.embedding_length as f32).sqrt();
    parts.finish(layers, ropes, Activation::GeluTanh, scale)
}
