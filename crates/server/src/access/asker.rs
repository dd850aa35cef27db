//! Who asks, with what the headers say about KV memory: what a request to the engine starts from.

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use reef_engine::Request;

use super::{Caller, kv_headers};
use crate::app::{App, Model};
use crate::error::ApiError;
use crate::types::kv::KvFields;

/// Who asks, and Reef's headers.
#[derive(Clone, Debug)]
pub struct Asker {
    /// Who.
    pub caller: Caller,
    headers: KvFields,
}

impl<S: Send + Sync> FromRequestParts<S> for Asker {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Asker, ApiError> {
        let caller = Caller::from_request_parts(parts, state).await?;
        Ok(Asker { caller, headers: kv_headers(&parts.headers)? })
    }
}

impl Asker {
    /// A request to continue `ids` on the account, with the contract, the priority, the deadline and the kept
    /// spans that the body's `kv`, else the headers, ask for; `vllm_priority` is the body's
    /// `priority`, of which lower goes first.
    ///
    /// # Errors
    /// What is wrong with them, or not permitted.
    pub fn request(
        &self,
        app: &App,
        model: &Model,
        ids: Vec<u32>,
        kv: Option<KvFields>,
        vllm_priority: Option<i32>,
    ) -> Result<Request, ApiError> {
        let kv = kv.unwrap_or_default().or(self.headers.clone());
        let default = app.settings.fidelity;
        let asked = kv.fidelity.is_some().then(|| kv.fidelity(default)).transpose()?;
        if let Some(asked) = asked.filter(|asked| *asked > default) {
            let (asked, most) = (asked.name(), default.name());
            let message = format!(
                "kv.fidelity is {asked}, which permits more than this server does: ask for {most} or a \
                 stricter one (reef serve --fidelity {asked} would permit it)"
            );
            return Err(ApiError::invalid("kv.fidelity", message));
        }
        let priority = kv.priority.or(vllm_priority.map(i32::saturating_neg));
        let tenant = app.access.tenant(&self.caller, kv.tenant.as_deref())?;
        let (fidelity, priority) = app.access.permit(tenant, asked, default, priority)?;
        let mut request = Request::new(ids, fidelity);
        kv.apply(&mut request, model.door.now_us())?;
        (request.tenant, request.priority) = (tenant, priority);
        Ok(request)
    }
}
