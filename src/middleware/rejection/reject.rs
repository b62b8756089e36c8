//! The kinds of responses that there are to a [`Rejection`].

use std::fmt::{self, Write};
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, Response, StatusCode};

use super::{Rejection, problem};

/// Makes the response to a refused request, with its rate-limit headers.
///
/// [`ProblemJson`], [`EmptyBody`], [`GitHubBody`], [`Grpc`] and closures ([`OnReject`]) do.
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
        why.response(B::from(problem::problem(why)), Some(&PROBLEM))
    }
}

/// Only status and headers: [`FixedWindowLayer::empty_body`](crate::FixedWindowLayer::empty_body).
#[derive(Clone, Copy, Debug, Default)]
pub struct EmptyBody;

#[diagnostic::do_not_recommend]
impl<B: Default> Reject<B> for EmptyBody {
    fn reject(&self, why: &Rejection<'_>) -> Response<B> {
        why.response(B::default(), None)
    }
}

/// The body of GitHub's API:
/// [`FixedWindowLayer::github_body`](crate::FixedWindowLayer::github_body).
#[derive(Clone, Copy, Debug, Default)]
pub struct GitHubBody;

#[diagnostic::do_not_recommend]
impl<B: From<Bytes>> Reject<B> for GitHubBody {
    fn reject(&self, why: &Rejection<'_>) -> Response<B> {
        static JSON: HeaderValue = HeaderValue::from_static("application/json; charset=utf-8");
        why.response(B::from(problem::github(why)), Some(&JSON))
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
        let mut response = why.response(B::default(), Some(&GRPC));
        *response.status_mut() = StatusCode::OK;
        let headers = response.headers_mut();
        headers.insert(STATUS, HeaderValue::from(why.reason().consequences().grpc as u16));
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
        why.complete((self.0)(why))
    }
}
