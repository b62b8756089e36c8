//! Counts that go from process to process: each child is this test program once more.

use std::env;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tower_fixed_window::{Limit, Limiter, ManualClock, MemoryStore, Quota};

use super::folder;
use crate::answer;

const NO_LIMIT: u64 = 1 << 50;
const MIDNIGHT: u64 = 1_700_006_400_000;

/// The child's task, and its file.
const TASK: &str = "SAVED_CHILD";
const FILE: &str = "SAVED_FILE";

/// Runs this program as a child that only does its task.
fn child(task: &str, file: &Path) -> Command {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", "saved::processes::the_child_does_its_task", "--nocapture"]);
    command.env(TASK, task).env(FILE, file).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn the_child_does_its_task() {
    let (Ok(task), Some(file)) = (env::var(TASK), env::var_os(FILE)) else { return };
    let file = Path::new(&file);
    match &*task {
        "zones" => count_in_zones(file, ["Asia/Tokyo", "Europe/Berlin", "America/New_York"]),
        "load" => load(file),
        "fail" => fail(file),
        "debug" => {
            tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).with_ansi(false).init();
            MemoryStore::open(file, Duration::MAX).and_then(|store| store.save()).expect("saves");
        }
        "hold" => {
            let _store = MemoryStore::open(file, Duration::MAX).expect("opens");
            println!("\nopen");
            let _ = std::io::stdin().read(&mut [0]);
        }
        now => count_on_a_day(file, now.parse().expect("milliseconds")),
    }
}

fn output(mut child: Command) -> (String, String) {
    let output = child.output().expect("the child runs");
    let [out, err] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(output.status.success(), "{out}{err}");
    (out, err)
}

fn count_in_zones(file: &Path, zones: [&str; 3]) {
    let store = MemoryStore::open(file, Duration::MAX).expect("opens");
    for zone in zones {
        let quota = Quota::per_year(3).in_zone(zone);
        let limiter = Limit::new(quota).name("zoned").store(store.clone());
        assert!(answer(limiter.check(zone)).is_allowed());
    }
}

#[test]
fn another_process_finds_counters_of_time_zones_in_any_order() {
    let folder = folder();
    let file = folder.path().join("counts");
    let zones = ["America/New_York", "Europe/Berlin", "Asia/Tokyo"];
    count_in_zones(&file, zones);
    output(child("zones", &file));
    let store = MemoryStore::open(&file, Duration::MAX).expect("opens");
    for zone in zones {
        let limit = Quota::per_year(3).in_zone(zone).name("zoned");
        let limiter = limit.store(store.clone());
        assert_eq!(answer(limiter.peek(zone)).used(), 2, "{zone}");
    }
}

/// A zone whose clock is always so many hours ahead of UTC, in a folder of zone data.
fn zone(folder: &Path, hours: i32) {
    let counts = [0_u32, 0, 0, 0, 1, 4].map(u32::to_be_bytes).concat();
    let rules = [&(hours * 3_600).to_be_bytes()[..], &[0, 0], b"ABC\0"].concat();
    let block = [b"TZif2", &[0; 15][..], &counts, &rules].concat();
    let footer = format!("\nABC{}\n", -hours);
    std::fs::create_dir_all(folder.join("Test")).expect("a folder");
    let zone = [&block[..], &block, footer.as_bytes()].concat();
    std::fs::write(folder.join("Test/Zone"), zone).expect("written");
}

/// Prints how many requests pass under a daily quota, under one that keeps tokens, and under one from
/// an instant, at which the zone's clock shows another time by another edition.
fn count_on_a_day(file: &Path, now: u64) {
    let store = MemoryStore::with_max_keys(100).clock(ManualClock::at_ms(now));
    let store = store.saved_to(file, Duration::MAX).expect("opens");
    let day = Quota::per_day(5).in_zone("Test/Zone");
    let since = Quota::per_day(5).starting_at(Duration::from_millis(MIDNIGHT)).in_zone("Test/Zone");
    let quotas = [("plain", day), ("keeps", day.rollover_up_to(10)), ("since", since)];
    let passed = quotas.map(|(name, quota)| {
        let limiter = Limit::new(quota).name(name).store(store.clone());
        (0..20).filter(|_| answer(limiter.check("alice")).is_allowed()).count()
    });
    println!("\npassed {passed:?}");
}

