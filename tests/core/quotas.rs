//! Quotas as text, and wrong quotas (S10, S11): refused where they are written, with a message
//! that says what to write.

use std::panic::catch_unwind;
use std::time::Duration;

use proptest::prelude::*;
use serde::{Deserialize, Serialize};
use tower_fixed_window::{Plan, Quota, Quotas, Weekday};

use crate::trace::{amounts, quota, set, specs};

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(5_000) })]

    #[test]
    fn printed_quotas_parse_to_the_same_quota(specs in specs(amounts())) {
        let quotas = set(&specs).expect("checked");
        prop_assert_eq!(quotas.to_string().parse::<Quotas>(), Ok(quotas));
        let quota = quota(&specs[0]);
        prop_assert_eq!(quota.to_string().parse(), Ok(quota));
        let json = serde_json::to_string(&quotas).expect("text");
        prop_assert_eq!(serde_json::from_str::<Quotas>(&json).expect("text"), quotas);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "\\PC{0,30}|[0-9_]{0,25}([/ ]| per |){0,2}[0-9_]{0,25}(ms|s|min|hour|w)?( [a-z-]{0,20}=?[0-9]{0,20}){0,3}") {
        if let Err(error) = text.parse::<Quotas>() {
            prop_assert!(error.to_string().len() < 600);
        }
    }
}

#[test]
fn a_quota_parses_in_every_documented_spelling() {
    let seconds = |n| Duration::from_secs(n);
    for (text, quota) in [
        ("100/hour", Quota::per_hour(100)),
        ("1_000/hour", Quota::per_hour(1_000)),
        ("1000 per hour", Quota::per_hour(1_000)),
        ("1_0_0 per  10 seconds staggered", Quota::new(100, Duration::from_secs(10)).staggered()),
        ("7 per month in UTC", Quota::per_month(7)),
        ("100/h", Quota::per_hour(100)),
        ("100 / hours", Quota::per_hour(100)),
        (" 100/ 1 hour ", Quota::per_hour(100)),
        ("5/10s", Quota::new(5, seconds(10))),
        ("5/10 seconds", Quota::new(5, seconds(10))),
        ("5/250ms", Quota::new(5, Duration::from_millis(250))),
        ("0/minute", Quota::per_minute(0)),
        ("7/w", Quota::per_week(7)),
        ("9007199254740991/d", Quota::per_day(Quota::MAX_TOKENS)),
        ("1/3650d", Quota::new(1, Quota::MAX_WINDOW)),
        ("60/hour from-first-request", Quota::per_hour(60).from_first_request()),
        ("60/hour staggered", Quota::per_hour(60).staggered()),
        ("60/day starting-at=6h", Quota::per_day(60).starting_at(seconds(6 * 3_600))),
        ("60/hour rollover-up-to=90", Quota::per_hour(60).rollover_up_to(90)),
        ("60/hour reserve-up-to=5 staggered", Quota::per_hour(60).reserve_up_to(5).staggered()),
        ("7/month", Quota::per_month(7)),
        ("7/year", Quota::per_year(7)),
        ("7/month from day 15", Quota::per_month(7).from_day(15)),
        ("7/week from sunday", Quota::per_week(7).from_weekday(Weekday::Sunday)),
        ("7/month starting-at=50d", Quota::per_month(7).starting_at(seconds(50 * 86_400))),
        (
            "7/week starting-at=50d in Asia/Tokyo",
            Quota::per_week(7).starting_at(seconds(50 * 86_400)).in_zone("Asia/Tokyo"),
        ),
        ("7/year from 02-29", Quota::per_year(7).from_date(2, 29)),
        ("7/year from 4-6", Quota::per_year(7).from_date(4, 6)),
        ("7/d in Asia/Tokyo", Quota::per_day(7).in_zone("Asia/Tokyo")),
        ("7/day in asia/tokyo", Quota::per_day(7).in_zone("Asia/Tokyo")),
        ("7/24h in Asia/Tokyo", Quota::per_day(7).in_zone("Asia/Tokyo")),
        (
            "7/month from day 31  in Etc/GMT+5 rollover-up-to=9",
            Quota::per_month(7).from_day(31).in_zone("Etc/GMT+5").rollover_up_to(9),
        ),
        (
            "7/month reserve-up-to=1 in America/New_York from day 2",
            Quota::per_month(7).in_zone("America/New_York").from_day(2).reserve_up_to(1),
        ),
    ] {
        assert_eq!(text.parse(), Ok(quota), "{text}");
    }
}

