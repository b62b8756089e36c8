//! Time zones, and when a day begins in them: [`Zone`].
//!
//! A quota is `Copy` and is compared in a `const`, so a zone is a pointer to data that is loaded
//! once for each name and kept for the life of the process, which thus has one edition of the zone
//! data. Only this file uses `jiff`.

use std::collections::BTreeMap;
#[cfg(not(feature = "time-zones"))]
use std::convert::Infallible as TimeZone;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

#[cfg(feature = "time-zones")]
use jiff::tz::{self, TimeZone};

use super::{FNV_1A, fnv_1a};

const DAY: i64 = super::DAY_MS as i64;
/// More than any clock is away from UTC.
const MAX_OFFSET: i64 = 26 * 3_600_000;
/// The end of the search for skipped days, in 2100. Later changes repeat the rules of until then.
const SKIPPED_UNTIL: i64 = 4_102_444_800_000;

#[derive(Clone, Copy)]
pub(super) struct Zone(Option<&'static LoadedZone>);

struct LoadedZone {
    /// A number above 0 that only this zone has, the same in each process.
    id: u64,
    name: String,
    rules: TimeZone,
    /// Days that the zone's clock never showed.
    skipped: Vec<i64>,
    recent: RecentWindows,
}

static LOADED: Mutex<BTreeMap<&str, &LoadedZone>> = Mutex::new(BTreeMap::new());

static RECENT_UTC: RecentWindows = RecentWindows::new();

impl Zone {
    pub(super) const UTC: Self = Self(None);

    /// An IANA name in upper or lower case.
    pub(super) fn named(name: &str) -> Result<Self, &'static str> {
        if name.eq_ignore_ascii_case("UTC") {
            return Ok(Self::UTC);
        }
        let loaded = || LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(zone) = loaded().get(name) {
            return Ok(Self(Some(zone)));
        }
        // Tests give a zone the clock of another one, as another edition of the zone data may do:
        // `Etc/GMT+12=Etc/GMT+11` has the counters of the first, and the days of the second.
        let edition = name.split_once('=').filter(|_| cfg!(feature = "testing"));
        let (zone, clock) = edition.unwrap_or((name, name));
        let (_, spelled) = load_rules(zone)?;
        let (rules, _) = load_rules(clock)?;
        let found_by = if edition.is_some() { name.to_owned() } else { spelled.clone() };
        let mut loaded = loaded();
        if let Some(zone) = loaded.get(&*found_by) {
            return Ok(Self(Some(zone)));
        }
        // Counters that outlive the process are found by this number.
        let id = (fnv_1a(FNV_1A, spelled.bytes()) >> 24) + 1;
        let skipped = find_skipped_days(&rules);
        let recent = RecentWindows::new();
        // The names in the database bound the leak.
        let zone: &LoadedZone =
            Box::leak(Box::new(LoadedZone { id, name: spelled, rules, skipped, recent }));
        loaded.insert(found_by.leak(), zone);
        Ok(Self(Some(zone)))
    }

    pub(super) const fn is_utc(self) -> bool {
        self.0.is_none()
    }

    /// Returns a number of less than 41 bits that only this zone has.
    pub(super) const fn id(self) -> u64 {
        match self.0 {
            Some(zone) => zone.id,
            None => 0,
        }
    }

    pub(super) fn name(self) -> &'static str {
        self.0.map_or("UTC", |zone| &zone.name)
    }

    /// Returns what the zone's clock shows at an instant, as an instant of UTC.
    pub(super) fn clock_at(self, at: i64) -> i64 {
        at + self.0.map_or(0, |zone| offset_at(&zone.rules, at))
    }

    /// The first instant at which the zone's clock shows this or a later time.
    pub(super) fn first_instant(self, clock: i64) -> i64 {
        self.0.map_or(clock, |zone| first_instant(&zone.rules, clock))
    }

    pub(super) fn skipped_days(self) -> &'static [i64] {
        self.0.map_or(&[], |zone| &zone.skipped)
    }

    pub(super) fn recent(self) -> &'static RecentWindows {
        self.0.map_or(&RECENT_UTC, |zone| &zone.recent)
    }
}

fn first_instant(rules: &TimeZone, clock: i64) -> i64 {
    let mut from = clock - MAX_OFFSET;
    let mut offset = offset_at(rules, from);
    for (change, next) in changes(rules, from) {
        if clock - offset < change {
            break;
        }
        (from, offset) = (change, next);
    }
    from.max(clock - offset)
}

