//! `Shared`: a table that reads and writes counters as a store. The table fails, stands still and
//! panics, callers leave, and runtimes end: nothing is lost or taken twice.

use std::collections::{HashMap, HashSet};
use std::future::{Future, pending};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tower_fixed_window::store::{
    Account, Adjust, Charge, CounterId, Counters, Remote, Scope, Shared, State, Store, Write,
};
use tower_fixed_window::{Clock, Key, Limiter, ManualClock, Quota, Quotas, StoreError};
use tower_fixed_window_conformance::{Job, conformance};

use crate::sized;

const NOW: u64 = 1_700_000_050_000;

type Rows = HashMap<CounterId, State>;

/// A handle, as a node has it.
#[derive(Clone)]
struct Table {
    rows: Arc<Mutex<Rows>>,
    clock: ManualClock,
    chance: Option<Arc<Mutex<fastrand::Rng>>>,
    fails: bool,
    /// The counters that this handle writes.
    writing: Arc<Mutex<HashSet<CounterId>>>,
    /// A read and a write each take one, if they are counted.
    steps: Option<Arc<Semaphore>>,
    reads: Arc<AtomicU64>,
    writes: Arc<AtomicU64>,
    /// The server is so far away.
    away: Duration,
    trouble: Trouble,
    is_in_trouble: Arc<AtomicBool>,
}

#[derive(Clone, Copy, PartialEq)]
enum Trouble {
    None,
    /// The row of the key 0 is not found as it was read, as if another client had it locked.
    Locked,
    /// What others took of a counter is told only if it is alone in its call.
    Untold,
    /// The connection is cut behind the server.
    Cut,
    /// The row of the key 0 can't be read.
    Unreadable,
    /// Reads stand still, with the runtime, for longer than callers wait.
    Blocks,
}

impl Table {
    fn new(clock: ManualClock) -> Self {
        Self {
            rows: Arc::default(),
            clock,
            chance: None,
            fails: false,
            writing: Arc::default(),
            steps: None,
            reads: Arc::default(),
            writes: Arc::default(),
            away: Duration::ZERO,
            trouble: Trouble::None,
            is_in_trouble: Arc::new(AtomicBool::new(true)),
        }
    }

    fn at_once() -> Self {
        Self::new(ManualClock::at_ms(NOW))
    }

    /// Reads and writes wait until they are [let through](Self::let_through).
    fn held_up() -> Self {
        let steps = Some(Arc::new(Semaphore::new(0)));
        Self { steps, ..Self::at_once() }
    }

    fn with(self, trouble: Trouble) -> Self {
        Self { trouble, ..self }
    }

    fn set_trouble(&self, is_in_trouble: bool) {
        self.is_in_trouble.store(is_in_trouble, Ordering::SeqCst);
    }

    fn is(&self, trouble: Trouble) -> bool {
        self.trouble == trouble && self.is_in_trouble.load(Ordering::SeqCst)
    }

    fn let_through(&self, steps: usize) {
        self.steps.as_ref().expect("it is held up").add_permits(steps);
    }

    fn other_handle(&self) -> Self {
        Self { writing: Arc::default(), ..self.clone() }
    }

    fn used(&self) -> i64 {
        self.rows.lock().expect("no panic").values().map(|state| state.used).sum()
    }

    fn random(&self, below: u64) -> u64 {
        let chance = self.chance.as_ref();
        chance.map_or(1, |chance| chance.lock().expect("no panic").u64(0..below))
    }

    async fn misfortune(&self) -> Result<(), StoreError> {
        sleep(Duration::from_micros(self.random(3_000))).await;
        match if self.fails { self.random(100) } else { 99 } {
            0 | 1 => Err(StoreError::new("no connection")),
            2 => resume_unwind(Box::new("a panic")),
            3 => pending().await,
            4 => {
                sleep(Duration::from_secs(5)).await;
                Ok(())
            }
            _ => Ok(()),
        }
    }

    async fn call<T>(&self, step: impl FnOnce(&mut Rows) -> T) -> Result<T, StoreError> {
        if let Some(steps) = &self.steps {
            steps.acquire().await.expect("it is open").forget();
        }
        self.pass().await?;
        let done = step(&mut self.rows.lock().expect("no panic"));
        if self.chance.is_some() || !self.away.is_zero() {
            self.pass().await?;
        }
        match self.is(Trouble::Cut) {
            true => Err(StoreError::new("no connection")),
            false => Ok(done),
        }
    }

    /// One way.
    async fn pass(&self) -> Result<(), StoreError> {
        match (&self.chance, self.away) {
            (Some(_), _) => return self.misfortune().await,
            (None, Duration::ZERO) => tokio::task::yield_now().await,
            (None, away) => sleep(away).await,
        }
        Ok(())
    }
}

