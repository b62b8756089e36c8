//! Windows of a calendar (S35), in every time zone, from 1970 to 2100: they cover time without a gap or an
//! overlap, and each begins with the first instant at which the zone's clock shows its first day, and its time of
//! day, or a later one.
//! The oracle walks: over the days of the calendar one by one, and over each stretch of time in which a zone's
//! offset stays the same.
//!
//! A sample of zones and first days, or with `FULL_SIZE=1` all of them:
//! `FULL_SIZE=1 cargo test --release -p tests --test core calendars`.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use jiff::civil::{Date, date};
use jiff::tz::TimeZone;
use jiff::{Timestamp, ToSpan};
use tower_fixed_window::store::{Account, Adjust, Charge, Scope, State, Windows};
use tower_fixed_window::{Key, Limit, ManualClock, MemoryStore, Quota, Quotas, Weekday};

use crate::{answer, sized, window_at};

const DAY: i64 = 86_400;
/// 1969-01-01 and 2102-01-01, in days since the epoch: a year more on both sides.
const DAYS: (i64, i64) = (-365, 48_213);
/// From 1970 to 2100.
const CHECKED: (i64, i64) = (0, 4_133_980_800);

/// The first day of a quota's windows.
#[derive(Clone, Copy, Debug)]
enum First {
    Day,
    Week(usize),
    Month(u8),
    Year(u8, u8),
}

const WEEKDAYS: [Weekday; 7] = [
    Weekday::Monday,
    Weekday::Tuesday,
    Weekday::Wednesday,
    Weekday::Thursday,
    Weekday::Friday,
    Weekday::Saturday,
    Weekday::Sunday,
];

impl First {
    fn all() -> Vec<Self> {
        let mut all = vec![Self::Day];
        all.extend((0..7).map(Self::Week));
        all.extend((1..=31).map(Self::Month));
        for month in 1..=12 {
            all.extend((1..=length(date(2000, month, 1))).map(|day| Self::Year(month as u8, day)));
        }
        all
    }

    fn quota(self, limit: u64) -> Quota {
        let quota = self.period(limit);
        match self {
            Self::Day => quota,
            Self::Week(weekday) => quota.from_weekday(WEEKDAYS[weekday]),
            Self::Month(day) => quota.from_day(day),
            Self::Year(month, day) => quota.from_date(month, day),
        }
    }

    fn period(self, limit: u64) -> Quota {
        match self {
            Self::Day => Quota::per_day(limit),
            Self::Week(_) => Quota::per_week(limit),
            Self::Month(_) => Quota::per_month(limit),
            Self::Year(..) => Quota::per_year(limit),
        }
    }

    /// Whether it is the first day of a window, and in no shorter month another one.
    fn is_exactly(self, day: Date) -> bool {
        match self {
            Self::Month(first) | Self::Year(_, first) => self.is(day) && day.day() as u8 == first,
            _ => self.is(day),
        }
    }

    fn is(self, day: Date) -> bool {
        let is_day = |first: u8| day.day() as u8 == first.min(length(day));
        match self {
            Self::Day => true,
            Self::Week(weekday) => day.weekday().to_monday_zero_offset() as usize == weekday,
            Self::Month(first) => is_day(first),
            Self::Year(month, first) => day.month() as u8 == month && is_day(first),
        }
    }
}

/// The days of a month.
fn length(day: Date) -> u8 {
    day.days_in_month() as u8
}

/// When each day begins, from the first of [`DAYS`] on, at a time of day, in seconds.
fn days(zone: &TimeZone, time: i64) -> Vec<i64> {
    let offset = |at: i64| -> i64 {
        let at = Timestamp::from_second(at).expect("in range");
        zone.to_offset(at).seconds().into()
    };
    let mut days = Vec::new();
    let end = DAYS.1 * DAY;
    let mut from = (DAYS.0 - 2) * DAY;
    while from < end {
        // Where the offset changes next: it stays for six hours at least.
        let now = offset(from);
        let mut to = from;
        while to < end && offset(to + DAY / 4) == now {
            to += DAY / 4;
        }
        let (mut same, mut other) = (to, to + DAY / 4);
        while other - same > 1 {
            let middle = same + (other - same) / 2;
            *(if offset(middle) == now { &mut same } else { &mut other }) = middle;
        }
        // The days that begin in this stretch.
        loop {
            let begins = from.max((DAYS.0 + days.len() as i64) * DAY + time - now);
            if begins >= other {
                break;
            }
            days.push(begins);
        }
        from = other;
    }
    days
}

