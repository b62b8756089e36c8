//! Files that can't be used, and places where none can be: the store says why, and never lets more
//! pass than if its process had been killed.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use tower_fixed_window::{Clock, Limit, ManualClock, MemoryStore, Quota};

use super::{Deploys, MINUTE_MS, NOW_MS, folder, used};
use crate::answer;

/// The checksum of a file: FNV-1a of 64 bits.
pub(super) fn sum(bytes: &[u8]) -> [u8; 8] {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step).to_le_bytes()
}

/// The bytes of a file with counts of a few keys, some of which share a count.
fn saved() -> Vec<u8> {
    let deploys = Deploys::new();
    let store = deploys.saved(deploys.store(4)).expect("opens");
    for quota in [Quota::per_hour(1), Quota::per_month(5).in_zone("Europe/Berlin")] {
        let limiter = Limit::new(quota).name("api").store(store.clone());
        (0..12).for_each(|key| drop(answer(limiter.check(key))));
    }
    assert!(store.overflowed() > 0);
    store.save().expect("saves");
    fs::read(deploys.path()).expect("a file")
}

/// Opens a file of these bytes twice: for its error, and for the empty store instead.
fn open(bytes: &[u8]) -> (String, MemoryStore, Deploys) {
    let deploys = Deploys::new();
    fs::write(deploys.path(), bytes).expect("written");
    let error = deploys.saved(deploys.store(1_000).error_if_broken()).expect_err("it is broken");
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    assert_eq!(fs::read(deploys.path()).expect("still there"), bytes);
    let store = deploys.open();
    assert!(!deploys.path().exists());
    let aside = fs::read(deploys.folder.path().join("counts.broken")).expect("kept");
    assert_eq!(aside, bytes, "what was there is kept");
    let told = error.to_string();
    assert!(told.starts_with("can't use ") && told.contains("/counts: "), "{told}");
    (told.rsplit_once(": ").expect("a reason").1.to_owned(), store, deploys)
}

/// Asserts that the store counts, and that the next deploy finds the counts.
fn assert_works(store: MemoryStore, deploys: &Deploys) {
    let limiter = Quota::per_hour(3).name("api").store(store);
    let passed = (0..9).filter(|_| answer(limiter.check("alice")).is_allowed()).count();
    assert_eq!(passed, 3);
    drop(limiter);
    assert_eq!(used(&deploys.limiter(Quota::per_hour(3)), "alice"), [3]);
}

#[test]
fn a_file_cut_at_any_byte_is_not_used() {
    let bytes = saved();
    for len in 0..bytes.len() {
        let (told, store, deploys) = open(&bytes[..len]);
        let expected = match len {
            // A file without its beginning could be any program's.
            9..16 => "it is not a file of counts",
            0..24 => "it is cut short",
            _ => "it is cut short or damaged",
        };
        assert_eq!(told, expected, "{len} bytes");
        assert_eq!(store.live_entries(), 0);
        if len % 64 == 0 {
            assert_works(store, &deploys);
        }
    }
}

#[test]
fn a_file_with_any_bit_flipped_is_not_used() {
    let bytes = saved();
    for at in 0..bytes.len() {
        // The header is tried with each bit of each byte, the rest with one bit of each byte.
        for bit in (0..8).filter(|bit| at < 40 || *bit == at % 8) {
            let mut flipped = bytes.clone();
            flipped[at] ^= 1 << bit;
            let (told, store, _) = open(&flipped);
            let expected = match at {
                0..8 => "it is not a file of counts",
                8..16 => "of the format",
                _ => "it is cut short or damaged",
            };
            assert!(told.contains(expected), "bit {bit} of byte {at}: {told}");
            assert_eq!(store.live_entries(), 0);
        }
    }
}

#[test]
fn a_file_with_bytes_at_its_end_is_not_used() {
    let mut bytes = saved();
    bytes.push(0);
    assert_eq!(open(&bytes).0, "it is cut short or damaged");
    // Also where the checksum is right.
    let mut bytes = saved();
    bytes.truncate(bytes.len() - 8);
    bytes.push(0);
    let sum = sum(&bytes);
    bytes.extend(sum);
    assert_eq!(open(&bytes).0, "it ends too late");
}