impl Counters for Table {
    async fn read(&self, counters: &[CounterId]) -> Result<(u64, Vec<Option<State>>), StoreError> {
        let order =
            |of: &CounterId| (of.scope.clone(), of.key.as_bytes().to_vec(), of.window.clone());
        assert!(counters.is_sorted_by(|one, other| order(one) < order(other)), "distinct, sorted");
        assert!((1..=128).contains(&counters.len()), "a call of some size");
        self.reads.fetch_add(1, Ordering::SeqCst);
        let read = |rows: &mut Rows| counters.iter().map(|of| rows.get(of).copied()).collect();
        let states = self.call(read).await?;
        if self.is(Trouble::Blocks) {
            std::thread::sleep(Duration::from_millis(30));
        }
        let zero = Key::from(0_u64);
        match self.is(Trouble::Unreadable) && counters.iter().any(|of| of.key == zero) {
            true => Err(StoreError::new("no count").of_key()),
            false => Ok((self.clock.now_ms(), states)),
        }
    }

    async fn write(&self, groups: &[Vec<Write>]) -> Result<(u64, Vec<Option<u64>>), StoreError> {
        assert!(groups.iter().all(|group| !group.is_empty()), "something to write");
        self.writes.fetch_add(1, Ordering::SeqCst);
        for write in groups.iter().flatten() {
            let is_new = self.writing.lock().expect("no panic").insert(write.counter.clone());
            // One that is not answered for long is given up.
            assert!(is_new || self.fails, "two calls of a handle meet at a counter");
            let passes = write.state.used <= write.quota.limit() as i64;
            assert!(passes || self.chance.is_none(), "above the limit");
        }
        let is_told = !self.is(Trouble::Untold) || groups.len() == 1;
        let swap = |rows: &mut Rows, group: &Vec<Write>| {
            let is_locked = self.is(Trouble::Locked) && group[0].counter.key == Key::from(0_u64);
            let row = |write: &Write| rows.get(&write.counter).copied().filter(|_| !is_locked);
            if let ([write], Some(row)) = (&group[..], row(&group[0]))
                && let Some(had) = write.had
            {
                let (mut state, more) = (write.state, row.used - had.used);
                let is_like_it = (row.start, row.end, row.until) == (had.start, had.end, had.until);
                state.used += more;
                let has_room = is_like_it && (0..=write.room as i64).contains(&more);
                let fits = state.used <= write.quota.limit() as i64;
                assert!(!has_room || more == 0 || fits, "above the limit");
                let told = if is_told { more as u64 } else { 0 };
                return has_room.then(|| rows.insert(write.counter.clone(), state)).map(|_| told);
            }
            let is_unchanged = group.iter().all(|write| row(write) == write.had);
            let new = group.iter().map(|write| (write.counter.clone(), write.state));
            is_unchanged.then(|| rows.extend(new)).map(|()| 0)
        };
        let written =
            self.call(|rows| groups.iter().map(|group| swap(rows, group)).collect()).await;
        for write in groups.iter().flatten() {
            self.writing.lock().expect("no panic").remove(&write.counter);
        }
        Ok((self.clock.now_ms(), written?))
    }

    async fn reset(&self, scope: &str, key: &Key) -> Result<(), StoreError> {
        let is_other = |of: &CounterId| *of.scope != *scope || of.key != *key;
        self.rows.lock().expect("no panic").retain(|counter, _| is_other(counter));
        Ok(())
    }
}

/// On a paused clock: a job that waits for ever fails at once.
fn run(job: impl Future<Output = ()>) {
    let runtime = Builder::new_current_thread().enable_all().start_paused(true).build();
    let job = async { timeout(Duration::from_secs(3_600), job).await.expect("it ends") };
    runtime.expect("a runtime").block_on(job);
}

/// Charges a key of the scope `one`, of 5 in a minute, and returns whether it passed.
async fn charge(store: &Shared<Table>, key: u64) -> Result<bool, StoreError> {
    charge_under(store, key, 5).await
}

async fn charge_under(store: &Shared<Table>, key: u64, limit: u64) -> Result<bool, StoreError> {
    let (scope, key) = (Scope::named("one"), Key::from(key));
    let quotas = Quota::per_minute(limit).into();
    let decision = store.charge(Charge::new(Account::new(&scope, &quotas, &key), 1)).await?;
    Ok(decision.is_allowed())
}

fn spawn_charge(store: &Shared<Table>, key: u64) -> JoinHandle<Result<bool, StoreError>> {
    let store = store.clone();
    tokio::spawn(async move { charge(&store, key).await })
}

async fn idle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

