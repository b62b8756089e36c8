//! A store in Redis beside the arithmetic, which decides in memory: both must decide the same, whatever
//! happens to a key, of one limit or of several.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;
use std::time::{Duration, UNIX_EPOCH};

use fastrand::Rng;
use harness::Server;
use redis::aio::ConnectionLike;
use tower_fixed_window::store::{Account, Adjust, Charge, Reply, Scope, State, Store};
use tower_fixed_window::{Clock, Decision, Key, ManualClock, Quota, Quotas, StoreError, Usage};
use tower_fixed_window_redis::RedisStore;

/// Polls the replies in this order, all before the first answer.
pub(crate) async fn at_once(
    replies: impl IntoIterator<Item = Reply<Decision>>,
) -> Vec<Result<Decision, StoreError>> {
    let mut all: Vec<_> = replies.into_iter().map(|reply| (reply, None)).collect();
    poll_fn(|cx| {
        let mut done = true;
        for (reply, answer) in &mut all {
            if answer.is_none()
                && let Poll::Ready(ready) = Pin::new(reply).poll(cx)
            {
                *answer = Some(ready);
            }
            done &= answer.is_some();
        }
        if done { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    all.into_iter().map(|(_, answer)| answer.expect("it is done")).collect()
}

/// Asserts that no key is kept for ever.
pub(crate) fn assert_all_expire(server: &Server) {
    let without = "local n = 0 for _, key in ipairs(redis.call('KEYS', '*')) do \
                   if redis.call('PTTL', key) < 0 then n = n + 1 end end return n";
    assert_eq!(server.ask::<u64>(&["EVAL", without, "0"]), 0, "keys without an expiry");
}

/// The arithmetic over counts that never expire.
#[derive(Default)]
struct Model(HashMap<(String, Key, String), State>);

impl Model {
    fn id(account: &Account<'_>, quota: &Quota) -> (String, Key, String) {
        let scope = account.scope.name().to_owned();
        (scope, account.key.clone(), quota.counter())
    }

    fn charge(&mut self, charge: Charge<'_>, now: u64) -> Decision {
        let load = |account: &Account<'_>, quota: &Quota| self.0.get(&Self::id(account, quota));
        let (decision, writes) = charge.decide(now, |account, quota| load(account, quota).copied());
        for (account, quota, state) in writes {
            self.0.insert(Self::id(&account, quota), state);
        }
        decision
    }

    fn adjust(&mut self, adjust: Adjust<'_>, now: u64) {
        let account = adjust.account;
        let writes = adjust.apply(now, |quota| self.0.get(&Self::id(&account, quota)).copied());
        for (quota, state) in writes {
            self.0.insert(Self::id(&account, quota), state);
        }
    }
}

/// A store, and the arithmetic by the same clock.
pub(crate) struct Pair<S> {
    seed: u64,
    clock: ManualClock,
    model: Model,
    pub(crate) redis: S,
    /// The decisions that passed, for later corrections.
    taken: Vec<Decision>,
}

impl<S: Store> Pair<S> {
    /// Counters in Redis are new for each seed. Nothing here depends on time, since a busy machine
    /// may be slow.
    pub(crate) fn new(
        connection: &(impl ConnectionLike + Clone + Send + Sync + 'static),
        seed: u64,
        clock: &ManualClock,
        with: impl Fn(RedisStore) -> S,
    ) -> Self {
        let redis = RedisStore::from(connection.clone()).deadline(Duration::from_secs(60));
        let redis = with(redis.prefix(&seed.to_string()).clock(clock.clone()));
        Self { seed, clock: clock.clone(), model: Model::default(), redis, taken: Vec::new() }
    }

    pub(crate) async fn charge(&mut self, charge: Charge<'_>, at: &str) -> Decision {
        let expected = self.model.charge(charge, self.clock.now_ms());
        let decision = self.redis.charge(charge).await;
        let decision = decision.unwrap_or_else(|error| panic!("{at}: {error}"));
        let each = |of: &Decision| of.limits().map(|(_, of)| of).collect::<Vec<_>>();
        assert_eq!(each(&decision), each(&expected), "{at}: {charge:?}");
        assert_eq!(decision, expected, "{at}: {charge:?}");
        if decision.is_allowed() {
            self.taken.push(decision.clone());
        }
        decision
    }

    /// Returns tokens of an earlier decision on this account or takes more, if one has passed.
    pub(crate) async fn adjust(
        &mut self,
        rng: &mut Rng,
        account: Account<'_>,
        tokens: impl FnOnce(&mut Rng) -> u64,
        at: &str,
    ) {
        if self.taken.is_empty() {
            return;
        }
        let decision = self.taken.swap_remove(rng.usize(..self.taken.len()));
        let decision = decision.of(account.scope.name()).unwrap_or(decision);
        let adjust = match rng.bool() {
            true => Adjust::refund(account, rng.u64(..=decision.granted()), &decision),
            false => Adjust::take(account, tokens(rng), &decision),
        };
        self.model.adjust(adjust, self.clock.now_ms());
        self.redis.adjust(adjust).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    }

    async fn reset(&mut self, scope: &Scope, key: &Key, at: &str) {
        self.model.0.retain(|(of, other, _), _| of != scope.name() || other != key);
        let reset = self.redis.reset(scope, key).await;
        reset.unwrap_or_else(|error| panic!("{at}: {error}"));
    }
}

impl Pair<RedisStore> {
    /// Charges all at once in Redis, and one after the other in the model: the same decisions.
    pub(crate) async fn charge_at_once(&mut self, crowd: &[Charge<'_>]) -> Vec<Decision> {
        // Otherwise the first charge may wait for the check of an idle connection, and come late.
        self.redis.ping().await.expect("it answers");
        let answers = at_once(crowd.iter().map(|&charge| self.redis.charge(charge))).await;
        let mut decisions = Vec::new();
        for (i, (&charge, answer)) in crowd.iter().zip(answers).enumerate() {
            let (seed, now) = (self.seed, self.clock.now_ms());
            let expected = self.model.charge(charge, now);
            let at = format!("SEED={seed} charge {i} at {now}: {charge:?}");
            let decision = answer.unwrap_or_else(|error| panic!("{at}: {error:?}"));
            assert_eq!(decision, expected, "{at}");
            decisions.push(decision);
        }
        decisions
    }
}

/// How often traces have met a case.
#[derive(Default, Debug)]
pub(crate) struct Seen {
    pub(crate) passed: u32,
    pub(crate) refused: u32,
    /// Refused though each limit had room: it would have run too late for another limit (S13).
    pub(crate) late: u32,
    /// More was used than the limit.
    pub(crate) above: u32,
    /// A window began with tokens that were used before.
    pub(crate) debts: u32,
    /// Tokens were used under a limit of 0.
    pub(crate) at_zero: u32,
    /// A count has become larger than what Redis has as a number, or smaller again.
    pub(crate) crossings: u32,
    is_text: bool,
}

impl Seen {
    fn note(&mut self, decision: &Decision, now: u64) {
        match decision.is_allowed() {
            true => self.passed += 1,
            false => self.refused += 1,
        }
        let any = |is: fn(&Usage) -> bool| u32::from(decision.usage().iter().any(is));
        self.above += any(|usage| usage.used() > usage.limit());
        let is_text = any(|usage| u128::from(usage.used()) >= usage.window().as_micros()) > 0;
        self.crossings += u32::from(is_text != self.is_text);
        self.is_text = is_text;
        self.at_zero += any(|usage| usage.limit() == 0 && usage.used() > 0);
        let begins = |usage: &&Usage| {
            usage.reset_at() == UNIX_EPOCH + Duration::from_millis(now) + usage.window()
        };
        let mut begun = decision.usage().iter().filter(begins);
        self.debts += u32::from(begun.any(|usage| usage.used() > decision.granted()));
    }
}

/// Random operations on keys of each limit.
pub(crate) struct Trace<Q, T, C> {
    /// The quotas of each limit.
    pub(crate) quotas: Q,
    pub(crate) tokens: T,
    /// Returns the next time, from the time before and the decision made then.
    pub(crate) next: C,
}

impl<Q, T, C> Trace<Q, T, C>
where
    Q: Fn(&mut Rng) -> Vec<Quotas>,
    T: Fn(&mut Rng) -> u64,
    C: Fn(&mut Rng, u64, Option<&Decision>) -> u64,
{
    /// Charges, corrections, resets and changed limits over this many steps.
    pub(crate) async fn run<S: Store>(
        self,
        mut pair: Pair<S>,
        clock: &ManualClock,
        rng: &mut Rng,
        steps: usize,
        seen: &mut Seen,
    ) {
        let Self { quotas: some_quotas, tokens, next } = self;
        let (mut quotas, mut last) = (some_quotas(rng), None);
        let scopes: Vec<_> =
            (0..quotas.len()).map(|i| Scope::named(&format!("agreement-{i}"))).collect();
        let keys = [Key::from(rng.u64(..)), Key::from("another")];
        let keys = &keys[..scopes.len().min(2)];
        let mut now = next(rng, 0, None);
        for step in 0..steps {
            now = next(rng, now, last.as_ref());
            clock.set_ms(now);
            if rng.u8(..4) == 0 {
                let new = some_quotas(rng);
                let same =
                    |(old, new): (&Quotas, &Quotas)| old.as_ref().len() == new.as_ref().len();
                // Decisions are of as many quotas as there were.
                if quotas.iter().zip(&new).all(same) {
                    quotas = new;
                }
            }
            let at = format!("SEED={} step {step} at {now}: {quotas:?}", pair.seed);
            let of = rng.usize(..scopes.len());
            let account = Account::new(&scopes[of], &quotas[of], rng.choice(keys).expect("some"));
            match rng.u8(..20) {
                0 => pair.reset(account.scope, account.key, &at).await,
                1..=4 => pair.adjust(rng, account, &tokens, &at).await,
                _ => {}
            }
            let lines: Vec<_> = scopes
                .iter()
                .zip(&quotas)
                .map(|(scope, quotas)| {
                    let key = rng.choice(keys).expect("some");
                    (Account::new(scope, quotas, key), tokens(rng))
                })
                .collect();
            let (reserves, peeks) = (rng.u8(..3) == 0, rng.u8(..5) == 0);
            let charge = Charge::together(&lines);
            let charge = if reserves { charge.reserving() } else { charge };
            let charge = if peeks { charge.peeking() } else { charge };
            let fits = lines.iter().all(|&(account, cost)| {
                let line = Charge::new(account, cost).peeking();
                let line = if reserves { line.reserving() } else { line };
                pair.model.charge(line, now).is_allowed()
            });
            let decision = pair.charge(charge, &at).await;
            seen.note(&decision, now);
            seen.late += u32::from(fits && !decision.is_allowed());
            last = Some(decision);
        }
    }
}
