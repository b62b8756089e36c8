//! Decisions a second of `Shared` around a table in memory whose read and write take a millisecond
//! each, as over a network: 2,000 callers over two handles, on one key and on 10,000, with the CPU's
//! time for each. Beside it a store that makes a call for each charge. Asserts that the table has
//! counted what has passed.
//!
//! `cargo bench -p benches --bench shared`, on an idle machine; with `-- --test` for a moment.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tower_fixed_window::store::{
    Account, Adjust, Charge, CounterId, Counters, Reply, Scope, Shared, State, Write,
};
use tower_fixed_window::{Decision, Key, Limit, Limiter, Quota, Store, StoreError};

const CALLERS: u64 = 2_000;
/// Of a read and of a write. A timer adds up to a tick.
const TAKES: Duration = Duration::from_millis(1);
const NOW: u64 = 1_700_000_040_000;

#[derive(Clone, Default)]
struct Table {
    rows: Arc<Mutex<HashMap<CounterId, State>>>,
    calls: Arc<AtomicU64>,
    changed: Arc<AtomicU64>,
}

impl Table {
    async fn call<T>(&self, step: impl FnOnce(&mut HashMap<CounterId, State>) -> T) -> T {
        sleep(TAKES).await;
        self.calls.fetch_add(1, Ordering::Relaxed);
        step(&mut self.rows.lock().expect("no panic"))
    }
}

impl Counters for Table {
    async fn read(&self, counters: &[CounterId]) -> Result<(u64, Vec<Option<State>>), StoreError> {
        let states = self.call(|rows| counters.iter().map(|id| rows.get(id).copied()).collect());
        Ok((NOW, states.await))
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<(u64, Vec<Option<u64>>), StoreError> {
        let written = self.call(|rows| {
            let swap = |group: &Vec<Write>| {
                let swaps = group.iter().all(|row| rows.get(&row.counter).copied() == row.had);
                if swaps {
                    rows.extend(group.iter().map(|row| (row.counter.clone(), row.state)));
                }
                swaps.then_some(0)
            };
            groups.iter().map(swap).collect::<Vec<_>>()
        });
        let written = written.await;
        let changed = written.iter().filter(|written| written.is_none()).count();
        self.changed.fetch_add(changed as u64, Ordering::Relaxed);
        Ok((NOW, written))
    }

    async fn reset(&self, _: &str, _: &Key) -> Result<(), StoreError> {
        Ok(())
    }
}

/// Reads and writes for each charge.
struct OneByOne(Table);

impl Store for OneByOne {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (table, charge) = (self.0.clone(), charge.to_owned());
        Reply::later(async move {
            let charge = charge.as_charge();
            let id = |account: &Account<'_>, quota: &Quota| CounterId {
                scope: account.scope.name().into(),
                key: account.key.clone(),
                window: quota.counter().into(),
            };
            loop {
                let (account, _) = charge.lines().next().expect("a line");
                let counter = id(&account, &account.quotas.as_ref()[0]);
                let had = table.call(|rows| rows.get(&counter).copied()).await;
                let (decision, writes) = charge.decide(NOW, |_, _| had);
                let written = table.call(|rows| {
                    let swaps = rows.get(&counter).copied() == had;
                    if swaps {
                        rows.extend(writes.iter().map(|(_, _, state)| (counter.clone(), *state)));
                    }
                    swaps
                });
                if written.await {
                    return Ok(decision);
                }
                table.changed.fetch_add(1, Ordering::Relaxed);
            }
        })
    }

    fn adjust(&self, _: Adjust<'_>) -> Reply<()> {
        Reply::now(())
    }

    fn reset(&self, _: &Scope, _: &Key) -> Reply<()> {
        Reply::now(())
    }
}

fn main() {
    let lasts = match std::env::args().any(|arg| arg == "--test") {
        true => Duration::from_millis(200),
        false => Duration::from_secs(2),
    };
    println!("{CALLERS} callers over two handles; a read and a write take 1 ms and a timer's tick");
    println!(
        "  calls  |   keys | decisions/s | p50 ms | p99 ms | statements/s | met a change | CPU us"
    );
    for keys in [1, 10_000] {
        measure("shared", keys, lasts, |table| Limit::store(limit(), Shared::around(table)));
    }
    for keys in [1, 10_000] {
        measure("one each", keys, lasts, |table| Limit::store(limit(), OneByOne(table)));
    }
}

fn limit() -> Limit {
    Quota::per_minute(1_000_000_000).name("bench")
}

fn measure<L: Into<Limiter>>(name: &str, keys: u64, lasts: Duration, around: impl Fn(Table) -> L) {
    let table = Table::default();
    let handles = [(); 2].map(|()| around(table.clone()).into());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let cpu = cpu_seconds();
    let (is_over, times) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    runtime.block_on(async {
        let callers: Vec<_> = (0..CALLERS)
            .map(|caller| {
                let limiter: Limiter = handles[caller as usize % 2].clone();
                let (is_over, times) = (Arc::clone(&is_over), Arc::clone(&times));
                tokio::spawn(async move {
                    let (mut random, mut took) = (caller, Vec::new());
                    while !is_over.load(Ordering::Relaxed) {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let start = Instant::now();
                        let decision = limiter.check((random >> 33) % keys).await;
                        assert!(decision.expect("the table answers").is_allowed());
                        took.push(start.elapsed().as_secs_f32());
                    }
                    times.lock().expect("no panic").append(&mut took);
                })
            })
            .collect();
        sleep(lasts).await;
        is_over.store(true, Ordering::Relaxed);
        for caller in callers {
            caller.await.expect("no panic");
        }
    });
    let mut times = std::mem::take(&mut *times.lock().expect("no panic"));
    times.sort_by(f32::total_cmp);
    let counted: i64 = table.rows.lock().expect("no panic").values().map(|state| state.used).sum();
    assert_eq!(counted, times.len() as i64, "what has passed is counted");
    let of = |share: f64| times[((times.len() - 1) as f64 * share) as usize] * 1e3;
    let a_second = |of: u64| of as f64 / lasts.as_secs_f64();
    let cpu = (cpu_seconds() - cpu) * 1e6 / times.len() as f64;
    println!(
        "{name:>8} | {keys:>6} | {:>11.0} | {:>6.1} | {:>6.1} | {:>12.0} | {:>12} | {cpu:>6.1}",
        a_second(times.len() as u64),
        of(0.5),
        of(0.99),
        a_second(table.calls.load(Ordering::Relaxed)),
        table.changed.load(Ordering::Relaxed),
    );
}

/// The CPU's time of this process, if the system says so; else 0.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11);
    fields.take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