/// Checks all windows of a quota, and some distances between them.
fn check(name: &str, zone: &TimeZone, (first, time): (First, i64), days: &[i64], random: &mut Rng) {
    let mut starts: Vec<(i64, i64)> = Vec::new();
    let mut civil = date(1969, 1, 1);
    // Of these, one is chosen for the instant of the quota.
    let mut exact = Vec::new();
    for (n, begins) in days.iter().enumerate() {
        if first.is(civil) {
            let shown = (DAYS.0 + n as i64) * DAY + time;
            let offset = zone.to_offset(Timestamp::from_second(*begins).expect("in range"));
            let shows = begins + i64::from(offset.seconds()) == shown;
            if shows && first.is_exactly(civil) && *begins >= 0 {
                exact.push(*begins);
            }
            // A day that was skipped begins when the next one does.
            match starts.last_mut() {
                Some(last) if last.1 == *begins => {}
                _ => starts.push((DAYS.0 + n as i64, *begins)),
            }
        }
        civil = civil.tomorrow().expect("in range");
    }
    let quota = match time {
        0 => first.quota(1),
        _ => {
            let since = Duration::from_secs(exact[random.usize(..exact.len())] as u64);
            first.period(1).starting_at(since)
        }
    };
    let quota = if name == "UTC" { quota } else { quota.in_zone(name) };
    let (scope, quotas, key) = (Scope::named("any"), Quotas::from(quota), Key::global());
    let account = Account::new(&scope, &quotas, &key);
    let inside = |at: &i64| (CHECKED.0..CHECKED.1).contains(at);
    for pair in starts.windows(2).filter(|pair| inside(&pair[0].1)) {
        let ((day, start), (_, end)) = (pair[0], pair[1]);
        let what = || format!("{first:?} at {time} in {name}, from day {day}");
        let (start, end) = (start * 1_000, end * 1_000);
        // Not in the order of time: what is remembered of the last one is not to matter.
        for at in [end - 1, start, start + (end - start) / 2] {
            assert_eq!(window_at(&account, &quota, at), start..end, "{}, at {at}", what());
        }
        let shown = |at: i64| {
            let at = Timestamp::from_millisecond(at).expect("in range");
            let shown = zone.to_datetime(at);
            shown.to_zoned(TimeZone::UTC).expect("in range").timestamp().as_millisecond()
        };
        if random.u8(..16) == 0 {
            let first = (day * DAY + time) * 1_000;
            assert!(shown(start) >= first, "{}", what());
            assert!(shown(start - 1) < first, "{}", what());
        }
    }
    // Distances, in one step: a debt of n limits lasts n windows, and less after some of them.
    let since_epoch = starts.partition_point(|start| start.1 < 0).max(1);
    for _ in 0..20 {
        let from = random.usize(since_epoch..starts.len() - 1);
        let to = random.usize(from + 1..starts.len());
        let passed = random.usize(from..to);
        let (at, n) = (starts[from].1 * 1_000, (to - from) as i64);
        let (nothing, _) = Charge::new(account, 0).decide(at as u64, |_, _| None);
        let state = Adjust::take(account, n as u64, &nothing).apply(at as u64, |_| None)[0].1;
        let mut expected = State::default();
        (expected.start, expected.used, expected.until) = (at, n, starts[to].1 * 1_000);
        expected.end = starts[from + 1].1 * 1_000;
        assert_eq!(state, expected, "{first:?} in {name}, {n} windows");
        let now = random.i64(starts[passed].1 * 1_000..starts[passed + 1].1 * 1_000);
        let (later, _) = Charge::new(account, 0).decide(now as u64, |_, _| Some(state));
        let ends = UNIX_EPOCH + Duration::from_secs(starts[passed + 1].1 as u64);
        let expected = (ends, (n - (passed - from) as i64) as u64);
        assert_eq!((later.reset_at(), later.used()), expected, "{first:?} in {name} at {now}");
    }
}

