//! A store elsewhere, which decides on its own server: it can be written against the public API.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::FutureExt;
use tower_fixed_window::store::{Account, Adjust, Charge, Remote, Reply, Scope, State, Store};
use tower_fixed_window::{
    Clock, Decision, Key, ManualClock, MemoryStore, OnStoreFailure, Quota, StoreError, SystemClock,
};

use crate::window_at;

/// A quota as it is sent to the server. It has neither rollover nor reservations.
struct Row {
    counter: String,
    limit: i64,
    /// The starts of windows, from the one before now on. Windows of a calendar differ in length,
    /// so the server can't work them out.
    starts: Vec<i64>,
}

/// The most windows that a debt lasts in these tests.
const STARTS: usize = 60;

impl Row {
    fn new(account: &Account<'_>, quota: &Quota, now: u64) -> Self {
        let mut starts = vec![window_at(account, quota, now as i64).start];
        for _ in 0..STARTS / 2 {
            starts.insert(0, window_at(account, quota, starts[0] - 1).start);
        }
        while starts.len() < STARTS {
            starts.push(window_at(account, quota, starts[starts.len() - 1]).end);
        }
        Self { counter: quota.counter(), limit: quota.limit() as i64, starts }
    }

    /// The index of the window at an instant.
    fn number(&self, at: i64) -> usize {
        self.starts.partition_point(|start| *start <= at) - 1
    }

    /// The tokens that count in the current window: of earlier windows, only debt.
    fn used(&self, now: u64, state: Option<State>) -> i64 {
        let Some(state) = state else { return 0 };
        let passed = self.number(now as i64) - self.number(state.start);
        (state.used - passed as i64 * self.limit).max(0)
    }

    fn state(&self, now: u64, used: i64) -> State {
        let number = self.number(now as i64);
        let windows = (used + self.limit - 1) / self.limit;
        let mut state = State::default();
        (state.start, state.used) = (self.starts[number], used);
        state.until = self.starts[number + windows.max(1) as usize];
        state
    }
}

/// The tables of a server, and two procedures that change them, in arithmetic of their own.
#[derive(Clone)]
struct Server {
    clock: ManualClock,
    states: Arc<Mutex<HashMap<(String, String), State>>>,
}

impl Server {
    /// The time, and the states as they were.
    fn call_charge(
        &self,
        owner: &str,
        rows: &[Row],
        cost: i64,
        peek: bool,
    ) -> (u64, Vec<Option<State>>) {
        let now = self.clock.now_ms();
        let mut states = self.states.lock().expect("no panic");
        let key = |row: &Row| (owner.to_owned(), row.counter.clone());
        let before: Vec<_> = rows.iter().map(|row| states.get(&key(row)).copied()).collect();
        let counted = || rows.iter().zip(&before).map(|(row, state)| (row, row.used(now, *state)));
        if cost > 0 && !peek && counted().all(|(row, used)| used + cost <= row.limit) {
            for (row, used) in counted() {
                states.insert(key(row), row.state(now, used + cost));
            }
        }
        (now, before)
    }

    /// Adds to the counts of this window; what comes back does so until then, and opens no window.
    fn call_adjust(&self, owner: &str, rows: &[Row], tokens: i64, until: &[u64]) {
        let now = self.clock.now_ms();
        let mut states = self.states.lock().expect("no panic");
        for (i, row) in rows.iter().enumerate() {
            let key = (owner.to_owned(), row.counter.clone());
            let state = states.get(&key).copied();
            let used = match (state, until.get(i)) {
                (Some(state), Some(until)) if now < *until => (state.used - tokens).max(0),
                (_, Some(_)) => continue,
                (state, None) => row.used(now, state) + tokens,
            };
            states.insert(key, row.state(now, used));
        }
    }
}

fn owner(scope: &Scope, key: &Key) -> String {
    format!("{}/{}", scope.name(), key.readable())
}

/// The owner and the quotas of an account, as sent to the server.
fn sent(account: &Account<'_>, now: u64) -> (String, Vec<Row>) {
    let rows = account.quotas.into_iter().map(|quota| Row::new(account, quota, now)).collect();
    (owner(account.scope, account.key), rows)
}

impl Store for Server {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        let (server, charge) = (self.clone(), charge.to_owned());
        Reply::later(async move {
            let charge = charge.as_charge();
            let (account, cost) = charge.lines().next().expect("a line");
            let (owner, rows) = sent(&account, server.clock.now_ms());
            let (now, states) = server.call_charge(&owner, &rows, cost as i64, charge.is_peek());
            let mut states = states.into_iter();
            // The states that the server has seen lead to the decision that it made.
            Ok(charge.decide(now, |_, _| states.next().flatten()).0)
        })
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        let (server, adjust) = (self.clone(), adjust.to_owned());
        Reply::later(async move {
            let adjust = adjust.as_adjust();
            let until = adjust.refundable_within().map(|(_, within)| within.end as u64);
            let until: Vec<_> = until.collect();
            let (owner, rows) = sent(&adjust.account, server.clock.now_ms());
            server.call_adjust(&owner, &rows, adjust.tokens as i64, &until);
            Ok(())
        })
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        let (server, owner) = (self.clone(), owner(scope, key));
        Reply::later(async move {
            let mut states = server.states.lock().expect("no panic");
            states.retain(|(of, _), _| *of != owner);
            Ok::<_, StoreError>(())
        })
    }
}

#[test]
fn a_store_that_decides_on_its_server_needs_only_what_is_public() {
    // Six hours before the end of a November.
    let clock = ManualClock::at_ms(1_701_367_200_000);
    let server = Server { clock: clock.clone(), states: Arc::default() };
    // Temporary changes end by the system's clock, unless the store has another one.
    assert!(server.now_ms().abs_diff(SystemClock.now_ms()) < 60_000);
    let elsewhere = Remote::around(server);
    let elsewhere = elsewhere.remember_refusals(Duration::ZERO).on_failure(OnStoreFailure::Deny);
    let quotas = Quota::per_minute(5)
        .and(Quota::per_hour(20).staggered())
        .and(Quota::per_month(1_500).in_zone("Europe/Berlin"));
    let limit = quotas.name("api");
    let there = limit.clone().store(elsewhere);
    let here = limit.store(MemoryStore::new().clock(clock.clone()));

    let mut rng = fastrand::Rng::with_seed(7);
    let mut receipts = Vec::new();
    for _ in 0..2_000 {
        clock.advance(Duration::from_millis(rng.u64(..20_000)));
        let (key, cost) = (rng.u64(..3), rng.u64(..4));
        match rng.u8(..8) {
            0 => assert_eq!(answer(there.peek(key)), answer(here.peek(key))),
            1..=4 => match (answer(there.charge(key, cost)), answer(here.charge(key, cost))) {
                (Ok(one), Ok(other)) => {
                    assert_eq!(one.decision(), other.decision());
                    receipts.push((one, other));
                }
                (one, other) => assert_eq!(one.unwrap_err(), other.unwrap_err()),
            },
            5 | 6 => {
                if let Some((one, other)) = receipts.pop() {
                    answer(there.settle(one, cost));
                    answer(here.settle(other, cost));
                }
            }
            _ if rng.u8(..8) == 0 => {
                answer(there.reset(key));
                answer(here.reset(key));
            }
            _ => {}
        }
        assert_eq!(answer(there.peek(key)).usage(), answer(here.peek(key)).usage());
    }
}

fn answer<T>(reply: Reply<T>) -> T {
    reply.now_or_never().expect("neither waits").expect("neither fails")
}
