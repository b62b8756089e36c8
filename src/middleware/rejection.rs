//! The response to a refused request. A [`Reason`] says why it is refused, with the usual status; a
//! [`Rejection`] shows the reason to the [`Reject`] of the layer, which makes the response.

use std::fmt::Write;
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Response, StatusCode};

use super::headers::{
    FAILED_RETRY_AFTER, Headers, PreparedHeaders, mark_refused, put_failure_headers,
    retry_after_secs,
};
use crate::decision::{Decision, RateLimited};
use crate::key::{MissingKey, grpc};
use crate::limits::Limiter;
use crate::store::StoreError;

/// Why a request was refused: [`Rejection::reason`](crate::Rejection).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Reason {
    /// The limit is reached: 429, or the layer's status.
    #[doc(alias = "quota exceeded")]
    RateLimited(Decision),
    /// The request has no key: 400 if the client left something out or sent something that can't be
    /// used, 500 if the server is misconfigured.
    MissingKey(MissingKey),
    /// The store failed, and its policy is to refuse requests then; or it gave a queue no answer
    /// within `max_wait`: 503.
    StoreFailed,
    /// The queue was closed while the request was waiting in it: 503.
    QueueClosed,
}

impl Reason {
    pub(crate) fn decision(&self) -> Option<&Decision> {
        match self {
            Self::RateLimited(decision) => Some(decision),
            _ => None,
        }
    }

    /// The status, unless the layer sets one; the code of gRPC; and whether the same request may
    /// pass later.
    pub(crate) fn answer(&self) -> (StatusCode, u16, bool) {
        match self {
            // RESOURCE_EXHAUSTED
            Self::RateLimited(_) => (StatusCode::TOO_MANY_REQUESTS, 8, true),
            // INVALID_ARGUMENT
            Self::MissingKey(missing) if missing.is_client() => (StatusCode::BAD_REQUEST, 3, false),
            // INTERNAL
            Self::MissingKey(_) => (StatusCode::INTERNAL_SERVER_ERROR, 13, false),
            // UNAVAILABLE
            Self::StoreFailed | Self::QueueClosed => (StatusCode::SERVICE_UNAVAILABLE, 14, true),
        }
    }
}

/// A refused request, as passed to the closure that makes the response.
///
/// ```
/// use http::Request;
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{FixedWindowLayer, Key, Quota, Reason};
///
/// let limit = Quota::per_hour(0).name("api").key(Key::global());
/// let layer = FixedWindowLayer::new(limit).on_reject(|_parts, why| {
///     assert!(matches!(why.reason, Reason::RateLimited(decision) if decision.limit() == 0));
///     assert_eq!((why.name, why.status().as_u16()), ("api", 429));
///     // A limit of 0 never grants anything.
///     assert_eq!(why.retry_after(), None);
///     why.response(why.message())
/// });
/// let response = ask(&layer, Request::get("/"));
/// assert_eq!(response.headers()["x-ratelimit-remaining"], "0");
/// assert!(response.body().starts_with(b"API rate limit exceeded"));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Rejection<'a> {
    /// Why the request was refused.
    pub reason: &'a Reason,
    /// The name of the limit that refuses; if several do, of the one with the longest wait. It is
    /// empty if the limit has none.
    pub name: &'a str,
    pub(crate) layer_status: Option<StatusCode>,
    pub(crate) headers: &'a PreparedHeaders,
}

