//! Limits and windows: [`Quota`], and several of them at once, [`Quotas`].

use std::fmt;
use std::hash::{Hash, Hasher};
use std::time::Duration;

mod calendar;
mod set;
mod text;
mod zone;

pub use calendar::{Calendar, Weekday};
pub(crate) use calendar::{SavedWindows, Span};
pub(crate) use set::Periods;
pub use set::{Plan, Quotas};
pub use text::ParseQuotaError;
pub(crate) use text::rate;

use calendar::Period;
use zone::Zone;

const DAY_MS: u64 = 86_400_000;
const WEEK_MS: u64 = 7 * DAY_MS;
/// The first Monday, four days after the epoch, a Thursday.
const MONDAY_MS: u64 = 4 * DAY_MS;

// Why a quota can't be built, and what to write instead, where that is said in several places.
const LIMIT_TOO_LARGE: &str =
    "a quota's limit is at most 2^53 - 1: for \"unlimited\", .skip(..) the request";
const WINDOW_TOO_LONG: &str =
    "a quota's window is at most ten years of 365 days: choose a shorter one";
const NOT_A_CALENDAR: &str = "only a day, a week, a month or a year follows a calendar: write \
    Quota::per_day(n), per_week, per_month or per_year";
const CALENDAR_ANCHOR: &str = "a calendar says where windows begin: leave out staggered and \
    from_first_request, and write starting_at in place of a first day, before in_zone";
const CAPACITY: &str =
    "a rollover capacity is at least the limit and, with what may be reserved, at most 2^53 - 1";
const FIRST_DAY: &str = "a week begins on a weekday, a month on a day from 1 to 31, a year on a \
    month and a day: write .from_weekday(..), .from_day(..) or .from_date(..)";

/// A quota: `limit` tokens per `window`.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::Quota;
///
/// const API: Quota = Quota::per_hour(5_000);
/// assert_eq!(API.limit(), 5_000);
/// assert_eq!(API.window(), Duration::from_secs(3_600));
/// assert_eq!(Quota::new(100, Duration::from_secs(10)).to_string(), "100/10s");
/// assert_eq!(API.staggered().to_string(), "5000/hour staggered");
/// assert_eq!(API.from_first_request().to_string(), "5000/hour from-first-request");
///
/// // Windows that begin at 06:00 UTC.
/// let shifted = Quota::per_day(100).starting_at(Duration::from_secs(6 * 3_600));
/// assert_eq!(shifted.to_string(), "100/day starting-at=21600000ms");
///
/// let quota = API.rollover_up_to(6_000).reserve_up_to(100);
/// assert_eq!((quota.capacity(), quota.max_reserved()), (6_000, 100));
/// assert_eq!(quota.with_limit(60), Quota::per_hour(60).reserve_up_to(100));
/// ```
///
/// `name`, `key` or `key_fn` makes a [`Limit`](crate::Limit) of a quota; the other options, such as
/// `store` and `shadow`, are the limit's.
///
/// Windows are half-open: a request at exactly the end of a window belongs to the next one. By
/// default, windows are *aligned* to the clock in UTC: a minute begins at the full minute, a week
/// on Monday at 00:00. [`starting_at`](Self::starting_at), [`staggered`](Self::staggered) and
/// [`from_first_request`](Self::from_first_request) choose other starts.
///
/// Days, weeks, months and years can have a time zone and a chosen first day:
///
/// ```
/// # #[cfg(feature = "time-zones")] {
/// use tower_fixed_window::{Quota, Weekday};
///
/// let quota = Quota::per_month(10_000).from_day(15).in_zone("America/New_York");
/// assert_eq!(quota.to_string(), "10000/month from day 15 in America/New_York");
/// let quota = Quota::per_week(500).from_weekday(Weekday::Sunday);
/// assert_eq!(quota.to_string(), "500/week from sunday");
/// let tax_year = Quota::per_year(100_000).from_date(4, 6);
/// assert_eq!(tax_year.to_string(), "100000/year from 04-06");
/// # }
/// ```
///
/// **What a fixed window does not promise:** a client can spend one limit just before a boundary
/// and another just after it, so up to twice the limit within the length of one window. If your
/// backend can't absorb that, add a shorter window:
/// `Quota::per_hour(1_000).and(Quota::per_minute(50))`.
///
/// # Bounds
///
/// A limit is at most 2^53 - 1 ([`MAX_TOKENS`](Self::MAX_TOKENS)). A limit of 0 refuses every
/// request; for "unlimited", see [`Plan::UNLIMITED`](crate::Plan::UNLIMITED). A window is a whole
/// number of milliseconds, from 1 ms to ten years ([`MAX_WINDOW`](Self::MAX_WINDOW)). Other values
/// panic; in a `const`, that is a compile error. For values from a database or a file, parse text,
/// which returns an error: `format!("{limit}/{seconds}s").parse::<Quota>()`, in [this
/// form](#impl-FromStr-for-Quota).
#[derive(Clone, Copy)]
pub struct Quota {
    pub(crate) limit: u64,
    /// Milliseconds.
    pub(crate) window: u64,
    pub(crate) anchor: Anchor,
    /// At least `limit`: the rollover capacity.
    pub(crate) capacity: u64,
    pub(crate) max_reserved: u64,
}

