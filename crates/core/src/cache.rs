//! What a layer's KV cache is made of.

use crate::{abi::TensorRole, dtype::DataType};

/// One tensor of a layer's cache.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CacheTensorSpec {
    /// What it holds.
    pub role: TensorRole,
    /// Element type.
    pub dtype: DataType,
    /// Sizes; the one that counts blocks is −1.
    pub shape: Vec<i64>,
    /// Alignment of its first byte.
    pub alignment: u64,
    /// Bytes of one block in this tensor.
    pub bytes_per_block: u64,
}

/// A layer's cache.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvCacheSpec {
    /// Its tensors.
    pub tensors: Vec<CacheTensorSpec>,
}

impl KvCacheSpec {
    /// Bytes of one block in all tensors together.
    #[must_use]
    pub fn bytes_per_block(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes_per_block).sum()
    }
}

/// The name of a layout: blocks, then KV heads, then tokens, then elements
/// (`[num_blocks, num_kv_heads, block_size, head_size]`).
pub const LAYOUT_HEAD_MAJOR: &str = "head_major";
/// The name of a layout: blocks, then tokens, then KV heads, then elements
/// (`[num_blocks, block_size, num_kv_heads, head_size]`).
pub const LAYOUT_TOKEN_MAJOR: &str = "token_major";
/// The name of MLA's layout: `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`.
pub const LAYOUT_LATENT: &str = "latent";
