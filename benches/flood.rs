//! A flood of invented keys against the store in memory: 100 million charges over 20 million random
//! keys, a store of a million entries, and 1,000 regular keys that were there before, all in one
//! window. Asserts that the regular keys get exactly their limit, and that memory stays within its
//! bound. Measures the time of a charge with and without the flood, and compares how many newcomers
//! are refused early with the formula.
//!
//! `cargo bench -p benches --bench flood`, or with `-- --test` a hundredth of it. `-- regulars 20000000`
//! makes that many charges, and only one of the parts: `regulars`, `newcomers`, `times`.

use std::hint::black_box;
use std::time::Instant;

use tower_fixed_window::store::{Account, Charge, Scope};
use tower_fixed_window::{Decision, Key, ManualClock, MemoryStore, Quota, Quotas, Store};

const LIMIT: u64 = 60;
const REGULARS: u64 = 1_000;
const NEWCOMERS: u64 = 1_000;

/// The size of a run.
struct Scale {
    max_keys: usize,
    charges: u64,
    keys: u64,
}

struct Rig {
    store: MemoryStore,
    scope: Scope,
    quotas: Quotas,
}

impl Rig {
    fn new(scale: &Scale) -> Self {
        let clock = ManualClock::at_ms(1_700_000_040_000);
        Self {
            store: MemoryStore::with_max_keys(scale.max_keys).clock(clock),
            scope: Scope::named("flood"),
            quotas: Quota::per_minute(LIMIT).into(),
        }
    }

    fn ask(&self, key: impl Into<Key>, peek: bool) -> Decision {
        let key = key.into();
        let charge = Charge::new(Account::new(&self.scope, &self.quotas, &key), 1);
        let reply = self.store.charge(if peek { charge.peeking() } else { charge });
        reply.into_now().expect("memory answers now").expect("memory does not fail")
    }

    /// Nanoseconds per charge of a random key, out of `keys` keys.
    fn time(&self, next: &mut impl FnMut() -> u64, charges: u64, keys: u64) -> f64 {
        let started = Instant::now();
        for _ in 0..charges {
            let _ = black_box(self.ask(next() % keys, false));
        }
        started.elapsed().as_nanos() as f64 / charges as f64
    }
}

fn main() {
    let small = std::env::args().any(|arg| arg == "--test");
    let mut scale = match small {
        true => Scale { max_keys: 10_000, charges: 1_000_000, keys: 200_000 },
        false => Scale { max_keys: 1_000_000, charges: 100_000_000, keys: 20_000_000 },
    };
    scale.charges = std::env::args().find_map(|arg| arg.parse().ok()).unwrap_or(scale.charges);
    let Scale { max_keys, charges, keys } = scale;
    println!("{charges} charges over {keys} random keys, a store of {max_keys}, limit {LIMIT}");
    let asked_for = |part: &str| {
        let is_part = |arg: &String| !arg.starts_with("--") && arg.parse::<u64>().is_err();
        let mut parts = std::env::args().skip(1).filter(is_part).peekable();
        parts.peek().is_none() || parts.any(|arg| arg == part)
    };
    if asked_for("regulars") {
        regulars(&scale);
    }
    if asked_for("newcomers") {
        newcomers(&scale);
    }
    if asked_for("times") {
        times(&scale, small);
    }
}

