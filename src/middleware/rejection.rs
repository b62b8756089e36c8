//! The response to a refused request: a [`Reject`] creates it from a [`Rejection`].

use std::fmt::Write;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};

use super::headers::{
    FAILED_RETRY_AFTER, LimitAt, PreparedHeaders, is_refused_inside, policy_name, retry_after_secs,
    stamp_failed,
};
use super::reason::Reason;
use crate::decision::Decision;
use crate::quota::Quota;

mod outside;
mod problem;
mod reject;

#[cfg(feature = "openapi")]
pub(crate) use problem::QUOTA_EXCEEDED;
pub use reject::{EmptyBody, GitHubBody, Grpc, ProblemJson, Reject};

/// A refused request, for closures that create the response.
///
/// ```
/// use axum::{response::IntoResponse, routing::any};
/// use http::Request;
/// use tower_fixed_window::testing::ask_around;
/// use tower_fixed_window::{FixedWindowLayer, Key, Quota, Reason};
///
/// let limit = Quota::per_hour(0).name("api").key(Key::global());
/// let layer = FixedWindowLayer::new(limit).on_reject(|_parts, why| {
///     assert!(matches!(why.reason(), Reason::RateLimited(decision) if decision.limit() == 0));
///     assert_eq!((why.name(), why.status().as_u16()), ("api", 429));
///     why.message().into_response()
/// });
/// let response = ask_around(&layer, any(async || "hello"), Request::get("/"));
/// assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rejection<'a> {
    pub(crate) reason: &'a Reason,
    /// The status of refusals by a limit.
    pub(crate) limited: StatusCode,
    pub(crate) name: &'a str,
    /// The limits that were decided, as far as these are known: the first, and the others.
    pub(crate) first: Option<LimitAt<'a>>,
    pub(crate) others: &'a [LimitAt<'a>],
    /// `true` if the layer's refusals differ by their headers only.
    pub(crate) has_one_body: bool,
    pub(crate) headers: &'a PreparedHeaders,
}

