//! What a key may spend: [`Quota`], and several of them at once, [`Quotas`].

use std::fmt;
use std::time::Duration;

mod error;
mod set;
mod text;

pub use error::QuotaError;
pub use set::Quotas;
pub use text::ParseQuotaError;

/// The largest limit, cost or capacity: 2^53 - 1, the largest integer that every client
/// (JavaScript's numbers, Lua's in Redis) reads exactly.
pub const MAX_TOKENS: u64 = (1 << 53) - 1;

/// The longest window: ten years of 365 days.
pub const MAX_WINDOW: Duration = Duration::from_secs(10 * 365 * 86_400);

const WEEK_MS: u64 = 7 * 86_400_000;
/// The epoch is a Thursday; the first Monday is four days later.
const MONDAY_MS: u64 = 4 * 86_400_000;

/// `limit` tokens per `window`.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::Quota;
///
/// const API: Quota = Quota::per_hour(5_000);
/// assert_eq!(API.limit(), 5_000);
/// assert_eq!(API.window(), Duration::from_secs(3_600));
/// assert_eq!(Quota::new(100, Duration::from_secs(10)).to_string(), "100/10s");
/// ```
///
/// A window is half-open: a request at exactly its end is in the next one. By default windows are
/// *aligned*: a minute turns at the top of the minute, an hour at the top of the hour, a day at
/// midnight, all in UTC, and a week on Monday 00:00 UTC. [`starting_at`](Self::starting_at),
/// [`staggered`](Self::staggered) and [`from_first_request`](Self::from_first_request) choose
/// other grids.
///
/// **What a fixed window does not promise:** a client may spend a whole limit just before a
/// boundary and another just after it, so up to twice the limit passes within one window's length.
/// Where that matters, add a second, shorter window:
/// `Quota::per_hour(1_000).and(Quota::per_minute(50))`.
///
/// # Bounds
///
/// A limit is at most 2^53 - 1 ([`MAX_TOKENS`]); a limit of 0 refuses everything (for "unlimited",
/// skip the request instead). A window is a whole number of milliseconds from 1 ms to ten years
/// ([`MAX_WINDOW`]). Anything else panics where it is written, which in a `const` is a compile
/// error; for numbers out of a database or a file there is [`try_new`](Self::try_new).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Quota {
    pub(crate) limit: u64,
    /// Milliseconds.
    pub(crate) window: u64,
    pub(crate) anchor: Anchor,
    /// At least `limit`; the rollover ceiling.
    pub(crate) capacity: u64,
    pub(crate) max_reserved: u64,
}

/// Where a quota's windows begin.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Anchor {
    /// On a grid through `offset` milliseconds after the epoch, less than a window.
    Grid { offset: u64 },
    /// On a grid of the key's own, shifted by a hash of scope and key.
    Staggered,
    /// With the first charge that finds no state.
    FirstRequest,
}

