//! Windows that follow a calendar (S35): days, weeks, months and years of a time zone, from a first
//! day on. They differ in length, so that a window is found by its number, not by its length.

use std::fmt;

use super::error::QuotaError;
use super::zone::{Recent, Zone};

/// The last instant (S11).
const MAX: i64 = (1 << 53) - 1;
/// 9999-12-31, the last day that windows begin on, in days since the epoch.
const LAST_DAY: i64 = 2_932_896;
/// The epoch is a Thursday; the first Monday is four days later.
const MONDAY: i64 = 4;

/// The first day of a week: [`Quota::from_weekday`](crate::Quota::from_weekday).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[allow(missing_docs, reason = "their names say it")]
pub enum Weekday {
    Monday,
    Tuesday,
    Wednesday,
    Thursday,
    Friday,
    Saturday,
    Sunday,
}

impl Weekday {
    /// As they are written in a quota's text.
    pub(super) const NAMES: [(&'static str, Self); 7] = [
        ("monday", Self::Monday),
        ("tuesday", Self::Tuesday),
        ("wednesday", Self::Wednesday),
        ("thursday", Self::Thursday),
        ("friday", Self::Friday),
        ("saturday", Self::Saturday),
        ("sunday", Self::Sunday),
    ];
}

/// Which windows a calendar has.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Calendar {
    pub(super) period: Period,
    pub(super) zone: Zone,
}

/// What repeats, and on which day it begins.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Period {
    Day,
    Week(Weekday),
    /// On this day, or the last one of a month that is shorter.
    Month(u8),
    /// On this month and day, or the last day of the month where it is shorter.
    Year(u8, u8),
}

/// A window: `[start, end)`, in milliseconds since the epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Span {
    pub(crate) start: i64,
    pub(crate) end: i64,
}

/// Where windows begin: some in a row, with the number of the first.
#[cfg(feature = "redis")]
#[derive(Debug)]
pub(crate) struct Boundaries {
    pub(crate) first: i64,
    /// The number of the last window there is.
    pub(crate) last: i64,
    pub(crate) starts: Vec<i64>,
}

impl Calendar {
    pub(super) const fn new(period: Period, zone: Zone) -> Self {
        Self { period, zone }
    }

    /// The window that holds an instant. A function of its own, so that windows of one length
    /// need no stack for it.
    #[inline(never)]
    pub(crate) fn around(self, at: i64) -> Span {
        let (start, end) = self.zone.recent().get(self.period.kind());
        if start <= at && at < end { Span { start, end } } else { self.find(at) }
    }

    #[cold]
    fn find(self, at: i64) -> Span {
        let period = self.period_at(at);
        let (start, end) = (self.start(period), self.start(period + 1));
        self.zone.recent().set(self.period.kind(), start, end);
        Span { start, end }
    }

    /// The number of the window that holds an instant. Windows are numbered in order, without gaps.
    pub(crate) fn number(self, at: i64) -> i64 {
        let period = self.period_at(at);
        period - self.skipped().partition_point(|skipped| *skipped < period) as i64
    }

    /// Where the window of a number begins; the last instant for those past the year 9999.
    pub(crate) fn boundary(self, number: i64) -> i64 {
        let mut period = number.min(MAX);
        for skipped in self.skipped() {
            period += i64::from(*skipped <= period);
        }
        self.start(period)
    }

    /// How many windows begin after the one that holds `from`, until the one that holds `to`.
    pub(crate) fn windows(self, from: i64, to: i64) -> i64 {
        self.number(to) - self.number(from)
    }

    /// The same, with the part of a window before `to` as a whole one.
    pub(crate) fn windows_until(self, from: i64, to: i64) -> i64 {
        let last = self.number(to);
        last - self.number(from) + i64::from(self.boundary(last) < to)
    }

    /// Where the `n`th window after the one that holds an instant begins.
    pub(crate) fn after(self, at: i64, n: i64) -> i64 {
        self.boundary(self.number(at).saturating_add(n))
    }

    /// The starts of `count` windows, from the one before the one that holds an instant.
    #[cfg(feature = "redis")]
    pub(crate) fn boundaries(self, at: i64, count: i64) -> Boundaries {
        let first = self.number(at) - 1;
        let starts = (first..first + count).map(|number| self.boundary(number)).collect();
        Boundaries { first, last: self.number(MAX), starts }
    }

    /// A number for the windows that it has, the same as no other's in this process.
    pub(super) const fn id(self) -> u64 {
        self.zone.id() << 16 | self.period.kind() as u64
    }

