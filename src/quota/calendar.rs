//! Windows of a calendar (S35): days, weeks, months and years of a time zone, from a first day on.
//! Their lengths differ, so windows have numbers.

use std::fmt;
#[cfg(feature = "saved")]
use std::ops::RangeInclusive;

use super::FIRST_DAY;
use super::zone::Zone;

const DAY: i64 = super::DAY_MS as i64;
/// The last instant (S11).
const MAX: i64 = super::Quota::MAX_TOKENS as i64;
/// 9999-12-31, the last day that windows begin on, in days since the epoch.
const LAST_DAY: i64 = 2_932_896;
/// How far a boundary may be from where another edition of the zone data has it: 6 hours.
const MOST_MOVED: i64 = 6 * 3_600_000;
/// The first Monday, in days since the epoch, a Thursday.
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

/// The windows of a quota on a calendar, numbered in order without gaps, as in the example of
/// [`Windows`](crate::store::Windows).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Calendar {
    pub(super) period: Period,
    /// Windows begin on the day and at the time that the zone's clock shows at this instant; -1: on
    /// the period's first day. It identifies counters, since zone data may change what is shown.
    pub(super) since: i64,
    pub(super) zone: Zone,
}

/// A [`Calendar`] by the zone data of this process.
#[derive(Clone, Copy)]
struct Days {
    period: Period,
    /// The time of day at which windows begin, in milliseconds.
    time: i64,
    /// The period that has the number 0: that of the instant, whose number is then the same by each
    /// edition of the zone data.
    first: i64,
    zone: Zone,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Period {
    Day,
    Week(Weekday),
    /// From this day, or from the last day of a shorter month.
    Month(u8),
    /// From this month and day, or from the last day of the month if it is shorter.
    Year(u8, u8),
}

/// A window: `[start, end)`, in milliseconds since the epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Span {
    pub(crate) start: i64,
    pub(crate) end: i64,
}

impl Calendar {
    /// In UTC.
    pub(super) const fn new(period: Period) -> Self {
        Self { period, since: -1, zone: Zone::UTC }
    }

    fn days(self) -> Days {
        let Self { period, since, zone } = self;
        if since < 0 {
            return Days { period, time: 0, first: 0, zone };
        }
        let clock = zone.clock_at(since);
        let (day, time) = (clock.div_euclid(DAY), clock.rem_euclid(DAY));
        let period = period.starting_on(day);
        Days { period, time, first: period.number_at(day), zone }
    }

    /// Never inlined, so that grids need no stack for it.
    #[inline(never)]
    pub(crate) fn around(self, at: i64) -> Span {
        if self.since >= 0 {
            return self.find_window(at);
        }
        let (start, end) = self.zone.recent().get(self.period.index());
        if start <= at && at < end { Span { start, end } } else { self.find_window(at) }
    }

    #[cold]
    fn find_window(self, at: i64) -> Span {
        let days = self.days();
        let period = days.period_at(at);
        let (start, end) = (days.period_start(period), days.period_start(period + 1));
        // Those from an instant are as many as there are subscriptions.
        if self.since < 0 {
            self.zone.recent().set(self.period.index(), start, end);
        }
        Span { start, end }
    }

    /// Returns the number of the window around an instant, in milliseconds since the epoch: see
    /// [`Windows`](crate::store::Windows).
    pub fn number(self, at: i64) -> i64 {
        let days = self.days();
        let period = days.period_at(at);
        let skipped = days.skipped_periods().partition_point(|skipped| *skipped < period);
        period - days.first - skipped as i64
    }

    /// Returns when the window with this [number](Self::number) begins, in milliseconds since the
    /// epoch. After the year 9999, it returns the last instant.
    pub fn start_of(self, number: i64) -> i64 {
        let days = self.days();
        let mut period = number.clamp(-MAX, MAX) + days.first;
        for skipped in days.skipped_periods() {
            period += i64::from(*skipped <= period);
        }
        days.period_start(period)
    }

    /// The number of a window that begins at an instant, even by another edition of the zone data.
    pub(crate) fn number_from(self, start: i64) -> i64 {
        self.beginning_at(start).unwrap_or_else(|| self.number(start.saturating_add(self.apart())))
    }

    /// From a boundary on. A part of a window before `to` counts as one.
    pub(crate) fn windows_until(self, from: i64, to: i64) -> i64 {
        let end = self.beginning_at(to);
        let end = end.unwrap_or_else(|| self.number(to.saturating_sub(self.apart())) + 1);
        end - self.number_from(from)
    }

