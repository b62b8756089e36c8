//! The rules of time zones, from the time zone database: how far a zone's clock is ahead of UTC,
//! and when that changes. Only this file uses `jiff`.

use super::error::QuotaError;

/// The rules of one zone. Instants are seconds since the epoch.
#[cfg(feature = "time-zones")]
pub(super) struct Rules(jiff::tz::TimeZone);

#[cfg(feature = "time-zones")]
impl Rules {
    /// Returns the rules of a zone by its name in upper or lower case, and the database's spelling.
    pub(super) fn named(name: &str) -> Result<(Self, String), QuotaError> {
        let database = jiff::tz::db();
        let found = database.get(name).ok().filter(|zone| !zone.is_unknown());
        match found.map(|zone| (zone.iana_name().map(str::to_owned), zone)) {
            Some((Some(spelled), zone)) => Ok((Self(zone), spelled)),
            _ if database.is_definitively_empty() => Err(QuotaError::NoTimeZoneDatabase),
            _ => Err(QuotaError::UnknownTimeZone),
        }
    }

    /// Returns how many seconds the clock is ahead of UTC.
    pub(super) fn offset(&self, at: i64) -> i64 {
        self.0.to_offset(timestamp(at)).seconds().into()
    }

    /// Returns the changes after an instant, in order: each with its time and the new offset.
    pub(super) fn changes(&self, after: i64) -> impl Iterator<Item = (i64, i64)> {
        let changes = self.0.following(timestamp(after));
        changes.map(|change| (change.timestamp().as_second(), change.offset().seconds().into()))
    }
}

/// Converts an instant. One outside of jiff's years, which callers don't pass, is cut to these.
#[cfg(feature = "time-zones")]
fn timestamp(second: i64) -> jiff::Timestamp {
    use jiff::Timestamp;

    let (min, max) = (Timestamp::MIN.as_second(), Timestamp::MAX.as_second());
    Timestamp::from_second(second.clamp(min, max)).unwrap_or_default()
}

/// No rules: without the feature there is no time zone database.
#[cfg(not(feature = "time-zones"))]
pub(super) enum Rules {}

#[cfg(not(feature = "time-zones"))]
impl Rules {
    pub(super) fn named(_: &str) -> Result<(Self, String), QuotaError> {
        Err(QuotaError::NoTimeZones)
    }

    pub(super) fn offset(&self, _: i64) -> i64 {
        match *self {}
    }

    pub(super) fn changes(&self, _: i64) -> impl Iterator<Item = (i64, i64)> {
        match *self {}
        #[allow(unreachable_code)]
        std::iter::empty()
    }
}
