//! `kv_b_proj`, cut by head and packed for the products that it takes part in.
//!
//! Owns its layout: `[num_heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank]`, per head
//! `[k_nope | v]`. Must not know attention.

use crate::choice::Dimensions;
use attache_cpu_kernels::Packed;
use attache_cpu_plugin::{Number, with_number};
use attache_sdk::prelude::*;

/// The matrices of one head.
pub struct Head {
    /// `[qk_nope_head_dim, kv_lora_rank]`: takes a query into the latent space.
    pub absorb: Packed,
    /// `[kv_lora_rank, qk_nope_head_dim]`: makes keys of latent rows.
    pub keys: Packed,
    /// `[kv_lora_rank, v_head_dim]`: makes values of latent rows, and outputs of absorbed outputs.
    pub values: Packed,
}

/// The matrices of all heads.
pub struct Weights {
    /// By head.
    pub heads: Vec<Head>,
}

impl Weights {
    /// Packs a projection in f32, f16 or bf16.
    ///
    /// # Errors
    /// For another element type, a shape that does not fit the dimensions, or gaps between elements.
    pub fn pack(projection: &TensorView<'_>, dimensions: &Dimensions) -> Result<Self> {
        let (nope, value) = (dimensions.qk_nope_head_dim, dimensions.v_head_dim);
        let rows = dimensions.num_heads * (nope + value);
        projection.expect_shape("kv_b_proj", &[rows as i64, dimensions.kv_lora_rank as i64])?;
        with_number!(projection.dtype(), T => {
            let all = projection.as_slice::<T>()?;
            Ok(Self { heads: (0..dimensions.num_heads).map(|head| pack_head(all, head, dimensions)).collect() })
        })
    }
}

fn pack_head<T: Number>(all: &[T], head: usize, dimensions: &Dimensions) -> Head {
    let (rank, nope, value) = (dimensions.kv_lora_rank, dimensions.qk_nope_head_dim, dimensions.v_head_dim);
    let first = head * (nope + value);
    let at = |row: usize, latent: usize| all[(first + row) * rank + latent].to_f32();
    Head {
        absorb: Packed::new(nope, rank, at),
        keys: Packed::new(rank, nope, |latent, row| at(row, latent)),
        values: Packed::new(rank, value, |latent, row| at(nope + row, latent)),
    }
}