    /// How far apart two editions may have a boundary. If an instant is on 28 February by one, and on
    /// 1 March by the other, the windows from it are three days apart in longer months.
    fn apart(self) -> i64 {
        MOST_MOVED + (self.period.max_days() as i64 / 10).min(3) * DAY
    }

    /// Exactly, since a window can be shorter than a boundary moves: where a zone skipped a day.
    fn beginning_at(self, start: i64) -> Option<i64> {
        let number = self.number(start);
        (self.start_of(number) == start).then_some(number)
    }

    /// The end of a window with a state until then, if its boundaries are those of another edition,
    /// and the state lasts no longer than the window.
    pub(crate) fn only_end(self, start: i64, until: i64) -> Option<i64> {
        let most = self.period.max_days() as i64 * DAY + MOST_MOVED + self.apart();
        let is_ours = || self.beginning_at(start).is_some() && self.beginning_at(until).is_some();
        let is_theirs = until.saturating_sub(start) <= most
            && !is_ours()
            && self.windows_until(start, until) == 1;
        is_theirs.then_some(until)
    }

    pub(crate) fn after(self, start: i64, n: i64) -> i64 {
        self.start_of(self.number_from(start).saturating_add(n))
    }

    /// The first number is above all windows' lengths.
    pub(super) const fn identity(self) -> (u64, u64) {
        let period = self.zone.id() << 16 | self.period.index() as u64;
        (1 << 63 | period, (self.since + 1) as u64)
    }
}

impl Days {
    fn skipped_periods(self) -> &'static [i64] {
        // Only days from midnight on can be skipped: no zone has left out more than that.
        let from_midnight = self.period == Period::Day && self.time == 0;
        if from_midnight { self.zone.skipped_days() } else { &[] }
    }

    /// Counted from 1970, skipped ones included.
    fn period_at(self, at: i64) -> i64 {
        let at = at.clamp(-MAX, MAX - 1);
        let day = (self.zone.clock_at(at) - self.time).div_euclid(DAY).min(LAST_DAY);
        let mut period = self.period.number_at(day);
        // If the clock is set back over midnight, the day that has begun goes on. A skipped period
        // is never found, since it ends where it begins.
        while self.period_start(period + 1) <= at {
            period += 1;
        }
        while self.period_start(period) > at {
            period -= 1;
        }
        period
    }

    fn period_start(self, period: i64) -> i64 {
        match self.period.first_day(period) {
            day if day > LAST_DAY => MAX,
            // Before all windows of an instant: a foreign count may have any number.
            day => self.zone.first_instant(day.max(-MAX / DAY - 1_000) * DAY + self.time),
        }
    }
}

/// Windows of a file, which this process' edition of the zone data has otherwise.
#[derive(Default)]
pub(crate) struct SavedWindows(Vec<(Calendar, Span)>);

impl SavedWindows {
    pub(crate) fn end_of(&self, calendar: Calendar, start: i64) -> Option<i64> {
        let windows = self.0.iter().filter(|(of, _)| *of == calendar).map(|(_, window)| window);
        if let Some(window) = windows.clone().find(|window| window.start == start) {
            return Some(window.end);
        }
        // Behind one that ends early, the next one begins before a boundary, and lasts until the one
        // after.
        let before = windows.clone().find(|window| window.end == start)?;
        let is_early = calendar.number(start) == calendar.number_from(before.start);
        is_early.then(|| calendar.after(before.start, 2))
    }

    /// From now on this window ends as the file has it (S35).
    #[cfg(feature = "saved")]
    pub(crate) fn add(&mut self, calendar: Calendar, window: Span) {
        if calendar.around(window.start) != window {
            self.0.push((calendar, window));
        }
    }

    /// The windows around the instants of a range as they end, up to twenty years from now: a clock
    /// that was wrong for a moment may have counted in any year.
    #[cfg(feature = "saved")]
    pub(crate) fn all(
        &self,
        calendar: Calendar,
        range: RangeInclusive<i64>,
        now: i64,
    ) -> Vec<Span> {
        const MOST: i64 = 20 * 366 * DAY;

        let first = *range.start().max(&(now - MOST));
        let last = *range.end().min(&(now + MOST));
        let saved = self.0.iter().filter(|(of, window)| *of == calendar && first <= window.end);
        let mut windows: Vec<_> = saved.map(|(_, window)| *window).collect();
        let mut at = first;
        while at <= last {
            let window = calendar.around(at);
            if windows.iter().all(|of| of.start != window.start) {
                windows.push(window);
            }
            at = window.end;
        }
        windows
    }
}

