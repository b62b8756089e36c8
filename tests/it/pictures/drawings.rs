//! `docs/pictures/`: drawn from what limiters decide, under clocks that are moved by hand.
//! `DRAW=1 cargo test -p tests --test it drawings` writes them anew.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};
use std::{env, fs};

use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Decision, Limit, ManualClock, MemoryStore, Quota, Quotas};

use super::svg::{Svg, WIDTH};
use super::{FIVE, NOON_MS, PAGE, TWO_IN_TEN, herd};

const README: &str = include_str!("../../../README.md");

/// A drawing, by the name of its file; the title is its alternative text as well.
struct Picture {
    name: &'static str,
    title: String,
    svg: String,
}

impl Picture {
    fn new(name: &'static str, svg: Svg, title: &str, description: &str, height: i32) -> Self {
        Self { name, title: title.to_owned(), svg: svg.finish(title, description, height) }
    }
}

/// The outcome of one client's requests, in columns of 5 seconds from 12:00 on.
struct Lane {
    name: &'static str,
    /// In each column: how many passed and how many were refused.
    columns: Vec<(u32, u32)>,
    /// For each quota its windows, by their ends: seconds from 12:00, tokens that were there when
    /// it was first seen, and how many of them were taken.
    windows: Vec<BTreeMap<i64, Window>>,
}

#[derive(Clone, Copy)]
struct Window {
    start: i64,
    granted: u64,
    taken: u64,
}

impl Lane {
    fn run(name: &'static str, quotas: impl Into<Quotas>, asks: &str) -> Self {
        let quotas = quotas.into();
        let clock = ManualClock::at_ms(NOON_MS);
        let store = MemoryStore::new().clock(clock.clone());
        let limiter = Limit::new(quotas).store(store);
        let look = || block_on(limiter.peek("client")).unwrap();
        let second = |time: SystemTime| {
            let ms = time.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis() as i64;
            (ms - NOON_MS as i64) / 1_000
        };
        let opens_late = name.contains("first request");
        let mut lane = Self { name, columns: Vec::new(), windows: Vec::new() };
        lane.windows.resize(look().usage().len(), BTreeMap::new());
        for figure in asks.chars() {
            let before = look();
            let asked = figure.to_digit(10).unwrap_or(0);
            let answers = (0..asked).map(|_| block_on(limiter.check("client")).unwrap());
            let passed = answers.filter(Decision::is_allowed).count() as u32;
            lane.columns.push((passed, asked - passed));
            let after = look();
            for (i, standing) in after.usage().iter().enumerate() {
                if opens_late && standing.used() == 0 {
                    continue;
                }
                let end = second(standing.reset_at());
                let start = end - standing.window().as_secs() as i64;
                let granted = before.usage()[i].remaining();
                let new = Window { start, granted, taken: 0 };
                lane.windows[i].entry(end).or_insert(new).taken += u64::from(passed);
            }
            clock.advance(Duration::from_secs(5));
        }
        lane
    }

    fn passed(&self) -> u32 {
        self.columns.iter().map(|(passed, _)| passed).sum()
    }

    fn asked(&self) -> u32 {
        self.columns.iter().map(|(passed, refused)| passed + refused).sum()
    }
}

const LEFT: i32 = 20;
const DOT: i32 = 10;
const BAND: i32 = 22;