/// S35: the end of a window that runs is in the file, and binds another edition of the zone data.
#[test]
fn another_edition_of_the_zone_data_grants_nothing_again() {
    const HOUR: u64 = 3_600_000;
    for hours in [-9, -1, 1, 9] {
        let folder = folder();
        let zones = folder.path().join("zones");
        let passed = |hours, now: u64| {
            zone(&zones, hours);
            let mut child = child(&now.to_string(), &folder.path().join("counts"));
            child.env("TZDIR", &zones);
            let told = output(child).0;
            told.lines().find(|line| line.starts_with("passed")).expect("it is told").to_owned()
        };
        assert_eq!(passed(0, MIDNIGHT - 12 * HOUR), "passed [5, 10, 5]");
        // Some of these are in another day by the new edition, and in the same by the old one.
        for before in [11 * HOUR, 8 * HOUR, HOUR / 2, 1] {
            assert_eq!(passed(hours, MIDNIGHT - before), "passed [0, 0, 0]", "{hours}: {before}");
        }
        assert_eq!(passed(hours, MIDNIGHT), "passed [5, 5, 5]", "{hours}: the window has ended");
    }
}

#[test]
fn a_file_that_another_process_holds_is_an_error_until_that_ends() {
    let folder = folder();
    let file = folder.path().join("counts");
    let mut child = child("hold", &file).stdin(Stdio::piped()).spawn().expect("the child runs");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    assert!(lines.any(|line| line.expect("text") == "open"));
    let error = MemoryStore::open(&file, Duration::MAX).expect_err("it is held");
    assert_eq!(error.kind(), std::io::ErrorKind::ResourceBusy, "{error}");
    // The lock ends with the process, also if the process is killed.
    child.kill().expect("killed");
    child.wait().expect("ended");
    drop(MemoryStore::open(&file, Duration::MAX).expect("opens"));
}

/// Saves fail three times, and work again.
fn fail(file: &Path) {
    let store = MemoryStore::open(file, Duration::MAX).expect("opens");
    store.save().expect("saves");
    let in_its_way = file.with_file_name("counts.new");
    for _ in 0..2 {
        std::fs::create_dir(&in_its_way).expect("a folder");
        (0..3).for_each(|_| assert!(store.save().is_err()));
        // The log tells for how long.
        std::thread::sleep(Duration::from_millis(2));
        std::fs::remove_dir(&in_its_way).expect("removed");
        (0..3).for_each(|_| store.save().expect("saves"));
    }
}

#[test]
fn failures_to_save_are_told_once_each_and_so_is_their_end() {
    let folder = folder();
    let start = Instant::now();
    let (_, told) = output(child("fail", &folder.path().join("counts")));
    let took = start.elapsed().as_secs_f64();
    let told: Vec<_> = told.lines().filter(|line| line.starts_with("tower_fixed")).collect();
    assert_eq!(told.len(), 4, "{told:?}");
    for told in told.chunks(2) {
        let fails = "tower_fixed_window: the counts can't be saved, and would be lost with the \
                     process error=can't replace ";
        assert!(told[0].starts_with(fails), "{told:?}");
        assert!(told[1].starts_with("tower_fixed_window: the counts are saved again "), "{told:?}");
        let (_, seconds) = told[1].rsplit_once(" seconds=").expect("it is told");
        let seconds: f64 = seconds.parse().expect("a number");
        assert!((0.002..took).contains(&seconds), "{told:?}, in {took} s");
    }
}