/// A change with its checksum, as another version would write it.
fn changed(bytes: &[u8], at: usize, to: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes.truncate(bytes.len() - 8);
    bytes[at..at + to.len()].copy_from_slice(to);
    let sum = sum(&bytes);
    bytes.extend(sum);
    bytes
}

#[test]
fn a_file_of_another_version_is_not_used() {
    let bytes = saved();
    let (told, store, deploys) = open(&changed(&bytes, 8, &1_u64.to_le_bytes()));
    assert_eq!(told, "it has version 1 of the format");
    assert_works(store, &deploys);
    // The seed and what becomes of known keys by it.
    for at in [24, 32] {
        let (told, store, deploys) = open(&changed(&bytes, at, &[!bytes[at]]));
        assert_eq!(told, "another version of this crate, which hashes keys otherwise, wrote it");
        assert_works(store, &deploys);
    }
}

/// The zone data of this build lacks a zone of the file, as another edition might.
#[test]
fn a_reset_fails_where_a_time_zone_is_not_known_any_more() {
    let bytes = saved();
    let zone = b"Europe/Berlin";
    let at = bytes.windows(zone.len()).position(|found| found == zone).expect("in a quota");
    let deploys = Deploys::new();
    fs::write(deploys.path(), changed(&bytes, at, b"Europe/Bonn!!")).expect("written");
    let store = deploys.saved(deploys.store(4).error_if_broken()).expect("all else is there");
    let limiter = Quota::per_hour(1).name("api").store(store);
    assert!(limiter.reset("unheard of").into_now().expect("at once").is_err());
}

/// Another edition of the zone data has the day end an hour later.
#[test]
fn the_ends_of_a_file_bind_its_store_and_no_other() {
    const HOUR: u64 = 3_600_000;
    let deploys = Deploys::new();
    let days = Quota::per_day(5).in_zone("Europe/Berlin").rollover_up_to(10);
    let ends = |store: MemoryStore, cost| {
        let limiter = Limit::new(days).name("api").store(store);
        assert!(answer(limiter.charge("alice", cost)).is_ok());
        answer(limiter.peek("alice")).reset_at().duration_since(UNIX_EPOCH).expect("after 1970")
    };
    // The count lasts two days.
    let end = ends(deploys.open(), 7);
    let bytes = fs::read(deploys.path()).expect("a file");
    let later = (end + Duration::from_millis(HOUR)).as_millis() as u64;
    let end = end.as_millis() as u64;
    let is_end = |at: &usize| bytes[*at..].starts_with(&end.to_le_bytes());
    let found: Vec<usize> = (0..bytes.len()).filter(is_end).collect();
    assert_eq!(found.len(), 1);
    let bytes = changed(&bytes, found[0], &later.to_le_bytes());
    fs::write(deploys.path(), bytes).expect("written");
    let of_file = deploys.open();
    for (store, cost, end) in [(of_file, 1, later), (deploys.store(1_000), 7, end)] {
        assert_eq!(ends(store, cost).as_millis() as u64, end);
    }
}

#[test]
fn a_file_that_can_not_be_is_not_used() {
    for shards in [0, 3, 1 << 20, u64::MAX] {
        let told = open(&changed(&saved(), 16, &u64::to_le_bytes(shards))).0;
        assert_eq!(told, "its number of shards is not possible");
    }
    // The first entry's numbers: its start, its end, and how much is used. Found by fuzzing.
    let bytes = saved();
    let (start, until, used) = (64, 72, 80);
    let end: [u8; 8] = bytes[until..until + 8].try_into().expect("eight bytes");
    let least = (-(1_i64 << 53)).to_le_bytes();
    let bad = [(start, end), (start, least), (used, least), (until, [0; 8]), (until, [0xff; 8])];
    for (at, to) in bad {
        let told = open(&changed(&bytes, at, &to)).0;
        assert_eq!(told, "a number in it is not possible", "{to:?} at {at}");
    }
    // Many buckets: the store allocates no memory for buckets that the file does not have.
    for buckets in [1_000, u64::MAX] {
        let told = open(&changed(&saved(), 40, &u64::to_le_bytes(buckets))).0;
        let expected = ["it ends too early", "a number in it is not possible"];
        assert!(expected.contains(&&*told), "{told}");
    }
}