impl Rejection<'_> {
    /// Returns the status of the response.
    pub fn status(&self) -> StatusCode {
        match (self.reason, self.layer_status) {
            (Reason::RateLimited(_), Some(status)) => status,
            (reason, _) => reason.answer().0,
        }
    }

    /// Returns the time in the header `retry-after`, after which the same request may pass: whole
    /// seconds, rounded up, at least 1. Returns `None` if waiting does not help.
    pub fn retry_after(&self) -> Option<Duration> {
        let seconds = match self.reason {
            Reason::RateLimited(decision) => retry_after_secs(decision),
            reason => {
                let (_, _, may_retry) = reason.answer();
                may_retry.then_some(FAILED_RETRY_AFTER)
            }
        };
        seconds.map(Duration::from_secs)
    }

    /// Returns a sentence for the client. If a limit refuses, it begins with "API rate limit
    /// exceeded", which clients of GitHub's API look for.
    pub fn message(&self) -> String {
        match self.reason {
            Reason::RateLimited(decision) => {
                let violated = decision.violated().join(", ");
                let mut text = format!("API rate limit exceeded: {violated}");
                let numbers = decision.left_and_cost();
                if let Some((left, cost)) = numbers {
                    write!(text, "; {left} left for a cost of {cost}")
                        .expect("writing to a string");
                }
                if decision.retry_at_ms().is_none() {
                    let cost = "; the cost of this request exceeds the limit";
                    text.push_str(numbers.map_or(cost, |_| ", which exceeds the limit"));
                }
                text
            }
            Reason::MissingKey(missing) if missing.is_client() => {
                let verb = if missing.is_unusable() { "has" } else { "lacks" };
                format!("The request {verb} {missing}")
            }
            Reason::MissingKey(_) => {
                "The rate limit of this server is misconfigured; its log says how to fix it".into()
            }
            Reason::StoreFailed => "The rate limit can't be checked at the moment".into(),
            Reason::QueueClosed => "The server is shutting down".into(),
        }
    }

    /// Returns a response with this body and the refusal's [status](Self::status); the layer adds
    /// the headers. The body can be anything that converts into the service's body, such as text
    /// for axum's.
    pub fn response<B>(&self, body: impl Into<B>) -> Response<B> {
        let mut response = Response::new(body.into());
        *response.status_mut() = self.status();
        response
    }

    #[inline]
    pub(crate) fn stamp<B>(&self, response: &mut Response<B>) {
        match self.reason {
            Reason::RateLimited(decision) => self.headers.stamp_refused(response, decision),
            _ => {
                put_failure_headers(response.headers_mut(), self.retry_after().is_some());
                mark_refused(response);
            }
        }
    }
}

/// Makes the response to a refused request: its status, its body, and headers that describe the
/// body.
///
/// The layer adds the rate-limit headers, `retry-after` and `cache-control`.
/// [`FixedWindowLayer::reject`](crate::FixedWindowLayer::reject) takes [`ProblemJson`],
/// [`EmptyBody`], [`GitHubBody`], [`Grpc`] or one of your own, and
/// [`on_reject`](crate::FixedWindowLayer::on_reject) a closure with the same arguments.
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
///         why.response(why.message())
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
    note = "write `.on_reject(|_, why| why.response(why.message()))` if it implements `From<String>` (lambda_http's)",
    note = "or write `.on_reject(|parts, why| ...)` and make the response yourself",
    note = "a body that only its own crate can make (of tower-http's layers and `ServeDir`, of rmcp) becomes axum's `Body` by `.layer(MapResponseBodyLayer::new(Body::new))` between the limit and that service (tower-http, feature `map-response-body`)"
)]
pub trait Reject<B>: 'static {
    /// Returns the response to a refused request.
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<B>;
}

/// The default response to refused requests: `application/problem+json` (RFC 9457), with the
/// problem type of the IETF rate-limit draft, and a `message` that clients of GitHub's API
/// understand. [The guide](crate::guide::responses) shows one.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProblemJson;

#[diagnostic::do_not_recommend]
impl<B: From<Bytes>> Reject<B> for ProblemJson {
    fn reject(&self, _: &Parts, why: &Rejection<'_>) -> Response<B> {
        problem_response(why)
    }
}

fn typed<B>(why: &Rejection<'_>, body: B, content_type: &HeaderValue) -> Response<B> {
    let mut response = why.response(body);
    response.headers_mut().insert(CONTENT_TYPE, content_type.clone());
    response
}

fn problem_response<B: From<Bytes>>(why: &Rejection<'_>) -> Response<B> {
    static PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");
    let make = || typed(why, problem(why), &PROBLEM);
    let decision = why.reason.decision();
    decision.map_or_else(make, |of| why.headers.cached_refusal(of, make)).map(B::from)
}

/// A response with only status and headers, for bodies that can't be made from bytes: tonic's, a
/// `BoxBody`. It is used as [`GitHubBody`] is.
#[derive(Clone, Copy, Debug, Default)]
pub struct EmptyBody;

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for EmptyBody {
    fn reject(&self, _: &Parts, why: &Rejection<'_>) -> Response<B> {
        why.response(B::default())
    }
}

/// The JSON body of GitHub's API, `{"message": "API rate limit exceeded ..."}`. With
/// [`status`](crate::FixedWindowLayer::status) 403, the response is what GitHub sends.
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
        let body = format!(r#"{{"message":"{}"}}"#, escaped(&why.message()));
        typed(why, B::from(body.into()), &JSON)
    }
}