#[test]
fn a_table_passes_the_suite_unless_it_does_not_tell_what_was_taken() {
    for (trouble, passes) in [(Trouble::None, true), (Trouble::Untold, false)] {
        let runtime = Runtime::new().expect("a runtime");
        let new = |clock| {
            let table = Table::new(clock).with(trouble);
            [table.other_handle(), table].map(Shared::around)
        };
        let ends = async |job: Job<'_>| timeout(Duration::from_secs(60), job).await;
        let wait = |job: Job<'_>| runtime.block_on(ends(job)).expect("it ends");
        assert_eq!(catch_unwind(AssertUnwindSafe(|| conformance(new, wait))).is_ok(), passes);
    }
}

#[test]
fn equal_charges_share_a_read_and_a_write() {
    run(async {
        let table = Table::held_up();
        let store = Shared::around(table.clone());
        let ask = || spawn_charge(&store, 1);
        // The first leaves at once, and the others wait for it.
        let first = ask();
        idle().await;
        let others: Vec<_> = (0..100).map(|_| ask()).collect();
        idle().await;
        assert_eq!(table.reads.load(Ordering::SeqCst), 1);
        table.let_through(4);
        let mut passed = u64::from(first.await.expect("no panic").expect("an answer"));
        for other in others {
            passed += u64::from(other.await.expect("no panic").expect("an answer"));
        }
        assert_eq!((passed, table.used()), (5, 5));
        assert_eq!(table.reads.load(Ordering::SeqCst), 2);
        assert_eq!(table.writes.load(Ordering::SeqCst), 2);
    });
}

/// What does not fit into a call is of the next one.
#[test]
fn a_call_is_of_so_many_charges_and_counters() {
    // The table checks how many counters a call has.
    for (keys, charges, calls) in [(300, 300, 4), (1, 1_025, 3)] {
        run(async {
            let table = Table::held_up();
            let store = Shared::around(table.clone());
            let ask = |key: u64| {
                let store = store.clone();
                tokio::spawn(async move { charge_under(&store, key, 2_000).await })
            };
            let first = ask(keys);
            idle().await;
            let others: Vec<_> = (0..charges).map(|i| ask(i % keys)).collect();
            idle().await;
            table.let_through(100);
            for asked in others.into_iter().chain([first]) {
                assert!(asked.await.expect("no panic").expect("an answer"));
            }
            assert_eq!(table.writes.load(Ordering::SeqCst), calls, "{charges} charges");
        });
    }
}

/// One full call costs a near database less than two others.
#[test]
fn near_calls_follow_each_other_unless_one_stands_still() {
    run(async {
        let table = Table::held_up();
        let store = Shared::around(table.clone());
        let ask = |key| spawn_charge(&store, key);
        let sent = || table.reads.load(Ordering::SeqCst);
        table.let_through(2);
        let mut asked = vec![ask(0)];
        idle().await;
        asked.extend([1, 2, 3].map(ask));
        idle().await;
        assert_eq!(sent(), 3, "few ask: 1 is alone, and 2 and 3 need not wait for it");
        table.let_through(4);
        idle().await;
        asked.extend([4, 5].map(ask));
        idle().await;
        asked.extend([6, 7].map(ask));
        idle().await;
        assert_eq!(sent(), 4, "6 and 7 wait for 4 and 5");
        sleep(Duration::from_millis(10)).await;
        asked.push(ask(8));
        idle().await;
        assert_eq!(sent(), 5, "which stand still");
        table.let_through(100);
        for asked in asked {
            assert!(asked.await.expect("no panic").expect("an answer"));
        }
        assert_eq!((sent(), table.used()), (5, 9));
    });
}

#[test]
fn a_charge_that_is_dropped_before_it_is_written_is_not_made() {
    run(async {
        let table = Table::held_up();
        let store = Shared::around(table.clone());
        let ask = |key| spawn_charge(&store, key);
        // One is read, one waits for it, and one has a call of its own.
        let asked = [ask(1), ask(1), ask(2)];
        idle().await;
        for asked in asked {
            asked.abort();
            assert!(asked.await.is_err_and(|error| error.is_cancelled()));
        }
        table.let_through(100);
        idle().await;
        assert_eq!((table.used(), table.writes.load(Ordering::SeqCst)), (0, 0));
        assert!(charge(&store, 1).await.expect("an answer"));
        assert_eq!(table.used(), 1);
    });
}

