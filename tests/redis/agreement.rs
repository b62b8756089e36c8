//! A store in memory beside one in Redis: both must decide the same, whatever happens to a key.

use std::time::Duration;

use fastrand::Rng;
use redis::aio::MultiplexedConnection;
use tower_fixed_window::store::{Account, Adjust, Charge, RedisStore, Scope, Store};
use tower_fixed_window::{Decision, Key, ManualClock, MemoryStore, Quotas};

/// Two stores with one clock.
pub(crate) struct Pair<S> {
    seed: u64,
    pub(crate) memory: MemoryStore,
    pub(crate) redis: S,
    /// The decisions that passed, for later corrections.
    taken: Vec<Decision>,
}

impl<S: Store> Pair<S> {
    /// Counters in Redis are new for each seed. Nothing here depends on time, since a busy machine
    /// may be slow.
    pub(crate) fn new(
        connection: &MultiplexedConnection,
        seed: u64,
        clock: &ManualClock,
        with: impl Fn(RedisStore) -> S,
    ) -> Self {
        let redis = RedisStore::from(connection.clone()).deadline(Duration::from_secs(60));
        let redis = with(redis.prefix(&seed.to_string()).clock(clock.clone()));
        let memory = MemoryStore::with_max_keys(100).clock(clock.clone());
        Self { seed, memory, redis, taken: Vec::new() }
    }

    pub(crate) async fn charge(&mut self, charge: Charge<'_>, at: &str) -> Decision {
        let expected = self.memory.charge(charge).await.expect("memory answers");
        let decision = self.redis.charge(charge).await;
        let decision = decision.unwrap_or_else(|error| panic!("{at}: {error}"));
        assert_eq!(decision, expected, "{at}: {charge:?}");
        if decision.allowed() {
            self.taken.push(decision.clone());
        }
        decision
    }

    /// Returns tokens of an earlier decision or takes more, if one has passed.
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
        let adjust = match rng.bool() {
            true => Adjust::refund(account, rng.u64(..=decision.granted()), &decision),
            false => Adjust::take(account, tokens(rng), &decision),
        };
        self.memory.adjust(adjust).await.expect("memory answers");
        self.redis.adjust(adjust).await.unwrap_or_else(|error| panic!("{at}: {error}"));
    }
}

/// Random operations on a key.
pub(crate) struct Trace<Q, C> {
    pub(crate) quotas: Q,
    pub(crate) tokens: fn(&mut Rng) -> u64,
    /// Returns the next time, from the time before and the decision made then.
    pub(crate) next: C,
}

impl<Q, C> Trace<Q, C>
where
    Q: Fn(&mut Rng) -> Quotas,
    C: Fn(&mut Rng, u64, Option<&Decision>) -> u64,
{
    /// Charges, corrections, resets and changed limits over this many steps.
    pub(crate) async fn run<S: Store>(
        self,
        mut pair: Pair<S>,
        clock: &ManualClock,
        rng: &mut Rng,
        steps: usize,
    ) {
        let Self { quotas: some_quotas, tokens, next } = self;
        let (scope, key) = (Scope::named("agreement"), Key::from(rng.u64(..)));
        let (mut quotas, mut last) = (some_quotas(rng), None);
        let mut now = next(rng, 0, None);
        for step in 0..steps {
            now = next(rng, now, last.as_ref());
            clock.set_ms(now);
            if rng.u8(..8) == 0 {
                let new = some_quotas(rng);
                // Decisions are of as many quotas as there were.
                if new.as_ref().len() == quotas.as_ref().len() {
                    quotas = new;
                }
            }
            let account = Account::new(&scope, &quotas, &key);
            let at = format!("SEED={} step {step} at {now}: {quotas}", pair.seed);
            match rng.u8(..20) {
                0 => {
                    pair.memory.reset(&scope, &key).await.expect("memory answers");
                    let reset = pair.redis.reset(&scope, &key).await;
                    reset.unwrap_or_else(|error| panic!("{at}: {error}"));
                }
                1..=4 => pair.adjust(rng, account, tokens, &at).await,
                _ => {}
            }
            let mut charge = Charge::new(account, tokens(rng));
            charge = if rng.u8(..3) == 0 { charge.reserving() } else { charge };
            charge = if rng.u8(..5) == 0 { charge.peeking() } else { charge };
            last = Some(pair.charge(charge, &at).await);
        }
    }
}
