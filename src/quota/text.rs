//! Quotas as text, `"33/minute, 2000/hour"`: parsed, and written.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::calendar::{Calendar, Period, Weekday};
use super::{
    Anchor, CALENDAR_ANCHOR, CAPACITY, DAY_MS, LIMIT_TOO_LARGE, MONDAY_MS, NOT_A_CALENDAR, Plan,
    Quota, Quotas, WEEK_MS, WINDOW_TOO_LONG,
};

/// Units, longest first, with the names that are parsed. A unit alone is printed by its first name,
/// several by its last.
const UNITS: [(u64, &[&str]); 6] = [
    (WEEK_MS, &["week", "weeks", "w"]),
    (DAY_MS, &["day", "days", "d"]),
    (3_600_000, &["hour", "hours", "h"]),
    (60_000, &["minute", "minutes", "min", "m"]),
    (1_000, &["second", "seconds", "sec", "s"]),
    (1, &["ms"]),
];

const UNLIMITED: &str = "unlimited";

impl FromStr for Quota {
    type Err = ParseQuotaError;

    /// Parses `limit/window` or `limit per window`. The limit may contain underscores, `1_000`. The
    /// window is a unit (`minute`, `month`) or a number of units (`10s`, `10 seconds`; not of
    /// months or years).
    ///
    /// Options may follow, each named after a method: `staggered`, `from-first-request`,
    /// `starting-at=6h`, `rollover-up-to=150`, `reserve-up-to=20`. The first three exclude each
    /// other, and no option may occur twice. Instead of these three, a week, a month or a year can
    /// have a first day: `from sunday`, `from day 15` (of the month) or `from 04-06` (6 April). A
    /// day, a week, a month or a year can have a time zone, `in Asia/Tokyo` (feature `time-zones`),
    /// which follows `starting-at`.
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
        Words { text, rest: text }.quota()
    }
}

impl FromStr for Quotas {
    type Err = ParseQuotaError;

    /// Parses quotas separated by commas.
    fn from_str(text: &str) -> Result<Self, ParseQuotaError> {
        let mut quotas = None::<Self>;
        for rest in text.split(',') {
            let mut words = Words { text, rest };
            let quota = words.quota()?;
            quotas = Some(match quotas {
                None => quota.into(),
                Some(quotas) => {
                    quotas.try_and(quota).map_err(|error| words.error(rest.trim_start(), error))?
                }
            });
        }
        Ok(quotas.expect("a text has a part"))
    }
}

impl FromStr for Plan {
    type Err = ParseQuotaError;

    /// Parses quotas separated by commas, or `unlimited`.
    fn from_str(text: &str) -> Result<Self, ParseQuotaError> {
        let is_unlimited = text.trim() == UNLIMITED;
        Ok(if is_unlimited { Self::UNLIMITED } else { text.parse::<Quotas>()?.into() })
    }
}

/// The error for text that is not a quota: what was expected, and at which column, as in the
/// example of [`Quota::from_str`].
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

type Parsed<T> = Result<T, ParseQuotaError>;

const BEGINNINGS: [&str; 3] = ["staggered", "from-first-request", "starting-at="];
const A_BEGINNING: &str = "one of staggered, from-first-request, starting-at=";
const AN_OPTION: &str = "a comma, the end, or one of staggered, from-first-request, starting-at=, rollover-up-to=, reserve-up-to=, from, in";
const A_NUMBER: &str = "a whole number of at most 2^53 - 1";

/// The words of a quota, and the text that they are parts of, for the column of an error.
struct Words<'a> {
    text: &'a str,
    rest: &'a str,
}

