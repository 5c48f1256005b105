//! The crate's error type: what was asked, what was found, what to do.
//!
//! Must not know how any operation computes.

use thiserror::Error;

/// Why the reference refused its input. Nothing in this crate panics on bad input.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum ReferenceError {
    /// A slice does not hold the number of elements that its shape needs.
    #[error("{tensor}: shape {shape:?} needs {expected} elements, {found} given; pass the whole tensor, contiguous")]
    Length {
        /// Name of the tensor or list.
        tensor: &'static str,
        /// The shape that the dimensions ask for.
        shape: Vec<usize>,
        /// Elements (or bytes, where the name says so) of that shape.
        expected: usize,
        /// Elements given.
        found: usize,
    },
    /// A shape's element count overflows or cannot be allocated.
    #[error("{tensor}: shape {shape:?} does not fit in memory; use a smaller case")]
    TooLarge {
        /// Name of the tensor.
        tensor: &'static str,
        /// The shape asked for.
        shape: Vec<usize>,
    },
    /// A dimension that must be at least 1 is 0.
    #[error("{name} is 0; it must be at least 1")]
    Zero {
        /// Name of the dimension.
        name: &'static str,
    },
    /// Query heads are not a whole multiple of KV heads.
    #[error(
        "num_heads {num_heads} is not a multiple of num_kv_heads {num_kv_heads}; GQA needs an integer ratio, change one of the two"
    )]
    HeadRatio {
        /// Query heads.
        num_heads: usize,
        /// KV heads.
        num_kv_heads: usize,
    },
    /// A number outside its domain (scale, soft-cap, sink, slope, LSE, cache value).
    #[error("{name}[{index}] is {value}; {rule}")]
    Value {
        /// Name of the parameter; a scalar has index 0.
        name: &'static str,
        /// Which element.
        index: usize,
        /// What was found.
        value: f64,
        /// What is accepted.
        rule: &'static str,
    },
    /// An integer (offset, length, row index, span edge) outside its domain.
    #[error("{name}[{index}] is {found}; {rule}")]
    Index {
        /// Name of the list.
        name: &'static str,
        /// Which element.
        index: usize,
        /// What was found.
        found: i64,
        /// What is accepted.
        rule: String,
    },
    /// Two options that define the same thing are both set.
    #[error("{first} and {second} are both set; they define the same thing twice, set one")]
    Conflict {
        /// One option.
        first: &'static str,
        /// The other.
        second: &'static str,
    },
    /// A storage format that the operation does not take.
    #[error("{operation} does not take format {found}; use one of: {valid}")]
    Format {
        /// The operation.
        operation: &'static str,
        /// Name of the format found.
        found: &'static str,
        /// Names of the formats accepted.
        valid: &'static str,
    },
    /// Two partial states of different shape.
    #[error(
        "states to merge differ: [q_len, num_heads, head_size_v] {first:?} and {other:?}; merge states of the same queries"
    )]
    StateShape {
        /// Shape of the first state.
        first: [usize; 3],
        /// Shape of the differing one.
        other: [usize; 3],
    },
    /// A merge of no states: its shape is unknown.
    #[error("no states to merge; pass at least one")]
    NoStates,
}
