//! [`Reject`], and the kinds of responses that this crate has for a [`Rejection`].

use std::fmt::Write;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Response, StatusCode};

use super::{Rejection, problem};

/// Makes the response to a refused request: its status, its body, and headers that describe the
/// body.
///
/// The layer adds the rate-limit headers, `retry-after` and `cache-control`, once, whatever makes
/// the response. [`ProblemJson`], [`EmptyBody`], [`GitHubBody`] and [`Grpc`] are installed with
/// [`FixedWindowLayer::reject`](crate::FixedWindowLayer::reject), closures with
/// [`on_reject`](crate::FixedWindowLayer::on_reject), which have the same arguments.
///
/// ```
/// use http::request::Parts;
/// use http::{Request, Response};
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{FixedWindowLayer, Key, Quota, Reject, Rejection};
///
/// struct PlainText;
///
/// impl<B: From<String>> Reject<B> for PlainText {
///     fn reject(&self, _: &Parts, why: &Rejection<'_>) -> Response<B> {
///         why.response(B::from(why.message()))
///     }
/// }
///
/// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(Key::global())).reject(PlainText);
///
/// let response = ask(&layer, Request::get("/"));
/// assert_eq!(response.status(), 429);
/// assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
/// ```
#[diagnostic::on_unimplemented(
    message = "the rate limiter can't make a refusal's body of type `{B}` by `{Self}`",
    label = "no way to make a `{B}`",
    note = "the default answer needs a body that implements `From<Bytes>` (axum's `Body`, `Full<Bytes>`)",
    note = "write `.reject(EmptyBody)` on the `FixedWindowLayer` if the body implements `Default` (tonic's, `BoxBody`), `.reject(Grpc)` for gRPC",
    note = "write `.on_reject(|_, why| why.response(why.message().into()))` if it implements `From<String>` (lambda_http's)",
    note = "or write `.on_reject(|parts, why| ...)` and make the response yourself",
    note = "a body that only its own crate can make (of tower-http's layers and `ServeDir`, of rmcp) becomes axum's `Body` by `.layer(MapResponseBodyLayer::new(Body::new))` between the limit and that service (tower-http, feature `map-response-body`)"
)]
pub trait Reject<B> {
    /// The response to a refused request.
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<B>;
}

/// The default answer: `application/problem+json` (RFC 9457) with the problem type of the IETF
/// rate-limit draft, and a `message` that clients of GitHub's API understand.
///
/// ```
/// use http::Request;
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
///
/// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(Key::global()));
///
/// let response = ask(&layer, Request::get("/"));
/// assert_eq!(response.headers()["content-type"], "application/problem+json");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ProblemJson;

#[diagnostic::do_not_recommend]
impl<B: From<Bytes>> Reject<B> for ProblemJson {
    fn reject(&self, _: &Parts, why: &Rejection<'_>) -> Response<B> {
        problem_response(why)
    }
}

/// Returns the default response.
pub(super) fn problem_response<B: From<Bytes>>(why: &Rejection<'_>) -> Response<B> {
    static PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");
    let Some(decision) = why.reason().decision().filter(|of| why.has_body_of_all(of)) else {
        return why.stamped(B::from(problem::problem(why)), Some(&PROBLEM));
    };
    let make = || problem::quota_exceeded(why);
    let (headers, body) = why.headers.last_refusal(decision, Some(&PROBLEM), Some(&make));
    let mut response = why.response(B::from(body));
    why.headers.put_refused(&mut response, headers, || why.limits(), decision);
    response
}

/// Only status and headers, for bodies that can't be made from bytes: tonic's, a `BoxBody`.
///
/// ```
/// use http::Request;
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{EmptyBody, FixedWindowLayer, Key, Quota};
///
/// let layer = FixedWindowLayer::new(Quota::per_minute(0).key(Key::global())).reject(EmptyBody);
///
/// let response = ask(&layer, Request::get("/"));
/// assert_eq!(response.status(), 429);
/// assert_eq!(response.headers().get("content-type"), None);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct EmptyBody;

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for EmptyBody {
    fn reject(&self, _: &Parts, why: &Rejection<'_>) -> Response<B> {
        why.stamped(B::default(), None)
    }
}

/// The JSON body of GitHub's API, `{"message": "API rate limit exceeded ..."}`, for clients that
/// were written for that one. With [`status`](crate::FixedWindowLayer::status) 403 it is what
/// GitHub answers.
///
/// ```
/// use http::{Request, StatusCode};
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{FixedWindowLayer, GitHubBody, Key, Quota};
///
/// let layer = FixedWindowLayer::new(Quota::per_hour(0).key(Key::global()))
///     .reject(GitHubBody)
///     .status(StatusCode::FORBIDDEN);
///
/// let response = ask(&layer, Request::get("/"));
/// assert_eq!(response.status(), 403);
/// assert_eq!(response.headers()["content-type"], "application/json; charset=utf-8");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct GitHubBody;

#[diagnostic::do_not_recommend]
impl<B: From<Bytes>> Reject<B> for GitHubBody {
    fn reject(&self, _: &Parts, why: &Rejection<'_>) -> Response<B> {
        static JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");
        why.stamped(B::from(problem::github(why)), Some(&JSON))
    }
}

/// Trailers-only responses of gRPC: 200 with `grpc-status: 8` (RESOURCE_EXHAUSTED), a message, and
/// the rate-limit headers as metadata. A plain 429 would reach gRPC clients as UNAVAILABLE, which
/// they retry at once. A call of gRPC-web is answered in its own content type.
///
/// ```
/// use http::Request;
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{FixedWindowLayer, Grpc, Key, Quota};
///
/// let layer = FixedWindowLayer::new(Quota::per_second(0).key(Key::global())).reject(Grpc);
///
/// let response = ask(&layer, Request::post("/"));
/// assert_eq!(response.status(), 200);
/// assert_eq!(response.headers()["grpc-status"], "8");
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Grpc;

impl Grpc {
    pub(crate) const HEADERS: [HeaderName; 2] =
        [HeaderName::from_static("grpc-status"), HeaderName::from_static("grpc-message")];
}

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for Grpc {
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<B> {
        static GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

        // Percent-encoded, as gRPC wants it.
        let mut message = String::new();
        for byte in why.message().bytes() {
            match byte {
                b'%' | 0..0x20 | 0x7f.. => {
                    write!(message, "%{byte:02X}").expect("writing to a string");
                }
                _ => message.push(byte.into()),
            }
        }
        let asked = parts.headers.get(CONTENT_TYPE).filter(|asked| is_grpc_web(asked));
        let mut response = why.stamped(B::default(), asked.or(Some(&GRPC)));
        *response.status_mut() = StatusCode::OK;
        let headers = response.headers_mut();
        let [status_name, message_name] = Grpc::HEADERS;
        headers.insert(status_name, HeaderValue::from(why.reason().consequences().grpc as u16));
        headers.extend(HeaderValue::try_from(message).ok().map(|message| (message_name, message)));
        response
    }
}

fn is_grpc_web(content_type: &HeaderValue) -> bool {
    const PREFIX: &[u8] = b"application/grpc-web";
    content_type.as_bytes().get(..PREFIX.len()).is_some_and(|t| t.eq_ignore_ascii_case(PREFIX))
}

#[diagnostic::do_not_recommend]
impl<B, F> Reject<B> for F
where
    F: Fn(&Parts, &Rejection<'_>) -> Response<B>,
{
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<B> {
        self(parts, why)
    }
}
