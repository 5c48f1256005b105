//! `CPU_MLA`: multi-head latent attention on the CPU.
//!
//! The cache holds one row `[latent | rope]` a token, shared by all heads. The absorbed form reads
//! it as it is; the expanded form makes keys and values of it. Both give the same answer; `choice`
//! says which one is cheaper.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod absorbed;
mod backend;
mod choice;
mod expanded;
mod keys;
mod lanes;
mod layer;
mod merge;
mod options;
mod plan;
mod views;
mod weights;

pub use backend::CpuMla;

attache_sdk::export_backends! { name: "mla", vendor: "Attaché", backends: [CpuMla] }
