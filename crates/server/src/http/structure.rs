//! What a text must be, as the engine wants it.

use reef_engine::constraint::Constraint;

use crate::app::Model;
use crate::error::ApiError;
use crate::grammar::{GrammarError, Structure, StructureFields};

/// What the fields ask for; `None`: any text.
///
/// # Errors
/// Fields that cannot be read or do not go together, and what does not compile.
pub async fn constraint(
    model: &Model,
    fields: &StructureFields,
) -> Result<Option<Box<dyn Constraint>>, ApiError> {
    match fields.structure()? {
        Some(structure) => compile(model, structure).await.map(Some),
        None => Ok(None),
    }
}

/// Compiles `structure`, which may take long, without holding others up.
///
/// # Errors
/// What is wrong with it.
pub async fn compile(model: &Model, structure: Structure) -> Result<Box<dyn Constraint>, ApiError> {
    let grammars = model.grammars.clone();
    let compiled = tokio::task::spawn_blocking(move || grammars.compile(&structure)).await;
    Ok(compiled.map_err(|_| ApiError::internal("the grammar's compiler failed"))??)
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> ApiError {
        ApiError::invalid(error.field, error.to_string())
    }
}