/// Regular keys use their limit during the flood.
fn regulars(scale: &Scale) {
    let memory = resident();
    let rig = Rig::new(scale);
    let regular = |i: u64| format!("regular-{i}");
    for i in 0..REGULARS {
        assert!(rig.ask(regular(i), false).is_allowed());
    }
    let mut next = random(1);
    // A round for each token left: each regular key is charged once per round.
    let rounds = LIMIT - 1;
    let mut refused = 0;
    for round in 0..rounds {
        for _ in 0..scale.charges / rounds {
            refused += u64::from(!rig.ask(next() % scale.keys, false).is_allowed());
        }
        for i in 0..REGULARS {
            let decision = rig.ask(regular(i), false);
            assert!(decision.is_allowed(), "a regular key was refused before its limit");
            assert_eq!(decision.used(), round + 2, "a regular key has lost its count");
        }
    }
    for i in 0..REGULARS {
        assert!(!rig.ask(regular(i), false).is_allowed(), "a regular key got more than its limit");
    }
    let grown = resident().saturating_sub(memory);
    let bound = rig.store.max_bytes();
    println!(
        "regular keys: {REGULARS} of {REGULARS} got exactly {LIMIT}, in the midst of the flood"
    );
    println!("the flood: {refused} refused; {} shared entries", rig.store.overflowed());
    let started = Instant::now();
    let len = rig.store.live_entries();
    println!(
        "live_entries(): {len} entries, found in {:.1} ms",
        started.elapsed().as_secs_f64() * 1e3
    );
    println!("memory: {grown} bytes more are resident, the bound is {bound}");
    assert!(grown <= bound + (8 << 20), "above the bound, and more than an allocator's play");
}

/// A newcomer shares one of `entries` overflow entries with all keys that have no entry of their
/// own. It is refused early if that entry has been charged `LIMIT` times before: the Poisson
/// distribution gives the probability, from the charges per overflow entry.
fn newcomers(scale: &Scale) {
    let rig = Rig::new(scale);
    let mut next = random(2);
    let mut peeks = 0;
    let entries = scale.max_keys as f64 / 114.9;
    println!("newcomers refused early, of {NEWCOMERS}:");
    println!("  charges in overflow per entry | refused | by the formula");
    for mean in [30.0, 45.0, 55.0, 60.0, 65.0, 75.0, 100.0] {
        while ((rig.store.overflowed() - peeks) as f64) < mean * entries {
            for _ in 0..100 {
                let _ = rig.ask(next() % scale.keys, false);
            }
        }
        let of_them = |i: &u64| !rig.ask(format!("newcomer-{mean}-{i}"), true).is_allowed();
        let refused = (0..NEWCOMERS).filter(of_them).count() as f64 / NEWCOMERS as f64;
        peeks += NEWCOMERS;
        let expected = poisson_at_least(LIMIT, mean);
        println!("  {mean:>29} | {:>6.1}% | {:>6.1}%", refused * 100.0, expected * 100.0);
        if scale.max_keys >= 1_000_000 {
            assert!((refused - expected).abs() < 0.1, "the formula is documented");
        }
    }
}

/// Compares charges of as many keys as the store has room for with charges of the flood's keys.
fn times(scale: &Scale, small: bool) {
    let charges = scale.charges / 10;
    let (mut calm, mut flooded) = (vec![], vec![]);
    let room = Rig::new(scale);
    let full = Rig::new(scale);
    let tracked = scale.max_keys as u64;
    let mut next = random(3);
    room.time(&mut next, 4 * tracked, tracked);
    full.time(&mut next, 8 * tracked, scale.keys);
    // The parts take turns, so that a busy machine slows both down.
    for _ in 0..10 {
        calm.push(room.time(&mut next, charges / 10, tracked));
        flooded.push(full.time(&mut next, charges / 10, scale.keys));
    }
    let (calm, flooded) = (median(calm), median(flooded));
    let ratio = flooded / calm;
    println!("a charge: {calm:.0} ns without the flood, {flooded:.0} ns in it, {ratio:.2} times");
    assert!(small || ratio <= 2.0, "more than twice the time");
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// The probability of at least `least` events if `mean` are expected.
fn poisson_at_least(least: u64, mean: f64) -> f64 {
    let (mut term, mut below) = ((-mean).exp(), 0.0);
    for k in 0..least {
        below += term;
        term *= mean / (k + 1) as f64;
    }
    1.0 - below
}

/// Bytes of memory that the process uses, if the system says so; else 0.
fn resident() -> usize {
    let pages = |text: String| text.split(' ').nth(1)?.parse::<usize>().ok();
    std::fs::read_to_string("/proc/self/statm").ok().and_then(pages).unwrap_or(0) * 4_096
}

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (state ^ (state >> 32)).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ (mixed >> 29)
    }
}