#[test]
fn a_parse_error_names_its_column() {
    for (text, column, what) in [
        ("", 1, "expected a limit: a whole number, as in 100/hour"),
        ("   ", 4, "expected a limit"),
        ("many/hour", 1, "expected a limit"),
        ("-1/hour", 1, "expected a limit"),
        ("100", 4, "expected a slash and a window, as in 100/hour"),
        ("1_/hour", 1, "expected a limit"),
        ("1__0/hour", 1, "expected a limit"),
        ("_1/hour", 1, "expected a limit"),
        ("1,000/hour", 2, "expected a slash"),
        ("100 per", 5, "expected a slash and a window"),
        ("100 per10s", 5, "expected a slash and a window"),
        ("100 per fortnight", 9, "expected a unit"),
        ("unlimited", 1, "read \"unlimited\" as a Plan"),
        ("100 hour", 5, "expected a slash"),
        ("1.5/hour", 1, "expected a limit"),
        ("100/", 5, "expected a unit: ms, s, minute, hour, day, week, month or year"),
        ("100/2month", 6, "expected a unit: ms, s, minute, hour, day or week"),
        ("100/months", 5, "expected a unit"),
        ("9007199254740992/month", 1, "a quota's limit is at most 2^53 - 1"),
        ("100/hour in Asia/Tokyo", 10, "only a day, a week, a month or a year follows a calendar"),
        ("100/2d in Asia/Tokyo", 8, "only a day, a week, a month or a year follows a calendar"),
        ("100/day in Mars/Olympus", 12, "has no such time zone: write an IANA name"),
        ("100/day in Etc/Unknown", 12, "has no such time zone"),
        ("100/day in", 11, "expected a time zone"),
        ("100/day in ", 12, "expected a time zone, as in Europe/Berlin"),
        ("100/day in , 5/s", 12, "expected a time zone"),
        ("100/day in Asia/Tokyo in Asia/Tokyo", 23, "in is here already"),
        ("100/day in Asia/Tokyo staggered", 23, "a calendar says where windows begin"),
        ("100/day staggered in Asia/Tokyo", 19, "a calendar says where windows begin"),
        ("100/month from day 5 starting-at=5h", 22, "write starting_at in place of a first day"),
        ("100/month starting-at=5h from day 5", 26, "write starting_at in place of a first day"),
        ("1/week from monday starting-at=50h", 20, "write starting_at in place of a first day"),
        ("1/day in UTC starting-at=6h", 14, "write starting_at in place of a first day"),
        ("100/week starting-at=5h from sunday", 25, "write starting_at in place of a first day"),
        ("100/day in Asia/Tokyo starting-at=5h", 23, "write starting_at in place of a first day"),
        ("100/year from-first-request", 10, "a calendar says where windows begin"),
        ("100/month from day 32", 16, "a month on a day from 1 to 31"),
        ("100/month from day 0", 16, "a month on a day from 1 to 31"),
        ("100/month from day 300", 16, "a month on a day from 1 to 31"),
        ("100/month from 15", 16, "expected a weekday, day 15, or 04-06"),
        ("100/month from sunday", 16, "a week begins on a weekday"),
        ("100/month from Sunday", 16, "expected a weekday, day 15, or 04-06"),
        ("100/month from day", 19, "expected a day of the month, as in day 15"),
        ("100/month fromday 3", 11, "expected a comma, the end"),
        ("100/month from day 3 from day 4", 22, "from is here already"),
        ("100/week from day 3", 15, "a week begins on a weekday"),
        ("100/day from sunday", 14, "a week begins on a weekday"),
        ("100/year from 02-30", 15, "a year on a month and a day"),
        ("100/year from 13-01", 15, "a year on a month and a day"),
        ("100/year from 04-", 18, "expected a day of the month"),
        ("5/month, 6/month", 10, "two quotas of one set have the same window and anchor"),
        ("5/day in UTC, 6/day", 15, "two quotas of one set have the same window and anchor"),
        ("100/fortnight", 5, "expected a unit"),
        ("100/10", 7, "expected a unit"),
        ("100/10 ", 8, "expected a unit"),
        ("100/Hour", 5, "expected a unit"),
        ("100/0s", 5, "a quota's window is at least 1 ms: write"),
        ("100/11000d", 5, "a quota's window is at most ten years"),
        ("100/18446744073709551615w", 5, "a quota's window is at most ten years"),
        ("9007199254740992/s", 1, "a quota's limit is at most 2^53 - 1"),
        ("18446744073709551616/s", 1, "expected a whole number of at most 2^53 - 1"),
        ("100/hour,", 10, "expected a limit"),
        ("100/hour 5/minute", 10, "expected a comma, the end, or one of staggered,"),
        ("100/hour stagered", 10, "expected a comma, the end"),
        ("100/hour rollover-up-to=", 25, "expected a whole number"),
        ("100/hour rollover-up-to=99", 10, "a rollover capacity is at least the limit"),
        ("100/hour reserve-up-to=9007199254740991", 10, "at most 2^53 - 1"),
        ("5/minute, 100/60s", 11, "and would be one counter: keep the smaller"),
        ("5/s, 5/m, 5/h, 5/d, 5/w", 21, "at most 4 quotas: stack a second layer for more"),
        ("5/s, 5/m, 5/h, 5/d, 9/d", 21, "at most 4 quotas: stack a second layer for more"),
        ("5/hour staggered from-first-request", 18, "one of staggered, from-first-request"),
        ("5/hour staggered starting-at=5h", 18, "one of staggered, from-first-request"),
        ("5/hour staggered staggered", 18, "one of staggered, from-first-request"),
        ("5/hour staggeredstarting-at=5h", 8, "expected a comma, the end"),
        ("5/day starting-at=5hstaggered", 20, "expected a unit"),
        ("5/hour starting-at=5min staggered, 1/s", 25, "one of staggered, from-first-request"),
        ("5/hour rollover-up-to=9 rollover-up-to=9", 25, "rollover-up-to= is here already"),
        ("5/hour reserve-up-to=1 rollover-up-to=9 reserve-up-to=2", 41, "is here already"),
        ("5/hour rollover-up-to=9staggered", 23, "expected a whole number"),
        ("é/hour", 1, "expected a limit"),
        ("100/hour é", 10, "expected a comma, the end"),
    ] {
        let error = text.parse::<Quotas>().expect_err(text).to_string();
        assert!(error.contains(&format!(", column {column}: ")), "{text:?}: {error}");
        assert!(error.contains(what), "{text:?}: {error}");
    }
}

