//! What a refused request is answered with: [`Rejection`] says why, and [`Reject`] makes a response
//! of it.

use std::fmt::{self, Write};
use std::sync::Arc;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderName, HeaderValue, Response, StatusCode};

use super::headers::{self, Fixed, policy};
use crate::decision::Decision;
use crate::key::MissingKey;
use crate::quota::{Quota, Quotas};
use crate::store::Account;

/// Why a request was refused.
#[derive(Clone, Copy, Debug)]
pub struct Rejection<'a> {
    reason: Reason<'a>,
    status: StatusCode,
    account: Account<'a>,
    /// The body for a refusal by the only quota there is, made beforehand.
    prepared: Option<&'a Bytes>,
    fixed: &'a Fixed,
}

/// What kind of refusal it is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Reason<'a> {
    /// The limit is spent: 429, or the status that the layer was given.
    RateLimited(&'a Decision),
    /// There is nobody to count it for: 400 where the client left its part out, 500 where the
    /// server is set up wrong.
    MissingKey(&'a MissingKey),
    /// The store can't say whether it may pass, and the layer is set to refuse then: 503.
    StoreFailed,
    /// The request was waiting for its window when the queue was closed: 503.
    QueueClosed,
}

impl<'a> Rejection<'a> {
    pub(crate) fn new(
        reason: Reason<'a>,
        status: StatusCode,
        account: Account<'a>,
        prepared: Option<&'a Bytes>,
        fixed: &'a Fixed,
    ) -> Self {
        Self { reason, status, account, prepared, fixed }
    }

    /// What kind of refusal it is.
    pub fn reason(&self) -> Reason<'a> {
        self.reason
    }

    /// The decision of a request that is over the limit.
    pub fn decision(&self) -> Option<&'a Decision> {
        match self.reason {
            Reason::RateLimited(decision) => Some(decision),
            _ => None,
        }
    }

    /// The status to answer with.
    pub fn status(&self) -> StatusCode {
        match self.reason {
            Reason::RateLimited(_) => self.status,
            Reason::MissingKey(missing) if missing.is_client() => StatusCode::BAD_REQUEST,
            Reason::MissingKey(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Reason::StoreFailed | Reason::QueueClosed => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// The name of the layer; empty if it has none.
    pub fn name(&self) -> &'a str {
        self.account.scope().name()
    }

    /// The quotas that refused.
    pub fn violated(&self) -> impl Iterator<Item = &'a Quota> + use<'a> {
        let (quotas, decision) = (self.account.quotas(), self.decision());
        decision.into_iter().flat_map(|decision| decision.refusing()).map(|i| &quotas.as_slice()[i])
    }

    /// A sentence for the client. For a limit it begins "API rate limit exceeded", which clients of
    /// GitHub's API look for.
    pub fn message(&self) -> String {
        match self.reason {
            Reason::RateLimited(decision) => {
                let mut text = String::from("API rate limit exceeded: ");
                self.write_policies(&mut text, "", ", ");
                if decision.is_final() {
                    text.push_str("; this request costs more than that can ever grant");
                }
                text
            }
            Reason::MissingKey(missing) if missing.is_client() => {
                format!("The request lacks {missing}")
            }
            Reason::MissingKey(_) => {
                "The rate limit of this server is set up wrong; its log says how to mend it".into()
            }
            Reason::StoreFailed => "The rate limit can't be checked at the moment".into(),
            Reason::QueueClosed => "The server is shutting down".into(),
        }
    }

    /// A response of this body. Its fields are put in at once, which is cheaper than afterwards.
    fn respond<B>(&self, body: B, content_type: Option<&HeaderValue>) -> Response<B> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status();
        *response.headers_mut() = match self.reason {
            Reason::RateLimited(decision) => headers::refusal(decision, content_type, self.fixed),
            _ => content_type.map(|value| (CONTENT_TYPE, value.clone())).into_iter().collect(),
        };
        response
    }

    /// The body of [`ProblemJson`].
    fn problem(&self) -> Bytes {
        match self.reason {
            Reason::RateLimited(decision) => {
                let only_one = self.account.quotas().len() == 1 && !decision.is_final();
                if let Some(prepared) = self.prepared.filter(|_| only_one) {
                    return prepared.clone();
                }
                let mut policies = String::new();
                self.write_policies(&mut policies, "\"", ",");
                quota_exceeded(self.status, &self.message(), &policies)
            }
            _ => {
                let status = self.status();
                let title = status.canonical_reason().unwrap_or_default();
                let mut text = format!(
                    r#"{{"type":"about:blank","title":"{title}","status":{},"message":""#,
                    status.as_u16()
                );
                write!(text, "{}\"}}", Escaped(&self.message())).expect("writing to a string");
                text.into()
            }
        }
    }

    fn write_policies(&self, text: &mut String, quote: &str, separator: &str) {
        for (i, quota) in self.violated().enumerate() {
            let separator = if i == 0 { "" } else { separator };
            let policy = policy(self.name(), quota);
            write!(text, "{separator}{quote}{policy}{quote}").expect("writing to a string");
        }
    }
}