impl<'a> Rejection<'a> {
    /// Returns why the request was refused.
    pub fn reason(&self) -> &'a Reason {
        self.reason
    }

    /// Returns the status of the response.
    pub fn status(&self) -> StatusCode {
        match self.reason {
            Reason::RateLimited(_) => self.limited,
            reason => reason.consequences().status,
        }
    }

    /// Returns the time that the header `retry-after` has, after which the same request may pass:
    /// whole seconds, rounded up, at least 1. `None` if waiting does not help.
    ///
    /// ```
    /// use axum::{response::IntoResponse, routing::any};
    /// use http::Request;
    /// use tower_fixed_window::testing::ask_around;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let never = Quota::per_minute(0).key(Key::global());
    /// let layer = FixedWindowLayer::new(never).on_reject(|_, why| {
    ///     let seconds = why.retry_after().map(|after| after.as_secs());
    ///     let again = seconds.map_or(String::new(), |seconds| format!(", again in {seconds} s"));
    ///     (why.status(), why.message() + &again).into_response()
    /// });
    /// // A limit of 0 never grants anything.
    /// let response = ask_around(&layer, any(async || "hello"), Request::get("/"));
    /// assert_eq!(response.headers().get("retry-after"), None);
    /// ```
    pub fn retry_after(&self) -> Option<Duration> {
        let seconds = match self.reason {
            Reason::RateLimited(decision) => retry_after_secs(decision),
            reason => reason.consequences().may_retry.then_some(FAILED_RETRY_AFTER),
        };
        seconds.map(Duration::from_secs)
    }

    /// Returns the name of the limit that refuses: of several, the one with the latest retry. It is
    /// empty if the limit has none.
    pub fn name(&self) -> &'a str {
        self.name
    }

    fn limits(&self) -> impl Iterator<Item = LimitAt<'a>> + use<'a> {
        self.first.into_iter().chain(self.others.iter().copied())
    }

    /// Returns whether all refusals of the layer that have the same wait have the same body.
    #[inline]
    fn has_body_of_all(&self, decision: &Decision) -> bool {
        self.has_one_body
            && self.first.is_some_and(|(_, _, quotas)| quotas.len() == 1)
            && !decision.exceeds_capacity()
            && decision.left_and_cost().is_none()
    }

    /// Returns the quotas that refused, with the names of their limits.
    fn violated(&self) -> Vec<(&'a str, &'a Quota)> {
        let mut violated = Vec::new();
        let Some(decision) = self.reason.decision() else { return violated };
        for (place, name, quotas) in self.limits() {
            let decision = decision.at(place);
            let refusing = decision.into_iter().flat_map(|decision| decision.refusing());
            let refusing = refusing.filter_map(|i| quotas.as_slice().get(i));
            violated.extend(refusing.map(|quota| (name, quota)));
        }
        violated
    }

    /// Returns a sentence for the client. For a limit it begins with "API rate limit exceeded",
    /// which clients of GitHub's API look for.
    pub fn message(&self) -> String {
        match self.reason {
            Reason::RateLimited(decision) => {
                let mut text = String::from("API rate limit exceeded");
                if self.first.is_some() {
                    text.push_str(": ");
                    self.write_policies(&mut text, "", ", ");
                }
                let numbers = decision.left_and_cost();
                if let Some((left, cost)) = numbers {
                    write!(text, "; {left} left for a cost of {cost}")
                        .expect("writing to a string");
                }
                if decision.exceeds_capacity() {
                    let cost = "; the cost of this request exceeds the limit";
                    text.push_str(numbers.map_or(cost, |_| ", which exceeds the limit"));
                }
                text
            }
            Reason::MissingKey(missing) if missing.is_client() => {
                format!("The request lacks {missing}")
            }
            Reason::MissingKey(_) => {
                "The rate limit of this server is misconfigured; its log says how to fix it".into()
            }
            Reason::StoreFailed => "The rate limit can't be checked at the moment".into(),
            Reason::QueueClosed => "The server is shutting down".into(),
        }
    }

    fn write_policies(&self, text: &mut String, quote: &str, separator: &str) {
        for (i, (name, quota)) in self.violated().into_iter().enumerate() {
            let separator = if i == 0 { "" } else { separator };
            let policy = policy_name(name, quota);
            write!(text, "{separator}{quote}{policy}{quote}").expect("writing to a string");
        }
    }

    /// Returns a response with this body and the refusal's [status](Self::status). The layer adds
    /// the headers.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(Key::global()))
    ///     .on_reject(|_, why| why.response(why.message().into()));
    ///
    /// let response = ask(&layer, Request::get("/"));
    /// assert_eq!(response.status(), 429);
    /// assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
    /// assert!(response.body().starts_with(b"API rate limit exceeded"));
    /// ```
    pub fn response<B>(&self, body: B) -> Response<B> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status();
        response
    }

    /// Returns a response with this body, the refusal's status and its headers.
    fn stamped<B>(&self, body: B, content_type: Option<&HeaderValue>) -> Response<B> {
        let mut response = self.response(body);
        self.stamp(&mut response, content_type);
        response
    }

    /// Adds the refusal's headers, unless the response has them. Responses that this crate makes
    /// are complete from the start, which avoids a header map that is only replaced.
    #[inline(always)]
    pub(crate) fn complete<B>(&self, response: &mut Response<B>) {
        if !is_refused_inside(response) {
            let content_type = response.headers_mut().remove(CONTENT_TYPE);
            self.stamp(response, content_type.as_ref());
        }
    }

    #[inline]
    fn stamp<B>(&self, response: &mut Response<B>, content_type: Option<&HeaderValue>) {
        match self.reason {
            Reason::RateLimited(decision) => {
                self.headers.stamp_refused(response, content_type, || self.limits(), decision);
            }
            reason => {
                let content_type = content_type.map(|value| (CONTENT_TYPE, value.clone()));
                response.headers_mut().extend(content_type);
                stamp_failed(response, reason.consequences().may_retry);
            }
        }
    }
}