#[test]
fn another_limit_leaves_as_much_to_reserve_as_can_be_counted() {
    const MOST: u64 = Quota::MAX_TOKENS;
    let reserved =
        |first, then| Quota::per_hour(1).reserve_up_to(first).with_limit(then).max_reserved();
    assert_eq!(
        [(9, 5), (MOST - 1, 1), (MOST - 1, 10), (MOST - 10, 10), (9, MOST)]
            .map(|(first, then)| reserved(first, then)),
        [9, MOST - 1, MOST - 10, MOST - 10, 0]
    );
}

#[test]
fn a_calendar_is_printed_as_it_is_read_and_known_by_its_windows() {
    const PLAN: Quota = Quota::per_month(10).from_day(15);
    const SET: Quotas = Quota::per_minute(5).and(PLAN).and(Quota::per_year(9));

    for (quota, text, counter) in [
        (Quota::per_month(10), "10/month", "month+1@UTC"),
        (PLAN, "10/month from day 15", "month+15@UTC"),
        (
            PLAN.in_zone("europe/BERLIN"),
            "10/month from day 15 in Europe/Berlin",
            "month+15@Europe/Berlin",
        ),
        (Quota::per_year(9), "9/year", "year+01-01@UTC"),
        (Quota::per_year(9).from_date(2, 29), "9/year from 02-29", "year+02-29@UTC"),
        (Quota::per_week(9).from_weekday(Weekday::Sunday), "9/week from sunday", "week+sunday@UTC"),
        (
            Quota::per_week(9).in_zone("Asia/Tokyo"),
            "9/week in Asia/Tokyo",
            "week+monday@Asia/Tokyo",
        ),
        (Quota::per_day(9).in_zone("Asia/Tokyo"), "9/day in Asia/Tokyo", "day@Asia/Tokyo"),
        // Windows that begin as the plain ones do are the plain ones.
        (Quota::per_day(9).in_zone("UTC"), "9/day", "86400000+0"),
        (Quota::per_day(9).in_zone("Asia/Tokyo").in_zone("utc"), "9/day", "86400000+0"),
        (Quota::per_week(9).from_weekday(Weekday::Monday), "9/week", "604800000+345600000"),
        // An alias of a zone is another name, and so another counter.
        (Quota::per_day(9).in_zone("Etc/UTC"), "9/day in Etc/UTC", "day@Etc/UTC"),
    ] {
        assert_eq!(quota.to_string(), text);
        assert_eq!(text.parse(), Ok(quota), "{text}");
        assert_eq!(quota.counter(), counter);
        let json = serde_json::to_string(&quota).expect("text");
        assert_eq!(serde_json::from_str::<Quota>(&json).expect("text"), quota);
    }
    assert_eq!(SET.as_ref().len(), 3);
    assert_eq!(PLAN.with_limit(9).in_zone("Asia/Tokyo").window(), Duration::from_secs(31 * 86_400));
    let tokyo = Quota::per_day(9).in_zone("Asia/Tokyo");
    assert_eq!(tokyo.and(Quota::per_day(9)).and(tokyo.in_zone("Asia/Seoul")).as_ref().len(), 3);
    assert_ne!(tokyo, tokyo.in_zone("Asia/Seoul"));
}