impl<'a> Words<'a> {
    /// The next word: empty at the end.
    fn next(&mut self) -> &'a str {
        let rest = self.rest.trim_start();
        let (word, rest) = rest.split_at(rest.find(char::is_whitespace).unwrap_or(rest.len()));
        self.rest = rest;
        word
    }

    fn quota(&mut self) -> Parsed<Quota> {
        let rest = self.rest.trim_start();
        let ends = |c: char| c == '/' || c.is_whitespace();
        let (limited, rest) = rest.split_at(rest.find(ends).unwrap_or(rest.len()));
        if limited == UNLIMITED {
            let message = "a quota is always a limit: read \"unlimited\" as a Plan";
            return Err(self.error(limited, message));
        }
        let limit = self.number(limited, "a limit: a whole number, as in 100/hour")?;
        let rest = rest.trim_start();
        let per = rest.strip_prefix("per").filter(|rest| rest.starts_with(char::is_whitespace));
        self.rest = rest
            .strip_prefix('/')
            .or(per)
            .ok_or_else(|| self.expected(rest, "a slash and a window, as in 100/hour"))?;

        let first = self.next();
        let mut periods = [Period::Month(1), Period::Year(1, 1)].into_iter();
        let period = periods.find(|period| period.name() == first);
        let window = match period {
            Some(_) => Duration::from_millis(DAY_MS),
            None => self.span(first, ", day, week, month or year")?,
        };
        let mut quota = Quota::try_new(limit, window).map_err(|error| {
            let is_limit = error == LIMIT_TOO_LARGE;
            self.error(if is_limit { limited } else { first }, error)
        })?;
        if let Some(period) = period {
            quota = quota.on_calendar(Calendar::new(period));
        }
        self.with_options(quota)
    }

    fn with_options(&mut self, mut quota: Quota) -> Parsed<Quota> {
        let mut seen = Vec::new();
        loop {
            let word = self.next();
            let (option, value) = word.split_at(word.find('=').map_or(word.len(), |at| at + 1));
            let kind = if BEGINNINGS.contains(&option) { A_BEGINNING } else { option };
            if seen.contains(&kind) {
                return Err(self.error(word, format!("{kind} is here already: keep one")));
            }
            seen.push(kind);
            let value = if ["from", "in"].contains(&option) { self.next() } else { value };
            let changed = match option {
                "" => return Ok(quota),
                "staggered" => quota.anchored(Anchor::Staggered),
                "from-first-request" => quota.anchored(Anchor::FirstRequest),
                // Even with the day or the zone that is the default.
                "starting-at=" if seen.contains(&"from") || seen.contains(&"in") => {
                    Err(CALENDAR_ANCHOR)
                }
                "starting-at=" => quota.since(self.span(value, ", day or week")?),
                "rollover-up-to=" => {
                    quota.with_room(self.number(value, A_NUMBER)?, quota.max_reserved)
                }
                "reserve-up-to=" => quota.with_room(quota.capacity, self.number(value, A_NUMBER)?),
                "from" => quota.starting_on(self.first_day(value)?),
                "in" if value.is_empty() => {
                    return Err(self.expected(value, "a time zone, as in Europe/Berlin"));
                }
                "in" => quota.in_named_zone(value),
                _ => return Err(self.expected(word, AN_OPTION)),
            };
            quota = changed.map_err(|error| {
                let is_of_word = [NOT_A_CALENDAR, CALENDAR_ANCHOR, CAPACITY].contains(&error);
                self.error(if is_of_word { word } else { value }, error)
            })?;
        }
    }

    /// Parses `sunday`, `day 15` or `04-06`.
    fn first_day(&mut self, word: &'a str) -> Parsed<Period> {
        // A larger number becomes 255, which is no day either.
        let day = |number| u8::try_from(number).unwrap_or(u8::MAX);
        if let Some((_, first)) = Weekday::NAMES.into_iter().find(|(name, _)| *name == word) {
            return Ok(Period::Week(first));
        }
        if word == "day" {
            let first = self.next();
            return Ok(Period::Month(day(self.number(first, "a day of the month, as in day 15")?)));
        }
        let what = "a weekday, day 15, or 04-06 for 6 April";
        let (month, first) = word.split_once('-').ok_or_else(|| self.expected(word, what))?;
        let month = day(self.number(month, what)?);
        Ok(Period::Year(month, day(self.number(first, "a day of the month")?)))
    }

    /// Parses `minute`, `10s` or `10 seconds`.
    fn span(&mut self, word: &'a str, more_units: &str) -> Parsed<Duration> {
        let digits = word.find(|c: char| !c.is_ascii_digit() && c != '_').unwrap_or(word.len());
        let (count, mut unit) = word.split_at(digits);
        let more_units = if count.is_empty() { more_units } else { ", day or week" };
        let count = if count.is_empty() { 1 } else { self.number(count, A_NUMBER)? };
        if unit.is_empty() {
            unit = self.next();
        }
        let known = UNITS.into_iter().find(|(_, names)| names.contains(&unit));
        let (millis, _) = known.ok_or_else(|| {
            self.expected(unit, &format!("a unit: ms, s, minute, hour{more_units}"))
        })?;
        let millis = count.checked_mul(millis).map(Duration::from_millis);
        millis.ok_or_else(|| self.error(word, WINDOW_TOO_LONG))
    }

    /// Parses digits, perhaps with `_` between them.
    fn number(&self, word: &str, what: &str) -> Parsed<u64> {
        let is_digits = |of: &str| !of.is_empty() && of.bytes().all(|b| b.is_ascii_digit());
        if !word.split('_').all(is_digits) {
            return Err(self.expected(word, what));
        }
        word.replace('_', "").parse().map_err(|_| self.expected(word, A_NUMBER))
    }

    fn expected(&self, word: &str, what: &str) -> ParseQuotaError {
        self.error(word, format!("expected {what}"))
    }

    fn error(&self, word: &str, message: impl ToString) -> ParseQuotaError {
        let at = word.as_ptr().addr() - self.text.as_ptr().addr();
        ParseQuotaError { text: self.text.to_owned(), at, message: message.to_string() }
    }
}