    /// Periods in which there is no window.
    fn skipped(self) -> &'static [i64] {
        // A week without one of its days is still a window.
        if self.period == Period::Day { self.zone.skipped() } else { &[] }
    }

    fn period_at(self, at: i64) -> i64 {
        let at = at.clamp(-MAX, MAX - 1);
        let day = self.zone.day_at(at.div_euclid(1_000)).min(LAST_DAY);
        let mut period = self.period.of(day);
        // Where a clock is set back over midnight, a day that has begun goes on. No period that was
        // skipped is found, since it ends where it begins.
        while self.start(period + 1) <= at {
            period += 1;
        }
        while self.start(period) > at {
            period -= 1;
        }
        period
    }

    fn start(self, period: i64) -> i64 {
        match self.period.first_day(period) {
            day if day > LAST_DAY => MAX,
            day => self.zone.first_instant(day) * 1_000,
        }
    }
}

impl fmt::Display for Calendar {
    /// Identifies its counters: `month+15@America/New_York`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.period.name())?;
        match self.period {
            Period::Day => {}
            Period::Week(first) => write!(f, "+{first}")?,
            Period::Month(first) => write!(f, "+{first}")?,
            Period::Year(month, day) => write!(f, "+{month:02}-{day:02}")?,
        }
        write!(f, "@{}", self.zone.name())
    }
}

impl fmt::Display for Weekday {
    /// Its English name in small letters, as in a quota's text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES[*self as usize].0)
    }
}

impl Period {
    /// How long it is at most, but for changes of the clock, in days.
    pub(super) const fn days(self) -> u64 {
        match self {
            Self::Day => 1,
            Self::Week(_) => 7,
            Self::Month(_) => 31,
            Self::Year(..) => 366,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Day => "day",
            Self::Week(_) => "week",
            Self::Month(_) => "month",
            Self::Year(..) => "year",
        }
    }

    /// Whether they differ in their first day at most.
    pub(super) const fn is_like(self, other: Self) -> bool {
        matches!(
            (self, other),
            (Self::Day, Self::Day)
                | (Self::Week(_), Self::Week(_))
                | (Self::Month(_), Self::Month(_))
                | (Self::Year(..), Self::Year(..))
        )
    }

    /// Itself, if there are such first days.
    pub(super) const fn checked(self) -> Result<Self, QuotaError> {
        let exists = match self {
            Self::Day | Self::Week(_) => true,
            Self::Month(day) => 1 <= day && day <= 31,
            Self::Year(month, day) => {
                1 <= month && month <= 12 && 1 <= day && day as i64 <= days_of(2_000, month as i64)
            }
        };
        if exists { Ok(self) } else { Err(QuotaError::FirstDay) }
    }

    /// Which of [`Recent::KINDS`] it is.
    const fn kind(self) -> usize {
        let kind = match self {
            Self::Day => 0,
            Self::Week(first) => 1 + first as usize,
            Self::Month(day) => 7 + day as usize,
            Self::Year(month, day) => 38 + (month as usize - 1) * 31 + day as usize,
        };
        debug_assert!(kind < Recent::KINDS);
        kind
    }

    /// The first day of the nth one since 1970, in days since the epoch.
    fn first_day(self, n: i64) -> i64 {
        match self {
            Self::Day => n,
            Self::Week(first) => 7 * n + MONDAY + first as i64,
            Self::Month(day) => {
                let (year, month) = (1_970 + n.div_euclid(12), n.rem_euclid(12) + 1);
                first_of_month(year, month) + i64::from(day).min(days_of(year, month)) - 1
            }
            Self::Year(month, day) => {
                let (year, month) = (1_970 + n, month.into());
                first_of_month(year, month) + i64::from(day).min(days_of(year, month)) - 1
            }
        }
    }

    /// The number of the one that a day is in.
    fn of(self, day: i64) -> i64 {
        let n = match self {
            Self::Day => return day,
            Self::Week(first) => return (day - MONDAY - first as i64).div_euclid(7),
            Self::Month(_) => {
                let (year, month) = month_of(day);
                (year - 1_970) * 12 + month - 1
            }
            Self::Year(..) => month_of(day).0 - 1_970,
        };
        if day < self.first_day(n) { n - 1 } else { n }
    }
}

/// How many days a month has.
const fn days_of(year: i64, month: i64) -> i64 {
    first_of_month(year + month / 12, month % 12 + 1) - first_of_month(year, month)
}

/// The first of a month, in days since the epoch.
const fn first_of_month(year: i64, month: i64) -> i64 {
    // Years from March on end with the day that is there in some of them only.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    // Months have 31, 30, 31, 30, 31 days from March and from August on.
    let before = (153 * month + 2) / 5;
    let leap = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // 719,468 days are between the first of March in the year 0 and the epoch.
    365 * year + leap + before - 719_468
}

/// Year and month of a day.
fn month_of(day: i64) -> (i64, i64) {
    // The mean year and month are right, or one too late or early.
    let mut year = 1_970 + (day * 400).div_euclid(146_097);
    while first_of_month(year, 1) > day {
        year -= 1;
    }
    while first_of_month(year + 1, 1) <= day {
        year += 1;
    }
    let mut month = ((day - first_of_month(year, 1)) / 31) + 1;
    if month < 12 && first_of_month(year, month + 1) <= day {
        month += 1;
    }
    (year, month)
}
