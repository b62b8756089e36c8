//! Quotas as text, `"33/minute, 2000/hour"`: parsed, and written.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::calendar::{Period, Weekday};
use super::zone::Zone;
use super::{Anchor, MONDAY_MS, Plan, Quota, QuotaError, Quotas, WEEK_MS};

/// Units, longest first, with the names that are parsed. A unit alone is printed by its first name,
/// several by its last.
const UNITS: [(u64, &[&str]); 6] = [
    (WEEK_MS, &["week", "weeks", "w"]),
    (86_400_000, &["day", "days", "d"]),
    (3_600_000, &["hour", "hours", "h"]),
    (60_000, &["minute", "minutes", "min", "m"]),
    (1_000, &["second", "seconds", "sec", "s"]),
    (1, &["ms"]),
];

const UNLIMITED: &str = "unlimited";

impl FromStr for Quota {
    type Err = ParseQuotaError;

    /// Parses `limit/window` or `limit per window`. The limit may have underscores, `1_000`. The
    /// window is a unit (`minute`, `month`) or a number of units (`10s`, `10 seconds`; not of
    /// months or years). Options follow, each for the method of that name: `staggered`,
    /// `from-first-request`, `starting-at=6h`, `rollover-up-to=150`, `reserve-up-to=20`. The first
    /// three exclude each other, and no option may occur twice. Instead of these three, a day, a
    /// week, a month or a year can have a first day, `from sunday`, `from day 15` (of the month) or
    /// `from 04-06` (6 April), and a time zone, `in Asia/Tokyo`, which needs the feature
    /// `time-zones`.
    ///
    /// ```
    /// use tower_fixed_window::Quota;
    ///
    /// assert_eq!("100/hour".parse(), Ok(Quota::per_hour(100)));
    /// assert_eq!("1_000 per hour".parse(), Ok(Quota::per_hour(1_000)));
    /// assert_eq!("60/h from-first-request".parse(), Ok(Quota::per_hour(60).from_first_request()));
    ///
    /// let error = "100/fortnight".parse::<Quota>().unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "\"100/fortnight\", column 5: expected a unit: ms, s, minute, hour, day, week, month or year",
    /// );
    /// ```
    fn from_str(text: &str) -> Result<Self, ParseQuotaError> {
        Parser { text, at: 0 }.parse_all(Parser::quota)
    }
}

impl FromStr for Quotas {
    type Err = ParseQuotaError;

    /// Parses quotas separated by commas.
    fn from_str(text: &str) -> Result<Self, ParseQuotaError> {
        Parser { text, at: 0 }.parse_all(Parser::quotas)
    }
}

impl FromStr for Plan {
    type Err = ParseQuotaError;

    /// Parses quotas separated by commas, or `unlimited`.
    fn from_str(text: &str) -> Result<Self, ParseQuotaError> {
        Parser { text, at: 0 }
            .parse_all(|p| Ok(if p.eat(UNLIMITED) { Self::UNLIMITED } else { p.quotas()?.into() }))
    }
}

#[cfg(feature = "serde")]
pub(super) fn windows(limit: u64, text: &str) -> Result<Quota, ParseQuotaError> {
    Parser { text, at: 0 }.parse_all(|p| p.windows(limit, 0))
}

/// Why a text is not a quota: what was expected, and at which column, as in the example of
/// [`Quota::from_str`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseQuotaError {
    text: String,
    at: usize,
    message: String,
}

impl fmt::Display for ParseQuotaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The shown text is bounded, since it may be a whole file by mistake.
        let shown: String = self.text.chars().take(80).collect();
        let column = self.text[..self.at].chars().count() + 1;
        write!(f, "{shown:?}, column {column}: {}", self.message)
    }
}

impl std::error::Error for ParseQuotaError {}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

type Parsed<T> = Result<T, ParseQuotaError>;

/// The options that may follow a rate. The first three choose where windows begin.
const OPTIONS: [&str; 7] = [
    "staggered",
    "from-first-request",
    "starting-at=",
    "rollover-up-to=",
    "reserve-up-to=",
    "from",
    "in",
];
const STARTING_AT: usize = 2;
const FROM: usize = 5;
const IN: usize = 6;
/// The messages for options that occur twice: the first is for the three that choose where windows
/// begin.
const ONCE: [&str; 5] = [
    "windows begin in one way: keep one of staggered, from-first-request, starting-at=",
    "rollover-up-to= is here twice: keep one",
    "reserve-up-to= is here twice: keep one",
    "windows begin on one day: keep one of the two after \"from\"",
    "a calendar has one time zone: keep one of the two after \"in\"",
];
const UNLIMITED_QUOTA: &str = "a quota is always a limit: read \"unlimited\" as a Plan";
const A_UNIT: &str = "a unit: ms, s, minute, hour, day or week";
const A_NUMBER: &str = "a whole number of at most 2^53 - 1";