#[test]
fn windows_cover_time_in_every_zone_from_every_first_day() {
    let full = sized(false, true);
    let names: Vec<String> =
        jiff::tz::db().available().map(|name| name.as_str().to_owned()).collect();
    assert!(names.len() > 400, "the time zone database is there");
    // In a sample, those in which something has happened at midnight are always there.
    const ODD: [&str; 8] = [
        "America/Sao_Paulo",
        "Pacific/Apia",
        "Pacific/Kwajalein",
        "Pacific/Kiritimati",
        "Asia/Tehran",
        "Africa/Monrovia",
        "Australia/Lord_Howe",
        "UTC",
    ];
    let mut random = Rng::with_seed(35);
    let chosen: Vec<_> = names
        .iter()
        .map(|name| &**name)
        .filter(|name| full || ODD.contains(name) || random.u8(..32) == 0)
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(name) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut random = Rng::with_seed(name.len() as u64);
            let zone = TimeZone::get(name).expect("it is there");
            // On both sides of where clocks change.
            let times = [random.i64(1..DAY), 2 * 3_600, 9_000, 23 * 3_600];
            for time in [0, times[random.usize(..4)]] {
                let days = days(&zone, time);
                for first in First::all() {
                    if full || random.u8(..24) == 0 || matches!(first, First::Day) {
                        check(name, &zone, (first, time), &days, &mut random);
                    }
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(2, NonZero::get) {
            scope.spawn(work);
        }
    });
}

/// The database of zones ends before, and its last rules go on.
#[test]
fn months_of_far_years_begin_by_the_last_rules_of_their_zone() {
    for name in ["Europe/Berlin", "America/New_York", "Asia/Tokyo"] {
        let zone = TimeZone::get(name).expect("a zone");
        for (year, month) in [2_345, 2_500, 5_000, 9_998]
            .into_iter()
            .flat_map(|year| (1..=11).map(move |month| (year, month)))
        {
            let first_of = |month| {
                let first = date(year, month, 1).to_zoned(zone.clone()).expect("a time");
                SystemTime::from(first.timestamp())
            };
            let (start, end) = (first_of(month), first_of(month + 1));
            let clock = ManualClock::at_ms(0);
            let store = MemoryStore::new().clock(clock.clone());
            let limiter = Quota::per_month(9).in_zone(name).name("far").store(store);
            for at in [start, end - Duration::from_millis(1)] {
                clock.set_ms(at.duration_since(UNIX_EPOCH).expect("later").as_millis() as u64);
                let decision = answer(limiter.check("k"));
                assert_eq!(
                    (decision.used(), decision.reset_at()),
                    (if at == start { 1 } else { 2 }, end),
                    "{name}: {at:?}"
                );
            }
        }
    }
}

/// The store remembers which window runs now, for each calendar that it has seen.
#[test]
fn each_first_day_has_windows_of_its_own() {
    let now = date(2023, 11, 14);
    let at = |day: Date| day.to_zoned(TimeZone::UTC).expect("a time").timestamp();
    let clock = ManualClock::at_ms(at(now).as_millisecond() as u64);
    let store = MemoryStore::new().clock(clock);
    let months = (1..=31).map(|day| (None, day));
    let years = (1..=12).flat_map(|month| (1..=31).map(move |day| (Some(month), day)));
    // Twice, so that the other calendars are remembered before each.
    for (month, day) in months.chain(years).collect::<Vec<_>>().repeat(2) {
        let quota = match month {
            None => Quota::per_month(9).from_day(day as u8),
            Some(month) => {
                let Ok(_) = Date::new(2024, month, day) else { continue };
                Quota::per_year(9).from_date(month as u8, day as u8)
            }
        };
        let first_of = |from: Date| {
            let first =
                from.with().month(month.unwrap_or(from.month())).day(1).build().expect("a day");
            first.with().day(day.min(first.days_in_month())).build().expect("a day")
        };
        let step = if month.is_some() { 12.months() } else { 1.month() };
        let end = [first_of(now), first_of(now.with().day(1).build().expect("a day") + step)];
        let end = end.into_iter().find(|end| *end > now).expect("the second is");
        let decision = answer(quota.name("calendar").store(store.clone()).check("k"));
        assert_eq!(decision.reset_at(), SystemTime::from(at(end)), "{month:?}-{day}");
    }
}

