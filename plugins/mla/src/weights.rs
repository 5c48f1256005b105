//! `kv_b_proj`, cut by head and packed for the products that it takes part in.
//!
//! Owns its layout: `[num_heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank]`, per head
//! `[k_nope | v]`. Must not know attention.

use crate::choice::Dimensions;
use attache_cpu_kernels::{Isa, Packed, PackedPairs};
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
    /// `keys` and `values` for rows of bf16, where the machine has dot products of it and the
    /// projection is exact in it.
    pub pairs: Option<[PackedPairs; 2]>,
}

/// The matrices of all heads.
pub struct Weights {
    /// By head.
    pub heads: Vec<Head>,
}

impl Weights {
    /// Packs a projection in f32, f16 or bf16, for an instruction set.
    ///
    /// # Errors
    /// For another element type, a shape that does not fit the dimensions, or gaps between elements.
    pub fn pack(projection: &TensorView<'_>, dimensions: &Dimensions, isa: Isa) -> Result<Self> {
        let (nope, value) = (dimensions.qk_nope_head_dim, dimensions.v_head_dim);
        let rows = dimensions.num_heads * (nope + value);
        projection.expect_shape("kv_b_proj", &[rows as i64, dimensions.kv_lora_rank as i64])?;
        with_number!(projection.dtype(), T => {
            let all = projection.as_slice::<T>()?;
            Ok(Self { heads: (0..dimensions.num_heads).map(|head| pack_head(all, head, dimensions, isa)).collect() })
        })
    }
}

fn pack_head<T: Number>(all: &[T], head: usize, dimensions: &Dimensions, isa: Isa) -> Head {
    let (rank, nope, value) = (dimensions.kv_lora_rank, dimensions.qk_nope_head_dim, dimensions.v_head_dim);
    let first = head * (nope + value);
    let at = |row: usize, latent: usize| all[(first + row) * rank + latent].to_f32();
    let (keys, values) = (|latent, row| at(row, latent), |latent, row| at(nope + row, latent));
    let pairs = PackedPairs::new(isa, rank, nope, keys).zip(PackedPairs::new(isa, rank, value, values));
    Head {
        absorb: Packed::new(nope, rank, at),
        keys: Packed::new(rank, nope, keys),
        values: Packed::new(rank, value, values),
        pairs: pairs.map(|(keys, values)| [keys, values]),
    }
}