impl<'a> Parser<'a> {
    fn parse_all<T>(mut self, parse: impl FnOnce(&mut Self) -> Parsed<T>) -> Parsed<T> {
        self.skip_space();
        let value = parse(&mut self)?;
        if self.at == self.text.len() {
            return Ok(value);
        }
        self.expected("a comma, the end, or one of staggered, from-first-request, starting-at=, rollover-up-to=, reserve-up-to=, from, in")
    }

    fn quotas(&mut self) -> Parsed<Quotas> {
        let mut quotas = Quotas::from(self.quota()?);
        while self.eat(",") {
            self.skip_space();
            let at = self.at;
            let quota = self.quota()?;
            quotas = quotas.try_and(quota).map_err(|error| self.error(at, error))?;
        }
        Ok(quotas)
    }

    fn quota(&mut self) -> Parsed<Quota> {
        let start = self.at;
        if self.eat(UNLIMITED) {
            return Err(self.error(start, UNLIMITED_QUOTA));
        }
        let limit = self.number("a limit: a whole number, as in 100/hour")?;
        self.skip_space();
        let is_rate =
            self.eat("/") || self.eat("per") && self.rest().starts_with(char::is_whitespace);
        if !is_rate {
            return self.expected("a slash and a window, as in 100/hour");
        }
        self.skip_space();
        self.windows(limit, start)
    }

    fn windows(&mut self, limit: u64, start: usize) -> Parsed<Quota> {
        let at = self.at;
        let (window, period) = match self.period() {
            Some(period) => (Duration::from_secs(86_400), Some(period)),
            None => (self.span("a unit: ms, s, minute, hour, day, week, month or year")?, None),
        };
        let mut quota = Quota::try_new(limit, window).map_err(|error| {
            let limit = error == QuotaError::LimitTooLarge;
            self.error(if limit { start } else { at }, error)
        })?;
        if let Some(period) = period {
            quota = quota.on_calendar(period, Zone::UTC);
        }
        let mut seen = [false; ONCE.len()];
        loop {
            let end = self.at;
            self.skip_space();
            let at = self.at;
            let Some((option, _)) = (0..).zip(OPTIONS).find(|(_, option)| self.eat(option)) else {
                return Ok(quota);
            };
            if at == end {
                return Err(self.error(at, "expected a space"));
            }
            let slot = usize::saturating_sub(option, STARTING_AT);
            if std::mem::replace(&mut seen[slot], true) {
                return Err(self.error(at, ONCE[slot]));
            }
            let fixed = match option {
                FROM => seen[0],
                STARTING_AT => seen[FROM - STARTING_AT] || seen[IN - STARTING_AT],
                _ => option < STARTING_AT && matches!(quota.anchor, Anchor::Calendar(_)),
            };
            if fixed {
                return Err(self.error(at, QuotaError::CalendarAnchor));
            }
            match option {
                0 => quota = quota.staggered(),
                1 => quota = quota.from_first_request(),
                STARTING_AT => quota = quota.starting_at(self.span(A_UNIT)?),
                3 => quota.capacity = self.number(A_NUMBER)?,
                4 => quota.max_reserved = self.number(A_NUMBER)?,
                _ => {
                    let end = self.at;
                    self.skip_space();
                    let value = self.at;
                    if value == end {
                        return self.expected("a space");
                    }
                    let on_calendar = match option {
                        FROM => quota.starting_on(self.first_day()?),
                        _ => quota.in_named_zone(self.zone()?),
                    };
                    quota = on_calendar.map_err(|error| match error {
                        QuotaError::NotACalendar | QuotaError::CalendarAnchor => {
                            self.error(at, error)
                        }
                        error => self.error(value, error),
                    })?;
                }
            }
            let sum = quota.capacity.saturating_add(quota.max_reserved);
            if quota.capacity < quota.limit || sum > Quota::MAX_TOKENS {
                return Err(self.error(at, QuotaError::Capacity));
            }
        }
    }

    /// Parses `sunday`, `day 15` or `04-06`.
    fn first_day(&mut self) -> Parsed<Period> {
        // A larger number becomes 255, which is no day either.
        let day = |number| u8::try_from(number).unwrap_or(u8::MAX);
        if let Some((_, first)) = Weekday::NAMES.into_iter().find(|(name, _)| self.eat(name)) {
            return Ok(Period::Week(first));
        }
        if self.eat("day") {
            self.skip_space();
            return Ok(Period::Month(day(self.number("a day of the month, as in day 15")?)));
        }
        let month = self.number("a weekday, day 15, or 04-06 for 6 April")?;
        if !self.eat("-") {
            return self.expected("a month and a day, as in 04-06 for 6 April");
        }
        Ok(Period::Year(day(month), day(self.number("a day of the month")?)))
    }

