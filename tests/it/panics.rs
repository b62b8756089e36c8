//! A panic on what an app has written names the app's line, and not one of this crate or of axum.

use std::path::Path;
use std::process::Command;
use std::{env, fs, panic};

use tower_fixed_window::Weekday;
use tower_fixed_window::store::Scope;
use tower_fixed_window::testing::ask;
use tower_fixed_window_redis::RedisStore;

use crate::prelude::*;

const TOO_MANY: u64 = Quota::MAX_TOKENS + 1;

fn minute() -> Quota {
    Quota::per_minute(1)
}

fn limit() -> Limit {
    Limit::new(minute())
}

fn layer(name: &str) -> FixedWindowLayer {
    FixedWindowLayer::new(minute().name(name))
}

/// A store whose counters other limiters find by name.
fn shared() -> TestStore {
    TestStore::new(Mood::Now).shared()
}

type Mistake = (u32, fn());

fn made<T>(_: T) {}

/// Each mistake is on a line of its own, which the panic names.
#[rustfmt::skip]
const MISTAKES: &[Mistake] = &[
    (line!(), || made(Quota::new(TOO_MANY, secs(1)))),
    (line!(), || made(Quota::new(1, Duration::ZERO))),
    (line!(), || made(Quota::per_second(TOO_MANY))),
    (line!(), || made(Quota::per_minute(TOO_MANY))),
    (line!(), || made(Quota::per_hour(TOO_MANY))),
    (line!(), || made(Quota::per_day(TOO_MANY))),
    (line!(), || made(Quota::per_week(TOO_MANY))),
    (line!(), || made(Quota::per_month(TOO_MANY))),
    (line!(), || made(Quota::per_year(TOO_MANY))),
    (line!(), || made(Quota::per_month(1).in_zone("Asia/Tokyo").starting_at(Duration::ZERO))),
    (line!(), || made(Quota::per_month(1).staggered())),
    (line!(), || made(Quota::per_month(1).from_first_request())),
    (line!(), || made(Quota::per_day(1).in_zone("Europe/Atlantis"))),
    (line!(), || made(minute().in_zone("Europe/Berlin"))),
    (line!(), || made(minute().from_weekday(Weekday::Sunday))),
    (line!(), || made(Quota::per_month(1).from_day(32))),
    (line!(), || made(Quota::per_year(1).from_date(2, 30))),
    (line!(), || made(Quota::per_minute(2).rollover_up_to(1))),
    (line!(), || made(minute().rollover_up_to(TOO_MANY))),
    (line!(), || made(minute().reserve_up_to(Quota::MAX_TOKENS))),
    (line!(), || made(minute().with_limit(TOO_MANY))),
    (line!(), || made(minute().and(minute()))),
    (line!(), || made(Quotas::from(minute()).and(minute()))),
    (line!(), || made(limit().name("Log in"))),
    (line!(), || made(minute().name(""))),
    (line!(), || made(Quotas::from(minute()).name(""))),
    (line!(), || made(limit().store(shared()))),
    (line!(), || made(Limits::new([minute()]).store(shared()))),
    (line!(), || made(Limits::new([minute(), minute()]))),
    (line!(), || made(Limits::new([minute().name("a"), minute().name("a")]))),
    (line!(), || made(Limits::new([minute().name("a")]).limiter("b"))),
    (line!(), || made(FixedWindowLayer::new([limit(), limit()]))),
    (line!(), || made(RateLimitEndpoint::new([&FixedWindowLayer::new(minute())]))),
    (line!(), || made(RateLimitEndpoint::new([&layer("a"), &FixedWindowLayer::new(minute())]))),
    (line!(), || made(Scope::named("ä"))),
    (line!(), || made(MemoryStore::with_max_keys(0))),
    (line!(), || { let store = MemoryStore::new(); made(store.clone().clock(ManualClock::at_ms(0))) }),
    (line!(), || made(RedisStore::new("redis://127.0.0.1/").expect("an address").prefix("{"))),
    (line!(), || made(header("X-Api-Key"))),
    (line!(), || made(client_ip().ipv6_prefix(129))),
    (line!(), || made(client_ip().trusting(["10.0.0/8"]))),
    (line!(), || made(client_ip().trusting_hops(1).trusting(["10.0.0.0/8"]))),
    (line!(), || made(client_ip().trusting(["10.0.0.0/8"]).trusting_hops(1))),
    (line!(), || made(client_ip().from_header("ä"))),
    (line!(), || made(client_ip().is_in(["10.0.0/8"]))),
    (line!(), || made(ask(&layer("a"), Request::get("not a path")))),
];

/// Set in a process that makes mistakes.
const MISTAKEN: &str = "TOWER_FIXED_WINDOW_MISTAKEN";

#[test]
fn a_panic_names_the_line_of_the_app() {
    if env::var(MISTAKEN).is_ok() {
        for (line, mistake) in MISTAKES {
            panic::catch_unwind(mistake).expect_err(&line.to_string());
        }
        return;
    }
    // This test, in a process that makes the mistakes.
    let output = Command::new(env::current_exe().expect("this program"))
        .args(["--exact", "panics::a_panic_names_the_line_of_the_app", "--nocapture"])
        .env(MISTAKEN, "1")
        .output()
        .expect("it starts");
    let told = String::from_utf8_lossy(&output.stderr);
    for (line, _) in MISTAKES {
        let place = format!("panicked at {}:{line}:", file!());
        assert!(told.contains(&place), "not {place}\n{told}");
    }
}

/// The functions whose documentation has a section on panics. The suite for stores is left out,
/// since it shows what a store has done.
#[test]
fn what_may_panic_shows_its_callers_line() {
    fn search_folder(folder: &Path, found: &mut usize) {
        for entry in fs::read_dir(folder).expect("a directory") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                search_folder(&path, found);
                continue;
            }
            let text = fs::read_to_string(&path).expect("UTF-8");
            let is_suite = path.ends_with("src/testing.rs");
            for item in text.split("/// # Panics").skip(1).filter(|_| !is_suite) {
                let is_code = |line: &&str| !line.trim_start().starts_with("//");
                let head: Vec<_> = item
                    .lines()
                    .skip(1)
                    .filter(is_code)
                    .take_while(|l| !l.contains(" fn "))
                    .collect();
                let name = item.lines().find(|line| is_code(line) && line.contains("fn "));
                *found += 1;
                let shows = head.iter().any(|line| line.trim() == "#[track_caller]");
                assert!(shows, "{}: no #[track_caller]: {name:?}", path.display());
            }
        }
    }
    let mut found = 0;
    search_folder(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../src")), &mut found);
    assert!(found > 40, "{found}");
}