/// A count above a limit that was lowered since ends with its window, also if the window is long or
/// the clock has stepped back by several windows.
#[test]
fn a_count_above_a_lowered_limit_ends_with_its_window() {
    let at = |text: &str| text.parse::<Timestamp>().expect("an instant");
    let day = Quota::per_day(10).in_zone("Europe/Berlin");
    // 25 hours long.
    let clock = ManualClock::at_ms(at("2026-10-25T11:00:00Z").as_millisecond() as u64);
    let limiter = Limit::new(day).store(MemoryStore::new().clock(clock.clone()));
    assert!(answer(limiter.charge("alice", 10)).is_ok());

    let lowered = limiter.with_quotas(day.with_limit(1));
    let tomorrow = SystemTime::from(at("2026-10-25T23:00:00Z"));
    assert_eq!(answer(lowered.check("alice")).retry_at(), Some(tomorrow));

    clock.set_ms(at("2026-10-22T11:00:00Z").as_millisecond() as u64);
    let tomorrow = SystemTime::from(at("2026-10-22T22:00:00Z"));
    assert_eq!(answer(lowered.check("alice")).retry_at(), Some(tomorrow));
}

/// Another edition of the zone data may show another time at an instant (S35).
#[test]
fn an_instant_as_it_was_written_is_the_counter() {
    let since = |text: &str| {
        let at: Timestamp = text.parse().expect("an instant");
        Duration::from_millis(at.as_millisecond() as u64)
    };
    let month = |text| Quota::per_month(5).starting_at(since(text)).in_zone("America/New_York");
    // Both begin on the 15th at 10:00.
    let texts = ["2026-01-15T15:00:00Z", "2026-07-15T14:00:00Z"];
    let [winter, summer] = texts.map(month);
    assert_ne!(winter, summer);
    let (scope, key) = (Scope::named("any"), Key::global());
    let quotas = winter.and(summer);
    let account = Account::new(&scope, &quotas, &key);
    let windows = [winter, summer].map(|quota| window_at(&account, &quota, 1_790_000_000_000));
    assert_eq!(windows[0], windows[1]);
    for (quota, text) in [winter, summer].into_iter().zip(texts) {
        let at = since(text).as_millis() as i64;
        assert_eq!(quota.counter(), format!("month+{at}ms@America/New_York"));
        let Windows::OnCalendar(calendar) = account.windows_of(&quota) else { panic!() };
        let numbers = [at - 1, at, at + 1].map(|at| calendar.number(at));
        assert_eq!((numbers, calendar.start_of(0)), ([-1, 0, 0], at));
        assert!(calendar.start_of(-i64::MAX) < at && calendar.start_of(i64::MAX) > at);
        // The search for the window of the earliest instant ends, as stores may have any number.
        assert!(calendar.start_of(calendar.number(i64::MIN)) < calendar.start_of(-1));
    }

    let utc = Quota::per_month(5).starting_at(since(texts[0]));
    assert_eq!(winter.in_zone("UTC"), utc);
    for quota in [winter, summer.in_zone("UTC"), winter.rollover_up_to(9)] {
        assert_eq!(quota.to_string().parse(), Ok(quota), "{quota}");
    }

    // In UTC, days and weeks are on a grid; in a zone, they are not.
    let sunday = since("2026-11-01T05:30:00Z");
    let week = Quota::per_week(5).starting_at(sunday);
    assert_eq!(week.counter(), "604800000+279000000");
    assert_eq!(week.in_zone("America/New_York").counter(), "week+1793511000000ms@America/New_York");
}