fn find_skipped_days(rules: &TimeZone) -> Vec<i64> {
    let mut offset = offset_at(rules, i64::MIN);
    let mut skipped = Vec::new();
    for (change, next) in changes(rules, i64::MIN).take_while(|(change, _)| *change < SKIPPED_UNTIL)
    {
        let days = [offset, next].map(|offset| (change + offset).div_euclid(DAY));
        let begins = |day: i64| first_instant(rules, day * DAY);
        let is_skipped = |day: &i64| begins(*day) == begins(day + 1);
        skipped.extend((days[0]..days[1]).filter(is_skipped));
        offset = next;
    }
    skipped
}

impl PartialEq for Zone {
    fn eq(&self, other: &Self) -> bool {
        self.0.map(ptr::from_ref) == other.0.map(ptr::from_ref)
    }
}

impl Eq for Zone {}

impl fmt::Debug for Zone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The last window of each index that was looked up, so that boundaries are not computed for each
/// request.
pub(super) struct RecentWindows([AtomicU64; RecentWindows::COUNT]);

impl RecentWindows {
    pub(super) const COUNT: usize = 1 + 7 + 31 + 12 * 31;
    /// Start and length in seconds share one number, so that both are of the same window. No window
    /// has 2^25 seconds, and the year 9999 ends before 2^38.
    const LENGTH: u32 = 25;

    const fn new() -> Self {
        Self([const { AtomicU64::new(0) }; Self::COUNT])
    }

    /// The last window in milliseconds; both are 0 if there was none.
    #[inline]
    pub(super) fn get(&self, index: usize) -> (i64, i64) {
        let seen = self.0[index].load(Ordering::Relaxed);
        let start = (seen >> Self::LENGTH) as i64 * 1_000;
        (start, start + (seen & ((1 << Self::LENGTH) - 1)) as i64 * 1_000)
    }

    pub(super) fn set(&self, index: usize, start: i64, end: i64) {
        let (start, length) = (start / 1_000, (end - start) / 1_000);
        if (0..1 << (64 - Self::LENGTH)).contains(&start) && length < 1 << Self::LENGTH {
            let seen = (start as u64) << Self::LENGTH | length as u64;
            self.0[index].store(seen, Ordering::Relaxed);
        }
    }
}

/// From the time zone database, with the name as it spells it.
#[cfg(feature = "time-zones")]
fn load_rules(name: &str) -> Result<(TimeZone, String), &'static str> {
    const NO_DATABASE: &str = "there is no time zone database: install tzdata, or use the feature \
        `time-zones-bundled`";
    const UNKNOWN: &str = "the time zone database has no such time zone: write an IANA name, such \
        as Europe/Berlin";

    let database = tz::db();
    let found = database.get(name).ok().filter(|zone| !zone.is_unknown());
    match found.map(|zone| (zone.iana_name().map(str::to_owned), zone)) {
        Some((Some(spelled), zone)) => Ok((zone, spelled)),
        _ if database.is_definitively_empty() => Err(NO_DATABASE),
        _ => Err(UNKNOWN),
    }
}

#[cfg(not(feature = "time-zones"))]
fn load_rules(_: &str) -> Result<(TimeZone, String), &'static str> {
    Err("time zones other than UTC need the feature `time-zones` of tower-fixed-window")
}

/// How far the zone's clock is ahead of UTC.
fn offset_at(rules: &TimeZone, at: i64) -> i64 {
    #[cfg(feature = "time-zones")]
    return i64::from(rules.to_offset(timestamp(at)).seconds()) * 1_000;
    #[cfg(not(feature = "time-zones"))]
    match (*rules, at).0 {}
}

/// The changes after an instant in order, each with its time and the new offset.
#[cfg(feature = "time-zones")]
fn changes(rules: &TimeZone, after: i64) -> impl Iterator<Item = (i64, i64)> {
    rules.following(timestamp(after)).map(|change| {
        (change.timestamp().as_millisecond(), i64::from(change.offset().seconds()) * 1_000)
    })
}

#[cfg(not(feature = "time-zones"))]
fn changes(rules: &TimeZone, _: i64) -> std::iter::Empty<(i64, i64)> {
    match *rules {}
}

/// Converts an instant. One outside of jiff's years has the offset of their first or last instant.
#[cfg(feature = "time-zones")]
fn timestamp(at: i64) -> jiff::Timestamp {
    use jiff::Timestamp;

    let (min, max) = (Timestamp::MIN.as_millisecond(), Timestamp::MAX.as_millisecond());
    Timestamp::from_millisecond(at.clamp(min, max)).unwrap_or_default()
}
