//! The kind of a layer: the KV-cache group that it belongs to.

use crate::request::{AttentionType, LayerRequest};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The KV-cache group a layer belongs to. Per-kind overrides use these names.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Every earlier token is visible.
    FullAttention,
    /// The last `sliding_window` tokens are visible.
    SlidingWindow,
    /// Multi-head latent attention.
    MlaAttention,
    /// Multi-head latent attention with a window.
    SlidingWindowMla,
    /// Only tokens of the same chunk are visible.
    ChunkedLocalAttention,
    /// A window plus the first tokens, which are always visible.
    SinkFullAttention,
    /// Bidirectional attention without a cache.
    EncoderOnlyAttention,
    /// Attention from a decoder to an encoder's output.
    CrossAttention,
    /// A state-space or linear-attention layer.
    Mamba,
}

impl Kind {
    /// All kinds, in the order in which they are listed to people.
    pub const ALL: [Self; 9] = [
        Self::FullAttention,
        Self::SlidingWindow,
        Self::MlaAttention,
        Self::SlidingWindowMla,
        Self::ChunkedLocalAttention,
        Self::SinkFullAttention,
        Self::EncoderOnlyAttention,
        Self::CrossAttention,
        Self::Mamba,
    ];

    /// The kind of a request. `chunked_local_attention` and `sink_full_attention` are never derived:
    /// layers that are of these kinds say so themselves.
    #[must_use]
    pub fn of(request: &LayerRequest) -> Self {
        if request.state_space.is_some() {
            return Self::Mamba;
        }
        match (&request.attn_type, request.use_mla, request.has_sliding_window) {
            (AttentionType::EncoderOnly, _, _) => Self::EncoderOnlyAttention,
            (AttentionType::EncoderDecoder, _, _) => Self::CrossAttention,
            (_, true, true) => Self::SlidingWindowMla,
            (_, true, false) => Self::MlaAttention,
            (_, false, true) => Self::SlidingWindow,
            (_, false, false) => Self::FullAttention,
        }
    }

    /// The name used in configuration and output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::FullAttention => "full_attention",
            Self::SlidingWindow => "sliding_window",
            Self::MlaAttention => "mla_attention",
            Self::SlidingWindowMla => "sliding_window_mla",
            Self::ChunkedLocalAttention => "chunked_local_attention",
            Self::SinkFullAttention => "sink_full_attention",
            Self::EncoderOnlyAttention => "encoder_only_attention",
            Self::CrossAttention => "cross_attention",
            Self::Mamba => "mamba",
        }
    }

    /// The kind with exactly this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