/// Lanes below each other over one time axis, with a dashed line at each full minute; and how high.
fn lanes(lanes: &[Lane]) -> (Svg, i32) {
    let mut svg = Svg::default();
    let columns = lanes[0].columns.len() as i32;
    let width = (WIDTH - 2 * LEFT) / columns;
    let end = i64::from(columns) * 5;
    let x = |second: i64| LEFT + (second.clamp(0, end) as i32) * width / 5;
    svg.key(28);
    let mut boundaries = String::new();
    let mut y = 14;
    for lane in lanes {
        let top = y + 24;
        svg.text("i h", LEFT, y + 14, lane.name);
        let most = lane.columns.iter().map(|(passed, refused)| passed + refused).max().unwrap();
        let ground = y + 22 + most as i32 * DOT;
        let (mut passed, mut refused) = (Vec::new(), Vec::new());
        let mut last = 0;
        for (i, &(pass, refuse)) in (0..).zip(&lane.columns) {
            let place = |n: u32| (LEFT + i * width + width / 2, ground - 2 - n as i32 * DOT);
            passed.extend((0..pass).map(place));
            refused.extend((pass..pass + refuse).map(place));
            if pass + refuse > 0 {
                last = i;
            }
        }
        svg.passed(&passed);
        svg.refused(&refused);
        if last < columns * 2 / 3 {
            let sum = format!("{} of {} pass", lane.passed(), lane.asked());
            svg.text("i h", LEFT + (last + 1) * width + 10, ground - 24, &sum);
        }
        y = ground + 8;
        for windows in &lane.windows {
            for (&until, window) in windows {
                let (from, to) = (x(window.start) + 1, x(until) - 1);
                if to - from < 8 {
                    continue;
                }
                let Window { granted, taken, .. } = *window;
                svg.block(if taken >= granted { "f" } else { "w" }, from, y, to - from, BAND);
                let full = if to - from > 100 { " tokens taken" } else { "" };
                let text = format!("{taken} of {granted}{full}");
                svg.text("i t m", (from + to) / 2, y + 15, &text);
            }
            y += BAND + 4;
        }
        for minute in 0..=columns / 12 {
            write!(boundaries, "M{} {top}V{y}", x(i64::from(minute) * 60)).unwrap();
        }
        y += 14;
    }
    for minute in 0..=columns / 12 {
        let at = x(i64::from(minute) * 60);
        let class = if minute == 0 {
            "s t"
        } else if minute * 12 == columns {
            "s t e"
        } else {
            "s t m"
        };
        svg.text(class, at, y + 8, &format!("12:0{minute}"));
    }
    svg.dashes("l", &boundaries);
    (svg, y + 22)
}

const AROUND: &str = "...........99...........";

fn boundary() -> Picture {
    let lane = Lane::run("5/minute", FIVE, AROUND);
    assert_eq!((lane.passed(), lane.asked()), (10, 18));
    let (svg, height) = lanes(&[lane]);
    Picture::new(
        "boundary",
        svg,
        "Under 5/minute, ten requests pass within ten seconds around the boundary of two windows",
        "A client sends nine requests just before 12:01 and nine just after. Five of each nine pass, \
         since each window grants five, and the other four are refused.",
        height,
    )
}

fn several_windows() -> Picture {
    let twice = FIVE.and(FIVE.starting_at(Duration::from_secs(30)));
    let drawn = [
        Lane::run("5/minute", FIVE, AROUND),
        Lane::run("5/minute, 2/10s", FIVE.and(TWO_IN_TEN), AROUND),
        Lane::run("5/minute, and once more half a minute later", twice, AROUND),
    ];
    assert_eq!([&drawn[0], &drawn[1], &drawn[2]].map(Lane::passed), [10, 4, 5]);
    let (svg, height) = lanes(&drawn);
    Picture::new(
        "several-windows",
        svg,
        "Nine requests just before a boundary and nine just after it: 10 pass under one window, 4 or 5 under two",
        "The same nine requests just before 12:01 and nine just after, three times. Under 5/minute ten \
         pass. With a second window of 2 in 10 seconds four pass. With the same minute once more, half a \
         minute later, five pass: that window spans the boundary of the other.",
        height,
    )
}

fn first_request() -> Picture {
    let quota = FIVE.from_first_request();
    let drawn = [
        Lane::run("5/minute from the first request", quota, AROUND),
        Lane::run(
            "5/minute from the first request, opened a minute before",
            quota,
            "1..........99...........",
        ),
    ];
    assert_eq!([&drawn[0], &drawn[1]].map(Lane::passed), [5, 10]);
    let (svg, height) = lanes(&drawn);
    Picture::new(
        "first-request",
        svg,
        "A window from the first request has its boundary where the client puts it",
        "Nine requests just before 12:01 and nine just after. For a client that sent nothing before, \
         the window begins with the first of them, and five pass. A client that opened its window with \
         one request at 12:00 has a boundary at 12:01, and nine of the eighteen pass.",
        height,
    )
}

