//! `attache-reference`: attention and state merge in f64, in plain loops.
//!
//! Slow, obvious, the source of truth: kernels, conformance and docs take each
//! convention (window, causal corner, LSE base, order of operations, storage
//! formats, tolerance) from here. It computes from the *stored* values, so a
//! caller decodes a quantised cache first ([`quantised_cache`], [`formats`]).
//!
//! This crate must not know the core, the ABI, any kernel or any engine: dense
//! `f64` slices go in, dense `f64` vectors come out.
//!
//! # Conventions, each defined once
//!
//! | convention | where |
//! |---|---|
//! | which key a query sees | [`mask::MaskSpec::visible`] |
//! | scale → soft-cap → ALiBi → mask → softmax, sinks, LSE | [`attention::attention`] |
//! | an empty state is LSE = −∞ | [`mod@merge`] |
//! | latent rows are `[latent | rope]` | [`mla`] |
//! | value = decode(stored) · scale | [`quantised_cache`] |
//! | how close is close enough | [`tolerance`](mod@tolerance) |
#![forbid(unsafe_code)]
#![warn(missing_docs)]

pub mod alibi;
pub mod attention;
pub mod error;
pub mod formats;
pub mod mask;
pub mod merge;
pub mod mla;
pub mod quantised_cache;
mod shape;
pub mod tolerance;
pub mod varlen;

pub use attention::{
    AttentionFeatures, AttentionInputs, AttentionOutput, SinkShare, attention, attention_partial, visible_value_scale,
};
pub use error::ReferenceError;
pub use formats::Format;
pub use mask::{MaskSpec, Span, query_position};
pub use merge::{merge, merge_into, merge_many};
pub use tolerance::{CompareReport, Mismatch, Tolerance, compare, compare_lse, compare_out, tolerance};
pub use varlen::{VarlenInputs, attention_varlen};