impl PartialEq for Quota {
    fn eq(&self, other: &Self) -> bool {
        let amounts = |of: &Self| (of.limit, of.capacity, of.max_reserved);
        self.same_counter(other) && amounts(self) == amounts(other)
    }
}

impl Eq for Quota {}

impl Hash for Quota {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.identity(), self.limit, self.capacity, self.max_reserved).hash(state);
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Anchor {
    /// On a grid through `offset` milliseconds after the epoch, less than a window. `since` is the
    /// instant that was given for it, for a time zone that is set later, or -1.
    Grid { offset: u64, since: i64 },
    /// On a grid of the key's own, shifted by a hash of scope and key.
    Staggered,
    /// With the first charge that finds no state.
    FirstRequest,
    /// On days of a calendar.
    Calendar(Calendar),
}

impl Anchor {
    const fn grid(window: u64, since: i64) -> Self {
        let aligned = if window == WEEK_MS { MONDAY_MS } else { 0 };
        let offset = if since < 0 { aligned } else { since as u64 % window };
        Self::Grid { offset, since }
    }

    /// This function is apart so that grids need no jump table. A pair is returned in registers.
    #[cold]
    const fn identity(self, window: u64) -> (u64, u64) {
        match self {
            Self::Calendar(calendar) => calendar.identity(),
            Self::Grid { offset, .. } => (window, offset),
            Self::Staggered => (window, u64::MAX),
            Self::FirstRequest => (window, u64::MAX - 1),
        }
    }
}

