//! S38: counts that outlive the process, as limits see it.

mod broken;
mod processes;
mod random;

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tempfile::TempDir;
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Limit, Limiter, ManualClock, MemoryStore, Quota, Quotas};

use crate::answer;

const NOW_MS: u64 = 1_700_000_050_000;
const MINUTE_MS: u64 = 60_000;
const MONTH_MS: u64 = 31 * 86_400_000;

/// The folder is in memory if the system has such a folder, since these tests don't depend on a
/// disk.
pub(crate) fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() };
    folder.expect("a folder")
}

/// A file, and the clock of the stores that open it: saved only when a test says so.
struct Deploys {
    folder: TempDir,
    clock: ManualClock,
}

impl Deploys {
    fn new() -> Self {
        Self { folder: folder(), clock: ManualClock::at_ms(NOW_MS) }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("counts")
    }

    fn store(&self, max_keys: usize) -> MemoryStore {
        MemoryStore::with_max_keys(max_keys).clock(self.clock.clone())
    }

    fn saved(&self, store: MemoryStore) -> io::Result<MemoryStore> {
        store.saved_to(self.path(), Duration::MAX)
    }

    fn open(&self) -> MemoryStore {
        self.saved(self.store(1_000)).expect("the file opens")
    }

    fn limiter(&self, quotas: impl Into<Quotas>) -> Limiter {
        Limit::new(quotas).name("api").store(self.open())
    }
}

fn used(limiter: &Limiter, key: &str) -> Vec<u64> {
    answer(limiter.peek(key)).usage().iter().map(|usage| usage.used()).collect()
}

#[test]
fn what_has_ended_is_not_loaded() {
    let deploys = Deploys::new();
    let limiter = deploys.limiter(Quota::per_minute(5).and(Quota::per_hour(50)));
    (0..50).for_each(|key| assert!(answer(limiter.check(key)).is_allowed()));
    drop(limiter);
    let size = |path: &Path| fs::metadata(path).expect("a file").len();
    let full = size(&deploys.path());
    assert_eq!(deploys.open().live_entries(), 100);

    deploys.clock.set_ms(NOW_MS + MINUTE_MS);
    assert_eq!(deploys.open().live_entries(), 50);
    deploys.clock.set_ms(NOW_MS + 60 * MINUTE_MS);
    assert_eq!(deploys.open().live_entries(), 0);
    assert!(size(&deploys.path()) < full / 2, "and does not stay in the file");
}

#[test]
fn a_save_when_a_window_ends_keeps_the_others() {
    let deploys = Deploys::new();
    let limiter = || deploys.limiter(Quota::per_minute(5).and(Quota::per_hour(50)));
    let before = limiter();
    deploys.clock.advance(answer(before.check("alice")).reset_after());
    drop(before);
    assert_eq!(used(&limiter(), "alice"), [0, 1]);
}

/// The store notes 1,024 counters, 64 of a limit.
#[test]
fn a_reset_that_would_not_find_all_is_an_error_after_a_deploy_too() {
    let deploys = Deploys::new();
    let limiter = |store: &MemoryStore, i: u64| {
        Quota::per_day(1).name(&format!("limit-{i}")).store(store.clone())
    };
    let resets = |store: &MemoryStore| {
        [0, 15, 16].map(|i| limiter(store, i).reset("alice").into_now().expect("at once").is_ok())
    };
    // With room for all, so that no key shares a count.
    let open = || deploys.saved(deploys.store(10_000)).expect("the file opens");
    let store = open();
    for i in 0..17 {
        for ms in 1..=if i == 0 { 65 } else { 64 } {
            let plan = Quota::new(1, Duration::from_millis(86_400_000 + ms));
            assert!(answer(limiter(&store, i).with_quotas(plan).check("alice")).is_allowed());
        }
    }
    assert_eq!(resets(&store), [false, true, false]);
    drop(store);
    assert_eq!(resets(&open()), [false, true, false]);
}

/// The store is full, so keys share counts.
#[test]
fn a_full_store_waits_no_longer_than_a_window_for_a_clock_that_was_ahead() {
    let deploys = Deploys::new();
    deploys.clock.set_ms(NOW_MS + 400 * MONTH_MS);
    let small = || deploys.saved(deploys.store(16)).expect("the file opens");
    let limiter = |store| Quota::per_minute(1).name("api").store(store);
    let ahead = limiter(small());
    (0..2_000).for_each(|key| drop(answer(ahead.check(key))));
    drop(ahead);

    deploys.clock.set_ms(NOW_MS);
    let store = small();
    let late = limiter(store.clone());
    (2_000..2_200).for_each(|key| drop(answer(late.check(key))));
    // The entries are free again. More keys than these might share a bucket.
    deploys.clock.set_ms(NOW_MS + 2 * MINUTE_MS);
    let before = store.overflowed();
    assert!(answer(late.check(3_000)).is_allowed());
    assert_eq!(store.overflowed(), before);
}