/// The body for a refusal by the only quota of a layer.
pub(crate) fn prepare(name: &str, quotas: &Quotas, status: StatusCode) -> Bytes {
    let policy = policy(name, &quotas.as_slice()[0]);
    quota_exceeded(status, &format!("API rate limit exceeded: {policy}"), &format!("\"{policy}\""))
}

/// The IETF draft's problem type for an exceeded quota (draft-ietf-httpapi-ratelimit-headers-10), with GitHub's
/// `message`.
fn quota_exceeded(status: StatusCode, message: &str, policies: &str) -> Bytes {
    let status = status.as_u16();
    format!(
        r#"{{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","title":"Quota exceeded","status":{status},"message":"{message}","violated-policies":[{policies}]}}"#
    )
    .into()
}

/// Text inside of a JSON string. Only what an extractor says is missing can need it.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '"' | '\\' => write!(f, "\\{c}"),
            c if c.is_control() => f.write_char(' '),
            c => f.write_char(c),
        })
    }
}

/// Makes the response to a refused request. The layer adds the rate-limit fields to it.
///
/// [`ProblemJson`], [`EmptyBody`] and closures ([`OnReject`]) are the ways there are.
#[diagnostic::on_unimplemented(
    message = "the rate limiter can't make a refusal's body of type `{B}` by `{Self}`",
    label = "no way to make a `{B}`",
    note = "the default answer needs a body that implements `From<Bytes>` (axum's `Body`, `Full<Bytes>`)",
    note = "write `.empty_body()` on the `FixedWindowLayer` if the body implements `Default` (tonic's, `BoxBody`)",
    note = "or write `.on_reject(|why| ...)` and make the response yourself"
)]
pub trait Reject<B> {
    /// The response to a refused request.
    fn reject(&self, why: &Rejection<'_>) -> Response<B>;
}

/// The default answer: `application/problem+json` (RFC 9457) with the problem type of the IETF
/// rate-limit draft, and a `message` that clients of GitHub's API understand.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProblemJson;

#[diagnostic::do_not_recommend]
impl<B: From<Bytes>> Reject<B> for ProblemJson {
    fn reject(&self, why: &Rejection<'_>) -> Response<B> {
        static PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");
        why.respond(B::from(why.problem()), Some(&PROBLEM))
    }
}

/// Only status and fields: [`FixedWindowLayer::empty_body`](crate::FixedWindowLayer::empty_body).
#[derive(Clone, Copy, Debug, Default)]
pub struct EmptyBody;

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for EmptyBody {
    fn reject(&self, why: &Rejection<'_>) -> Response<B> {
        why.respond(B::default(), None)
    }
}

/// The body of GitHub's API:
/// [`FixedWindowLayer::github_body`](crate::FixedWindowLayer::github_body).
#[derive(Clone, Copy, Debug, Default)]
pub struct GitHubBody;

#[diagnostic::do_not_recommend]
impl<B: From<Bytes>> Reject<B> for GitHubBody {
    fn reject(&self, why: &Rejection<'_>) -> Response<B> {
        let body = format!(r#"{{"message":"{}"}}"#, Escaped(&why.message()));
        static JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");
        why.respond(B::from(body.into()), Some(&JSON))
    }
}

/// Trailers-only responses of gRPC: [`FixedWindowLayer::grpc`](crate::FixedWindowLayer::grpc).
#[derive(Clone, Copy, Debug, Default)]
pub struct Grpc;

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for Grpc {
    fn reject(&self, why: &Rejection<'_>) -> Response<B> {
        const STATUS: HeaderName = HeaderName::from_static("grpc-status");
        const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

        // The codes of gRPC's specification.
        let code = match why.reason() {
            Reason::RateLimited(_) => "8", // RESOURCE_EXHAUSTED
            Reason::MissingKey(missing) if missing.is_client() => "3", // INVALID_ARGUMENT
            Reason::MissingKey(_) => "13", // INTERNAL
            Reason::StoreFailed | Reason::QueueClosed => "14", // UNAVAILABLE
        };
        // Percent-encoded, as gRPC wants it.
        let mut message = String::new();
        for byte in why.message().bytes() {
            match byte {
                b'%' | 0..0x20 | 0x7f.. => {
                    let _ = write!(message, "%{byte:02X}");
                }
                _ => message.push(byte.into()),
            }
        }
        let mut response = Response::new(B::default());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, const { HeaderValue::from_static("application/grpc") });
        headers.insert(STATUS, HeaderValue::from_static(code));
        headers.extend(HeaderValue::try_from(message).ok().map(|message| (MESSAGE, message)));
        response
    }
}

/// A closure's answer: [`FixedWindowLayer::on_reject`](crate::FixedWindowLayer::on_reject).
pub struct OnReject<F>(pub(crate) Arc<F>);

impl<F> Clone for OnReject<F> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<F> fmt::Debug for OnReject<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnReject(..)")
    }
}

#[diagnostic::do_not_recommend]
impl<B, F: Fn(&Rejection<'_>) -> Response<B>> Reject<B> for OnReject<F> {
    fn reject(&self, why: &Rejection<'_>) -> Response<B> {
        (self.0)(why)
    }
}
