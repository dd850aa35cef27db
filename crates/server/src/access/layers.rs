//! The checks before the handlers.

use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::Response;

use super::{Access, Caller};
use crate::error::ApiError;

/// Routes by who may use them.
#[derive(Debug)]
pub struct Routes {
    /// Anyone; the fallback too.
    pub open: Router,
    /// Whoever may generate; handlers take a [`Caller`].
    pub keyed: Router,
    /// The admin.
    pub admin: Router,
}

/// One router of all, with the checks before each. What is not listed as open needs a key.
pub fn protect(access: &Arc<Access>, routes: Routes) -> Router {
    let keyed = routes.keyed.layer(from_fn_with_state(access.clone(), callers));
    let admin = routes.admin.layer(from_fn_with_state(access.clone(), admins));
    // What is open tells nothing: probes may call the server by any name.
    let guarded = keyed.merge(admin).layer(from_fn_with_state(access.clone(), browsers));
    let all = routes.open.merge(guarded).layer(from_fn(as_declared));
    match access.origins.cors() {
        // Outermost: a preflight comes without a key.
        Some(cors) => all.layer(cors),
        None => all,
    }
}

async fn browsers(
    State(access): State<Arc<Access>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    access.check_browser(request.headers())?;
    Ok(next.run(request).await)
}

/// What a browser shows is what we say it is: an error that repeats markup stays JSON.
async fn as_declared(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let nosniff = HeaderValue::from_static("nosniff");
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, nosniff);
    response
}

async fn callers(
    State(access): State<Arc<Access>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let caller = access.caller(request.headers())?;
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

async fn admins(
    State(access): State<Arc<Access>>,
    mut request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let caller = access.admin(request.headers())?;
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Caller, ApiError> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| ApiError::internal("this route is not behind the check of keys"))
    }
}
