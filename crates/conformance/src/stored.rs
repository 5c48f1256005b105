//! What a cache holds of a key or value: the numbers that are left after storing.
//!
//! Owns which KV-cache format means which storage of the reference. Must not know attention.

use crate::case::Case;
use attache_core::{Dtype, KvCacheDtype};
use attache_reference::{
    Format, ReferenceError,
    quantised_cache::{CacheShape, PerTokenHead, Scales, decode, decode_per_token_head, encode, encode_per_token_head},
};

/// How a cache stores its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Storage {
    /// Plain floats, no scale.
    Plain(Format),
    /// Eight bits, with the caller's scales (1 where there are none).
    Scaled(Format),
    /// With a scale per token and head that the backend makes.
    PerTokenHead(PerTokenHead),
}

impl Storage {
    /// How a cache of this format stores its elements; `None` for a format that the reference does
    /// not know.
    #[must_use]
    pub fn of(kv_cache_dtype: Option<KvCacheDtype>, compute: Dtype) -> Option<Self> {
        Some(match kv_cache_dtype.map_or("auto", KvCacheDtype::name) {
            "auto" => Self::Plain(format_of(compute)),
            "float32" => Self::Plain(Format::F32),
            "float16" => Self::Plain(Format::F16),
            "bfloat16" => Self::Plain(Format::Bf16),
            "fp8" | "fp8_e4m3" => Self::Scaled(Format::Fp8E4m3),
            "fp8_e5m2" => Self::Scaled(Format::Fp8E5m2),
            "int8_per_token_head" => Self::PerTokenHead(PerTokenHead::Int8),
            "int4_per_token_head" => Self::PerTokenHead(PerTokenHead::Int4),
            "fp8_per_token_head" => Self::PerTokenHead(PerTokenHead::Fp8E4m3),
            _ => return None,
        })
    }

    /// The format of one element.
    #[must_use]
    pub fn format(self) -> Format {
        match self {
            Self::Plain(format) | Self::Scaled(format) => format,
            Self::PerTokenHead(kind) => kind.format(),
        }
    }

    /// Whether the caller's scales have a meaning.
    #[must_use]
    pub fn takes_scales(self) -> bool {
        matches!(self, Self::Scaled(_))
    }

    /// Values as they read back: `numbers` is `[tokens, num_kv_heads, head_size]`.
    ///
    /// # Errors
    /// Lengths that do not fit; numbers or scales that the format cannot hold.
    pub fn read_back(self, numbers: &[f64], shape: &CacheShape, scales: &[f32]) -> Result<Vec<f64>, ReferenceError> {
        match self {
            Self::Plain(format) => Ok(numbers.iter().map(|number| format.round(*number)).collect()),
            Self::Scaled(format) => {
                let scales = match scales {
                    [] => Scales::PerTensor(1.0),
                    [one] => Scales::PerTensor(*one),
                    many => Scales::PerHead(many),
                };
                decode(format, &encode(format, numbers, shape, scales)?, shape, scales)
            }
            Self::PerTokenHead(kind) => {
                decode_per_token_head(kind, &encode_per_token_head(kind, numbers, shape)?, shape)
            }
        }
    }
}

/// The reference's name of a compute dtype.
#[must_use]
pub fn format_of(dtype: Dtype) -> Format {
    match dtype {
        Dtype::F32 => Format::F32,
        Dtype::F16 => Format::F16,
        Dtype::BF16 => Format::Bf16,
    }
}

/// The shape of a case's keys (`head_size`) or values (`head_size_v`).
#[must_use]
pub fn cache_shape(case: &Case, head_size: usize) -> CacheShape {
    CacheShape { tokens: case.num_kv_tokens(), num_kv_heads: case.num_kv_heads, head_size }
}