impl fmt::Display for Quota {
    /// Writes the form that is parsed.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&rate(self.limit, self.window, self.period()))?;
        let aligned = if self.window == WEEK_MS { MONDAY_MS } else { 0 };
        match self.anchor {
            Anchor::Grid { offset, .. } if offset == aligned => {}
            Anchor::Grid { offset, .. } => write!(f, " starting-at={offset}ms")?,
            Anchor::Staggered => f.write_str(" staggered")?,
            Anchor::FirstRequest => f.write_str(" from-first-request")?,
            Anchor::Calendar(calendar) => {
                match calendar.period {
                    _ if calendar.since >= 0 => write!(f, " starting-at={}ms", calendar.since)?,
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

/// Limit and window only, for clients. `period` as [`Quota::period`] returns it.
pub(crate) fn rate(limit: u64, window_ms: u64, period: usize) -> String {
    if period > 0 {
        return format!("{limit}/{}", Period::NAMES[period - 1]);
    }
    let mut units = UNITS.into_iter();
    let (unit, names) = units
        .find(|(unit, _)| window_ms.is_multiple_of(*unit))
        .expect("every window is whole milliseconds");
    match window_ms / unit {
        1 => format!("{limit}/{}", names[0]),
        n => format!("{limit}/{n}{}", names[names.len() - 1]),
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

/// In configuration files.
#[cfg(feature = "serde")]
mod files {
    use std::marker::PhantomData;

    use serde::de::{Deserialize, Deserializer, Error, Visitor};
    use serde::ser::{Serialize, Serializer};

    use super::{FromStr, ParseQuotaError, Plan, Quota, Quotas, fmt};

    /// With what is expected, for errors.
    struct Text<T>(&'static str, PhantomData<T>);

    impl<T: FromStr<Err = ParseQuotaError>> Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }

        fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(E::custom)
        }
    }

    macro_rules! in_files {
        ($($t:ty, $expected:literal;)*) => {$(
            impl Serialize for $t {
                fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                    serializer.collect_str(self)
                }
            }

            impl<'de> Deserialize<'de> for $t {
                fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                    deserializer.deserialize_str(Text($expected, PhantomData))
                }
            }
        )*};
    }

    in_files! {
        Quota, "a quota such as \"100/hour\"";
        Quotas, "quotas such as \"100/hour\" or \"5/second, 100/hour\"";
        Plan, "\"unlimited\", or quotas such as \"100/hour\"";
    }
}
