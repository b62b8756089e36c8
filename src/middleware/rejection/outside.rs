//! Responses to refusals outside of the layer: a handler's own charge was refused, or its store
//! failed.

use bytes::Bytes;
use http::{Response, StatusCode};

use super::Rejection;
use super::reject::problem_response;
use crate::decision::RateLimited;
use crate::middleware::headers::{Headers, PreparedHeaders};
use crate::middleware::reason::Reason;
use crate::quota::Quotas;
use crate::store::StoreError;

/// 429, with the headers and the body that a layer's refusal has. An outer layer of this crate
/// leaves them alone, and takes nothing for the request.
///
/// ```
/// use bytes::Bytes;
/// use http::Response;
/// use http_body_util::Full;
/// use tower_fixed_window::{Limiter, Quota};
///
/// type Answer = Response<Full<Bytes>>;
///
/// async fn login(logins: &Limiter, email: &str) -> Result<Answer, Answer> {
///     logins.check(email).await?.into_result()?;
///     Ok(Response::new(Full::from("welcome")))
/// }
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let logins = Limiter::new(Quota::per_hour(1)).name("login");
/// assert!(login(&logins, "alice@example.com").await.is_ok());
///
/// let refused = login(&logins, "alice@example.com").await.unwrap_err();
/// assert_eq!(refused.status(), 429);
/// assert_eq!(refused.headers()["x-ratelimit-remaining"], "0");
/// assert!(refused.headers().contains_key("retry-after"));
/// # }
/// ```
impl<B: From<Bytes>> From<RateLimited> for Response<B> {
    fn from(error: RateLimited) -> Self {
        let (decision, refuser) = error.into_parts();
        let (name, quotas) =
            refuser.as_ref().map_or(("", None), |of| (&*of.name, Some(&of.quotas)));
        answer(&Reason::RateLimited(decision), name, quotas)
    }
}

/// 503 with `retry-after`, and nothing of the error's text.
impl<B: From<Bytes>> From<StoreError> for Response<B> {
    fn from(_: StoreError) -> Self {
        answer(&Reason::StoreFailed, "", None)
    }
}

fn answer<B: From<Bytes>>(reason: &Reason, name: &str, quotas: Option<&Quotas>) -> Response<B> {
    let headers = PreparedHeaders::new(Headers::GitHub, name, 0);
    let limited = StatusCode::TOO_MANY_REQUESTS;
    let why = Rejection { reason, limited, name, quotas, prepared_body: None, headers: &headers };
    problem_response(&why)
}

/// The response that `RateLimited` makes of itself: see `From<RateLimited> for http::Response<B>`.
///
/// ```
/// use axum::Form;
/// use axum::extract::State;
/// use tower_fixed_window::Limiter;
///
/// #[derive(serde::Deserialize)]
/// struct Login { email: String }
///
/// async fn login(
///     State(logins): State<Limiter>,
///     Form(form): Form<Login>,
/// ) -> axum::response::Result<&'static str> {
///     logins.check(form.email).await?.into_result()?;
///     Ok("welcome")
/// }
/// # let _: axum::Router<Limiter> = axum::Router::new().route("/", axum::routing::post(login));
/// ```
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl axum::response::IntoResponse for RateLimited {
    fn into_response(self) -> axum::response::Response {
        self.into()
    }
}

/// 503 with `retry-after`.
#[cfg(feature = "axum")]
#[cfg_attr(docsrs, doc(cfg(feature = "axum")))]
impl axum::response::IntoResponse for StoreError {
    fn into_response(self) -> axum::response::Response {
        self.into()
    }
}