impl fmt::Display for Calendar {
    /// Writes the text that identifies the counters: `month+15@America/New_York`, and from an instant
    /// `month+1738332309000ms@America/New_York`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.period.name())?;
        match self.period {
            _ if self.since >= 0 => write!(f, "+{}ms", self.since)?,
            Period::Day => {}
            Period::Week(first) => write!(f, "+{first}")?,
            Period::Month(first) => write!(f, "+{first}")?,
            Period::Year(month, day) => write!(f, "+{month:02}-{day:02}")?,
        }
        write!(f, "@{}", self.zone.name())
    }
}

impl fmt::Display for Weekday {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES[*self as usize].0)
    }
}

impl Period {
    pub(super) const fn max_days(self) -> u64 {
        match self {
            Self::Day => 1,
            Self::Week(_) => 7,
            Self::Month(_) => 31,
            Self::Year(..) => 366,
        }
    }

    pub(super) const NAMES: [&'static str; 4] = ["day", "week", "month", "year"];

    /// The position of its name.
    pub(super) const fn kind(self) -> usize {
        match self {
            Self::Day => 0,
            Self::Week(_) => 1,
            Self::Month(_) => 2,
            Self::Year(..) => 3,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        Self::NAMES[self.kind()]
    }

    /// The first day of weeks, months and years unless another one is chosen.
    pub(super) const fn is_usual(self) -> bool {
        matches!(self, Self::Day | Self::Week(Weekday::Monday) | Self::Month(1) | Self::Year(1, 1))
    }

    pub(super) const fn validated(self) -> Result<Self, &'static str> {
        let exists = match self {
            Self::Day | Self::Week(_) => true,
            Self::Month(day) => 1 <= day && day <= 31,
            Self::Year(month, day) => {
                // A leap year.
                let longest = days_in_month(12 * 30 + month as i64 - 1);
                1 <= month && month <= 12 && 1 <= day && day as i64 <= longest
            }
        };
        if exists { Ok(self) } else { Err(FIRST_DAY) }
    }

    /// The same period from another day on.
    fn starting_on(self, day: i64) -> Self {
        let month = Self::Month(1).number_at(day);
        let of_month = (day - first_of_month(month) + 1) as u8;
        match self {
            Self::Day => self,
            Self::Week(_) => Self::Week(Weekday::NAMES[(day - MONDAY).rem_euclid(7) as usize].1),
            Self::Month(_) => Self::Month(of_month),
            Self::Year(..) => Self::Year(month.rem_euclid(12) as u8 + 1, of_month),
        }
    }

    const fn index(self) -> usize {
        match self {
            Self::Day => 0,
            Self::Week(first) => 1 + first as usize,
            Self::Month(day) => 7 + day as usize,
            Self::Year(month, day) => 38 + (month as usize - 1) * 31 + day as usize,
        }
    }

    /// Periods are counted from 1970, days from the epoch.
    fn first_day(self, n: i64) -> i64 {
        let (month, day) = match self {
            Self::Day => return n,
            Self::Week(first) => return 7 * n + MONDAY + first as i64,
            Self::Month(day) => (n, day),
            Self::Year(month, day) => (12 * n + i64::from(month) - 1, day),
        };
        first_of_month(month) + i64::from(day).min(days_in_month(month)) - 1
    }

    fn number_at(self, day: i64) -> i64 {
        // By the mean length, and then corrected. 400 years have 146,097 days.
        let mut n = match self {
            Self::Day => return day,
            Self::Week(_) => day.div_euclid(7),
            Self::Month(_) => (day * 4_800).div_euclid(146_097),
            Self::Year(..) => (day * 400).div_euclid(146_097),
        };
        while self.first_day(n) > day {
            n -= 1;
        }
        while self.first_day(n + 1) <= day {
            n += 1;
        }
        n
    }
}

/// Months are counted from January 1970.
const fn days_in_month(month: i64) -> i64 {
    first_of_month(month + 1) - first_of_month(month)
}

/// In days since the epoch.
const fn first_of_month(month: i64) -> i64 {
    // Counted from March, so that the leap day is the last day of a year.
    let (year, month) = (1_970 + (month - 2).div_euclid(12), (month - 2).rem_euclid(12));
    // From March and from August on, months have 31, 30, 31, 30, 31 days.
    let before = (153 * month + 2) / 5;
    let leap = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // 719,468 days are between the first of March in the year 0 and the epoch.
    365 * year + leap + before - 719_468
}