#[test]
fn a_store_of_another_size_has_all_counts_and_room_for_them() {
    for (first, second) in [(1_000, 200_000), (200_000, 1_000), (10, 1_000), (50_000, 10)] {
        let deploys = Deploys::new();
        let open = |max_keys| deploys.saved(deploys.store(max_keys)).expect("the file opens");
        let limiter = |store| Quota::per_hour(3).name("api").store(store);
        // The second half of these fills a small store.
        let keys = 0..first.min(20_000) as u64 * 2;
        let before = limiter(open(first));
        keys.clone().for_each(|key| drop(answer(before.charge(key, 1 + key % 3))));
        let left = |limiter: &Limiter| -> Vec<_> {
            keys.clone().map(|key| answer(limiter.peek(key)).remaining()).collect()
        };
        let expected = left(&before);
        drop(before);

        let store = open(second);
        let live = store.live_entries();
        assert!(live * 32 <= store.max_bytes(), "{live} entries in {}", store.max_bytes());
        let after = limiter(store.clone());
        assert_eq!(left(&after), expected, "{first} and then {second} keys");
        // New keys count as well.
        for key in 100_000..100_010 {
            let passed = (0..5).filter(|_| answer(after.check(key)).is_allowed()).count();
            assert!(passed <= 3, "{first} and then {second} keys: {passed}");
        }
        drop((store, after));
        assert_eq!(left(&limiter(open(first))), expected, "{first}, {second} and {first} keys");
    }
}

#[test]
fn a_larger_store_has_room_for_more_keys_and_a_smaller_one_takes_less_memory() {
    let deploys = Deploys::new();
    let open = |max_keys| deploys.saved(deploys.store(max_keys)).expect("the file opens");
    let limiter = |store: &MemoryStore| Quota::per_hour(3).name("api").store(store.clone());
    let store = open(10);
    (0..10).for_each(|key| assert!(answer(limiter(&store).check(key)).is_allowed()));
    drop(store);
    let store = open(10_000);
    (0..10_000).for_each(|key| assert!(answer(limiter(&store).check(key)).is_allowed()));
    assert!(store.overflowed() < 200, "{}", store.overflowed());
    drop(store);

    // Two hours later, the store has few keys.
    deploys.clock.set_ms(NOW_MS + 120 * MINUTE_MS);
    let store = open(100);
    assert!(store.max_bytes() < 10_000, "{}", store.max_bytes());
    assert!(answer(limiter(&store).check(1)).is_allowed());
    drop(store);
    assert_eq!(open(100).live_entries(), 1);
}

/// Each save has what was counted before it began, also where tables grow meanwhile.
#[test]
fn a_save_while_keys_come_and_tables_grow_misses_none_of_those_before() {
    const THREADS: u64 = 2;
    let keys = if std::env::var_os("FULL_SIZE").is_some() { 200_000 } else { 20_000 };
    let deploys = Deploys::new();
    for _ in 0..5 {
        let store = deploys.saved(deploys.store(3 * keys as usize)).expect("opens");
        let limiter = |store: &MemoryStore| Quota::per_year(9).name("api").store(store.clone());
        let charged: [AtomicU64; THREADS as usize] = Default::default();
        std::thread::scope(|scope| {
            for (thread, charged) in charged.iter().enumerate() {
                let limiter = limiter(&store);
                scope.spawn(move || {
                    for i in 0..keys {
                        assert!(answer(limiter.check(i * THREADS + thread as u64)).is_allowed());
                        charged.store(i + 1, Ordering::Release);
                    }
                });
            }
            let copy = deploys.folder.path().join("copy");
            while charged.iter().any(|charged| charged.load(Ordering::Acquire) < keys) {
                let before: Vec<_> = charged.iter().map(|n| n.load(Ordering::Acquire)).collect();
                store.save().expect("saves");
                fs::copy(deploys.path(), &copy).expect("copied");
                let loaded = deploys.store(3 * keys as usize).saved_to(&copy, Duration::MAX);
                let loaded = loaded.expect("opens");
                let limiter = limiter(&loaded);
                for (thread, charged) in before.into_iter().enumerate() {
                    for key in (0..charged).map(|i| i * THREADS + thread as u64) {
                        assert_eq!(answer(limiter.peek(key)).used(), 1, "{key}");
                    }
                }
            }
        });
        drop(store);
        fs::remove_file(deploys.path()).expect("saved");
    }
}

