//! Logs and metrics of counts in a file: whether they were loaded, when they were saved, and why
//! they can't be.

use std::fs;
use std::path::Path;

use crate::metrics_and_logs::{recorder, scraped};
use crate::prelude::*;

fn open(path: &Path, now_ms: u64) -> MemoryStore {
    let store = MemoryStore::with_max_keys(1_000).clock(ManualClock::at_ms(now_ms));
    store.saved_to(path, Duration::MAX).expect("opens")
}

#[test]
fn the_log_names_the_file_that_is_loaded_and_the_reason_why_one_is_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("counts");
    let log = Log::start();
    let store = open(&path, NOW_MS);
    assert_eq!(log.text(), "", "there is none");
    let limiter = Quota::per_day(9).name("api").store(store.clone());
    assert!(block_on(limiter.check("secret")).expect("memory answers").is_allowed());
    drop((limiter, store));

    drop(open(&path, NOW_MS + 2_500));
    let text = log.text();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(" INFO tower_fixed_window: the counts of a file are loaded"), "{text}");
    let bytes = fs::metadata(&path).expect("a file").len();
    assert!(text.contains(&format!("/counts bytes={bytes} age=2.5")), "{text}");

    let bytes = fs::read(&path).expect("a file");
    fs::write(&path, &bytes[..bytes.len() - 1]).expect("written");
    drop(open(&path, NOW_MS));
    let text = log.warnings();
    assert_eq!(text.lines().count(), 1, "{text}");
    let told = "WARN tower_fixed_window: the store starts empty, because its file can't be used";
    assert!(text.contains(told), "{text}");
    assert!(text.contains("/counts: it is cut short or damaged"), "{text}");
    assert!(text.contains("/counts.broken"), "{text}");
    assert!(!text.contains("secret"), "{text}");
}

#[test]
fn gauges_show_when_counts_were_saved_how_long_that_took_and_how_much_it_was() {
    let (handle, _guard) = recorder();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("counts");
    let store = open(&path, NOW_MS);
    let of = |name: &str| {
        store.record_metrics("api");
        scraped(&handle).get(&format!(r#"{name}{{store="api"}}"#)).copied()
    };
    assert_eq!(of("saved_timestamp_seconds"), None);
    assert_eq!(of("save_failures_total"), Some(0.0));

    let now = || SystemTime::now().duration_since(UNIX_EPOCH).expect("later").as_secs_f64();
    let before = now();
    store.save().expect("saves");
    let at = of("saved_timestamp_seconds").expect("it was saved");
    assert!((before..=now()).contains(&at), "{at}");
    assert!((0.0..=now() - before).contains(&of("saved_seconds").expect("it was saved")));
    let bytes = fs::metadata(&path).expect("a file").len();
    assert_eq!(of("saved_bytes"), Some(bytes as f64));

    fs::create_dir(folder.path().join("counts.new")).expect("a folder");
    (0..3).for_each(|_| assert!(store.save().is_err()));
    assert_eq!(of("save_failures_total"), Some(3.0));
    assert_eq!(of("saved_timestamp_seconds"), Some(at), "of the last one that worked");
}