/// Trailers-only responses of gRPC: 200 with `grpc-status: 8` (RESOURCE_EXHAUSTED), a message, and
/// the rate-limit headers as metadata. A plain 429 would reach gRPC clients as UNAVAILABLE, which
/// they retry at once. A call of gRPC-web is answered in its own content type.
///
/// The wait of `retry-after` is also in `grpc-retry-pushback-ms`, and in `grpc-status-details-bin`
/// as a `google.rpc.RetryInfo`, without which OTLP exporters drop their data. If waiting does not
/// help, the pushback is -1, and there are no details.
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
    pub(crate) const HEADERS: [HeaderName; 4] = [
        HeaderName::from_static("grpc-status"),
        HeaderName::from_static("grpc-message"),
        HeaderName::from_static("grpc-retry-pushback-ms"),
        HeaderName::from_static("grpc-status-details-bin"),
    ];
}

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for Grpc {
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<B> {
        static GRPC: HeaderValue = HeaderValue::from_static("application/grpc");

        // Percent-encoded, as gRPC wants it.
        let text = why.message();
        let mut message = String::new();
        for byte in text.bytes() {
            match byte {
                b'%' | 0..0x20 | 0x7f.. => {
                    write!(message, "%{byte:02X}").expect("writing to a string");
                }
                _ => message.push(byte.into()),
            }
        }
        let asked = grpc(parts).filter(|(_, web)| *web).map(|(asked, _)| asked);
        let mut response = typed(why, B::default(), asked.unwrap_or(&GRPC));
        *response.status_mut() = StatusCode::OK;
        let headers = response.headers_mut();
        let [status_name, message_name, pushback_name, details_name] = Grpc::HEADERS;
        let (_, code, _) = why.reason.answer();
        headers.insert(status_name, code.into());
        headers.extend(HeaderValue::try_from(message).ok().map(|message| (message_name, message)));
        let Some(after) = why.retry_after() else {
            headers.insert(pushback_name, const { HeaderValue::from_static("-1") });
            return response;
        };
        headers.insert(pushback_name, after.as_secs().saturating_mul(1_000).into());
        let details = HeaderValue::try_from(base64(&status_of(code, &text, after)));
        headers.extend(details.ok().map(|details| (details_name, details)));
        response
    }
}

/// A `google.rpc.Status` with a `google.rpc.RetryInfo`, in the encoding of protobuf.
fn status_of(code: u16, message: &str, after: Duration) -> Vec<u8> {
    /// A field of bytes, text, or a message.
    fn field(number: u8, of: &[u8]) -> Vec<u8> {
        [&[number << 3 | 2][..], &varint(of.len() as u64), of].concat()
    }
    fn integer(number: u8, of: u64) -> Vec<u8> {
        [&[number << 3][..], &varint(of)].concat()
    }
    fn varint(mut of: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        while of > 0x7f {
            bytes.push(of as u8 | 0x80);
            of >>= 7;
        }
        bytes.push(of as u8);
        bytes
    }
    let retry = field(1, &integer(1, after.as_secs()));
    let kind = field(1, b"type.googleapis.com/google.rpc.RetryInfo");
    let detail = field(3, &[kind, field(2, &retry)].concat());
    [integer(1, code.into()), field(2, message.as_bytes()), detail].concat()
}

/// Without padding, as gRPC sends it.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let byte = |i: usize| usize::from(three.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        let digits = (0..=three.len()).map(|i| char::from(DIGITS[bits >> (18 - 6 * i) & 63]));
        text.extend(digits);
    }
    text
}

