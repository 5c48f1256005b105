//! `CPU_ATTN`: attention over a paged cache on the CPU.
//!
//! | module | owns |
//! |---|---|
//! | `backend` | what is claimed, and the refusal of everything else |
//! | `plan` | a batch, owned, and its cut into units |
//! | `layer` | the checks of each call, and the call |
//!
//! The kernels are those of `attache-cpu-kernels`.
#![forbid(unsafe_code)]

mod backend;
mod layer;
mod plan;

pub use backend::CpuAttention;

attache_sdk::export_backends! { name: "cpu", vendor: "Attaché", backends: [CpuAttention] }