fn rollover() -> Picture {
    let asks = "99..........11..........99..........";
    let drawn = [
        Lane::run("5/minute", FIVE, asks),
        Lane::run("5/minute, rollover up to 8", FIVE.rollover_up_to(8), asks),
    ];
    assert_eq!([&drawn[0], &drawn[1]].map(Lane::passed), [12, 18]);
    let (svg, height) = lanes(&drawn);
    Picture::new(
        "rollover",
        svg,
        "With rollover, what a minute leaves over is there in the next one, up to 8",
        "Eighteen requests in the first minute, two in the second, eighteen in the third. Under 5/minute \
         5, 2 and 5 pass. With rollover up to 8 a new client has 8, and the second minute leaves 3 over: \
         8, 2 and 8 pass.",
        height,
    )
}

fn staggered() -> Picture {
    let mut svg = Svg::default();
    let (width, high) = ((WIDTH - 2 * LEFT) / 12, 90);
    let spread = herd(Quota::per_minute(1).staggered());
    let (least, most) = (spread[1..].iter().min().unwrap(), spread.iter().max().unwrap());
    let mut y = 14;
    for (name, quota) in [
        ("1/minute, aligned", Quota::per_minute(1)),
        ("1/minute, staggered", Quota::per_minute(1).staggered()),
    ] {
        svg.text("i h", LEFT, y + 14, name);
        let ground = y + 40 + high;
        for (i, &back) in (0..).zip(&herd(quota)[1..]) {
            let tall = (back as i32 * high / 1_200).max(i32::from(back > 0) * 2);
            let left = LEFT + i * width;
            if back > 0 {
                let text = if back == 1_200 { "1,200".into() } else { back.to_string() };
                svg.block("b", left + 3, ground - tall, width - 6, tall);
                svg.text("i t m", left + width / 2, ground - tall - 5, &text);
            }
        }
        svg.path("l", 1, &format!("M{LEFT} {ground}H{}", LEFT + 12 * width));
        y = ground + 12;
    }
    for (at, class, text) in
        [(0, "s t", "12:00:00"), (6, "s t m", "12:00:30"), (12, "s t e", "12:01:00")]
    {
        svg.text(class, LEFT + at * width, y + 8, text);
    }
    Picture::new(
        "staggered",
        svg,
        "1,200 refused clients come back all at once with aligned windows, spread out with staggered ones",
        &format!(
            "When 1,200 clients that were refused at 12:00:00 are told to come back, counted in steps of \
             5 seconds. With aligned windows all 1,200 come in the last step before 12:01, with staggered \
             windows between {least} and {most} in each step."
        ),
        y + 22,
    )
}