#[derive(Serialize, Deserialize, PartialEq, Debug)]
struct AnyLimit {
    quota: Option<Quota>,
    quotas: Option<Quotas>,
    plan: Option<Plan>,
}

fn from_toml(text: &str) -> Result<AnyLimit, String> {
    toml::from_str(text).map_err(|error| error.to_string())
}

#[test]
fn files_have_quotas_and_plans_also_without_a_limit() {
    let hundred = Quota::new(100, Duration::from_secs(10));
    let limits = from_toml("quota = '100 per 10s'\nquotas = '100/10s'\nplan = '1_00/10 seconds'");
    let limits = limits.expect("quotas");
    assert_eq!((limits.quota, limits.quotas), (Some(hundred), Some(hundred.into())));
    assert_eq!(limits.plan, Some(hundred.into()));
    let json = r#"{"quota":"100/10s","quotas":"100/10s","plan":"100/10s"}"#;
    assert_eq!(serde_json::from_str::<AnyLimit>(json).expect("quotas"), limits);
    assert_eq!(serde_json::to_string(&limits).expect("text"), json);
    let both = hundred.and(Quota::per_hour(500).staggered());
    let unlimited = from_toml("plan = \"unlimited\"").expect("a plan").plan.expect("a plan");
    assert_eq!(unlimited, Plan::from(None::<Quota>));
    assert_eq!(
        serde_json::to_string(&[unlimited, both.into()]).expect("text"),
        r#"["unlimited","100/10s, 500/hour staggered"]"#
    );
}

#[test]
fn errors_in_files_say_what_to_write() {
    for (text, says) in [
        (
            "quota = \"unlimited\"",
            "column 1: a quota is always a limit: read \"unlimited\" as a Plan",
        ),
        ("quotas = \"5/s, unlimited\"", "column 6: a quota is always a limit"),
        ("quota = \"5/fortnight\"", "column 3: expected a unit"),
        ("quota = 5", "invalid type: integer `5`, expected a quota such as \"100/hour\""),
        ("quotas = { limit = 5 }", "expected quotas such as \"100/hour\" or"),
        ("quotas = [\"5/s\"]", "expected quotas such as \"100/hour\" or"),
        ("plan = 5", "expected \"unlimited\", or quotas such as \"100/hour\""),
        ("plan = \"unlimited, 5/s\"", "column 1: a quota is always a limit"),
    ] {
        let error = from_toml(text).expect_err(text);
        assert!(error.contains(says), "{text}: {error}");
        assert!(error.contains("line 1"), "{text}: {error}");
    }
}

type Build = fn() -> Quotas;

fn panics(f: Build) -> String {
    let panic = catch_unwind(f).expect_err("refused");
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic.downcast::<&str>().expect("a message").to_string(),
    }
}