/// As if their connection was gone, and their callers very patient. Two meet at a counter then.
#[test]
fn calls_without_an_answer_do_not_hold_up_others_for_long() {
    run(async {
        let table = Table { fails: true, ..Table::held_up() };
        let store = Shared::around(table.clone());
        let sent = || table.reads.load(Ordering::SeqCst);
        table.let_through(2);
        assert!(charge(&store, 0).await.expect("an answer"), "the distance is known");
        let mut asked = Vec::new();
        for key in 1..=20 {
            asked.push(spawn_charge(&store, key));
            sleep(Duration::from_millis(10)).await;
        }
        let in_flight = sent();
        assert!(in_flight < 10, "{in_flight} are in flight");
        sleep(Duration::from_secs(1)).await;
        assert_eq!(sent(), in_flight + 1, "the others share a call");
        asked.push(spawn_charge(&store, 1));
        idle().await;
        assert_eq!(sent(), in_flight + 2, "nor those of the same counter");
        table.let_through(100);
        for asked in asked {
            assert!(asked.await.expect("no panic").expect("an answer"));
        }
        assert_eq!(table.used(), 22, "the first are answered, too");
    });
    // Also a call that had answers before: its writes lost.
    run(async {
        let table = Table { fails: true, ..Table::held_up().with(Trouble::Locked) };
        let store = Shared::around(table.clone());
        table.let_through(8);
        assert!(charge(&store, 0).await.expect("an answer"));
        let _lost = spawn_charge(&store, 0);
        sleep(Duration::from_secs(3)).await;
        let _other = spawn_charge(&store, 0);
        idle().await;
        assert_eq!(table.reads.load(Ordering::SeqCst), 6, "one more");
    });
}