#[test]
fn each_save_is_logged_for_those_who_debug() {
    let folder = folder();
    let (file, start) = (folder.path().join("counts"), Instant::now());
    let (told, _) = output(child("debug", &file));
    let took = start.elapsed().as_secs_f64();
    // The last one is of the same bytes, when the store is dropped.
    let told: Vec<_> = told.lines().filter(|line| line.contains("the counts are saved")).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    let bytes = std::fs::metadata(&file).expect("a file").len();
    for line in told {
        assert!(line.contains(" DEBUG tower_fixed_window: the counts are saved file="), "{line}");
        let (_, seconds) =
            line.split_once(&format!("/counts bytes={bytes} seconds=")).expect("they are told");
        let seconds: f64 = seconds.parse().expect("a number");
        assert!((0.0..took).contains(&seconds), "{line}, in {took} s");
    }
}

const KEYS: u64 = 200;

fn limiter(store: &MemoryStore) -> Limiter {
    Quota::per_year(NO_LIMIT)
        .and(Quota::new(NO_LIMIT, Duration::from_secs(86_400 * 3_000)))
        .name("load")
        .store(store.clone())
}

/// Charges without end, and prints the counts before and after each save.
fn load(file: &Path) {
    let every = Duration::from_micros(300);
    let store = MemoryStore::with_max_keys(1_000).error_if_broken().saved_to(file, every);
    let store = store.expect("what a killed process leaves is whole");
    let limiter = limiter(&store);
    let mut charged = 0_u64;
    loop {
        for key in 0..KEYS {
            assert!(answer(limiter.check(key)).is_allowed());
        }
        charged += 1;
        println!("\ncharged {charged}");
        if charged.is_multiple_of(8) {
            store.save().expect("saves");
            println!("\nsaved {charged}");
        }
    }
}

fn last(lines: &[String], what: &str) -> u64 {
    let mut numbers = lines.iter().filter_map(|line| line.strip_prefix(what));
    numbers.next_back().map_or(0, |number| number.parse().expect("a number"))
}

/// Reads some lines of a child, kills it, and returns all of its output.
fn kill_after(mut child: Child, lines: usize, spins: u64) -> Vec<String> {
    let mut said = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut all: Vec<String> = said.by_ref().take(lines).map(|line| line.expect("text")).collect();
    (0..spins).for_each(|_| std::hint::spin_loop());
    child.kill().expect("killed");
    child.wait().expect("ended");
    // The last line may have been cut.
    let rest: Vec<_> = said.map_while(Result::ok).collect();
    all.extend(rest.iter().take(rest.len().saturating_sub(1)).cloned());
    all
}

#[test]
fn a_process_that_is_killed_at_any_of_200_moments_loses_no_more_than_since_its_last_save() {
    let folder = folder();
    let file = folder.path().join("counts");
    // The counters as the process before left them.
    let mut before = vec![0; 2 * KEYS as usize];
    for kill in 0..200 {
        let child = child("load", &file).spawn().expect("the child runs");
        let said = kill_after(child, fastrand::usize(..60), fastrand::u64(..200_000));
        let (saved, charged) = (last(&said, "saved "), last(&said, "charged "));
        let store = MemoryStore::with_max_keys(1_000).error_if_broken();
        let store = store.saved_to(&file, Duration::MAX);
        let limiter = limiter(&store.unwrap_or_else(|error| panic!("after kill {kill}: {error}")));
        let used = |key| answer(limiter.peek(key)).usage().iter().map(|u| u.used()).collect();
        let after: Vec<u64> = (0..KEYS).flat_map(|key| -> Vec<u64> { used(key) }).collect();
        for (before, after) in before.iter().zip(&after) {
            // The kill may come after a charge and before its line.
            let known = before + saved..=before + charged + 2;
            assert!(known.contains(after), "after kill {kill}: {after} is not of {known:?}");
        }
        before = after;
    }
    assert!(before[0] > 0, "something was saved");
}