#[test]
fn what_is_no_file_is_an_error() {
    let deploys = Deploys::new();
    fs::create_dir(deploys.path()).expect("a folder");
    let error = deploys.saved(deploys.store(1_000)).expect_err("a folder");
    assert!(error.to_string().ends_with("/counts: it is not a file"), "{error}");
    fs::remove_dir(deploys.path()).expect("empty");

    // No process writes to the pipe, so opening it would block for ever.
    let made = Command::new("mkfifo").arg(deploys.path()).status().expect("mkfifo runs");
    assert!(made.success());
    let error = deploys.saved(deploys.store(1_000)).expect_err("a pipe");
    assert!(error.to_string().ends_with("/counts: it is not a file"), "{error}");
}

#[test]
fn a_save_that_fails_leaves_the_file_and_the_next_one_works() {
    let deploys = Deploys::new();
    let store = deploys.open();
    let limiter = Quota::per_hour(3).name("api").store(store.clone());
    assert!(answer(limiter.check("alice")).is_allowed());
    store.save().expect("saves");
    let before = fs::read(deploys.path()).expect("a file");

    assert!(answer(limiter.check("alice")).is_allowed());
    let in_its_way = deploys.folder.path().join("counts.new");
    fs::create_dir(&in_its_way).expect("a folder");
    let error = store.save().expect_err("there is a folder");
    assert_ne!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    assert!(error.to_string().contains("can't replace"), "{error}");
    assert_eq!(fs::read(deploys.path()).expect("a file"), before);
    assert!(answer(limiter.check("alice")).is_allowed(), "requests are counted meanwhile");

    fs::remove_dir(in_its_way).expect("removed");
    store.save().expect("saves");
    drop((store, limiter));
    assert_eq!(used(&deploys.limiter(Quota::per_hour(3)), "alice"), [3]);
}

#[test]
fn a_file_is_not_replaced_by_the_same_again() {
    let deploys = Deploys::new();
    let store = deploys.open();
    let limiter = Quota::per_hour(3).name("api").store(store.clone());
    let inode = || fs::metadata(deploys.path()).map(|file| file.ino()).ok();
    assert!(answer(limiter.check("alice")).is_allowed());
    store.save().expect("saves");
    let first = inode();
    // Time goes on; what is counted is the same.
    deploys.clock.advance(Duration::from_secs(1));
    store.save().expect("saves");
    assert_eq!(inode(), first);
    assert!(!deploys.folder.path().join("counts.new").exists());

    assert!(answer(limiter.check("alice")).is_allowed());
    store.save().expect("saves");
    assert_ne!(inode(), first);
    // A file that is gone is written again, without a change.
    fs::remove_file(deploys.path()).expect("removed");
    store.save().expect("saves");
    drop((store, limiter));
    assert_eq!(used(&deploys.limiter(Quota::per_hour(3)), "alice"), [2]);
}

/// A folder of a few kilobytes. `None`: only root can mount one.
fn full_disk() -> Option<Mounted> {
    let folder = folder();
    let mount = |args: &[&str]| {
        let mounted = Command::new("mount").args(args).arg(folder.path()).output();
        mounted.is_ok_and(|output| output.status.success())
    };
    mount(&["-t", "tmpfs", "-o", "size=64k", "tmpfs"]).then(|| Mounted(folder))
}

struct Mounted(tempfile::TempDir);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_keeps_the_file_of_before() {
    let Some(disk) = full_disk() else {
        eprintln!("skipped: only root can mount a small disk");
        return;
    };
    let clock = ManualClock::at_ms(NOW_MS);
    let open = || {
        let store = MemoryStore::new().clock(clock.clone());
        store.saved_to(disk.0.path().join("counts"), Duration::MAX).expect("opens")
    };
    let limiter = |store: &MemoryStore| Quota::per_hour(3).name("api").store(store.clone());
    let store = open();
    assert!(answer(limiter(&store).check("alice")).is_allowed());
    store.save().expect("there is room for this");