#[test]
fn an_invalid_quota_is_rejected_when_it_is_built() {
    const MONTH: Quota = Quota::per_month(9);
    const WEEK: Quota = Quota::per_week(9);
    const MINUTE: Quota = Quota::per_minute(10);
    const EPOCH: Duration = Duration::ZERO;
    const SIX: Duration = Duration::from_secs(21_600);
    const SUNDAY: Weekday = Weekday::Sunday;
    const TOKYO: &str = "Asia/Tokyo";
    const FIRST_DAY: &str = "write starting_at in place of a first day";
    const FOUR: Quotas = Quota::per_second(1).and(MINUTE).and(Quota::per_hour(1)).and(MONTH);

    let minute = Duration::from_secs(60);
    let ms = Duration::from_millis;
    for (limit, window, says) in [
        (1, Duration::ZERO, "Duration::from_secs(60)"),
        (1, Quota::MAX_WINDOW + ms(1), "ten years"),
        (1, Duration::MAX, "Duration::from_millis(n)"),
        (1, Duration::from_secs(u64::MAX), "ten years"),
        (1, Duration::from_micros(1), "Duration::from_millis(n)"),
        (1, Duration::from_nanos(60_000_000_001), "whole milliseconds"),
        (Quota::MAX_TOKENS + 1, minute, ".skip(..)"),
        (u64::MAX, minute, "2^53 - 1"),
    ] {
        let panic = catch_unwind(|| Quota::new(limit, window)).expect_err("refused");
        let panic = panic.downcast::<String>().expect("a message");
        assert!(panic.contains(says), "{panic}");
        let Ok(millis) = u64::try_from(window.as_millis()) else { continue };
        if window.subsec_nanos().is_multiple_of(1_000_000) {
            let error = format!("{limit}/{millis}ms").parse::<Quota>().expect_err("refused");
            assert!(error.to_string().ends_with(&*panic), "the same message: {error}");
        }
    }
    let _ = (Quota::new(0, ms(1)), Quota::new(Quota::MAX_TOKENS, Quota::MAX_WINDOW));

    let refused: [(Build, &str); 25] = [
        (|| MONTH.staggered().into(), "a calendar says where windows begin"),
        (|| MONTH.from_first_request().into(), "a calendar says where"),
        (
            || MONTH.in_zone(TOKYO).starting_at(EPOCH).into(),
            "write starting_at in place of a first day, before in_zone",
        ),
        (|| MONTH.starting_at(EPOCH).in_zone(TOKYO).from_day(3).into(), FIRST_DAY),
        (|| MONTH.starting_at(EPOCH).from_day(3).in_zone(TOKYO).into(), FIRST_DAY),
        (|| WEEK.starting_at(EPOCH).from_weekday(SUNDAY).into(), FIRST_DAY),
        (|| WEEK.from_weekday(SUNDAY).starting_at(EPOCH).into(), FIRST_DAY),
        (|| MONTH.from_day(15).starting_at(EPOCH).into(), FIRST_DAY),
        (|| Quota::per_day(1).staggered().in_zone(TOKYO).into(), "a calendar says where"),
        (|| Quota::per_hour(1).in_zone(TOKYO).into(), "write Quota::per_day(n), per_week"),
        (|| WEEK.in_zone("Mars").into(), "\"Mars\": the time zone database has no such"),
        (|| MONTH.from_day(32).into(), "a day from 1 to 31"),
        (|| WEEK.from_day(1).into(), "a week begins on a weekday"),
        (|| Quota::per_year(1).from_date(2, 30).into(), "a year on a month and a day"),
        (|| Quota::per_month(u64::MAX).into(), ".skip(..)"),
        (|| Quota::per_second(Quota::MAX_TOKENS + 1).into(), ".skip(..)"),
        (|| Quota::per_week(u64::MAX).into(), ".skip(..)"),
        (|| MINUTE.with_limit(u64::MAX).into(), ".skip(..)"),
        (|| MINUTE.rollover_up_to(9).into(), "a rollover capacity is at least the limit"),
        (|| MINUTE.rollover_up_to(Quota::MAX_TOKENS + 1).into(), "at most 2^53 - 1"),
        (|| MINUTE.reserve_up_to(Quota::MAX_TOKENS).into(), "at most 2^53 - 1"),
        (|| MINUTE.reserve_up_to(u64::MAX).into(), "at most 2^53 - 1"),
        (|| MINUTE.and(Quota::per_minute(9)), "keep the smaller"),
        // Six hours on, a grid of six hours is the same grid.
        (|| Quota::new(5, SIX).and(Quota::new(9, SIX).starting_at(SIX)), "keep the smaller"),
        (|| FOUR.and(WEEK), "stack a second layer for more"),
    ];
    for (build, says) in refused {
        let panic = panics(build);
        assert!(panic.contains(says), "{panic}");
    }
    let _ = Quota::per_day(1).and(Quota::per_day(9).staggered()); // another anchor
}

#[test]
fn the_error_of_an_invalid_name_lists_valid_characters() {
    for name in ["", "Login", "a b", "é", &"x".repeat(65)] {
        let name = name.to_owned();
        let limiter =
            move || drop(tower_fixed_window::Limiter::new(Quota::per_minute(1).name(&name)));
        let panic =
            catch_unwind(limiter).expect_err("refused").downcast::<String>().expect("a message");
        assert!(panic.contains(".name(\"login\")"), "{panic}");
    }
}