    fn zone(&mut self) -> Parsed<&'a str> {
        let rest = self.rest();
        let name = rest.find(|c: char| c.is_whitespace() || c == ',').unwrap_or(rest.len());
        if name == 0 {
            return self.expected("a time zone, as in Europe/Berlin");
        }
        self.at += name;
        Ok(&rest[..name])
    }

    fn period(&mut self) -> Option<Period> {
        let rest = self.rest();
        let word = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let mut periods = [Period::Month(1), Period::Year(1, 1)].into_iter();
        let period = periods.find(|period| period.name() == &rest[..word])?;
        self.at += word;
        Some(period)
    }

    /// Parses `minute`, `10s` or `10 seconds`.
    fn span(&mut self, expected: &'static str) -> Parsed<Duration> {
        let start = self.at;
        let counted = self.rest().starts_with(|c: char| c.is_ascii_digit());
        let count = match counted {
            true => self.number(A_NUMBER)?,
            false => 1,
        };
        self.skip_space();
        let rest = self.rest();
        let word = rest.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(rest.len());
        let unit = UNITS.into_iter().find(|(_, names)| names.contains(&&rest[..word]));
        let Some((unit, _)) = unit else {
            return self.expected(if counted { A_UNIT } else { expected });
        };
        self.at += word;
        let millis =
            count.checked_mul(unit).ok_or_else(|| self.error(start, QuotaError::WindowTooLong))?;
        Ok(Duration::from_millis(millis))
    }

    fn number(&mut self, what: &'static str) -> Parsed<u64> {
        let rest = self.rest();
        if !rest.starts_with(|c: char| c.is_ascii_digit()) {
            return self.expected(what);
        }
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(rest.len());
        let digits = &rest[..end];
        let last = digits.trim_end_matches('_').len();
        if let Some(gap) = digits.find("__").or((last < end).then_some(last)) {
            return Err(self.error(self.at + gap, "digits stand around each _"));
        }
        let Ok(number) = digits.replace('_', "").parse() else { return self.expected(A_NUMBER) };
        self.at += end;
        Ok(number)
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn skip_space(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start().len();
    }

    fn expected<T>(&self, what: &'static str) -> Parsed<T> {
        Err(self.error(self.at, format!("expected {what}")))
    }

    fn error(&self, at: usize, message: impl ToString) -> ParseQuotaError {
        ParseQuotaError { text: self.text.to_owned(), at, message: message.to_string() }
    }
}

impl fmt::Display for Quota {
    /// Writes the form that is parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Rate { limit: self.limit, window: self.window, period: self.period() }.fmt(f)?;
        let aligned = if self.window == WEEK_MS { MONDAY_MS } else { 0 };
        match self.anchor {
            Anchor::Grid { offset } if offset == aligned => {}
            Anchor::Grid { offset } => write!(f, " starting-at={offset}ms")?,
            Anchor::Staggered => f.write_str(" staggered")?,
            Anchor::FirstRequest => f.write_str(" from-first-request")?,
            Anchor::Calendar(calendar) => {
                match calendar.period {
                    _ if calendar.time > 0 => write!(f, " starting-at={}ms", self.since.0)?,
                    Period::Day | Period::Week(Weekday::Monday) => {}
                    Period::Month(1) | Period::Year(1, 1) => {}
                    Period::Week(first) => write!(f, " from {first}")?,
                    Period::Month(first) => write!(f, " from day {first}")?,
                    Period::Year(month, day) => write!(f, " from {month:02}-{day:02}")?,
                }
                if !calendar.zone.is_utc() {
                    write!(f, " in {}", calendar.zone.name())?;
                }
            }
        }
        if self.capacity != self.limit {
            write!(f, " rollover-up-to={}", self.capacity)?;
        }
        if self.max_reserved != 0 {
            write!(f, " reserve-up-to={}", self.max_reserved)?;
        }
        Ok(())
    }
}

/// Limit and window only, for clients.
pub(crate) struct Rate {
    pub(crate) limit: u64,
    /// Milliseconds.
    pub(crate) window: u64,
    /// [`Quota::period`]
    pub(crate) period: usize,
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, window, period } = *self;
        if period > 0 {
            return write!(f, "{limit}/{}", Period::NAMES[period - 1]);
        }
        let (unit, names) = UNITS
            .into_iter()
            .find(|(unit, _)| window % unit == 0)
            .expect("every window is whole milliseconds");
        match window / unit {
            1 => write!(f, "{limit}/{}", names[0]),
            n => write!(f, "{limit}/{n}{}", names[names.len() - 1]),
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.quotas() {
            Some(quotas) => quotas.fmt(f),
            None => f.write_str(UNLIMITED),
        }
    }
}

impl fmt::Display for Quotas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, quota) in self.iter().enumerate() {
            write!(f, "{}{quota}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