impl Quota {
    /// Creates a quota of `limit` tokens per second.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_second(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(1))
    }

    /// Creates a quota of `limit` tokens per minute.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_minute(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(60))
    }

    /// Creates a quota of `limit` tokens per hour.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_hour(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(3_600))
    }

    /// Creates a quota of `limit` tokens per day, from midnight to midnight UTC.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_day(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400))
    }

    /// Creates a quota of `limit` tokens per week, from Monday 00:00 UTC.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_week(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(7 * 86_400))
    }

    /// Creates a quota of `limit` tokens per month, from the first day of the month at 00:00 UTC.
    /// In memory, a restart forgets the count: use `MemoryStore::open(path, interval)?` (feature
    /// `saved`) or `RedisStore`.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_month(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400)).on_calendar(Calendar::new(Period::Month(1)))
    }

    /// Creates a quota of `limit` tokens per year, from 1 January 00:00 UTC. In memory, a restart
    /// forgets the count, as for [`per_month`](Self::per_month).
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn per_year(limit: u64) -> Self {
        Self::new(limit, Duration::from_secs(86_400)).on_calendar(Calendar::new(Period::Year(1, 1)))
    }

    /// Creates a quota of `limit` tokens per window of the given length.
    ///
    /// # Panics
    /// If the limit or the window is out of [bounds](Quota#bounds).
    #[track_caller]
    pub const fn new(limit: u64, window: Duration) -> Self {
        expect_quota(Self::try_new(limit, window))
    }

    const fn try_new(limit: u64, window: Duration) -> Result<Self, &'static str> {
        if limit > Self::MAX_TOKENS {
            return Err(LIMIT_TOO_LARGE);
        }
        if !window.subsec_nanos().is_multiple_of(1_000_000) {
            return Err("a quota's window is whole milliseconds: write Duration::from_millis(n)");
        }
        if window.as_millis() == 0 {
            return Err(
                "a quota's window is at least 1 ms: write Duration::from_secs(60) for a minute",
            );
        }
        if window.as_millis() > Self::MAX_WINDOW.as_millis() {
            return Err(WINDOW_TOO_LONG);
        }
        let window = window.as_millis() as u64;
        let anchor = Anchor::grid(window, -1);
        Ok(Self { limit, window, anchor, capacity: limit, max_reserved: 0 })
    }

    /// Makes a window begin at an instant, `since_epoch` after 1970-01-01T00:00Z. The other windows
    /// follow and precede it without gaps. Use this to match another service, or the moment at
    /// which a subscription began. Months and years begin on the instant's day, or in a shorter
    /// month on the last day, and at its time of day. If a time zone is set afterwards, days and
    /// weeks follow the instant in that zone, too: [the
    /// guide](crate::guide::windows#months-and-days-in-a-time-zone) has a table.
    ///
    /// # Panics
    /// If the quota already has a first day or a time zone: write `.starting_at(..)` before
    /// `.in_zone(..)`.
    #[track_caller]
    pub const fn starting_at(self, since_epoch: Duration) -> Self {
        expect_quota(self.since(since_epoch))
    }

    const fn since(mut self, epoch: Duration) -> Result<Self, &'static str> {
        let millis = epoch.as_millis();
        let most = Self::MAX_TOKENS as u128;
        let since = if millis < most { millis } else { most } as i64;
        if let Anchor::Calendar(calendar) = self.anchor {
            if !calendar.period.is_usual() || !calendar.zone.is_utc() {
                return Err(CALENDAR_ANCHOR);
            }
            return Ok(self.on_calendar(Calendar { since, ..calendar }));
        }
        self.anchor = Anchor::grid(self.window, since);
        Ok(self)
    }

    /// Shifts the windows of each key by an offset of its own, so that waiting clients don't all
    /// come back at once. The offset is a hash of the limit's name and the key: it is the same on
    /// every node and after every restart.
    ///
    /// # Panics
    /// If the quota follows a calendar.
    #[track_caller]
    pub const fn staggered(self) -> Self {
        expect_quota(self.anchored(Anchor::Staggered))
    }

    /// Makes a key's window begin with its first request, and the next one with the first request
    /// after its end, as in GitHub's API.
    ///
    /// # Panics
    /// If the quota follows a calendar.
    #[track_caller]
    pub const fn from_first_request(self) -> Self {
        expect_quota(self.anchored(Anchor::FirstRequest))
    }

    const fn anchored(self, anchor: Anchor) -> Result<Self, &'static str> {
        match self.anchor {
            Anchor::Calendar(_) => Err(CALENDAR_ANCHOR),
            _ => Ok(Self { anchor, ..self }),
        }
    }

    /// Sets the time zone of days, weeks, months or years, by its IANA name. A day begins when the
    /// zone's clock first shows it, and can have 23 or 25 hours.
    ///
    /// The first quota in a zone reads the zone's data, and the process keeps it (4 kB for each
    /// zone). To read newer data, restart the process.
    ///
    /// # Panics
    /// If there is no such time zone, if the window is not a day, a week, a month or a year, or if
    /// the quota is staggered or begins with the first request.
    #[cfg(feature = "time-zones")]
    #[track_caller]
    #[doc(alias = "time_zone")]
    pub fn in_zone(self, name: &str) -> Self {
        match self.in_named_zone(name) {
            Ok(quota) => quota,
            Err(error) => panic!("{name:?}: {error}"),
        }
    }

    fn in_named_zone(self, name: &str) -> Result<Self, &'static str> {
        let calendar = self.calendar()?;
        Ok(self.on_calendar(Calendar { zone: Zone::named(name)?, ..calendar }))
    }

    /// Makes weeks begin on this day.
    ///
    /// # Panics
    /// If the quota is not one of [`per_week`](Self::per_week), or begins at an
    /// [instant](Self::starting_at).
    #[track_caller]
    pub const fn from_weekday(self, first: Weekday) -> Self {
        expect_quota(self.starting_on(Period::Week(first)))
    }

    /// Makes months begin on this day, 1 to 31, or in a shorter month on its last day: from day 31,
    /// a window runs from 31 January to 28 February, and the next one to 31 March.
    ///
    /// # Panics
    /// If there is no such day, or the quota is not one of [`per_month`](Self::per_month), or begins
    /// at an [instant](Self::starting_at).
    #[track_caller]
    pub const fn from_day(self, first: u8) -> Self {
        expect_quota(self.starting_on(Period::Month(first)))
    }

    /// Makes years begin on this month and day. From 29 February, they begin on 28 February in
    /// other years.
    ///
    /// # Panics
    /// If there is no such day, or the quota is not one of [`per_year`](Self::per_year), or begins at
    /// an [instant](Self::starting_at).
    #[track_caller]
    pub const fn from_date(self, month: u8, day: u8) -> Self {
        expect_quota(self.starting_on(Period::Year(month, day)))
    }

    const fn starting_on(self, first: Period) -> Result<Self, &'static str> {
        match (self.calendar(), first.validated()) {
            (Ok(calendar), Ok(first)) if calendar.period.kind() == first.kind() => {
                if calendar.since >= 0 {
                    return Err(CALENDAR_ANCHOR);
                }
                Ok(self.on_calendar(Calendar { period: first, ..calendar }))
            }
            (Ok(_), _) => Err(FIRST_DAY),
            (Err(error), _) => Err(error),
        }
    }

    const fn calendar(&self) -> Result<Calendar, &'static str> {
        let (period, since) = match (self.anchor, self.window) {
            (Anchor::Calendar(calendar), _) => return Ok(calendar),
            (Anchor::Grid { since, .. }, DAY_MS) => (Period::Day, since),
            (Anchor::Grid { since, .. }, WEEK_MS) => (Period::Week(Weekday::Monday), since),
            (_, DAY_MS | WEEK_MS) => return Err(CALENDAR_ANCHOR),
            _ => return Err(NOT_A_CALENDAR),
        };
        Ok(Calendar { period, since, zone: Zone::UTC })
    }

    /// In UTC, days, and weeks from Monday or from an instant, stay on a grid.
    const fn on_calendar(mut self, calendar: Calendar) -> Self {
        let Calendar { period, since, zone } = calendar;
        self.window = period.max_days() * DAY_MS;
        let is_grid = zone.is_utc() && period.is_usual() && period.max_days() <= 7;
        self.anchor =
            if is_grid { Anchor::grid(self.window, since) } else { Anchor::Calendar(calendar) };
        self
    }

    /// Carries unspent tokens over to later windows, up to a total of `capacity`. A new key starts
    /// with `capacity`, and each window adds `limit`.
    ///
    /// # Panics
    /// If `capacity` is below the limit, or if `capacity` and
    /// [`reserve_up_to`](Self::reserve_up_to) add up to more than [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[doc(alias = "burst")]
    #[track_caller]
    pub const fn rollover_up_to(self, capacity: u64) -> Self {
        expect_quota(self.with_room(capacity, self.max_reserved))
    }

    /// Allows [`Limiter::reserve`](crate::Limiter::reserve) to take up to `max_reserved` tokens of
    /// later windows in advance.
    ///
    /// # Panics
    /// If `max_reserved` and the capacity add up to more than [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn reserve_up_to(self, max_reserved: u64) -> Self {
        expect_quota(self.with_room(self.capacity, max_reserved))
    }

    const fn with_room(self, capacity: u64, max_reserved: u64) -> Result<Self, &'static str> {
        if capacity < self.limit || capacity.saturating_add(max_reserved) > Self::MAX_TOKENS {
            return Err(CAPACITY);
        }
        Ok(Self { capacity, max_reserved, ..self })
    }

    /// Combines this quota with another one, as in the example of [`Quotas`]. A request passes only
    /// if both grant it; a refused request takes tokens from neither.
    ///
    /// # Panics
    /// If both have the same window and start: they would be one counter. Keep the smaller.
    #[doc(alias = "burst")]
    #[must_use]
    #[track_caller]
    pub const fn and(self, other: Quota) -> Quotas {
        Quotas::one(self).and(other)
    }

    /// Returns a quota with the same windows and another limit. Counts continue, because a counter
    /// does not depend on the limit. A rollover capacity is dropped, and the reservable tokens are
    /// reduced to what is allowed.
    ///
    /// # Panics
    /// If the limit is above [`MAX_TOKENS`](Self::MAX_TOKENS).
    #[track_caller]
    pub const fn with_limit(mut self, limit: u64) -> Self {
        assert!(limit <= Self::MAX_TOKENS, "{}", LIMIT_TOO_LARGE);
        self.limit = limit;
        self.capacity = limit;
        if self.max_reserved > Self::MAX_TOKENS - limit {
            self.max_reserved = Self::MAX_TOKENS - limit;
        }
        self
    }

    /// Returns the limit: how many tokens each window grants.
    pub const fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the length of a window. On a calendar, where lengths differ, it is 24 hours for a
    /// day, 31 days for a month and 366 days for a year; [`Usage::window`](crate::Usage::window)
    /// returns the length of the current window.
    pub const fn window(&self) -> Duration {
        Duration::from_millis(self.window)
    }

    /// Returns the most tokens that can be available at once: the limit, or the rollover capacity.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns how many tokens of later windows can be reserved.
    pub const fn max_reserved(&self) -> u64 {
        self.max_reserved
    }

    /// Returns short text that identifies this quota's counters under one limit's name and key: its
    /// window and where windows start. The limit is not part of it.
    ///
    /// ```
    /// use tower_fixed_window::Quota;
    ///
    /// assert_eq!(Quota::per_minute(5).counter(), "60000+0");
    /// assert_eq!(Quota::per_minute(9).staggered().counter(), "60000s");
    /// assert_eq!(Quota::per_minute(9).from_first_request().counter(), "60000f");
    /// assert_eq!(Quota::per_month(9).from_day(15).counter(), "month+15@UTC");
    /// ```
    pub fn counter(&self) -> String {
        let window = self.window;
        match self.anchor {
            Anchor::Grid { offset, .. } => format!("{window}+{offset}"),
            Anchor::Staggered => format!("{window}s"),
            Anchor::FirstRequest => format!("{window}f"),
            Anchor::Calendar(calendar) => calendar.to_string(),
        }
    }

    /// [`counter`](Self::counter) as two numbers, which no other counter has in this process. Whoever
    /// makes one number of them mixes in what nobody can know: windows may be chosen by an enemy.
    #[inline]
    pub(crate) const fn identity(&self) -> [u64; 2] {
        let (first, second) = match self.anchor {
            Anchor::Grid { offset, .. } => (self.window, offset),
            other => other.identity(self.window),
        };
        [first, second]
    }

    /// Returns whether windows carry nothing over, and the limit is not 0.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.limit > 0 && self.capacity == self.limit
    }

    /// The number of a calendar's period, from 1 on. 0: the quota is on none.
    const fn period(&self) -> usize {
        match self.anchor {
            Anchor::Calendar(calendar) => 1 + calendar.period.kind(),
            _ => 0,
        }
    }

    pub(crate) const fn same_counter(&self, other: &Quota) -> bool {
        let ([a, b], [c, d]) = (self.identity(), other.identity());
        a == c && b == d
    }
}

// A block of its own: rustdoc shows a block's constants before its methods.
impl Quota {
    /// The largest limit, cost or capacity ([bounds](Self#bounds)): 2^53 - 1, the largest integer
    /// that every client represents exactly (JavaScript's numbers, Lua's in Redis).
    pub const MAX_TOKENS: u64 = (1 << 53) - 1;

    /// The longest window: ten years of 365 days, one of the [bounds](Self#bounds).
    pub const MAX_WINDOW: Duration = Duration::from_secs(10 * 365 * 86_400);
}

#[track_caller]
const fn expect_quota(quota: Result<Quota, &'static str>) -> Quota {
    match quota {
        Ok(quota) => quota,
        Err(error) => panic!("{}", error),
    }
}

pub(crate) const FNV_1A: u64 = 0xcbf2_9ce4_8422_2325;

#[inline]
pub(crate) fn fnv_1a(hash: u64, bytes: impl IntoIterator<Item = u8>) -> u64 {
    let add = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.into_iter().fold(hash, add)
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
