//! A file of counts, of any bytes or of a real one with any of them changed and the checksum that
//! belongs to it: it is loaded or refused with a reason. What is loaded answers without a panic, and
//! is the same after another deploy.
#![no_main]

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Limit, Limiter, ManualClock, MemoryStore, Quota, Quotas};

const NOW_MS: u64 = 1_700_000_050_000;
const KEYS: u8 = 24;
const HEADER: usize = 40;

#[derive(Arbitrary, Debug)]
enum Change {
    /// Bytes from there on.
    Bytes(u16, [u8; 2]),
    /// A number from there on, perhaps of an entry.
    Number(u16, i64),
    Remove(u16, u8),
    Insert(u16, Vec<u8>),
}

#[derive(Arbitrary, Debug)]
enum Op {
    Charge { who: u8, cost: u8, reserve: bool },
    Peek(u8),
    Reset(u8),
    Wait(u32),
    Back(u32),
}

#[derive(Arbitrary, Debug)]
struct Input {
    /// In place of a real file.
    raw: Option<Vec<u8>>,
    changes: Vec<Change>,
    max_keys: u8,
    now: Option<u64>,
    ops: Vec<Op>,
}

fn folder() -> &'static Path {
    static FOLDER: LazyLock<PathBuf> = LazyLock::new(|| {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let folder = parent.join(format!("tower-fixed-window-fuzz-{}", std::process::id()));
        // A process that was killed may have had the same id.
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        folder
    });
    &FOLDER
}

fn open(max_keys: u8, clock: &ManualClock) -> std::io::Result<MemoryStore> {
    let store = MemoryStore::with_max_keys(usize::from(max_keys) + 1).clock(clock.clone());
    store.error_if_broken().saved_to(folder().join("counts"), Duration::MAX)
}

fn limiters(store: &MemoryStore) -> [Limiter; 4] {
    let quotas: [Quotas; 4] = [
        Quota::per_minute(5).into(),
        Quota::per_hour(9).rollover_up_to(20).and(Quota::per_month(30)),
        Quota::per_minute(3).reserve_up_to(9).staggered().into(),
        Quota::new(4, Duration::from_secs(100)).from_first_request().into(),
    ];
    quotas.map(|quotas| Limit::new(quotas).name("fuzz").store(store.clone()))
}

/// A file with entries of each kind, some of them shared.
fn real() -> &'static [u8] {
    static REAL: LazyLock<Vec<u8>> = LazyLock::new(|| {
        let store = open(8, &ManualClock::at_ms(NOW_MS)).expect("there is none yet");
        for limiter in limiters(&store) {
            (0..KEYS).for_each(|key| drop(block_on(limiter.reserve(u64::from(key), 2))));
        }
        drop(store);
        fs::read(folder().join("counts")).expect("a file")
    });
    &REAL
}

/// The file with its changes, and its checksum.
fn changed(changes: Vec<Change>) -> Vec<u8> {
    let mut bytes = real().to_vec();
    bytes.truncate(bytes.len() - 8);
    for change in changes {
        // Without the version and what belongs to the hash.
        let body = bytes.len() - HEADER;
        let (at, put) = match change {
            Change::Bytes(at, to) => (at, to.to_vec()),
            Change::Number(at, to) => (at, to.to_le_bytes().to_vec()),
            Change::Remove(at, len) => {
                let at = HEADER + usize::from(at) % (body + 1);
                bytes.drain(at..bytes.len().min(at + usize::from(len)));
                continue;
            }
            Change::Insert(at, more) => {
                let at = HEADER + usize::from(at) % (body + 1);
                bytes.splice(at..at, more);
                continue;
            }
        };
        let at = HEADER + usize::from(at) % (body + 1);
        bytes[at..].iter_mut().zip(put).for_each(|(byte, to)| *byte = to);
    }
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    let sum = bytes.iter().fold(0xcbf2_9ce4_8422_2325, step);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Peeks at what each key has left.
fn standings(limiters: &[Limiter; 4]) -> Vec<Vec<u64>> {
    let keys = (0..KEYS).flat_map(|key| limiters.iter().map(move |limiter| (limiter, key)));
    let left = |(limiter, key): (&Limiter, u8)| {
        let decision = block_on(limiter.peek(u64::from(key))).expect("memory answers");
        decision.usage().iter().map(|usage| usage.remaining()).collect()
    };
    keys.map(left).collect()
}

fuzz_target!(|input: Input| {
    let Input { raw, changes, max_keys, now, ops } = input;
    let real = real();
    let bytes = raw.unwrap_or_else(|| changed(changes));
    fs::write(folder().join("counts"), &bytes).expect("written");
    let mut now = now.unwrap_or(NOW_MS);
    let clock = ManualClock::at_ms(now);
    let store = match open(max_keys, &clock) {
        Ok(store) => store,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            assert_ne!(bytes, real);
            return;
        }
    };
    assert!(store.live_entries() * 32 <= store.max_bytes());
    let all = limiters(&store);
    for op in ops {
        let of = |who: u8| (&all[usize::from(who) % 4], u64::from(who / 4 % KEYS));
        match op {
            Op::Charge { who, cost, reserve } => {
                let (limiter, key) = of(who);
                drop(match reserve {
                    true => block_on(limiter.reserve(key, cost.into())),
                    false => block_on(limiter.charge(key, cost.into())),
                });
            }
            Op::Peek(who) => drop(block_on(of(who).0.peek(of(who).1))),
            Op::Reset(who) => drop(block_on(of(who).0.reset(of(who).1))),
            Op::Wait(ms) => now = now.saturating_add(ms.into()),
            Op::Back(ms) => now = now.saturating_sub(ms.into()),
        }
        clock.set_ms(now);
    }
    // In a full store, a look-up lets windows that a step back has left ahead run from that step on:
    // their keys have shown a count that is over then. The second time, all have been looked up.
    drop(standings(&all));
    // A key may share a count with one that has ended since, and takes it along.
    let before = standings(&all);
    drop((all, store));
    let store = open(max_keys, &clock).expect("what was saved is whole");
    for (before, after) in before.iter().zip(standings(&limiters(&store))) {
        assert!(
            before.iter().zip(&after).all(|(before, after)| after <= before),
            "{before:?} {after:?}"
        );
    }
});
