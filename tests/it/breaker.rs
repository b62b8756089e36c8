//! The circuit breaker: it stops calls to a store that keeps failing, and lets one call at a time
//! try it (S32).

use futures_util::future::{FutureExt, join_all};
use tokio::task::yield_now;
use tokio::time::{Instant, advance};
use tower_fixed_window::store::{Adjust, Charge, Remote, Reply, Scope, Store, StoreError};

use crate::prelude::*;

#[derive(Clone, Copy, PartialEq)]
enum Does {
    Answer,
    AnswerLater,
    Fail,
    Hang,
    /// No connection can be had.
    CutOff,
}

/// A store that behaves as set, for each domain.
#[derive(Clone)]
struct Told {
    does: Arc<Mutex<[Does; 2]>>,
    memory: MemoryStore,
    calls: Arc<AtomicUsize>,
    under_way: Arc<AtomicUsize>,
    /// In front of it.
    remote: Option<Remote>,
}

struct UnderWay(Arc<AtomicUsize>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Told {
    fn to(does: Does, deadline: Duration) -> Self {
        let this = Self {
            does: Arc::new(Mutex::new([does; 2])),
            memory: MemoryStore::new(),
            calls: Arc::default(),
            under_way: Arc::default(),
            remote: None,
        };
        // Each request has to call the store, so nothing is remembered.
        let remote =
            Remote::around(this.clone()).deadline(deadline).remember_refusals(Duration::ZERO);
        Self { remote: Some(remote.on_failure(OnStoreFailure::Deny)), ..this }
    }

    fn now(&self, domain: usize, does: Does) {
        self.does.lock().expect("no panic")[domain] = does;
    }

    fn calls(&self) -> usize {
        self.calls.swap(0, Ordering::SeqCst)
    }

    fn limiter(&self) -> Limiter {
        let remote = self.remote.clone().expect("in front of it");
        Quota::per_day(1_000_000).name("told").store(remote)
    }
}

impl Store for Told {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let (account, _) = charge.lines().next().expect("a line");
        let does = self.does.lock().expect("no panic")[domain(account.key)];
        let answer = self.memory.charge(charge);
        self.under_way.fetch_add(1, Ordering::SeqCst);
        let under_way = UnderWay(Arc::clone(&self.under_way));
        match does {
            Does::Answer => answer,
            Does::AnswerLater => Reply::later(async {
                yield_now().await;
                answer.await
            }),
            Does::Fail => Reply::later(async { Err(StoreError::new("as it was told")) }),
            Does::CutOff => Reply::from(Err(StoreError::new("no connection").unsent())),
            Does::Hang => Reply::later(async move {
                let _under_way = under_way;
                std::future::pending().await
            }),
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        self.memory.adjust(adjust)
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.memory.reset(scope, key)
    }

    fn is_cut_off(&self, _: &Scope, key: &Key) -> bool {
        self.does.lock().expect("no panic")[domain(key)] == Does::CutOff
    }

    fn fault_domain(&self, _: &Scope, key: &Key) -> u64 {
        domain(key) as u64
    }
}

fn domain(key: &Key) -> usize {
    usize::from(key.readable() != "u0")
}

async fn fails(limiter: &Limiter, times: usize) {
    for _ in 0..times {
        assert!(limiter.check(0_u64).await.is_err());
    }
}

const PAUSE: Duration = ms(250);

#[tokio::test(start_paused = true)]
async fn an_open_breaker_lets_one_call_at_a_time_through() {
    let store = Told::to(Does::Hang, secs(10));
    let limiter = store.limiter();
    let answers = join_all((0..5).map(|_| limiter.check(0_u64))).await;
    assert!(answers.iter().all(Result::is_err));
    store.calls();
    let start = Instant::now();
    let mut waiting = Vec::new();
    while start.elapsed() < secs(25) {
        let limiter = limiter.clone();
        waiting.push(tokio::spawn(async move { limiter.check(0_u64).await.is_err() }));
        sleep(ms(50)).await;
        assert!(store.under_way.load(Ordering::SeqCst) <= 1, "one at a time");
    }
    // After 250 ms, and then 250 ms after each deadline.
    assert_eq!(store.calls(), 3);
    drop(waiting);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_trial_call_makes_room_for_the_next() {
    let store = Told::to(Does::Hang, secs(10));
    let limiter = store.limiter();
    join_all((0..5).map(|_| limiter.check(0_u64))).await;
    advance(PAUSE).await;
    let given_up = tokio::time::timeout(ms(100), limiter.check(0_u64)).await;
    assert!(given_up.is_err());
    store.now(0, Does::AnswerLater);
    assert!(limiter.check(0_u64).await.is_ok(), "the next one need not wait for its deadline");
    assert!(limiter.check(0_u64).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_call_that_answers_at_once_closes_the_breaker() {
    let store = Told::to(Does::Fail, PAUSE);
    let limiter = store.limiter();
    fails(&limiter, 5).await;
    store.now(0, Does::Answer);
    assert!(limiter.check(0_u64).await.is_err(), "it is left alone");
    advance(PAUSE).await;
    store.calls();
    for _ in 0..10 {
        assert!(limiter.check(0_u64).await.is_ok());
    }
    assert_eq!(store.calls(), 10, "it is asked again by all");
    // Four failures, an answer, four failures: not five in a row.
    for does in [Does::Fail, Does::Answer, Does::Fail, Does::Answer] {
        store.now(0, does);
        for _ in 0..4 {
            assert_eq!(limiter.check(0_u64).await.is_ok(), does == Does::Answer);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn limiters_of_one_store_leave_it_alone_together() {
    let store = Told::to(Does::Fail, PAUSE);
    let (one, other) = (store.limiter(), store.limiter());
    fails(&one, 5).await;
    assert_eq!(store.calls(), 5);
    assert!(other.check(0_u64).await.is_err());
    assert_eq!(store.calls(), 0);
    store.now(0, Does::AnswerLater);
    advance(PAUSE).await;
    assert!(other.check(0_u64).await.is_ok());
    assert!(one.check(0_u64).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_failure_of_a_single_key_does_not_open_the_breaker() {
    let store = Told::to(Does::AnswerLater, PAUSE);
    let limiter = store.limiter();
    store.now(1, Does::Fail);
    for _ in 0..100 {
        assert!(limiter.check(1_u64).await.is_err());
        assert!(limiter.check(0_u64).await.is_ok());
    }
    assert_eq!(store.calls(), 105);
    store.now(1, Does::AnswerLater);
    advance(PAUSE).await;
    assert!(limiter.check(1_u64).await.is_ok());
}

/// A trial call of an earlier outage, which lasts into a later one.
#[tokio::test(start_paused = true)]
async fn a_dropped_trial_of_an_earlier_outage_makes_no_room_beside_a_later_one() {
    let store = Told::to(Does::AnswerLater, secs(10));
    let limiter = store.limiter();
    let begin = || {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.check(0_u64).await.is_ok() })
    };
    let fail = async || {
        store.now(0, Does::Fail);
        fails(&limiter, 5).await;
        advance(PAUSE).await;
        store.now(0, Does::Hang);
    };
    // The call begins before the outage, and ends in it.
    let mut late = limiter.check(0_u64);
    assert!((&mut late).now_or_never().is_none());
    fail().await;
    let earlier = begin();
    sleep(ms(1)).await;
    assert!((&mut late).await.is_ok(), "that ends the outage");
    fail().await;
    let later = begin();
    sleep(PAUSE).await;
    store.calls();
    earlier.abort();
    sleep(ms(1)).await;
    let third = begin();
    sleep(ms(1)).await;
    assert_eq!(store.calls(), 0, "one at a time");
    drop((later, third));
}

/// No answer comes within the shorter deadline.
#[tokio::test(start_paused = true)]
async fn a_missed_deadline_stops_only_those_who_would_not_wait_longer() {
    let store = Told::to(Does::Hang, ms(1));
    let hasty = store.remote.clone().expect("in front of it");
    let patient = hasty.clone().deadline(secs(1));
    let of = |remote: &Remote| Quota::per_day(9).name("told").store(remote.clone());
    let (hasty, patient, other) = (of(&hasty), of(&patient), of(&patient));
    fails(&hasty, 20).await;
    assert_eq!(store.calls(), 5, "it is stopped itself");
    fails(&patient, 4).await;
    store.now(0, Does::AnswerLater);
    assert!(other.check(0_u64).await.is_ok(), "four failures in a row");
    store.now(0, Does::Hang);
    fails(&patient, 5).await;
    store.calls();
    assert!(other.check(0_u64).await.is_err() && hasty.check(0_u64).await.is_err());
    assert_eq!(store.calls(), 0);
}

/// A part that no connection can be had to.
#[tokio::test(start_paused = true)]
async fn a_store_that_is_cut_off_is_tried_now_and_then_and_by_the_first_request() {
    let store = Told::to(Does::CutOff, PAUSE);
    let limiter = store.limiter();
    for _ in 0..20 {
        assert!(limiter.check(0_u64).await.is_err());
        advance(PAUSE / 10).await;
    }
    assert_eq!(store.calls(), 2, "the first, and one after a pause");
    advance(100 * PAUSE).await;
    assert!(limiter.check(0_u64).await.is_err());
    assert_eq!(store.calls(), 1, "the first one after a while");
    store.now(0, Does::Answer);
    for _ in 0..5 {
        assert!(limiter.check(0_u64).await.is_ok(), "at once");
    }
}

#[test]
#[should_panic(expected = "without Remote::around")]
fn a_remote_around_a_remote_is_an_error() {
    let _ = Remote::around(Remote::around(MemoryStore::new()));
}
