//! What a text must be, as the engine wants it.

use reef_engine::constraint::Constraint;

use crate::app::Model;
use crate::error::ApiError;
use crate::grammar::{GrammarError, StructureFields};

/// What the fields ask for; `None`: any text.
///
/// # Errors
/// Fields that cannot be read or do not go together, and what does not compile.
pub async fn constraint(
    model: &Model,
    fields: &StructureFields,
) -> Result<Option<Box<dyn Constraint>>, ApiError> {
    match fields.structure()? {
        Some(structure) => Ok(Some(model.grammars.constraint(structure).await?)),
        None => Ok(None),
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> ApiError {
        ApiError::invalid(error.field, error.to_string())
    }
}
