//! Counts in a file: the time to load and to save a million counters, and the time of a decision
//! while they are saved all the time. It is compared, in turns, with decisions while nothing is
//! saved, and with decisions beside a thread that is as busy but does not use the store.
//!
//! `cargo bench -p benches --bench saved`, on an idle machine; with `-- --test` a hundredth of it.
//! Without the disk, if the system has a folder in memory, and then on the disk.

use std::hint::black_box;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tower_fixed_window::store::{Account, Charge, Scope};
use tower_fixed_window::{Key, MemoryStore, Quota, Quotas, Store};

const ROUNDS: usize = 9;

struct Scale {
    keys: u64,
    decisions: usize,
}

fn main() {
    let scale = match std::env::args().any(|arg| arg == "--test") {
        true => Scale { keys: 10_000, decisions: 20_000 },
        false => Scale { keys: 1_000_000, decisions: 2_000_000 },
    };
    let memory = Path::new("/dev/shm");
    for (name, parent) in [("in memory", memory), ("on disk", &std::env::temp_dir())] {
        if !parent.is_dir() {
            println!("skipped: there is no {}", parent.display());
            continue;
        }
        let folder = parent.join(format!("tower-fixed-window-{}", std::process::id()));
        std::fs::create_dir(&folder).expect("a folder of this process");
        measure(name, &folder.join("counts"), &scale);
        std::fs::remove_dir_all(folder).expect("it is ours");
    }
}

fn measure(name: &str, path: &Path, Scale { keys, decisions }: &Scale) {
    let max_keys = keys + keys / 5;
    let open = || MemoryStore::with_max_keys(max_keys as usize).saved_to(path, Duration::MAX);
    let mut store = open().expect("opens");
    (0..*keys).for_each(|key| ask(&store, key));
    let live = store.live_entries();

    let (mut saves, mut loads) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        // An unchanged store would not be written.
        ask(&store, 0);
        let start = Instant::now();
        store.save().expect("saves");
        saves.push(start.elapsed().as_secs_f64());
        drop(store);
        let start = Instant::now();
        store = open().expect("opens");
        loads.push(start.elapsed().as_secs_f64());
        assert_eq!(store.live_entries(), live, "all are loaded");
    }
    let bytes = std::fs::metadata(path).expect("a file").len();
    println!("{name}: {live} counters, {bytes} bytes");
    println!("  save {:.3} s, load {:.3} s (medians of {ROUNDS})", median(saves), median(loads));

    // The parts take turns, so that a busy machine slows all of them down.
    let (mut quiet, mut beside, mut saving): (Percentiles, Percentiles, Percentiles) =
        Default::default();
    let saved = AtomicU64::new(0);
    for round in 0..ROUNDS as u64 {
        quiet.add(time(&store, round, *keys, *decisions));
        let with = |work: &(dyn Fn() + Sync), percentiles: &mut Percentiles| {
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        work()
                    }
                });
                percentiles.add(time(&store, round, *keys, *decisions));
                done.store(true, Ordering::Relaxed);
            });
        };
        with(&|| _ = black_box(std::fs::read(path).expect("a file")), &mut beside);
        let save = || {
            store.save().expect("saves");
            saved.fetch_add(1, Ordering::Relaxed);
        };
        with(&save, &mut saving);
    }
    println!("  a decision, in ns, medians of {ROUNDS} rounds of {decisions}:");
    println!("  |                              | 50% | 99% | 99.9% | 99.99% |");
    quiet.print("nothing is saved");
    beside.print("a thread reads a file");
    saving.print(&format!("saved all the time ({})", saved.into_inner()));
}

fn ask(store: &MemoryStore, key: u64) {
    let (scope, quotas) = (Scope::named("saved"), Quotas::from(Quota::per_year(1_000_000)));
    charge(store, &scope, &quotas, key);
}

fn charge(store: &MemoryStore, scope: &Scope, quotas: &Quotas, key: u64) {
    let key = Key::from(key);
    let reply = store.charge(Charge::new(Account::new(scope, quotas, &key), 1));
    let _ = black_box(reply.into_now().expect("memory answers now").expect("memory can't fail"));
}

/// The time of each decision, for random keys.
fn time(store: &MemoryStore, seed: u64, keys: u64, decisions: usize) -> Vec<u32> {
    let (scope, quotas) = (Scope::named("saved"), Quotas::from(Quota::per_year(1_000_000)));
    let mut random = seed + 1;
    let mut times = Vec::with_capacity(decisions);
    for _ in 0..decisions {
        // Xorshift.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let start = Instant::now();
        charge(store, &scope, &quotas, random % keys);
        times.push(start.elapsed().as_nanos() as u32);
    }
    times
}

#[derive(Default)]
struct Percentiles([Vec<f64>; 4]);

impl Percentiles {
    fn add(&mut self, mut times: Vec<u32>) {
        times.sort_unstable();
        for (percentile, share) in self.0.iter_mut().zip([0.5, 0.99, 0.999, 0.9999]) {
            percentile.push(times[(times.len() as f64 * share) as usize].into());
        }
    }

    fn print(self, name: &str) {
        let [half, most, nearly, all] = self.0.map(median);
        println!("  | {name:28} | {half} | {most} | {nearly} | {all} |");
    }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_unstable_by(f64::total_cmp);
    of[of.len() / 2]
}
