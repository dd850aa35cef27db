//! Reef's own field of a request, `kv`: what may be done to its KV memory, and when it gives way.

use std::ops::Range;
use std::str::FromStr as _;

use reef_engine::Request;
use reef_kv::Fidelity;
use serde::Deserialize;

use crate::error::ApiError;

/// The field `kv`. Headers say the same for clients that cannot add fields; the field wins.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct KvFields {
    /// `exact`, `int8`, `int4` or `evict`; each permits those before it.
    pub fidelity: Option<String>,
    /// Higher goes first and gives way last; below 0: batch work.
    pub priority: Option<i32>,
    /// Ends the request wherever it is, so many milliseconds after its arrival.
    pub deadline_ms: Option<u64>,
    /// Spans of prompt tokens, `[[start, end], ...]`, that are never dropped.
    pub keep: Option<Vec<[usize; 2]>>,
    /// On whose account; only an administrator may say so.
    pub tenant: Option<String>,
    /// SSE comments tell when the request stands still.
    pub comments: Option<bool>,
}

/// Spans in `keep` at most.
const KEEP_MAX: usize = 1024;

impl KvFields {
    /// These fields, with those of `others` where these are silent.
    pub fn or(self, others: KvFields) -> KvFields {
        KvFields {
            fidelity: self.fidelity.or(others.fidelity),
            priority: self.priority.or(others.priority),
            deadline_ms: self.deadline_ms.or(others.deadline_ms),
            keep: self.keep.or(others.keep),
            tenant: self.tenant.or(others.tenant),
            comments: self.comments.or(others.comments),
        }
    }

    /// The contract; `default` where none is named.
    ///
    /// # Errors
    /// A name that is none.
    pub fn fidelity(&self, default: Fidelity) -> Result<Fidelity, ApiError> {
        let Some(name) = &self.fidelity else { return Ok(default) };
        Fidelity::from_str(name)
            .map_err(|error| ApiError::invalid("kv.fidelity", format!("kv.fidelity: {error}")))
    }

    /// Puts priority, deadline and kept spans into `request`; the engine's time is `now_us`.
    ///
    /// # Errors
    /// A span that is none, or too many.
    pub fn apply(&self, request: &mut Request, now_us: u64) -> Result<(), ApiError> {
        if let Some(priority) = self.priority {
            request.priority = priority;
        }
        if let Some(ms) = self.deadline_ms {
            request.deadline_us = Some(now_us.saturating_add(ms.saturating_mul(1000)));
        }
        let keep = self.keep.as_deref().unwrap_or_default();
        if keep.len() > KEEP_MAX {
            let spans = keep.len();
            let message = format!("kv.keep has {spans} spans: at most {KEEP_MAX} are taken");
            return Err(ApiError::invalid("kv.keep", message));
        }
        let spans = keep.iter().map(|&[start, end]| span(start, end, request.prompt.len()));
        request.keep = spans.collect::<Result<_, _>>()?;
        Ok(())
    }
}

fn span(start: usize, end: usize, prompt: usize) -> Result<Range<usize>, ApiError> {
    if start < end && end <= prompt {
        return Ok(start..end);
    }
    Err(ApiError::invalid(
        "kv.keep",
        format!(
            "kv.keep: [{start}, {end}] is no span of the prompt's {prompt} tokens: give [start, end] with \
             start < end <= {prompt}"
        ),
    ))
}