#[test]
fn a_runtime_that_ends_takes_only_its_own_calls_with_it() {
    let table = Table::held_up();
    let store = Shared::around(table.clone());
    for _ in 0..3 {
        let ending = Runtime::new().expect("a runtime");
        let asked = store.clone();
        ending.spawn(async move { charge(&asked, 1).await });
        while table.reads.swap(0, Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        ending.shutdown_timeout(Duration::from_secs(10));
    }
    table.let_through(100);
    run(async {
        for expected in [true, true, true, true, true, false] {
            assert_eq!(charge(&store, 1).await.expect("an answer"), expected);
        }
    });
    assert_eq!(table.used(), 5);
}

#[test]
fn outside_of_a_runtime_nothing_is_charged() {
    let table = Table::at_once();
    let store = Shared::around(table.clone());
    let answer = tower_fixed_window::testing::block_on(charge(&store, 1));
    assert!(answer.expect_err("no runtime").to_string().contains("runtime"));
    assert_eq!(table.used(), 0);
}

#[test]
fn a_counter_that_can_not_be_written_is_not_asked_for_ever_and_holds_up_no_other_one() {
    run(async {
        let store = Shared::around(Table { away: FAR, ..Table::at_once().with(Trouble::Locked) });
        for _ in 0..20 {
            let (_locked, asked) = (spawn_charge(&store, 0), Instant::now());
            assert!(charge_under(&store, 1, 1_000).await.expect("an answer"));
            assert!(asked.elapsed() < FAR * 16, "{:?}", asked.elapsed());
        }
        assert!(charge(&store, 0).await.is_err_and(|of| of.to_string().contains("changed")));
    });
}

const FAR: Duration = Duration::from_millis(20);

/// Charges of a key at two nodes, which both have read it before one of them writes. Of each: how
/// many tokens are left, or none if it was refused.
async fn meet(table: &Table, quotas: &[Quotas; 2], costs: [u64; 2]) -> [Option<u64>; 2] {
    let (scope, key) = (Scope::named("one"), Key::from(1_u64));
    let stores = [table.clone(), table.other_handle()].map(Shared::around);
    let ask = |node: usize| {
        let account = Account::new(&scope, &quotas[node], &key);
        let reply = stores[node].charge(Charge::new(account, costs[node]));
        tokio::spawn(async move {
            let decision = reply.await.expect("an answer");
            decision.is_allowed().then(|| decision.remaining())
        })
    };
    let asked = [0, 1].map(ask);
    for _ in 0..3 {
        idle().await;
        table.let_through(2);
    }
    let [one, other] = asked;
    [one.await.expect("no panic"), other.await.expect("no panic")]
}

/// The first charge begins the window.
#[test]
fn charges_that_pass_whatever_others_take_meanwhile_are_written_without_another_read() {
    let per_minute = Quota::per_minute(10);
    let cases: [([Quotas; 2], _, _, _); 6] = [
        // The second says what the first has left.
        ([per_minute.into(), per_minute.into()], [2, 3], [Some(7), Some(4)], 2),
        ([per_minute.into(), per_minute.into()], [4, 5], [Some(5), Some(0)], 2),
        // There is room for one of them.
        ([per_minute.into(), per_minute.into()], [5, 5], [Some(4), None], 2),
        // By the lower limit of the second, there is none beside the first.
        ([per_minute.into(), Quota::per_minute(5).into()], [3, 2], [Some(6), None], 2),
        // Tokens that roll over, and a second limit, which the first charge does not know.
        ([per_minute.rollover_up_to(20).into(); 2], [2, 3], [Some(17), Some(14)], 3),
        ([per_minute.and(Quota::per_hour(9)); 2], [2, 3], [Some(6), Some(3)], 3),
    ];
    for (quotas, costs, left, writes) in cases {
        run(async {
            let table = Table::held_up();
            table.let_through(2);
            let (scope, key) = (Scope::named("one"), Key::from(1_u64));
            let first = Charge::new(Account::new(&scope, &quotas[0], &key), 1);
            let first = Shared::around(table.clone()).charge(first).await;
            assert!(first.expect("an answer").is_allowed());
            let found = meet(&table, &quotas, costs).await;
            let wrote = table.writes.load(Ordering::SeqCst) - 1;
            assert_eq!((found, wrote), (left, writes), "{quotas:?}, {costs:?}");
        });
    }
}

/// What a node has written a moment ago it writes again without a read, also beside other nodes.
#[test]
fn a_counter_that_was_just_written_is_not_read() {
    run(async {
        let table = Table::at_once();
        let nodes = [table.clone(), table.other_handle()].map(Shared::around);
        let statements = || {
            let count = |of: &AtomicU64| of.swap(0, Ordering::SeqCst);
            (count(&table.reads), count(&table.writes))
        };
        let ask = async |node: usize| charge(&nodes[node], 1).await.expect("an answer");
        // The second node begins with a read; the last charge is refused, and what is refused is read.
        for (node, passes, expected) in [
            (0, true, (1, 1)),
            (0, true, (0, 1)),
            (1, true, (1, 1)),
            (0, true, (0, 1)),
            (1, true, (0, 1)),
            (0, false, (1, 1)),
            (1, false, (1, 0)),
        ] {
            assert_eq!((ask(node).await, statements()), (passes, expected), "node {node}");
        }
        assert_eq!(table.used(), 5);
    });
}

/// The table's time says that the window had ended, so the charge is decided again.
#[test]
fn a_charge_counts_in_the_window_that_runs_when_it_is_written() {
    run(async {
        let table = Table::at_once();
        let store = Shared::around(table.clone());
        let end = NOW.next_multiple_of(60_000);
        for at in [NOW, end - 1, end - 1, end, end, end + 59_999, end + 60_000] {
            table.clock.set_ms(at);
            assert!(charge(&store, 1).await.expect("an answer"));
        }
        assert_eq!(table.used(), 1);
        table.clock.set_ms(end + 60_001);
        for passes in [true, true, true, true, false] {
            assert_eq!(charge(&store, 1).await.expect("an answer"), passes);
        }
    });
}

/// A connection may have been cut while nothing was sent. A read that is lost takes nothing.
#[test]
fn after_a_pause_a_counter_is_read() {
    run(async {
        let table = Table::at_once();
        let store = Shared::around(table.clone());
        for (pause, reads) in [(0, 1), (9, 1), (9, 1), (10, 2), (0, 2)] {
            sleep(Duration::from_millis(pause)).await;
            assert!(charge(&store, 1).await.expect("an answer"));
            assert_eq!(table.reads.load(Ordering::SeqCst), reads, "after {pause} ms");
        }
    });
}

/// It has connections of its own, which may have been cut.
#[test]
fn another_runtime_reads_a_counter_for_itself() {
    let table = Table::at_once();
    let store = Shared::around(table.clone());
    let runtimes = [(); 2].map(|()| Builder::new_current_thread().enable_all().build().unwrap());
    for (runtime, reads) in [(0, 1), (1, 2)] {
        assert!(runtimes[runtime].block_on(charge(&store, 1)).expect("an answer"));
        assert_eq!(table.reads.load(Ordering::SeqCst), reads);
    }
}

/// The row moves along with the clock, or lasts into the next window: a charge is taken once.
#[test]
fn what_is_written_without_a_read_is_taken_once() {
    run(async {
        let table = Table::at_once();
        let store = Shared::around(table.clone());
        let (scope, quotas) = (Scope::named("one"), Quota::per_minute(5).reserve_up_to(5).into());
        let ask = async |key: &Key, cost, reserves| {
            let charge = Charge::new(Account::new(&scope, &quotas, key), cost);
            let charge = if reserves { charge.reserving() } else { charge };
            store.charge(charge).await.expect("an answer")
        };
        let (stepped, reserved) = (Key::from(1_u64), Key::from(2_u64));
        assert!(ask(&stepped, 1, false).await.is_allowed());
        table.clock.set_ms(NOW - 180_000);
        let decision = ask(&stepped, 2, false).await;
        assert!(decision.is_allowed());
        assert_eq!((decision.used(), table.used()), (3, 3));
        table.clock.set_ms(NOW);
        assert!(ask(&reserved, 6, true).await.is_allowed());
        table.clock.set_ms(NOW + 60_000);
        assert_eq!(ask(&reserved, 1, true).await.used(), 2);
    });
}

/// A peek, a correction and a second limit ask for what a counter is.
#[test]
fn only_charges_that_pass_by_themselves_go_without_a_read() {
    run(async {
        let table = Table::at_once();
        let store = Shared::around(table.clone());
        let limiter = Quota::per_minute(5).name("one").store(Remote::around(store.clone()));
        assert!(charge(&store, 1).await.expect("an answer"));
        assert!(limiter.check(1_u64).await.expect("an answer").is_allowed());
        assert_eq!(table.reads.swap(0, Ordering::SeqCst), 1);
        assert_eq!(limiter.peek(1_u64).await.expect("an answer").used(), 2);
        assert_eq!(table.reads.swap(0, Ordering::SeqCst), 1);
        let receipt = limiter.charge(1_u64, 3).await.expect("an answer").expect("it passes");
        limiter.refund(receipt).await.expect("an answer");
        assert_eq!(table.reads.swap(0, Ordering::SeqCst), 1);
        assert_eq!(table.used(), 2);
    });
}

/// A node that is a little later than another one would find each of its counters changed.
#[test]
fn nodes_that_meet_at_a_far_key_take_turns() {
    for nodes in [2, 4] {
        run(async {
            let table = Table::at_once();
            let callers = (0..nodes).map(|node| {
                let away = FAR + Duration::from_millis(node);
                let store = Shared::around(Table { away, ..table.other_handle() });
                tokio::spawn(async move {
                    let mut longest = Duration::ZERO;
                    for _ in 0..50 {
                        let asked = Instant::now();
                        // Of another key, beside the one that both count in.
                        let ask = |key| charge_under(&store, key, 1_000);
                        let (one, other) = tokio::join!(ask(1), ask(7 + node));
                        assert!(one.expect("an answer") && other.expect("an answer"));
                        longest = longest.max(asked.elapsed());
                    }
                    longest
                })
            });
            for longest in join_all(callers.collect::<Vec<_>>()).await {
                let longest = longest.expect("no panic");
                assert!(longest < FAR * 8 * nodes as u32, "{nodes} nodes: {longest:?}");
            }
        });
    }
}

/// A node that charges the same key without a pause reads now and then, and so leaves room for
/// what has to find the row as it was.
#[test]
fn a_busy_node_lets_another_one_charge_two_quotas() {
    run(async {
        let table = Table::at_once();
        let [busy, other] = [0, 1].map(|more| {
            let away = FAR + Duration::from_millis(more);
            Shared::around(Table { away, ..table.other_handle() })
        });
        let is_over = Arc::new(AtomicBool::new(false));
        let ends = Arc::clone(&is_over);
        let busy = tokio::spawn(async move {
            while !ends.load(Ordering::SeqCst) {
                assert!(charge_under(&busy, 1, 1_000_000).await.expect("an answer"));
            }
        });
        let (scope, key) = (Scope::named("one"), Key::from(1_u64));
        let quotas = Quota::per_minute(1_000_000).and(Quota::per_hour(1_000_000));
        for _ in 0..20 {
            let asked = Instant::now();
            let charge = Charge::new(Account::new(&scope, &quotas, &key), 1);
            assert!(other.charge(charge).await.expect("an answer").is_allowed());
            assert!(asked.elapsed() < FAR * 60, "{:?}", asked.elapsed());
        }
        is_over.store(true, Ordering::SeqCst);
        busy.await.expect("no panic");
    });
}

/// Each of 64 callers for each node asks again at once.
#[test]
fn nodes_that_meet_at_a_far_hot_key_pass_much_of_what_one_could() {
    run(async {
        let (table, start) = (Table { away: FAR / 20, ..Table::at_once() }, Instant::now());
        let stores = [table.other_handle(), table].map(Shared::around);
        let callers = (0..128).map(|caller| {
            let store = stores[caller % 2].clone();
            tokio::spawn(async move {
                let mut passed = 0;
                while start.elapsed() < Duration::from_secs(2) {
                    let asked = charge_under(&store, 1, 1_000_000).await.expect("an answer");
                    passed += u64::from(asked);
                }
                passed
            })
        });
        let passed = join_all(callers.collect::<Vec<_>>()).await;
        let passed: u64 = passed.into_iter().map(|of| of.expect("no panic")).sum();
        // Each node passes 64 in two round trips.
        assert!(passed > 60_000, "{passed}");
    });
}

fn limiter(table: impl Counters) -> Limiter {
    Quota::per_minute(5).name("one").store(Remote::around(Shared::around(table)))
}

/// Each as a task of its own, as requests are.
fn ask_each(limiter: &Limiter, keys: impl IntoIterator<Item = u64>) -> Vec<JoinHandle<bool>> {
    let ask = |key| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.check(key).await.expect("an answer").is_local() })
    };
    keys.into_iter().map(ask).collect()
}

