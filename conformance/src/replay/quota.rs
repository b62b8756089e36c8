//! The quotas of traces.

use std::time::Duration;

use serde::Deserialize;

use tower_fixed_window::{Quota, Quotas};

/// The quotas of one limit.
pub(super) fn all(specs: &[QuotaSpec]) -> Quotas {
    let mut quotas = specs.iter().map(QuotaSpec::quota);
    let first = Quotas::from(quotas.next().expect("a limit has a quota"));
    quotas.fold(first, Quotas::and)
}

#[derive(Deserialize)]
pub(super) struct QuotaSpec {
    limit: u64,
    /// The length of windows; absent for a calendar's.
    #[serde(default)]
    window_ms: u64,
    /// `day`, `week`, `month` or `year`.
    calendar: Option<String>,
    zone: Option<String>,
    first: Option<FirstSpec>,
    #[serde(default)]
    anchor: AnchorSpec,
    #[serde(default)]
    start_ms: u64,
    capacity: Option<u64>,
    #[serde(default)]
    max_reserved: u64,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum AnchorSpec {
    #[default]
    Aligned,
    StartingAt,
    FirstRequest,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FirstSpec {
    /// A day of the month.
    Day(u8),
    /// A weekday, or `MM-DD`.
    Name(String),
}

impl QuotaSpec {
    fn quota(&self) -> Quota {
        let mut quota = match &self.calendar {
            Some(calendar) => self.on_calendar(calendar),
            None => Quota::new(self.limit, Duration::from_millis(self.window_ms)),
        };
        quota = match self.anchor {
            _ if self.calendar.is_some() => quota,
            AnchorSpec::Aligned => quota,
            AnchorSpec::StartingAt => quota.starting_at(Duration::from_millis(self.start_ms)),
            AnchorSpec::FirstRequest => quota.from_first_request(),
        };
        if let Some(capacity) = self.capacity {
            quota = quota.rollover_up_to(capacity);
        }
        quota.reserve_up_to(self.max_reserved)
    }

    fn on_calendar(&self, calendar: &str) -> Quota {
        let mut text = format!("{}/{calendar}", self.limit);
        match &self.first {
            Some(FirstSpec::Day(day)) => text += &format!(" from day {day}"),
            Some(FirstSpec::Name(name)) => text += &format!(" from {name}"),
            None => {}
        }
        if let AnchorSpec::StartingAt = self.anchor {
            text += &format!(" starting-at={}ms", self.start_ms);
        }
        if let Some(zone) = &self.zone {
            text += &format!(" in {zone}");
        }
        text.parse().unwrap_or_else(|error| panic!("a calendar of a trace: {error}"))
    }
}
