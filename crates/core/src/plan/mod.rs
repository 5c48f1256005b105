//! Whole-model planning: from a model's configuration to what each layer asks for.
//!
//! Must not know: how a backend is loaded or run.

mod description;
mod families;
pub mod joint;
pub mod layouts;
mod model;

pub use crate::request::StateSpaceType;
pub use description::{EngineConfig, LayerDescription, MlaDimensions, ModelDescription};
pub use families::{ModelConfigError, describe};
pub use model::{ModelPlan, PlanError, PlannedLayer, plan};