    assert!(answer(limiter(&store).check("alice")).is_allowed());
    (0..5_000).for_each(|key| assert!(answer(limiter(&store).check(key)).is_allowed()));
    let error = store.save().expect_err("there is no room for these");
    assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
    assert!(!disk.0.path().join("counts.new").exists(), "the room is free again");
    // The process ends, and this save fails, too.
    drop(store);
    let store = open();
    assert_eq!(used(&limiter(&store), "alice"), [1]);
    (0..5_000).for_each(|key| assert!(answer(limiter(&store).check(key)).is_allowed()));
    assert!(store.save().is_err());
    // An hour later most of it has ended.
    clock.advance(Duration::from_millis(60 * MINUTE_MS));
    store.save().expect("there is room again");
}

/// A file that this build must read, and find the keys in: that it hashes as the builds before did.
#[test]
fn a_file_of_the_first_release_is_still_read() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("core/saved/first.counts");
    if std::env::var_os("WRITE_GOLDEN").is_some() {
        let store = MemoryStore::with_max_keys(10).clock(ManualClock::at_ms(NOW_MS));
        let store = store.saved_to(&golden, Duration::MAX).expect("opens");
        for (quota, cost) in golden_counts() {
            let limiter = Limit::new(quota).name("golden").store(store.clone());
            assert!(answer(limiter.charge("alice", cost)).is_ok());
        }
    }
    let deploys = Deploys::new();
    fs::copy(golden, deploys.path()).expect("copied");
    let store = deploys.saved(deploys.store(1_000).error_if_broken()).expect("this build reads it");
    for (quota, cost) in golden_counts() {
        let limiter = Limit::new(quota).name("golden").store(store.clone());
        assert_eq!(used(&limiter, "alice"), [cost], "{quota}");
        assert_eq!(used(&limiter, "bob"), [0], "{quota}");
    }
}

fn golden_counts() -> [(Quota, u64); 5] {
    [
        (Quota::per_hour(100), 1),
        (Quota::per_hour(100).staggered(), 2),
        (Quota::per_hour(100).from_first_request(), 3),
        (Quota::per_month(100).from_day(15), 4),
        (Quota::per_day(100).in_zone("Europe/Berlin"), 5),
    ]
}

#[test]
fn a_broken_file_takes_no_name_that_an_earlier_one_has() {
    let deploys = Deploys::new();
    for content in ["first", "second", "third"] {
        fs::write(deploys.path(), content).expect("written");
        drop(deploys.open());
    }
    for (suffix, content) in [("", "first"), ("-1", "second"), ("-2", "third")] {
        let name = format!("counts.broken{suffix}");
        assert_eq!(fs::read_to_string(deploys.folder.path().join(name)).expect("kept"), content);
    }
}

/// While the flag is set, it panics.
#[derive(Clone, Default)]
struct BrokenClock(Arc<AtomicBool>);

impl Clock for BrokenClock {
    fn now_ms(&self) -> u64 {
        assert!(!self.0.load(Ordering::SeqCst), "on purpose");
        NOW_MS
    }
}

#[test]
fn the_thread_that_saves_outlives_a_clock_that_panics() {
    let (folder, clock) = (folder(), BrokenClock::default());
    let path = folder.path().join("counts");
    let open = || {
        let store = MemoryStore::with_max_keys(1_000).clock(clock.clone());
        store.saved_to(&path, Duration::MAX).expect("the file opens")
    };
    let store = open();
    let limiter = Quota::per_hour(9).name("api").store(store.clone());
    assert!(answer(limiter.check("alice")).is_allowed());
    for _ in 0..2 {
        clock.0.store(true, Ordering::SeqCst);
        let error = store.save().expect_err("the clock panics");
        assert!(error.to_string().contains("clock"), "{error}");
        assert!(!folder.path().join("counts.new").exists());
        clock.0.store(false, Ordering::SeqCst);
        store.save().expect("it works again");
        assert!(answer(limiter.check("alice")).is_allowed());
    }
    drop((store, limiter));
    assert_eq!(used(&Quota::per_hour(9).name("api").store(open()), "alice"), [3], "the last save");
}
