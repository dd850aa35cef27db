//! Will it fit, where do the gigabytes go, and which flag to change: the answer in one value.

use serde::Serialize;

use crate::engines::mend::{Mend, mends};
use crate::engines::setup::Setup;
use crate::engines::{Engine, Plan, PlanError};
use crate::model::Model;

/// The answer of `reef plan fit`.
#[derive(Clone, Debug, Serialize)]
pub struct Fit {
    /// What the model keeps and weighs.
    pub model: ModelSummary,
    /// The start that was planned.
    pub setup: Setup,
    /// What the engine would print.
    pub plan: Plan,
    /// Changes that help most.
    pub mends: Vec<Mend>,
}

/// The model in a few numbers.
#[derive(Clone, Debug, Serialize)]
pub struct ModelSummary {
    /// Name.
    pub name: String,
    /// Family.
    pub family: String,
    /// Layers.
    pub layers: usize,
    /// Kinds of cache with the layers that have them, in order of first appearance.
    pub caches: Vec<CacheSummary>,
    /// Parameters that are loaded.
    pub parameters: Option<u64>,
    /// Parameters that a decoded token multiplies with.
    pub active_parameters: Option<u64>,
    /// Trained context in tokens.
    pub trained_context: Option<u64>,
}

/// Layers that cache alike.
#[derive(Clone, Debug, Serialize)]
pub struct CacheSummary {
    /// How many.
    pub layers: usize,
    /// What each keeps.
    #[serde(flatten)]
    pub cache: crate::model::Cache,
}

impl ModelSummary {
    /// Counts the layers of each kind.
    pub fn new(model: &Model) -> ModelSummary {
        let mut caches: Vec<CacheSummary> = Vec::new();
        for cache in &model.layers {
            match caches.iter_mut().find(|known| known.cache == *cache) {
                Some(known) => known.layers += 1,
                None => caches.push(CacheSummary { layers: 1, cache: *cache }),
            }
        }
        let parameters = model.parameters.as_ref().ok();
        ModelSummary {
            name: model.name.clone(),
            family: model.family.clone(),
            layers: model.layers.len(),
            caches,
            parameters: parameters.map(|parameters| parameters.total()),
            active_parameters: parameters.map(|parameters| parameters.active()),
            trained_context: model.trained_context,
        }
    }
}

/// Plans one start and looks for changes that help.
///
/// # Errors
/// What the engine's plan fails with.
pub fn fit(engine: &dyn Engine, model: &Model, setup: Setup) -> Result<Fit, PlanError> {
    let plan = engine.plan(model, &setup)?;
    let mends = mends(engine, model, &setup, &plan);
    Ok(Fit { model: ModelSummary::new(model), setup, plan, mends })
}
