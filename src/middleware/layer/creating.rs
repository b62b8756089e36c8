//! The layer of a limit, or of several.

use std::sync::Arc;

use super::FixedWindowLayer;
use crate::limits::IntoLimits;
use crate::line::Lines;
use crate::middleware::options::Options;
use crate::middleware::rejection::ProblemJson;

impl FixedWindowLayer {
    /// Limits requests by the address of their peer, in memory. `limits` is a quota, or anything
    /// else that becomes [`Limits`](crate::Limits).
    ///
    /// Under axum, this needs the feature `axum` and
    /// `into_make_service_with_connect_info::<SocketAddr>()`; under other servers, a
    /// [`PeerAddr`](crate::key::PeerAddr) in the extensions of each request.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::PeerAddr;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60));
    ///
    /// let request = || Request::get("/").extension(PeerAddr(([192, 0, 2, 1], 4711).into()));
    /// assert_eq!(ask(&layer, request()).headers()["x-ratelimit-remaining"], "59");
    /// assert_eq!(ask(&layer, request()).headers()["x-ratelimit-remaining"], "58");
    /// ```
    ///
    /// Several limits are decided together: a request passes only if all of them grant it, and a
    /// refusal takes from none.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::header;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let layer = FixedWindowLayer::new([
    ///     Quota::per_minute(600).name("organization").key(header("x-org")),
    ///     Quota::per_minute(60).name("user").key(header("x-user")),
    /// ]);
    ///
    /// let request = Request::get("/").header("x-org", "acme").header("x-user", "ann");
    /// let response = ask(&layer, request);
    /// // The limit with the smallest part left.
    /// assert_eq!(response.headers()["x-ratelimit-resource"], "user");
    /// assert_eq!(response.headers()["x-ratelimit-remaining"], "59");
    /// ```
    ///
    /// To peek, reset or change a limit at run time, make a [`Limiter`](crate::Limiter) or
    /// [`Limits`](crate::Limits) first, and the layer of it: `FixedWindowLayer::new(&limits)`.
    ///
    /// # Panics
    /// As [`Limits::new`](crate::Limits::new) does: of several limits, each needs a name of its
    /// own.
    #[track_caller]
    pub fn new(limits: impl IntoLimits) -> Self {
        let limits = limits.into_limits();
        limits.assert_valid();
        let lines = Arc::new(Lines::new(limits.limiters().len() > 1));
        Self { limits, options: Options::default(), lines, reject: Arc::new(ProblemJson) }
    }
}
