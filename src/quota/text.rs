//! Formats quotas as text, `"33/minute, 2000/hour"`.

use std::fmt;

use super::calendar::{Period, Weekday};
use super::set::{Plan, Quotas, UNLIMITED};
use super::{Anchor, MONDAY_MS, Quota, WEEK_MS};

/// Units, longest first, with the names that are parsed. A unit alone is printed by its first name,
/// several by its last.
pub(super) const UNITS: [(u64, &[&str]); 6] = [
    (WEEK_MS, &["week", "weeks", "w"]),
    (86_400_000, &["day", "days", "d"]),
    (3_600_000, &["hour", "hours", "h"]),
    (60_000, &["minute", "minutes", "min", "m"]),
    (1_000, &["second", "seconds", "sec", "s"]),
    (1, &["ms"]),
];

impl fmt::Display for Quota {
    /// Writes the form that is parsed: `60/minute`, `5/10s`, `60/hour from-first-request`, `100/day
    /// in Asia/Tokyo`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.rate().fmt(f)?;
        let aligned = if self.window == WEEK_MS { MONDAY_MS } else { 0 };
        match self.anchor {
            Anchor::Grid { offset } if offset == aligned => {}
            Anchor::Grid { offset } => write!(f, " starting-at={offset}ms")?,
            Anchor::Staggered => f.write_str(" staggered")?,
            Anchor::FirstRequest => f.write_str(" from-first-request")?,
            Anchor::Calendar(calendar) => {
                match calendar.period {
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

impl Quota {
    /// Returns the text of limit and window only, for clients.
    pub(crate) fn rate(&self) -> impl fmt::Display + use<> {
        Rate(*self)
    }
}

struct Rate(Quota);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Quota { limit, window, anchor, .. } = self.0;
        if let Anchor::Calendar(calendar) = anchor {
            return write!(f, "{limit}/{}", calendar.period.name());
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
