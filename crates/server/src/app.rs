//! What all handlers share.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use reef_model::chat_template::ChatTemplate;
use reef_model::tokenizer::Tokenizer;

use crate::access::Access;
use crate::door::Door;
use crate::error::ApiError;
use crate::grammar::Grammars;
use crate::http::pool::Looks;
use crate::lifecycle::{Lifecycle, Limits, State};
use crate::metrics::{Metrics, ModelMetrics};
use crate::settings::Settings;

/// A loaded model and the engine that runs it.
pub struct Model {
    /// Where it came from: the path or alias it was started with.
    pub root: String,
    /// When it was loaded, in seconds since 1970.
    pub created: u64,
    /// Its trained context in tokens.
    pub context: usize,
    /// Bytes of the KV pool.
    pub budget_bytes: usize,
    /// Tokens of a KV block.
    pub block_size: usize,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Schemas and other grammars over its vocabulary.
    pub grammars: Arc<Grammars>,
    /// How conversations become prompts; `None`: the file has none.
    pub template: Option<Arc<ChatTemplate>>,
    /// The engine.
    pub door: Arc<dyn Door>,
    /// What it has done, and its requests.
    pub metrics: ModelMetrics,
}

/// What all handlers share.
pub struct App {
    /// What the server was started with.
    pub settings: Settings,
    /// Who may do what.
    pub access: Arc<Access>,
    /// Limits, readiness, and what came and went.
    pub lifecycle: Arc<Lifecycle>,
    /// The last look at the pool.
    pub looks: Looks,
    /// What the server has answered.
    pub metrics: Metrics,
    model: OnceLock<Model>,
}

impl App {
    /// A server whose model is still to come, open to all on this machine.
    pub fn new(settings: Settings) -> App {
        App::guarded(settings, Access::default(), Limits::default())
    }

    /// The same with keys, tenants and limits.
    pub fn guarded(settings: Settings, access: Access, limits: Limits) -> App {
        let limits = Limits { body_bytes: settings.body_bytes_max, ..limits };
        let (access, lifecycle) = (Arc::new(access), Arc::new(Lifecycle::new(limits)));
        let (metrics, looks) = (Metrics::new(lifecycle.clone()), Looks::default());
        App { settings, access, lifecycle, looks, metrics, model: OnceLock::new() }
    }

    /// The model is there: requests are taken from now on. A second one is ignored.
    pub fn set_model(&self, model: Model) {
        let door = self.lifecycle.watch(model.door);
        let model = Model { door, ..model };
        // Only the start sets it.
        let _ = self.model.set(model);
        self.lifecycle.readiness.set(State::Ready);
    }

    /// The model.
    ///
    /// # Errors
    /// 503 while it is loaded.
    pub fn model(&self) -> Result<&Model, ApiError> {
        self.model.get().ok_or_else(|| ApiError::unavailable("the model is still being loaded"))
    }

    /// The model, for a request that names `name`; no name means the one there is.
    ///
    /// # Errors
    /// 503 while it is loaded; 404 where no model has this name.
    pub fn model_named(&self, name: Option<&str>) -> Result<&Model, ApiError> {
        let model = self.model()?;
        let names = &self.settings.model_names;
        match name.filter(|name| !names.iter().any(|known| known == name)) {
            None => Ok(model),
            Some(name) => Err(ApiError {
                param: Some("model".into()),
                ..ApiError::not_found(
                    format!(
                        "the model `{name}` does not exist: this server has {}",
                        names.join(", ")
                    ),
                    Some("model_not_found"),
                )
            }),
        }
    }

    /// The id that responses show.
    pub fn model_name(&self) -> &str {
        &self.settings.model_names[0]
    }
}

/// Seconds since 1970; what clients get as `created`.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