/// What waits for a call that is not answered was not sent: the server fails once.
#[test]
fn charges_that_expire_before_they_are_sent_open_no_breaker() {
    run(async {
        let table = Table::held_up();
        let limiter = limiter(table.clone());
        let waiting = ask_each(&limiter, [1; 20]);
        for is_local in join_all(waiting).await {
            assert!(is_local.expect("no panic"), "none was answered in time");
        }
        assert_eq!(table.reads.load(Ordering::SeqCst), 1);
        table.let_through(100);
        let decision = limiter.check(2_u64).await.expect("an answer");
        assert!(!decision.is_local(), "the breaker is closed");
    });
}

#[test]
fn a_counter_that_can_not_be_read_is_the_failure_of_its_key_alone() {
    run(async {
        let table = Table::held_up().with(Trouble::Unreadable);
        let limiter = limiter(table.clone());
        let keys: Vec<_> = (1..50).chain([0, 2, 0, 2, 3]).collect();
        let asked = ask_each(&limiter, keys.clone());
        idle().await;
        assert_eq!(table.reads.load(Ordering::SeqCst), 2, "one alone, then the others");
        table.let_through(1_000);
        for (key, is_local) in keys.into_iter().zip(join_all(asked).await) {
            assert_eq!(is_local.expect("no panic"), key == 0, "key {key}");
        }
        assert_eq!(table.used(), 49 + 3, "each once");
    });
}

