//! Responses outside of the layer: headers for a handler's own charge, and the responses for a
//! refusal and for a failed store.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Response, StatusCode};

use super::Rejection;
use super::reject::problem_response;
use crate::decision::{Decision, RateLimited};
use crate::limits::Limiter;
use crate::middleware::headers::{Headers, LimitAt, PreparedHeaders};
use crate::middleware::reason::Reason;
use crate::quota::{Quota, Quotas};
use crate::store::StoreError;

impl Limiter {
    /// Returns the headers that a layer of this name adds to a response, for a decision of this
    /// limiter under its own quotas, a plan's or a key's. Those of a refusal include `retry-after`
    /// and `cache-control`. The IETF's headers name a calendar's window by its length, such as
    /// `30d`, if the limiter's own quotas have none like it.
    ///
    /// This is for frameworks whose middleware is not Tower's. If their headers have another type
    /// than those of the crate `http`, convert each by `name.as_str()` and `value.as_bytes()`.
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
    /// for (name, value) in &limiter.headers(&refused, Headers::IetfDraft10) {
    ///     println!("{}: {}", name.as_str(), value.to_str().unwrap());
    /// }
    /// # assert!(limiter.headers(&refused, Headers::None).contains_key("retry-after"));
    /// # Ok(()) }
    /// ```
    pub fn headers(&self, decision: &Decision, headers: Headers) -> HeaderMap {
        let of = decision.of(self.name());
        let quotas = of.as_ref().map_or_else(|| self.quotas(), |of| quotas_of(of, &self.quotas()));
        let (decision, limits) = (of.as_ref().unwrap_or(decision), [(0, self.name(), &quotas)]);
        let limits = limits.into_iter();
        let prepared = PreparedHeaders::new(headers, self.name(), 0);
        let mut response = Response::new(());
        if decision.allowed() {
            prepared.stamp_passed(&mut response, || limits, decision, || decision.now_ms());
        } else {
            prepared.stamp_refused(&mut response, None, || limits, decision);
        }
        response.into_parts().0.headers
    }
}

/// Returns the limits and windows that a decision was made by: those of a plan, of a key, or of a
/// moment when the limiter had others. A decision knows its window, but no calendar: if it is in
/// none of the limiter's own, the quota is named by the length of the window.
fn quotas_of(decision: &Decision, own: &Quotas) -> Quotas {
    let mut quotas = decision.usage().iter().enumerate().filter_map(|(i, usage)| {
        let of_own_window = own.as_slice().get(i).filter(|own| own.may_last(usage.window()));
        let quota = of_own_window.map(|own| own.with_limit(usage.limit()));
        // Each with an anchor of its own: a set has no two equal ones.
        let anchor = Duration::from_millis(1 + i as u64);
        let other = Quota::try_new(usage.limit(), usage.window());
        quota.or_else(|| Some(other.ok()?.starting_at(anchor)))
    });
    let first = quotas.next().map_or(*own, Quotas::from);
    quotas.fold(first, |all, quota| all.try_and(quota).unwrap_or(all))
}

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
/// let logins = Limiter::new(Quota::per_hour(1).name("login"));
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
        let (decision, refusers) = error.into_parts();
        let limits: Vec<_> =
            refusers.iter().map(|(place, of)| (*place, &*of.name, &of.quotas)).collect();
        let governing = decision.governing_limit().to_owned();
        answer(&Reason::RateLimited(decision), &governing, &limits)
    }
}

/// 503 with `retry-after`, and nothing of the error's text.
impl<B: From<Bytes>> From<StoreError> for Response<B> {
    fn from(_: StoreError) -> Self {
        answer(&Reason::StoreFailed, "", &[])
    }
}

fn answer<B: From<Bytes>>(reason: &Reason, name: &str, limits: &[LimitAt<'_>]) -> Response<B> {
    let headers = PreparedHeaders::new(Headers::GitHub, name, 0);
    let limited = StatusCode::TOO_MANY_REQUESTS;
    let (first, others) = limits.split_first().map_or((None, limits), |(f, o)| (Some(*f), o));
    let why =
        Rejection { reason, limited, name, first, others, has_one_body: false, headers: &headers };
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
