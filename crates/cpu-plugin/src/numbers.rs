//! The float types that tensors come in.
//!
//! Must not know what the numbers mean.

use attache_sdk::Element;
use half::{bf16, f16};

/// A float type of a tensor.
pub trait Number: Element {
    /// Exact.
    fn to_f32(self) -> f32;
    /// Rounded to nearest, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl Number for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl Number for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

impl Number for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        Self::from_f32(value)
    }
}

/// Runs `$body` with `$type` standing for the Rust type of a [`DataType`](attache_sdk::DataType); other types than f32, f16
/// and bf16 are an error.
#[macro_export]
macro_rules! with_number {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            attache_sdk::DataType::F32 => {
                type $type = f32;
                $body
            }
            attache_sdk::DataType::F16 => {
                type $type = half::f16;
                $body
            }
            attache_sdk::DataType::BF16 => {
                type $type = half::bf16;
                $body
            }
            other => Err(attache_sdk::BackendError::unsupported(format!(
                "element type {other}; f32, f16 and bf16 are supported"
            ))),
        }
    };
}
