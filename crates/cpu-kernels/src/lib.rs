//! Attention on CPUs.
//!
//! | module | owns |
//! |---|---|
//! | [`isa`] | which instruction sets there are, and which one is taken |
//! | `simd` | vectors of f32 on each of them; the exponential |
//! | [`rows`] | where rows of q, k, v and out lie in memory |
//! | [`mask`] | which keys a query sees |
//! | [`partition`] | a ragged batch cut into units of about equal cost |
//! | `pack`, `micro` | tiles of K and V as the products want them, and the products |
//! | `amx` | the products on matrix tiles |
//! | `softmax` | one row's online softmax over a tile |
//! | `tile` | one unit: tiles of K and V against a block of query rows |
//! | [`attention`] | a whole call: units on the engine's threads, merge, output |
//! | [`product`] | rows times a prepacked matrix |
//!
//! **A row's result does not depend on what else is computed.** Tiles and chunks of K and V lie at
//! absolute positions; each element of a product is one chain of multiply-adds in ascending order,
//! whatever rows stand beside it; tiles that a row does not see change nothing, bit for bit; and
//! chunks are merged in one order, by one thread or by many. So results are equal alone and in a
//! batch, in one piece and in several, with few threads and with many.
//!
//! Must not know: the ABI, requests, selection.
#![deny(unsafe_op_in_unsafe_fn)]
#![warn(missing_docs)]

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
pub mod isa;
pub mod mask;
mod micro;
mod pack;
pub mod partition;
pub mod product;
pub mod rows;
mod scratch;
mod simd;
mod softmax;
mod tile;

pub use attention::{Attention, CallError, Output, Parts, Sequence, workspace_len};
pub use isa::{Isa, IsaError};
pub use mask::Mask;
pub use partition::{HeadShape, Partition, RequestShape, Unit};
pub use product::{Packed, PackedPairs};
pub use rows::{Elements, Rows, RowsError, RowsMut};
