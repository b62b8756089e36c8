//! A rate-limit endpoint in the form of GitHub's `GET /rate_limit`.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::header::{ALLOW, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use tower_service::Service;

use super::headers::{put_failure_headers, seconds};
use super::rejection::Reason;
use crate::decision::{Decision, Usage};
use crate::key::Key;
use crate::limits::{Limiter, Limits};
use crate::store::{Account, Charge, Reply, StoreError};

/// A service that reports what clients have used, in GitHub's JSON, without charging them.
///
/// In axum, it is a route:
/// `.route_service("/rate_limit", RateLimitEndpoint::new([&core, &search]))`. It extracts the keys
/// of each request as the layers do, and reads their counters. The first limit also appears as
/// `rate`. A limit of several quotas also has the list `quotas`, each with a `name` such as
/// `2/minute`.
///
/// A limit of several layers appears once. A limit does not appear if it is
/// [`Plan::UNLIMITED`](crate::Plan::UNLIMITED) for the client, or in [shadow
/// mode](crate::Limit::shadow). If all are in shadow mode, the response is that of GitHub
/// Enterprise without rate limits: 404 with the message "Rate limiting is not enabled."
///
/// Layers with different responses to refused requests have different types: list the [`Limits`]
/// that they are made from, or `Limits::from(&layer)`. The response has `reset` in seconds since
/// the Unix epoch:
///
/// ```json
/// {"resources":{"core":{"limit":5000,"used":1,"remaining":4999,"reset":1700003600},
///               "search":{"limit":30,"used":0,"remaining":30,"reset":1700000100}},
///  "rate":{"limit":5000,"used":1,"remaining":4999,"reset":1700003600}}
/// ```
///
/// A request without a key gets a 400 or 500, as from the layers. If a store fails, the response is
/// a 503 with `retry-after`. All limits are read concurrently.
///
/// The reads are not counted. In memory they are cheap, so the route needs no limit, as at GitHub
/// (`examples/github.rs`). In a remote store, they are a call for each limit: give the route a
/// limit of its own there, by address and in memory.
#[derive(Clone, Debug)]
pub struct RateLimitEndpoint {
    limits: Vec<Limiter>,
}

impl RateLimitEndpoint {
    /// Creates a service for these layers, [`Limits`] or limiters.
    ///
    /// # Panics
    /// If a limit has no name, or two limits have the same one.
    #[track_caller]
    pub fn new<L: Into<Limits>>(layers: impl IntoIterator<Item = L>) -> Self {
        let mut shown: Vec<Limiter> = Vec::new();
        // A closure would not show the caller's line.
        for limits in layers.into_iter().map(Into::into) {
            for limiter in &limits {
                assert!(
                    !limiter.name().is_empty(),
                    "a rate limit is shown by its name: write Quota::per_hour(5_000).name(\"core\")"
                );
                match shown.iter().find(|other| other.name() == limiter.name()) {
                    None => shown.push(limiter.clone()),
                    Some(other) => assert!(
                        Arc::ptr_eq(&other.live, &limiter.live),
                        "two rate limits are named `{}`, and a client could not tell them apart: \
                         give one of them another name",
                        limiter.name()
                    ),
                }
            }
        }
        Self { limits: shown }
    }
}

/// `None` if the request has no limit, or none that it may see (S23).
fn peek(limiter: &Limiter, parts: &Parts) -> Result<Option<Reply<Decision>>, Reason> {
    let (live, mut key) = (&limiter.live, Key::default());
    if live.is_shadow() {
        return Ok(None);
    }
    live.limit.key.extract(parts, &mut key).map_err(|missing| {
        missing.log_mistake();
        Reason::MissingKey(missing)
    })?;
    Ok(live.plan(parts, &key).quotas().map(|quotas| {
        let account = Account::new(&limiter.scope, quotas, &key);
        limiter.store.charge(Charge::new(account, 0).peeking())
    }))
}

impl<B> Service<Request<B>> for RateLimitEndpoint {
    type Response = Response<String>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<String>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let (parts, _) = request.into_parts();
        if !matches!(parts.method, Method::GET | Method::HEAD) {
            let mut response = failure(StatusCode::METHOD_NOT_ALLOWED, None, false);
            response.headers_mut().insert(ALLOW, const { HeaderValue::from_static("GET, HEAD") });
            return Box::pin(ready(Ok(response)));
        }
        self.limits.iter().for_each(Limiter::end_changes);
        if self.limits.iter().all(|limiter| limiter.live.is_shadow()) {
            let message = Some("Rate limiting is not enabled.");
            return Box::pin(ready(Ok(failure(StatusCode::NOT_FOUND, message, false))));
        }
        let peeked = self.limits.iter().map(|limiter| peek(limiter, &parts));
        let peeked: Result<Vec<_>, _> = peeked.collect();
        Box::pin(async move {
            let json = match peeked {
                Ok(replies) => standings(replies).await.map_err(|_| Reason::StoreFailed),
                Err(reason) => Err(reason),
            };
            Ok(match json.map_err(|reason| reason.answer()) {
                Ok(json) => response(StatusCode::OK, json, false),
                Err((status, _, may_retry)) => failure(status, None, may_retry),
            })
        })
    }
}

fn failure(status: StatusCode, message: Option<&str>, may_retry: bool) -> Response<String> {
    let message = message.or(status.canonical_reason()).unwrap_or_default();
    response(status, format!(r#"{{"message":"{message}"}}"#), may_retry)
}

fn response(status: StatusCode, json: String, may_retry: bool) -> Response<String> {
    const JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");

    let mut response = Response::new(json);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    put_failure_headers(response.headers_mut(), may_retry);
    response
}

/// Names need no escaping.
async fn standings(peeked: Vec<Option<Reply<Decision>>>) -> Result<String, StoreError> {
    let first_is_limited = peeked.first().is_some_and(Option::is_some);
    let decisions = Reply::all(peeked.into_iter().flatten().collect()).await?;
    let of = |decision: &Decision| format!(r#""{}":{}"#, decision.name(), standing(decision));
    let all: Vec<_> = decisions.iter().map(of).collect();
    let rate = match decisions.first() {
        Some(first) if first_is_limited => format!(r#","rate":{}"#, standing(first)),
        _ => String::new(),
    };
    Ok(format!(r#"{{"resources":{{{}}}{rate}}}"#, all.join(",")))
}

fn standing(decision: &Decision) -> String {
    let usage = decision.usage();
    let numbers_of = numbers(&usage[decision.governing_index()]);
    if usage.len() == 1 {
        return format!("{{{numbers_of}}}");
    }
    let quota = |(i, of)| format!(r#"{{"name":"{}",{}}}"#, decision.rate(i), numbers(of));
    let quotas: Vec<_> = usage.iter().enumerate().map(quota).collect();
    format!(r#"{{{numbers_of},"quotas":[{}]}}"#, quotas.join(","))
}

fn numbers(usage: &Usage) -> String {
    format!(
        r#""limit":{},"used":{},"remaining":{},"reset":{}"#,
        usage.limit(),
        usage.used(),
        usage.remaining(),
        seconds(usage.end),
    )
}