/// Windows of half a year, as the limiter ends them: months begin on their day, 30 days drift away.
fn months() -> Picture {
    const DAY: u64 = 86_400;
    /// 2026-01-01 00:00 UTC.
    const JANUARY: u64 = 20_454 * DAY;
    const MONTHS: [(&str, u64); 7] = [
        ("Jan", 0),
        ("Feb", 31),
        ("Mar", 59),
        ("Apr", 90),
        ("May", 120),
        ("Jun", 151),
        ("Jul", 181),
    ];

    let x = |day: u64| LEFT + (day.min(181) * (WIDTH as u64 - 2 * LEFT as u64) / 181) as i32;
    let mut svg = Svg::default();
    let mut y = 14;
    let plain = Quota::new(10_000, Duration::from_secs(30 * DAY));
    for (name, quota) in [
        ("10000/month from day 15", Quota::per_month(10_000).from_day(15)),
        ("10000/month from day 31", Quota::per_month(10_000).from_day(31)),
        ("10000/30d", plain.starting_at(Duration::from_secs(JANUARY))),
    ] {
        assert!(quota.to_string().starts_with(name), "{quota}");
        svg.text("i h", LEFT, y + 14, name);
        y += 22;
        let clock = ManualClock::at_ms(JANUARY * 1_000);
        let limiter = Limit::new(quota).store(MemoryStore::new().clock(clock.clone()));
        let mut day = 0;
        while day < 181 {
            let decision = block_on(limiter.peek("client")).unwrap();
            let days = decision.usage()[0].window().as_secs() / DAY;
            let end = day + decision.reset_after().as_secs() / DAY;
            let (from, to) = (x(end.saturating_sub(days)) + 1, x(end) - 1);
            svg.block("w", from, y, to - from, BAND);
            if to - from > 60 {
                svg.text("i t m", (from + to) / 2, y + 15, &format!("{days} days"));
            }
            clock.advance(Duration::from_secs((end - day) * DAY));
            day = end;
        }
        y += BAND + 14;
    }
    let lines: String = MONTHS.iter().map(|(_, day)| format!("M{} 24V{y}", x(*day))).collect();
    svg.dashes("l", &lines);
    for (name, day) in MONTHS {
        let class = if day == 0 {
            "s t"
        } else if day == 181 {
            "s t e"
        } else {
            "s t m"
        };
        svg.text(class, x(day), y + 14, name);
    }
    Picture::new(
        "months",
        svg,
        "Windows of a month begin on their day, in shorter months on the last one; 30 days drift",
        "The first half of 2026. Windows of a month begin on the 15th or, from the 31st on, on the last day of \
         each month. Windows of 30 days begin earlier each time.",
        y + 28,
    )
}

/// Where rustdoc looks for pictures: its pages have no files beside them.
fn for_rustdoc<'a>(pictures: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = String::new();
    for (name, svg) in pictures {
        let mut encoded = svg.replace('%', "%25").replace('#', "%23").replace('\n', "");
        for (c, code) in [('<', "%3C"), ('>', "%3E"), ('"', "'")] {
            encoded = encoded.replace(c, code);
        }
        writeln!(text, "[picture-{name}]: <data:image/svg+xml,{encoded}>").unwrap();
    }
    text
}

#[test]
fn drawings_match_the_limiter_and_each_is_on_a_page_with_alternative_text() {
    let pictures =
        [boundary(), several_windows(), staggered(), first_request(), rollover(), months()];
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/pictures");
    let is_committed = |file: &str, drawn: &str| {
        let file = folder.join(file);
        if env::var_os("DRAW").is_some() {
            fs::write(&file, drawn).unwrap();
        }
        assert!(
            fs::read_to_string(&file).is_ok_and(|committed| committed == drawn),
            "{} is not what the limiter does now: run this test with DRAW=1, and look at it",
            file.display()
        );
    };
    for Picture { name, svg, .. } in &pictures {
        is_committed(&format!("{name}.svg"), svg);
    }
    // Drawn by `scripts/peers`.
    let plot = fs::read_to_string(folder.join("../plots/peers.svg")).unwrap();
    let all = pictures.iter().map(|picture| (picture.name, &*picture.svg));
    is_committed("rustdoc.md", &for_rustdoc(all.chain([("peers", &*plot)])));
    assert!(README.contains("[picture-peers]\n") && README.contains("docs/plots/peers.svg"));
    for Picture { name, title, svg } in &pictures {
        assert!(svg.len() < 10_000, "{name} has {} bytes", svg.len());
        assert!(svg.contains("prefers-color-scheme:dark") && svg.contains("<desc "));
        let shown = format!("![{title}][picture-{name}]");
        assert!(PAGE.contains(&shown), "not in docs/windows.md: {shown}");
        assert!(PAGE.contains(&format!("\n[picture-{name}]: pictures/{name}.svg")));
    }
    let on_the_front = format!("![{}][picture-several-windows]", pictures[1].title);
    assert!(README.contains(&on_the_front), "not in README.md: {on_the_front}");
    assert!(README.contains("\n[picture-several-windows]: docs/pictures/several-windows.svg"));
    let files = fs::read_dir(&folder).unwrap().count();
    assert_eq!(files, pictures.len() + 1, "a picture that nothing draws");
}
