//! Models of what threads read without a lock: for each order of loads and stores that processors and
//! compilers may choose, by loom. (All threads see shuttle's atomics change in one order.)
//!
//! `cargo test --manifest-path tests/shuttle/Cargo.toml --test last_refused`

use std::sync::{Arc, Mutex};

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

// What the file imports.
mod sync {
    pub(crate) use loom::sync::atomic;
}
mod window {
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) struct State {
        pub(crate) start: i64,
        pub(crate) used: i64,
        pub(crate) until: i64,
        pub(crate) end: i64,
    }
}

#[path = "../../src/store/memory/last_refused.rs"]
mod last_refused;

use last_refused::LastRefused;
use window::State;

/// A key's state whose numbers all say which one it is.
fn state(number: i64) -> State {
    State { start: number, used: number, until: number, end: 0 }
}

/// Key 1 is refused, and then what this is given happens, while another thread reads its copy.
/// Returns all that the other thread has read, in any order of events.
fn read_during(change: impl Fn(&LastRefused) + Send + Sync + 'static) -> Vec<Option<State>> {
    // Not loom's: this is about all runs.
    let all = Arc::new(Mutex::new(Vec::new()));
    loom::model({
        let all = Arc::clone(&all);
        move || {
            let last = loom::sync::Arc::new(LastRefused::default());
            last.set(1, state(10));
            // Where the thread that was started writes, loom misses orders.
            let reader = thread::spawn({
                let (last, all) = (loom::sync::Arc::clone(&last), Arc::clone(&all));
                move || {
                    let read = last.get(1);
                    let mut all = all.lock().expect("no panic");
                    if !all.contains(&read) {
                        all.push(read);
                    }
                }
            });
            change(&last);
            reader.join().expect("no panic");
        }
    });
    let mut all = all.lock().expect("no panic").clone();
    all.sort_by_key(|read| read.map(|state| (state.start, state.used, state.until)));
    all
}

#[test]
fn a_copy_that_is_read_is_whole() {
    let all = read_during(|last| last.set(1, state(11)));
    assert_eq!(all, [None, Some(state(10)), Some(state(11))]);
}

#[test]
fn a_copy_that_is_read_is_of_the_key() {
    let all = read_during(|last| last.set(2, state(20)));
    assert_eq!(all, [None, Some(state(10))]);
}

#[test]
fn a_copy_that_comes_back_is_not_mixed_with_the_one_of_before() {
    let all = read_during(|last| {
        last.clear();
        last.set(1, state(11));
    });
    assert_eq!(all, [None, Some(state(10)), Some(state(11))]);
}

/// Who knows of a change, by any order between threads, reads no copy of before.
#[test]
fn a_copy_is_gone_for_all_who_know_of_the_change() {
    loom::model(|| {
        let last = loom::sync::Arc::new(LastRefused::default());
        last.set(1, state(10));
        let changed = loom::sync::Arc::new(AtomicU64::new(0));
        let reader = thread::spawn({
            let (last, changed) = (loom::sync::Arc::clone(&last), changed.clone());
            move || {
                let knows = changed.load(Ordering::Acquire) == 1;
                let read = last.get(1);
                assert!(read.is_none() || !knows, "{read:?}");
            }
        });
        last.clear();
        changed.store(1, Ordering::Release);
        reader.join().expect("no panic");
        assert_eq!(last.get(1), None);
    });
}
