//! A layer's options: [`Options`].

use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCESS_CONTROL_REQUEST_METHOD, ORIGIN};
use http::request::Parts;
use http::{Method, StatusCode, response};

use super::headers::Headers;
use super::upload::Drain;
use crate::decision::Decision;

type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;
type CountIf = Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>;
type OnDecision = Arc<dyn Fn(&Parts, &Decision) + Send + Sync>;

/// How a layer applies its limits to HTTP, apart from how it refuses.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) skip: Option<Skip>,
    pub(crate) skip_preflight: bool,
    pub(crate) count_if: Option<CountIf>,
    pub(crate) on_decision: Option<OnDecision>,
    pub(crate) refund_dropped: bool,
    pub(crate) expose_decision: bool,
    /// The most requests of a key that may wait, and the longest wait.
    pub(crate) queue: Option<(u64, Duration)>,
    /// Readers for the bodies of refused requests.
    pub(crate) drains: Vec<Drain>,
    pub(crate) status: StatusCode,
    pub(crate) headers: Headers,
}

/// Returns a reader for axum's bodies, with the feature `axum`.
fn default_drains() -> Vec<Drain> {
    #[cfg(feature = "axum")]
    return vec![Drain::of::<axum::body::Body>()];
    #[cfg(not(feature = "axum"))]
    Vec::new()
}

impl Default for Options {
    fn default() -> Self {
        Self {
            skip: None,
            skip_preflight: false,
            count_if: None,
            on_decision: None,
            refund_dropped: false,
            expose_decision: false,
            queue: None,
            drains: default_drains(),
            status: StatusCode::TOO_MANY_REQUESTS,
            headers: Headers::default(),
        }
    }
}

impl Options {
    /// Returns whether a request passes without being counted.
    #[inline]
    pub(crate) fn skips(&self, parts: &Parts) -> bool {
        let preflight = || {
            parts.method == Method::OPTIONS
                && parts.headers.contains_key(ORIGIN)
                && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        };
        self.skip_preflight && preflight() || self.skip.as_ref().is_some_and(|skip| skip(parts))
    }
}