#[diagnostic::do_not_recommend]
impl<B, F> Reject<B> for F
where
    F: Fn(&Parts, &Rejection<'_>) -> Response<B> + 'static,
{
    fn reject(&self, parts: &Parts, why: &Rejection<'_>) -> Response<B> {
        self(parts, why)
    }
}

/// The IETF draft's problem type for an exceeded quota (draft-ietf-httpapi-ratelimit-headers-10).
pub(crate) const QUOTA_EXCEEDED: &str =
    "https://iana.org/assignments/http-problem-types#quota-exceeded";

#[cold]
fn problem(why: &Rejection<'_>) -> Bytes {
    let (status, message) = (why.status(), why.message());
    let (kind, title, policies) = match why.reason {
        Reason::RateLimited(decision) => {
            let violated = decision.violated().join(r#"",""#);
            let policies = format!(r#","violated-policies":["{violated}"]"#);
            (QUOTA_EXCEEDED, "Quota exceeded", policies)
        }
        _ => ("about:blank", status.canonical_reason().unwrap_or_default(), String::new()),
    };
    let wait = why.retry_after().map(|after| format!(r#","retry_after":{}"#, after.as_secs()));
    format!(
        r#"{{"type":"{kind}","title":"{title}","status":{},"message":"{}"{}{policies}}}"#,
        status.as_u16(),
        escaped(&message),
        wait.unwrap_or_default()
    )
    .into()
}

/// Escapes text for a JSON string. Only the name of a missing key can need that.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '"' | '\\') {
            escaped.push('\\');
        }
        escaped.push(if c.is_control() { ' ' } else { c });
    }
    escaped
}

impl Limiter {
    /// Returns the headers that a layer would add to a response, for a decision of this limiter.
    /// Use it in frameworks whose middleware is not Tower's, and for limits whose key only the
    /// handler knows. The headers of a refusal include `retry-after` and `cache-control`.
    ///
    /// If the framework's headers are not those of the crate `http`, convert each by
    /// `name.as_str()` and `value.as_bytes()`.
    ///
    /// ```
    /// use tower_fixed_window::{Headers, Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let limiter = Limiter::new(Quota::per_hour(1).name("api"));
    ///
    /// let passed = limiter.check("alice").await?;
    /// let headers = limiter.headers(&passed, Headers::GitHub);
    /// assert_eq!(headers["x-ratelimit-remaining"], "0");
    /// assert_eq!(headers["x-ratelimit-resource"], "api");
    ///
    /// let refused = limiter.check("alice").await?;
    /// assert!(limiter.headers(&refused, Headers::None).contains_key("retry-after"));
    /// # Ok(()) }
    /// ```
    ///
    /// In many axum apps, an extractor authenticates. It can limit as well:
    ///
    /// ```
    /// use axum::extract::FromRequestParts;
    /// use axum::response::{IntoResponse, Response};
    /// use http::request::Parts;
    /// use http::{HeaderMap, StatusCode};
    /// use tower_fixed_window::{Headers, Limiter};
    ///
    /// struct User {
    ///     id: u64,
    ///     headers: HeaderMap,
    /// }
    ///
    /// impl FromRequestParts<Limiter> for User {
    ///     type Rejection = Response;
    ///
    ///     async fn from_request_parts(parts: &mut Parts, api: &Limiter) -> Result<Self, Response> {
    ///         let id = authenticated(parts).ok_or(StatusCode::UNAUTHORIZED.into_response())?;
    ///         let decision = api.check(id).await.map_err(IntoResponse::into_response)?;
    ///         let headers = api.headers(&decision, Headers::GitHub);
    ///         decision.into_result().map_err(IntoResponse::into_response)?;
    ///         Ok(Self { id, headers })
    ///     }
    /// }
    ///
    /// fn authenticated(parts: &Parts) -> Option<u64> {
    ///     // Your check of a cookie or a token.
    ///     # parts.headers.get("authorization")?.to_str().ok()?.parse().ok()
    /// }
    /// ```
    pub fn headers(&self, decision: &Decision, headers: Headers) -> HeaderMap {
        let of = decision.of(self.name());
        let decision = of.as_ref().unwrap_or(decision);
        let prepared = PreparedHeaders::new(headers, self.name(), 0);
        let mut response = Response::new(());
        if decision.is_allowed() {
            prepared.stamp_passed(&mut response, decision, || decision.now_ms(), None);
        } else {
            prepared.stamp_refused(&mut response, decision);
        }
        response.into_parts().0.headers
    }
}

/// 429, as a layer's refusal. An outer layer of this crate counts the request, and leaves these
/// headers alone.
///
/// The second example of [`Limiter::headers`] does so in an extractor.
impl<B: From<Bytes>> From<RateLimited> for Response<B> {
    fn from(error: RateLimited) -> Self {
        answer(&Reason::RateLimited(error.0))
    }
}

/// 503 with `retry-after`, and nothing of the error's text.
impl<B: From<Bytes>> From<StoreError> for Response<B> {
    fn from(_: StoreError) -> Self {
        answer(&Reason::StoreFailed)
    }
}

fn answer<B: From<Bytes>>(reason: &Reason) -> Response<B> {
    let name = reason.decision().map_or("", Decision::name);
    let headers = PreparedHeaders::new(Headers::GitHub, name, 0);
    let why = Rejection { reason, layer_status: None, name, headers: &headers };
    let mut response = problem_response(&why);
    why.stamp(&mut response);
    response
}

/// As `From<RateLimited> for http::Response<B>`.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for RateLimited {
    fn into_response(self) -> axum::response::Response {
        self.into()
    }
}

/// 503 with `retry-after`.
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for StoreError {
    fn into_response(self) -> axum::response::Response {
        self.into()
    }
}