impl Quota {
    /// `limit` tokens in each second.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`].
    pub const fn per_second(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(1))
    }

    /// `limit` tokens in each minute.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`].
    pub const fn per_minute(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(60))
    }

    /// `limit` tokens in each hour.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`].
    pub const fn per_hour(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(3_600))
    }

    /// `limit` tokens in each day, from midnight to midnight UTC.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`].
    pub const fn per_day(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400))
    }

    /// `limit` tokens in each week, from Monday 00:00 UTC.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`].
    pub const fn per_week(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(7 * 86_400))
    }

    /// `limit` tokens in each window of the given length.
    ///
    /// # Panics
    /// If the limit or the window is out of [bounds](Quota#bounds). In a `const` that is an error
    /// of the compiler:
    ///
    /// ```compile_fail
    /// # use std::time::Duration; use tower_fixed_window::Quota;
    /// const NEVER: Quota = Quota::new(10, Duration::ZERO);
    /// # let _ = NEVER;
    /// ```
    pub const fn new(limit: u64, window: Duration) -> Self {
        match Self::try_new(limit, window) {
            Ok(quota) => quota,
            Err(error) => panic!("{}", error.message()),
        }
    }

    /// The same as [`new`](Self::new), for numbers that come from a database or a file.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::Quota;
    ///
    /// let error = Quota::try_new(10, Duration::ZERO).unwrap_err();
    /// assert_eq!(error.to_string(), "a quota's window is at least 1 ms: write Duration::from_secs(60) for a minute");
    /// ```
    ///
    /// # Errors
    /// [`QuotaError`] if the limit or the window is out of [bounds](Quota#bounds).
    pub const fn try_new(limit: u64, window: Duration) -> Result<Self, QuotaError> {
        if limit > MAX_TOKENS {
            return Err(QuotaError::LimitTooLarge);
        }
        if !window.subsec_nanos().is_multiple_of(1_000_000) {
            return Err(QuotaError::WindowNotWholeMillis);
        }
        if window.as_millis() == 0 {
            return Err(QuotaError::WindowZero);
        }
        if window.as_millis() > MAX_WINDOW.as_millis() {
            return Err(QuotaError::WindowTooLong);
        }
        let window = window.as_millis() as u64;
        let offset = if window == WEEK_MS { MONDAY_MS } else { 0 };
        Ok(Self {
            limit,
            window,
            anchor: Anchor::Grid { offset },
            capacity: limit,
            max_reserved: 0,
        })
    }

    /// Windows on a grid that passes through the given time since the Unix epoch (UTC), also
    /// before it: to follow somebody else's windows, or to turn at local midnight.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::Quota;
    ///
    /// // Days that turn at 06:00 UTC.
    /// const SHIFT: Quota = Quota::per_day(100).starting_at(Duration::from_secs(6 * 3_600));
    /// ```
    pub const fn starting_at(mut self, since_epoch: Duration) -> Self {
        let offset = (since_epoch.as_millis() % self.window as u128) as u64;
        self.anchor = Anchor::Grid { offset };
        self
    }

    /// Each key's windows on a grid of its own, shifted by a hash of scope and key: the same on
    /// every node and after every restart, without state. It spreads the moment at which waiting
    /// clients come back.
    pub const fn staggered(mut self) -> Self {
        self.anchor = Anchor::Staggered;
        self
    }

    /// Each key's window begins with its first request, and the next one with the first request
    /// after that window has ended. GitHub's API counts in this way.
    pub const fn from_first_request(mut self) -> Self {
        self.anchor = Anchor::FirstRequest;
        self
    }

    /// Unspent tokens are carried into the next windows, until `capacity` are there: a new key
    /// starts with all of it, and each window adds `limit`.
    ///
    /// # Panics
    /// If `capacity` is below the limit, or with
    /// [`reserve_up_to`](Self::reserve_up_to) above [`MAX_TOKENS`].
    pub const fn rollover_up_to(mut self, capacity: u64) -> Self {
        assert!(
            capacity >= self.limit,
            "a rollover capacity is at least the limit: write .rollover_up_to(n) with n >= limit"
        );
        self.capacity = capacity;
        self.check_sum()
    }

    /// Up to `max_reserved` tokens may be taken in advance from windows to come, by callers that
    /// wait for them ([`Limiter::reserve`](crate::Limiter::reserve)).
    ///
    /// # Panics
    /// If `max_reserved` and the capacity add up to more than [`MAX_TOKENS`].
    pub const fn reserve_up_to(mut self, max_reserved: u64) -> Self {
        self.max_reserved = max_reserved;
        self.check_sum()
    }

    const fn check_sum(self) -> Self {
        assert!(
            self.max_reserved <= MAX_TOKENS && self.capacity <= MAX_TOKENS - self.max_reserved,
            "a quota's capacity and what may be reserved are together at most 2^53 - 1"
        );
        self
    }

    /// The same windows with another limit; a rollover capacity is dropped, what may be reserved
    /// is cut to what is allowed. Counters go on: the limit is no part of their identity.
    ///
    /// ```
    /// use tower_fixed_window::Quota;
    ///
    /// assert_eq!(Quota::per_hour(60).with_limit(5_000), Quota::per_hour(5_000));
    /// ```
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`].
    pub const fn with_limit(mut self, limit: u64) -> Self {
        assert!(limit <= MAX_TOKENS, "{}", QuotaError::LimitTooLarge.message());
        self.limit = limit;
        self.capacity = limit;
        if self.max_reserved > MAX_TOKENS - limit {
            self.max_reserved = MAX_TOKENS - limit;
        }
        self
    }

    /// This quota and another one: a request passes only if both grant it, and a refusal takes
    /// from neither.
    ///
    /// ```
    /// use tower_fixed_window::{Quota, Quotas};
    ///
    /// const SEARCH: Quotas = Quota::per_minute(33).and(Quota::per_hour(2_000));
    /// assert_eq!(SEARCH.to_string(), "33/minute, 2000/hour");
    /// ```
    ///
    /// # Panics
    /// If both have the same window and anchor: they would be one counter. Keep the smaller.
    #[must_use]
    pub const fn and(self, other: Quota) -> Quotas {
        Quotas::one(self).and(other)
    }

    /// Tokens a window grants.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// The length of a window.
    pub const fn window(&self) -> Duration {
        Duration::from_millis(self.window)
    }

    /// The most tokens that can be there at once: the limit, or the rollover ceiling.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// How many tokens may be reserved in advance.
    pub const fn max_reserved(&self) -> u64 {
        self.max_reserved
    }

    /// What tells this quota's counters from another's under one scope and key: window and anchor,
    /// as short text. The limit is no part of it.
    ///
    /// ```
    /// use tower_fixed_window::Quota;
    ///
    /// assert_eq!(Quota::per_minute(5).counter().to_string(), "60000+0");
    /// assert_eq!(Quota::per_minute(9).staggered().counter().to_string(), "60000s");
    /// assert_eq!(Quota::per_minute(9).from_first_request().counter().to_string(), "60000f");
    /// ```
    pub fn counter(&self) -> impl fmt::Display + use<> {
        Counter(*self)
    }

    /// The same as [`counter`](Self::counter), as a number that is still to be mixed.
    pub(crate) const fn identity(&self) -> u64 {
        let anchor = match self.anchor {
            Anchor::Grid { offset } => offset,
            Anchor::Staggered => u64::MAX,
            Anchor::FirstRequest => u64::MAX - 1,
        };
        self.window ^ anchor.wrapping_mul(0x9E37_79B9_7F4A_7C15)
    }

    const fn same_counter(&self, other: &Quota) -> bool {
        self.window == other.window
            && match (self.anchor, other.anchor) {
                (Anchor::Grid { offset: a }, Anchor::Grid { offset: b }) => a == b,
                (Anchor::Staggered, Anchor::Staggered)
                | (Anchor::FirstRequest, Anchor::FirstRequest) => true,
                _ => false,
            }
    }
}

struct Counter(Quota);

impl fmt::Display for Counter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.window)?;
        match self.0.anchor {
            Anchor::Grid { offset } => write!(f, "+{offset}"),
            Anchor::Staggered => f.write_str("s"),
            Anchor::FirstRequest => f.write_str("f"),
        }
    }
}

/// MurmurHash3's 64-bit finalizer.
pub(crate) const fn fmix64(mut x: u64) -> u64 {
    x ^= x >> 33;
    x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
    x ^= x >> 33;
    x = x.wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Quota({self})")
    }
}