/// What is known then, is that the store is late: not that a counter is locked.
#[test]
fn a_call_without_an_answer_is_a_failure_of_the_store() {
    run(async {
        let store = Shared::around(Table::held_up()).in_time(Duration::from_secs(1));
        let limit = Quota::per_minute(10).name("late");
        let limiter = Limiter::new(limit.store(store.expect("it ends its calls")));
        let error = limiter.check("ann").await.expect_err("it is late").to_string();
        assert!(error.contains("did not answer"), "{error}");
    });
}

/// As over Redis (S32): a correction is done, or an error says that it is not.
#[test]
fn a_correction_that_expires_while_its_counter_is_read_is_not_reported_as_done() {
    let table = Table::at_once().with(Trouble::Blocks);
    table.set_trouble(false);
    let store = Shared::around(table.clone());
    let store = store.in_time(Duration::from_millis(10)).expect("it ends its calls");
    let limiter = Limiter::new(Quota::per_minute(10).name("late").store(store));
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        // The first call of a runtime may take longer than the deadline.
        let receipt = loop {
            if let Ok(charged) = limiter.charge("ann", 1).await {
                break charged.expect("it passes");
            }
        };
        let used = table.used();
        table.set_trouble(true);
        let settled = limiter.settle(receipt, 5).await;
        assert_eq!((settled.is_ok(), table.used()), (false, used), "it was not made");
    });
}

#[test]
fn charges_lost_with_one_connection_are_one_failure() {
    run(async {
        let table = Table::held_up().with(Trouble::Cut);
        table.set_trouble(false);
        let limiter = limiter(table.clone());
        let lost = ask_each(&limiter, 0..100);
        idle().await;
        assert_eq!(table.reads.load(Ordering::SeqCst), 2, "one alone, then the others");
        table.set_trouble(true);
        table.let_through(2);
        for is_local in join_all(lost).await {
            assert!(is_local.expect("no panic"), "its connection was cut");
        }
        table.set_trouble(false);
        table.let_through(100);
        let decision = limiter.check(200_u64).await.expect("an answer");
        assert!(!decision.is_local(), "the breaker is closed");
    });
}

/// What was surely taken of a counter, and what may have been.
#[derive(Clone, Copy, Default)]
struct Taken {
    least: i64,
    most: i64,
}

struct World {
    scopes: [(Scope, Quotas); 3],
    taken: Mutex<HashMap<(usize, u64), Taken>>,
    fails: bool,
}

impl World {
    fn note(&self, scopes: &[usize], key: u64, least: i64, most: i64) {
        let mut taken = self.taken.lock().expect("no panic");
        for scope in scopes {
            let taken = taken.entry((*scope, key)).or_default();
            taken.least += least;
            taken.most += most;
        }
    }

