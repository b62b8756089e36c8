//! The suite for stores: memory passes it, and a store with a fault does not.

use std::collections::HashMap;
use std::future::poll_fn;
use std::mem;
use std::ops::Deref;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, State, Store};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Clock, Decision, Key, ManualClock, MemoryStore, Quota, Quotas};
use tower_fixed_window_conformance::{TOGETHER_VECTORS, VECTORS, conformance, replay};

use crate::sized;

fn state(start: i64, used: i64, until: i64) -> State {
    let mut state = State::default();
    (state.start, state.used, state.until) = (start, used, until);
    state
}

/// A kind of store for each fault, and a test that the suite refuses it.
macro_rules! faults {
    ($($(#[$what:meta])* $test:ident: $fault:ident),* $(,)?) => {
        #[derive(Clone, Copy, PartialEq, Debug)]
        enum Fault {
            None,
            /// No fault: several limits are charged in one step. Those with other faults charge in order.
            InOneStep,
            $($(#[$what])* $fault,)*
        }

        mod the_suite_refuses_a_store_that {
            use super::*;

            $(
                #[test]
                fn $test() {
                    let passed = catch_unwind(AssertUnwindSafe(|| suite(Fault::$fault))).is_ok();
                    assert!(!passed, "the suite has not noticed: {:?}", Fault::$fault);
                }
            )*
        }
    };
}

faults! {
    /// Other charges come between reading and writing.
    charges_in_two_steps: ChargesInTwoSteps,
    adjusts_in_two_steps: AdjustsInTwoSteps,
    settles_in_two_steps: SettlesInTwoSteps,
    /// Each quota is charged by itself, so a refusal by one quota takes tokens from another.
    charges_quota_by_quota: ChargesQuotaByQuota,
    writes_the_first_quota_only: WritesTheFirstQuotaOnly,
    forgets_at_the_windows_end: ForgetsAtTheWindowsEnd,
    forgets_a_minute_early: ForgetsAMinuteEarly,
    forgets_what_is_refunded_to_nothing: ForgetsWhatIsRefundedToNothing,
    never_forgets: NeverForgets,
    finds_by_limit: FindsByLimit,
    finds_by_position: FindsByPosition,
    finds_without_scope: FindsWithoutScope,
    finds_without_key: FindsWithoutKey,
    finds_without_window: FindsWithoutWindow,
    finds_without_anchor: FindsWithoutAnchor,
    finds_by_scope_and_key_run_together: FindsByScopeAndKeyRunTogether,
    finds_by_text_of_any_case: FindsByTextOfAnyCase,
    finds_by_the_first_255_characters: FindsByTheFirst255Characters,
    refunds_twice: RefundsTwice,
    refunds_nothing: RefundsNothing,
    refunds_into_nothing: RefundsIntoNothing,
    ignores_true_costs: IgnoresTrueCosts,
    charges_on_a_peek: PeeksTake,
    opens_windows_on_a_peek: PeeksOpenWindows,
    resets_everything: ResetsEverything,
    resets_the_scope: ResetsTheScope,
    resets_by_pattern: ResetsByPattern,
    resets_what_is_like_the_key: ResetsWhatIsLikeTheKey,
    /// As where rows are found by the first bytes of a key.
    resets_longer_keys: ResetsLongerKeys,
    resets_the_first_quota_only: ResetsTheFirstQuotaOnly,
    resets_the_quotas_charged_last: ResetsTheQuotasChargedLast,
    resets_nothing: ResetsNothing,
    never_reserves: NeverReserves,
    always_reserves: AlwaysReserves,
    /// Each limit is charged by itself, so a limit that passes keeps its tokens though another one
    /// refuses.
    charges_limit_by_limit: ChargesLimitByLimit,
    charges_limits_in_two_steps: ChargesLimitsInTwoSteps,
    writes_the_first_limit_only: WritesTheFirstLimitOnly,
    has_a_clock_that_never_steps_back: AClockThatNeverStepsBack,
    // Of one handle, these are right.
    locks_for_each_handle: LocksForEachHandle,
    /// As `SELECT .. FOR UPDATE` does.
    locks_only_what_is_there: LocksOnlyWhatIsThere,
    remembers_states_in_each_handle: RemembersStatesInEachHandle,
    reads_the_nodes_clock: ReadsTheNodesClock,
    reads_a_stale_copy: ReadsAStaleCopy,
    loses_refunds_between_nodes: LosesRefundsBetweenNodes,
    resets_for_one_handle: ResetsForOneHandle,
    retries_a_conflict_twice: RetriesAConflictTwice,
    /// Of what it has read it compares the tokens only, which may be the same in the next window.
    compares_only_tokens: ComparesOnlyTokens,
    compares_the_first_limit_only: ComparesTheFirstLimitOnly,
    sets_the_expiry_once: SetsTheExpiryOnce,
    answers_in_the_wrong_order: AnswersInTheWrongOrder,
    /// As a table without a column for it.
    drops_the_stored_end: DropsTheStoredEnd,
}

struct Faulty {
    fault: Fault,
    /// Which of the two.
    handle: usize,
    shared: Arc<Shared>,
}

/// What two handles share.
struct Shared {
    clock: ManualClock,
    states: Mutex<HashMap<String, State>>,
    latest: Mutex<u64>,
    /// The counters that were charged last.
    last: Mutex<Vec<String>>,
    locks: [Mutex<()>; 2],
    /// What a handle sees in place of the states.
    seen: [Mutex<HashMap<String, State>>; 2],
    /// Which handle wrote a state, and when it expires since the first write.
    written: Mutex<HashMap<String, (usize, i64)>>,
    waiting: [Mutex<Vec<Decision>>; 2],
}

impl Deref for Faulty {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Faulty {
    /// What a correct store does in one step.
    fn step(&self, is_there: impl FnOnce() -> bool) -> Option<MutexGuard<'_, ()>> {
        match self.fault {
            Fault::LocksForEachHandle => Some(lock(&self.locks[self.handle])),
            Fault::LocksOnlyWhatIsThere if !is_there() => None,
            _ if COMPARING.contains(&self.fault) => None,
            _ => Some(lock(&STEP)),
        }
    }

    fn now(&self) -> u64 {
        let (now, mut latest) = (self.clock.now_ms(), lock(&self.latest));
        *latest = match self.fault {
            Fault::ReadsTheNodesClock if self.handle == 1 => now + 30_000,
            Fault::AClockThatNeverStepsBack => now.max(*latest),
            _ => now,
        };
        *latest
    }

    fn id(&self, account: &Account<'_>, quota: &Quota) -> String {
        let scope = account.scope.name();
        let key = account.key.readable();
        let any_case = key.to_lowercase().replace("%2a", "%2A");
        let counter = quota.counter();
        let anchor = counter.trim_start_matches(|c: char| c.is_ascii_digit());
        let position = account.quotas.into_iter().position(|other| other == quota);
        match self.fault {
            Fault::FindsByLimit => format!("{scope} {key} {counter} {}", quota.limit()),
            Fault::FindsByPosition => format!("{scope} {key} {position:?}"),
            Fault::FindsWithoutScope => format!("{key} {counter}"),
            Fault::FindsWithoutKey => format!("{scope} {counter}"),
            Fault::FindsWithoutWindow => format!("{scope} {key} {anchor}"),
            Fault::FindsWithoutAnchor => format!("{scope} {key} {}", quota.window().as_millis()),
            Fault::FindsByScopeAndKeyRunTogether => {
                format!("{scope}{} {counter}", key.replace(",t", "").trim_start_matches('t'))
            }
            Fault::FindsByTextOfAnyCase => format!("{scope} {any_case} {counter}"),
            Fault::FindsByTheFirst255Characters => format!("{scope} {key:.255} {counter}"),
            _ => format!("{scope} {key} {counter}"),
        }
    }

    fn load(&self, account: &Account<'_>, quota: &Quota, now: u64) -> Option<State> {
        let id = self.id(account, quota);
        if let Some(state) = lock(&self.seen[self.handle]).get(&id) {
            return Some(*state);
        }
        let mut state = *lock(&self.states).get(&id)?;
        let end = state.start + quota.window().as_millis() as i64;
        let is_early = now as i64 >= state.until - 60_000 && end < state.until;
        match self.fault {
            Fault::ForgetsAtTheWindowsEnd if now as i64 >= end => return None,
            Fault::ForgetsAMinuteEarly if is_early => return None,
            Fault::ForgetsWhatIsRefundedToNothing if state.used == 0 => return None,
            Fault::NeverForgets => state.until = i64::MAX / 4,
            Fault::DropsTheStoredEnd => state.end = 0,
            Fault::SetsTheExpiryOnce if now as i64 >= lock(&self.written)[&id].1 => return None,
            _ => {}
        }
        Some(state)
    }

    fn save(&self, account: &Account<'_>, quota: &Quota, state: State) {
        let id = self.id(account, quota);
        let before = lock(&self.states).insert(id.clone(), state);
        match self.fault {
            Fault::RemembersStatesInEachHandle => {
                lock(&self.seen[self.handle]).insert(id.clone(), state);
            }
            Fault::ReadsAStaleCopy => {
                let stale = before.unwrap_or(self::state(state.start, 0, state.until));
                lock(&self.seen[1 - self.handle]).insert(id.clone(), stale);
                lock(&self.seen[self.handle]).remove(&id);
            }
            Fault::ResetsForOneHandle => _ = lock(&self.seen[self.handle]).remove(&id),
            _ => {}
        }
        let mut written = lock(&self.written);
        let (by, expires) = written.entry(id).or_insert((self.handle, state.until));
        *by = self.handle;
        if self.now() as i64 >= *expires {
            *expires = state.until;
        }
    }

    fn decide(&self, charge: Charge<'_>, now: u64) -> Decision {
        let (account, _) = charge.lines().next().expect("a line");
        let seen = Mutex::new(Vec::new());
        let (decision, writes) = charge.decide(now, |of, quota| {
            let state = self.load(of, quota, now);
            lock(&seen).push((self.id(of, quota), state));
            state
        });
        if COMPARING.contains(&self.fault) && !writes.is_empty() {
            let _step = lock(&STEP);
            let states = lock(&self.states).clone();
            let twice = self.fault == Fault::RetriesAConflictTwice;
            let compared = if self.fault == Fault::ComparesTheFirstLimitOnly { 1 } else { 99 };
            let is_same = |(id, state): &(String, Option<State>)| match (states.get(id), state) {
                (Some(is), Some(was)) if self.fault == Fault::ComparesOnlyTokens => {
                    is.used == was.used
                }
                (is, was) => is == was.as_ref(),
            };
            if !lock(&seen).iter().take(compared).all(is_same) {
                let now = self.now();
                let again = || charge.decide(now, |of, quota| self.load(of, quota, now));
                if twice {
                    // The first attempt is taken for undone.
                    again().1.iter().for_each(|(of, quota, state)| self.save(of, quota, *state));
                }
                let (decision, writes) = again();
                writes.iter().for_each(|(of, quota, state)| self.save(of, quota, *state));
                return decision;
            }
            writes.iter().for_each(|(of, quota, state)| self.save(of, quota, *state));
            return decision;
        }
        if !writes.is_empty() {
            let counters = account.quotas.into_iter().map(|quota| quota.counter());
            *lock(&self.last) = counters.collect();
        }
        for (of, quota, state) in writes {
            if self.fault != Fault::WritesTheFirstLimitOnly
                || of.scope.name() == account.scope.name()
            {
                self.save(&of, quota, state);
            }
            if self.fault == Fault::WritesTheFirstQuotaOnly {
                break;
            }
        }
        if self.fault == Fault::ChargesLimitByLimit && !decision.is_allowed() {
            for (account, cost) in charge.lines().filter(|_| charge.lines().len() > 1) {
                let _ = self.decide(Charge::new(account, cost), now);
            }
        }
        decision
    }
}

/// All work is done under one lock, except for the fault.
static STEP: Mutex<()> = Mutex::new(());

/// Several limits, of stores that can charge them together.
const IN_TWO_STEPS: [Fault; 2] = [Fault::ChargesLimitsInTwoSteps, Fault::ComparesTheFirstLimitOnly];

/// Stores that compare what they have read with what is there when they write.
const COMPARING: [Fault; 3] =
    [Fault::RetriesAConflictTwice, Fault::ComparesOnlyTokens, Fault::ComparesTheFirstLimitOnly];

impl Store for Faulty {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        if charge.lines().len() > 1 {
            let _step = (!IN_TWO_STEPS.contains(&self.fault)).then(|| lock(&STEP));
            return Reply::now(self.decide(charge, self.now()));
        }
        let (account, cost) = charge.lines().next().expect("a line");
        let is_there = || {
            let states = lock(&self.states);
            account.quotas.into_iter().all(|quota| states.contains_key(&self.id(&account, quota)))
        };
        let _step = if self.fault == Fault::ChargesInTwoSteps { None } else { self.step(is_there) };
        let now = self.now();
        let plain = Charge::new(account, cost);
        let plain = if charge.may_reserve() { plain.reserving() } else { plain };
        let decision = match self.fault {
            Fault::ChargesQuotaByQuota if !charge.is_peek() => {
                let decision = self.decide(charge, now);
                for quota in account.quotas.into_iter().filter(|_| !decision.is_allowed()) {
                    let one = Quotas::from(*quota);
                    let one = Account::new(account.scope, &one, account.key);
                    let _ = self.decide(Charge::new(one, cost), now);
                }
                decision
            }
            Fault::PeeksTake if charge.is_peek() => self.decide(plain, now),
            Fault::PeeksOpenWindows if charge.is_peek() => {
                let decision = self.decide(charge, now);
                let states = account.quotas.into_iter().zip(decision.usage());
                for (quota, standing) in states {
                    let end = standing.reset_at().duration_since(std::time::UNIX_EPOCH);
                    let end = end.map_or(0, |end| end.as_millis() as i64);
                    if self.load(&account, quota, now).is_none() {
                        let start = end - quota.window().as_millis() as i64;
                        self.save(&account, quota, state(start, 0, end));
                    }
                }
                decision
            }
            Fault::NeverReserves if !charge.is_peek() => {
                self.decide(Charge::new(account, cost), now)
            }
            Fault::AlwaysReserves => self.decide(charge.reserving(), now),
            _ => self.decide(charge, now),
        };
        if self.fault != Fault::AnswersInTheWrongOrder {
            return Reply::now(decision);
        }
        // Of the charges that wait together, the last one gets the first answer.
        let (shared, handle) = (Arc::clone(&self.shared), self.handle);
        lock(&shared.waiting[handle]).push(decision);
        let mut has_waited = false;
        Reply::later(poll_fn(move |cx| {
            if !mem::replace(&mut has_waited, true) {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Poll::Ready(Ok(lock(&shared.waiting[handle]).pop().expect("an answer")))
        }))
    }

    fn charges_together(&self) -> bool {
        let one_step =
            [Fault::InOneStep, Fault::ChargesLimitByLimit, Fault::WritesTheFirstLimitOnly];
        one_step.contains(&self.fault) || IN_TWO_STEPS.contains(&self.fault)
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let two_steps = [Fault::ChargesInTwoSteps, Fault::AdjustsInTwoSteps].contains(&self.fault)
            || self.fault == Fault::SettlesInTwoSteps && !adjust.is_refund();
        let _step = (!two_steps).then(|| match self.fault {
            Fault::LocksForEachHandle => lock(&self.locks[self.handle]),
            _ => lock(&STEP),
        });
        let now = self.now();
        let account = adjust.account;
        if self.fault == Fault::LosesRefundsBetweenNodes && adjust.is_refund() {
            let first = self.id(&account, &account.quotas.as_ref()[0]);
            if lock(&self.written).get(&first).is_some_and(|(by, _)| *by != self.handle) {
                return Reply::now(());
            }
        }
        let times = match self.fault {
            Fault::RefundsTwice if adjust.is_refund() => 2,
            Fault::RefundsNothing if adjust.is_refund() => 0,
            Fault::IgnoresTrueCosts if !adjust.is_refund() => 0,
            _ => 1,
        };
        for _ in 0..times {
            let writes = adjust.apply(now, |quota| {
                let none = state(now as i64, 0, now as i64 + 1);
                let state = self.load(&account, quota, now);
                let live = || state.filter(|s| s.until > now as i64).or(Some(none));
                if self.fault == Fault::RefundsIntoNothing { live() } else { state }
            });
            for (quota, state) in writes {
                self.save(&account, quota, state);
            }
        }
        Reply::now(())
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let _step = lock(&STEP);
        let mut states = lock(&self.states);
        if self.fault == Fault::ResetsForOneHandle {
            lock(&self.seen[1 - self.handle]).extend(states.clone());
        }
        let key = key.readable();
        let (scope, of_key) = (format!("{} ", scope.name()), format!("{} {key} ", scope.name()));
        let pattern = format!("{scope}{}", key.replace("%2A", ""));
        let is_like = |id: &str| id.bytes().zip(of_key.bytes()).all(|(a, b)| a == b || b == b'_');
        match self.fault {
            Fault::ResetsNothing => {}
            Fault::ResetsEverything => states.clear(),
            Fault::ResetsTheScope => states.retain(|id, _| !id.starts_with(&scope)),
            Fault::ResetsByPattern => states.retain(|id, _| !id.starts_with(&pattern)),
            Fault::ResetsWhatIsLikeTheKey => states.retain(|id, _| !is_like(id)),
            Fault::ResetsLongerKeys => {
                let longer = format!("{scope}{key},");
                states.retain(|id, _| !id.starts_with(&of_key) && !id.starts_with(&longer));
            }
            Fault::ResetsTheFirstQuotaOnly => {
                let first = states.keys().find(|id| id.starts_with(&of_key)).cloned();
                first.and_then(|id| states.remove(&id));
            }
            Fault::ResetsTheQuotasChargedLast => {
                lock(&self.last).iter().for_each(|of| _ = states.remove(&format!("{of_key}{of}")));
            }
            _ => states.retain(|id, _| !id.starts_with(&of_key)),
        }
        Reply::now(())
    }
}

fn suite(fault: Fault) {
    let new = |clock: ManualClock| {
        let shared = Arc::new(Shared {
            clock,
            states: Mutex::default(),
            latest: Mutex::default(),
            last: Mutex::default(),
            locks: Default::default(),
            seen: Default::default(),
            written: Mutex::default(),
            waiting: Default::default(),
        });
        [0, 1].map(|handle| Faulty { fault, handle, shared: Arc::clone(&shared) })
    };
    conformance(new, |job| block_on(job));
}

/// Memory is of one process, so its two handles are clones.
fn in_memory(max_keys: usize, clock: ManualClock) -> [MemoryStore; 2] {
    let store = MemoryStore::with_max_keys(max_keys).clock(clock);
    [store.clone(), store]
}

#[test]
fn memory_passes_the_suite_at_every_size() {
    for max_keys in [1_000_000, 100, 10_000] {
        conformance(|clock| in_memory(max_keys, clock), |job| block_on(job));
    }
}

/// Each store has a seed of its own, and in small ones counts meet in a bucket.
#[test]
fn the_shared_traces_pass_at_every_size_and_for_every_seed() {
    for (max_keys, seeds) in [(1_000_000, 2), (100, sized(20, 200)), (5_000, sized(4, 40))] {
        for (traces, number) in [(VECTORS, 69), (TOGETHER_VECTORS, 41)].repeat(seeds) {
            let new = |clock| MemoryStore::with_max_keys(max_keys).clock(clock);
            let mut report = None;
            block_on(async { report = Some(replay(traces, new).await) });
            let report = report.expect("it was replayed").expect("the traces are well-formed");
            assert!(report.failures.is_empty(), "{max_keys} keys: {report}");
            assert_eq!(report.passed, number);
        }
    }
}

#[test]
fn a_simple_correct_store_passes_the_suite() {
    suite(Fault::None);
    suite(Fault::InOneStep);
}

#[test]
fn a_report_says_what_a_trace_is_about() {
    let trace = r#"{"traces": [{"id": "X1", "note": "one a minute", "quotas": [{"limit": 1, "window_ms": 60000}],
        "steps": [{"op": "charge", "at_ms": 0, "cost": 1, "expect":
            {"allowed": false, "remaining": [0], "used": [1], "reset_ms": [60000]}}]}]}"#;
    let report = block_on(replay(trace, |clock| MemoryStore::new().clock(clock))).expect("a file");
    let text = report.to_string();
    assert!(text.starts_with("one a minute (X1, step 0): expected "), "{text}");
}