#[test]
fn the_last_clone_saves_when_it_is_dropped() {
    let deploys = Deploys::new();
    let store = deploys.open();
    let limiter = Quota::per_hour(3).name("api").store(store.clone());
    assert!(answer(limiter.check("alice")).is_allowed());
    drop(store);
    assert!(!deploys.path().exists());
    drop(limiter);
    assert!(deploys.path().exists());
    assert_eq!(used(&deploys.limiter(Quota::per_hour(3)), "alice"), [1]);
}

#[test]
fn the_file_is_saved_at_the_interval() {
    let deploys = Deploys::new();
    let path = deploys.path();
    let store = MemoryStore::open(&path, Duration::from_millis(1)).expect("opens");
    while !path.exists() {
        std::thread::yield_now();
    }
    drop(store);
}

#[test]
fn a_file_is_open_once() {
    let deploys = Deploys::new();
    let store = deploys.open();
    let error = deploys.saved(deploys.store(1_000)).expect_err("it is open");
    assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
    assert!(error.to_string().contains("another store has this file open"), "{error}");
    // By another name, too.
    let link = deploys.folder.path().join("link");
    store.save().expect("saves");
    std::os::unix::fs::symlink(deploys.path(), &link).expect("a link");
    let error = MemoryStore::open(&link, Duration::from_secs(1)).expect_err("it is open");
    assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
    drop(store);
    drop(MemoryStore::open(&link, Duration::from_secs(1)).expect("opens"));
    assert!(fs::symlink_metadata(link).expect("there").is_symlink(), "a link stays one");
}

#[test]
fn only_the_owner_can_read_what_is_saved() {
    let deploys = Deploys::new();
    fs::write(deploys.path(), "").expect("written");
    fs::set_permissions(deploys.path(), PermissionsExt::from_mode(0o666)).expect("permitted");
    // A killed process may leave such a file, and others can open it.
    let left = deploys.folder.path().join("counts.new");
    fs::write(&left, "").expect("written");
    fs::set_permissions(&left, PermissionsExt::from_mode(0o666)).expect("permitted");
    drop(deploys.open());
    for name in ["counts", "counts.lock"] {
        let metadata = fs::metadata(deploys.folder.path().join(name)).expect("there");
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{name}");
    }
    assert!(!left.exists());
}

#[test]
fn limits_on_such_a_store_have_a_name() {
    let deploys = Deploys::new();
    let store = deploys.open();
    let build = || Limit::new(Quota::per_hour(3)).store(store);
    let unnamed = catch_unwind(AssertUnwindSafe(build));
    let told = *unnamed.expect_err("no name").downcast::<&str>().expect("text");
    assert!(told.contains(".name("), "{told}");
}

#[test]
fn settings_that_make_no_sense_are_errors() {
    let deploys = Deploys::new();
    let error = MemoryStore::open(deploys.path(), Duration::ZERO).expect_err("no interval");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    let error = MemoryStore::new().save().expect_err("no file");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let missing = deploys.folder.path().join("no such folder/counts");
    let error = MemoryStore::open(missing, Duration::from_secs(1)).expect_err("no folder");
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert!(error.to_string().contains("no such folder"), "{error}");
    let error = MemoryStore::open("..", Duration::from_secs(1)).expect_err("a folder");
    assert!(!error.to_string().is_empty());
}

/// What was counted before is not in the file, so nothing of it comes back.
#[test]
fn receipts_from_before_a_store_has_its_file_are_another_stores() {
    let deploys = Deploys::new();
    let limit = || Quota::per_day(5).name("api");
    for (file, used) in [("a new one", 0), ("an older one", 5)] {
        let store = deploys.store(1_000);
        let receipt = answer(limit().store(store.clone()).charge("ann", 5)).expect("it passes");
        let limiter = limit().store(deploys.saved(store).expect("it opens"));
        assert!(answer(limiter.charge("ann", 5 - used)).is_ok(), "{file}");
        assert!(block_on(limiter.refund(receipt)).is_err(), "{file}");
        assert!(answer(limiter.charge("ann", 1)).is_err(), "{file}");
    }
}

#[test]
fn a_store_gets_one_file_and_before_it_is_cloned() {
    let deploys = Deploys::new();
    let store = deploys.store(10);
    let _clone = store.clone();
    assert!(catch_unwind(AssertUnwindSafe(|| deploys.saved(store))).is_err());
    let store = deploys.open();
    let other = deploys.folder.path().join("other");
    let twice = AssertUnwindSafe(|| store.saved_to(other, Duration::MAX));
    assert!(catch_unwind(twice).is_err());
    // It has ended, and let go of the file.
    drop(deploys.open());
    let store = deploys.open();
    assert!(catch_unwind(AssertUnwindSafe(|| store.error_if_broken())).is_err());
}
