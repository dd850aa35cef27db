//! Layers that read another layer's cache and own none (Gemma 3n and 4).

use super::LIMIT_LAYERS;
use super::window::Slot;
use crate::config::{ConfigError, Fields};
use crate::model::Cache;

/// The last `num_kv_shared_layers` layers read the last layer of the same kind before them.
pub fn apply(fields: &Fields, slots: &[Slot], layers: &mut [Cache]) -> Result<(), ConfigError> {
    const FIELD: &str = "num_kv_shared_layers";
    let shared = fields.number(&[FIELD], LIMIT_LAYERS)?.unwrap_or(0) as usize;
    if shared >= slots.len() && shared > 0 {
        return Err(fields.wrong(FIELD, "fewer than there are layers"));
    }
    let owners = slots.len() - shared;
    for index in owners..slots.len() {
        let owner = (0..owners).rev().find(|owner| slots[*owner] == slots[index]);
        let with = owner.ok_or_else(|| fields.wrong(FIELD, "an owner for each kind of layer"))?;
        layers[index] = Cache::Shared { with };
    }
    Ok(())
}
