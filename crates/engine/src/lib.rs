//! A small, real inference engine on Attaché: a client of the backend ABI.
//!
//! prompt → [`tokenizer`] → [`scheduler`] (continuous batching over the blocks of [`block_manager`])
//! → [`model`] (products, norms, rotations) → attention through the ABI → [`sampling`] → text.
//!
//! The engine knows the core's public interface alone: which backend runs a layer comes from a
//! [`LayerProvider`] (a [`Registry`](attache_core::registry::Registry) is one), and kernels are
//! reached only through `attache_core::runtime`.
#![deny(missing_docs)]

pub mod block_manager;
mod engine;
pub mod error;
pub mod gguf;
mod layers;
pub mod linear;
pub mod model;
mod ops;
pub mod pool;
pub mod sampling;
pub mod scheduler;
pub mod tokenizer;

pub use engine::{Engine, EngineOptions, Event, FinishReason, GenerateOutput, Generation, Prompt, Stats};
pub use error::{BackendFailure, EngineError, RefusedRequest, Result};
pub use gguf::Weights;
pub use layers::{LayerChoice, LayerPlan, LayerProvider, ModelChoice};
pub use model::LoadedModel;
pub use sampling::Sampling;