    /// As `Remote` does, at its deadline or before, since clients hang up.
    async fn wait<T>(
        &self,
        chance: &mut fastrand::Rng,
        asked: impl Future<Output = Result<T, StoreError>>,
    ) -> Option<T> {
        let patience = if chance.u8(0..8) == 0 { chance.u64(0..5) } else { 250 };
        match timeout(Duration::from_millis(patience), asked).await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(error)) => {
                assert!(self.fails, "{error}");
                None
            }
            Err(_) => None,
        }
    }

    async fn caller(self: Arc<Self>, store: Shared<Table>, mut chance: fastrand::Rng) {
        for _ in 0..12 {
            let (key, cost) = (chance.u64(0..3), chance.u64(1..4));
            let charged = [&[0_usize][..], &[1, 2], &[2]][chance.usize(0..3)];
            let of = Key::from(key);
            let account = |scope: &usize| {
                let (scope, quotas) = &self.scopes[*scope];
                Account::new(scope, quotas, &of)
            };
            let lines: Vec<_> = charged.iter().map(|scope| (account(scope), cost)).collect();
            let asked = store.charge(Charge::together(&lines));
            let Some(decision) = self.wait(&mut chance, asked).await else {
                self.note(charged, key, 0, cost as i64);
                continue;
            };
            for (account, _) in &lines {
                let own = decision.of(account.scope.name()).expect("its own answer");
                assert_eq!(own.limit(), account.quotas.as_ref()[0].limit(), "its own answer");
                assert!(!decision.is_allowed() || own.used() >= cost, "its tokens count");
            }
            if !decision.is_allowed() {
                continue;
            }
            self.note(charged, key, cost as i64, cost as i64);
            if charged == [0] && chance.u8(0..4) == 0 {
                let refund = Adjust::refund(account(&0), cost, &decision);
                match self.wait(&mut chance, store.adjust(refund)).await {
                    Some(()) => self.note(charged, key, -(cost as i64), -(cost as i64)),
                    None => self.note(charged, key, -(cost as i64), 0),
                }
            }
            sleep(Duration::from_micros(chance.u64(0..2_000))).await;
        }
    }
}

fn random_program(seed: u64) {
    let mut chance = fastrand::Rng::with_seed(seed);
    let fails = chance.bool();
    let scope = |name, limit| (Scope::named(name), Quota::per_minute(limit).into());
    let table =
        Table { chance: Some(Arc::new(Mutex::new(chance.fork()))), fails, ..Table::at_once() };
    let limit = chance.u64(20..200);
    let scopes = [scope("one", limit), scope("two", limit + 1), scope("three", limit + 2)];
    let world = Arc::new(World { scopes, taken: Mutex::default(), fails });
    let stores = [table.other_handle(), table.clone()].map(Shared::around);
    run(async {
        let caller = |i: usize| {
            let (world, store) = (Arc::clone(&world), stores[i % 2].clone());
            tokio::spawn(world.caller(store, chance.fork()))
        };
        let callers: Vec<_> = (0..16).map(caller).collect();
        for caller in callers {
            caller.await.expect("no panic");
        }
        // What stood still is given up or done.
        sleep(Duration::from_secs(8)).await;
        let taken = world.taken.lock().expect("no panic").clone();
        let rows = table.rows.lock().expect("no panic").clone();
        let used = |scope: usize, key: u64| {
            let scope = world.scopes[scope].0.name();
            let mut of = rows.iter().filter(|(id, _)| *id.scope == *scope && id.key == key.into());
            of.next().map_or(0, |(_, state)| state.used)
        };
        for ((scope, key), Taken { least, most }) in taken {
            let used = used(scope, key);
            assert!((least..=most).contains(&used), "{used} of {least} to {most}");
        }
        // No counter is kept from later charges.
        for (key, store) in (0..3).flat_map(|key| stores.iter().map(move |store| (key, store))) {
            let once = || timeout(Duration::from_millis(250), charge(store, key));
            let asked = timeout(Duration::from_secs(60), async {
                while !matches!(once().await, Ok(Ok(_))) {
                    sleep(Duration::from_millis(10)).await;
                }
            });
            assert!(asked.await.is_ok(), "no call has it, and it isn't answered");
        }
    });
}

#[test]
fn random_programs_lose_nothing_and_take_nothing_twice() {
    let seed = std::env::var("SHARED_SEED").ok().and_then(|seed| seed.parse().ok());
    match seed {
        Some(seed) => random_program(seed),
        None => (0..sized(200, 5_000)).for_each(|seed| {
            let failed = catch_unwind(|| random_program(seed)).is_err();
            assert!(!failed, "again with SHARED_SEED={seed}");
        }),
    }
}
