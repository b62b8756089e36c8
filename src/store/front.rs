//! What stands before a remote store: it answers what this process knows already (S34).
//!
//! A refusal is remembered as the counts that it was decided on. Later charges are decided on them
//! anew, under the quotas of their own: as counts only grow while their window runs, whom they
//! refuse the store would refuse as well, and whatever else would pass here is for the store to say.
//!
//! Times are the store's, which is asked for none: what it said is as old as the time that has
//! passed here since. A request under way takes time in both directions, so what was said ends
//! early, counted from when the question was sent, and says `now` late, from when the answer came.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::memory::{Entries, Entry};
use super::{
    Account, Adjust, Charge, Guard, Inner as Answer, MemoryStore, OwnedAccount, Reply, Store,
};
use crate::clock::Clock;
use crate::decision::Decision;
use crate::quota::{Quota, Quotas};
use crate::timer::Instant;
use crate::window::{MAX, State};

#[cfg(feature = "tokio")]
mod leases;

/// How long a refusal is remembered where tokens may come back, in milliseconds.
const BRIEF: i64 = 1_000;
/// Keys share the marks that say that one of them has changed.
const MARKS: usize = 1_024;

/// What a process remembers of a remote store: see [`Store::front`].
///
/// It takes no more memory than a [`MemoryStore`] of as many entries as that has by default, two
/// for each quota of a key that is refused, and forgets what finds no room.
#[derive(Clone)]
pub struct Front(Arc<Inner>);

struct Inner {
    since: Instant,
    notes: MemoryStore,
    /// How often a key of each kind was changed by this process: what was asked before then is not
    /// remembered.
    marks: Box<[AtomicU64]>,
    #[cfg(feature = "tokio")]
    leases: leases::Leases,
}

/// The time that has passed, in whole milliseconds.
struct Elapsed(Instant);

impl Clock for Elapsed {
    fn now_ms(&self) -> u64 {
        let elapsed = self.0.elapsed();
        // `as_millis` would count in 128 bits.
        elapsed.as_secs() * 1_000 + u64::from(elapsed.subsec_millis())
    }
}

/// When a question is sent, and what had happened to its key before.
#[derive(Clone, Copy)]
struct Sent {
    at: i64,
    mark: u64,
    /// Of the key and its first quota.
    #[cfg_attr(not(feature = "tokio"), allow(dead_code))]
    id: u64,
}

/// How a key is marked as changed.
#[derive(Clone, Copy)]
#[repr(u64)]
enum Change {
    /// Tokens came back.
    Refund = 1,
    /// The count is gone.
    Reset = 1 << 32,
}

impl Front {
    /// One that remembers nothing yet.
    pub fn new() -> Self {
        let since = Instant::now();
        Self(Arc::new(Inner {
            since,
            notes: MemoryStore::new().clock(Elapsed(since)),
            marks: (0..MARKS).map(|_| AtomicU64::new(0)).collect(),
            #[cfg(feature = "tokio")]
            leases: leases::Leases::default(),
        }))
    }

    fn entries(&self, charge: &Charge<'_>) -> Entries<'_> {
        self.0.notes.entries(&charge.account())
    }

    /// The time that has passed.
    #[cfg(feature = "tokio")]
    fn now(&self) -> i64 {
        self.0.since.elapsed().as_millis() as i64
    }

    fn mark(&self, entries: &Entries<'_>) -> &AtomicU64 {
        &self.0.marks[entries.hash() as usize % MARKS]
    }

    fn sent(&self, entries: &Entries<'_>, account: Account<'_>) -> Sent {
        Sent {
            at: entries.now(),
            mark: self.mark(entries).load(Ordering::Relaxed),
            id: entries.hash() ^ account.quotas().as_slice()[0].identity(),
        }
    }

    /// By how much the store's clock is ahead of this process's: at least, and at most.
    fn ahead(&self, decision: &Decision, sent: Sent) -> Range<i64> {
        // Rounded up: what the store said is not made younger.
        let received = self.0.since.elapsed().as_nanos().div_ceil(1_000_000) as i64;
        // One more: it was a fraction of a millisecond later than the store says.
        decision.now_ms() - received..decision.now_ms() - sent.at + 1
    }

    /// What a charge gets without asking, or when it is sent.
    #[inline]
    fn known(&self, charge: &Charge<'_>, how: &How) -> Result<Decision, Sent> {
        #[cfg_attr(not(feature = "tokio"), allow(unused_mut))]
        let mut entries = self.entries(charge);
        // What others wait for is looked up, then it is decided without them.
        #[cfg(feature = "tokio")]
        if how.leases > 1
            && let Some(hand) = leases::spend(&mut entries, charge)
        {
            let now = entries.now();
            drop(entries);
            return Ok(hand.decide(now, charge));
        }
        let _ = how;
        let (known, sent) = (Known::get(&entries, charge), self.sent(&entries, charge.account()));
        drop(entries);
        known.and_then(|known| known.refusal(charge)).ok_or(sent)
    }

    /// Remembers a refusal. Another answer brings what is remembered of its quotas up to date.
    fn note(&self, charge: &Charge<'_>, decision: &Decision, sent: Sent, brief: bool) {
        let ahead = self.ahead(decision, sent);
        let account = charge.account();
        let mut entries = self.0.notes.entries(&account);
        if self.mark(&entries).load(Ordering::Relaxed) != sent.mark {
            return;
        }
        let until = (!decision.allowed()).then(|| {
            let until = holds_until(charge, decision) - ahead.end;
            if brief { until.min(sent.at + BRIEF) } else { until }
        });
        for (i, quota) in account.quotas().iter().enumerate() {
            let known = Note::get(&entries, quota);
            let until = until.or(known.map(|known| known.until));
            if let Some(until) = until.filter(|&until| until > entries.now()) {
                let state = state(charge, decision, i, quota);
                if !(Note { until, state, ahead: ahead.clone() }.set(&mut entries, quota)) {
                    // Half of it is of no use, and is no harm.
                    return;
                }
            }
        }
    }

    fn forget(&self, account: &Account<'_>, change: Change) {
        let mut entries = self.0.notes.entries(account);
        self.mark(&entries).fetch_add(change as u64, Ordering::Relaxed);
        for quota in account.quotas() {
            Note::remove(&mut entries, quota);
            #[cfg(feature = "tokio")]
            if let Change::Reset = change {
                leases::forget(&mut entries, quota);
            }
        }
    }
}

impl Default for Front {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").finish_non_exhaustive()
    }
}

/// How the store said that a quota stands, in two entries.
struct Note {
    /// By this process's clock.
    until: i64,
    /// By the store's clock.
    state: State,
    /// By how much that is ahead of this process's: at least, and at most.
    ahead: Range<i64>,
}

impl Note {
    const COUNT: u64 = 0x6e91_2b5f_03c4_d7a8;
    const TIMES: u64 = 0x1d4f_86c3_e07a_5b92;
    /// What is later than that is not remembered.
    const ROUND_TRIP: i64 = 1 << 10;

    fn get(entries: &Entries<'_>, quota: &Quota) -> Option<Self> {
        let count = entries.get(Self::COUNT ^ quota.identity())?;
        let times = entries.get(Self::TIMES ^ quota.identity())?;
        let ([start, used], [end, ahead]) = (count.values, times.values);
        let (least, more) =
            (ahead.div_euclid(Self::ROUND_TRIP), ahead.rem_euclid(Self::ROUND_TRIP));
        let state = State { start, used, until: end };
        Some(Self { until: count.until, state, ahead: least..least + more })
    }

    /// `false`: it could not be kept.
    fn set(self, entries: &mut Entries<'_>, quota: &Quota) -> bool {
        let Self { until, state, ahead } = self;
        let more = ahead.end - ahead.start;
        let Some(least) = ahead.start.checked_mul(Self::ROUND_TRIP) else { return false };
        let count = Entry { until, values: [state.start, state.used] };
        let times = Entry { until, values: [state.until, least + more] };
        more < Self::ROUND_TRIP
            && entries.set(Self::COUNT ^ quota.identity(), count)
            && entries.set(Self::TIMES ^ quota.identity(), times)
    }

    fn remove(entries: &mut Entries<'_>, quota: &Quota) {
        entries.remove(Self::COUNT ^ quota.identity());
        entries.remove(Self::TIMES ^ quota.identity());
    }
}

/// What is remembered of all quotas of a charge.
struct Known {
    states: [State; Quotas::MAX],
    /// The time, by the store's clock: at least, and at most.
    now: Range<i64>,
}

impl Known {
    #[inline]
    fn get(entries: &Entries<'_>, charge: &Charge<'_>) -> Option<Self> {
        let mut states = [State::default(); Quotas::MAX];
        let (mut least, mut most) = (MAX, -MAX);
        for (state, quota) in states.iter_mut().zip(charge.account().quotas()) {
            let note = Note::get(entries, quota)?;
            *state = note.state;
            least = least.min(note.ahead.start);
            most = most.max(note.ahead.end);
        }
        Some(Self { states, now: entries.now() + least..entries.now() + most })
    }

    /// The refusal that follows from it.
    fn refusal(&self, charge: &Charge<'_>) -> Option<Decision> {
        let now = self.now.start;
        let load = |i: usize| move |_: &Quota| Some(self.states[i]);
        let (decision, _) = charge.decide_over::<{ Quotas::MAX }>(now, |account, i, quota| {
            account.window(now, quota, load(i))
        });
        let refused = !decision.allowed() && self.now.end < holds_until(charge, &decision);
        refused.then(|| {
            charge.account().scope().observe().refused_from_memory();
            decision
        })
    }
}

/// Until when a refusal is sure to be one, on the store's clock.
fn holds_until(charge: &Charge<'_>, decision: &Decision) -> i64 {
    match decision.retry_at_ms() {
        // That is when it fits without debt.
        Some(retry_at) if !charge.may_reserve() => retry_at,
        _ => decision.refusing().map(|i| decision.standings()[i].end()).max().unwrap_or(0),
    }
}

/// What the store keeps for one of the quotas, after its decision.
fn state(charge: &Charge<'_>, decision: &Decision, i: usize, quota: &Quota) -> State {
    let account = charge.account();
    let (start, used) = decision.standings()[i].count();
    let lasting = State { start, used, until: MAX };
    let window = account.window(decision.now_ms(), quota, |_| Some(lasting));
    let state = window.take(0);
    // The state may end earlier, if it was written under a higher limit; the store has said so.
    let cost = if charge.is_up_to() { 1 } else { charge.cost() };
    match (decision.retry_at_ms(), window.retry_at(cost, charge.may_reserve())) {
        (Some(said), Some(computed)) if computed > said => State { until: said, ..state },
        _ => state,
    }
}

/// How a limiter's questions are asked.
#[derive(Default)]
pub(crate) struct How {
    /// Tokens may come back, here or on other nodes.
    brief: AtomicBool,
    /// The largest lease; 0: none.
    #[cfg(feature = "tokio")]
    leases: u64,
}

impl How {
    /// The same for another scope.
    pub(crate) fn fork(&self) -> Self {
        Self {
            brief: AtomicBool::new(self.brief.load(Ordering::Relaxed)),
            #[cfg(feature = "tokio")]
            leases: self.leases,
        }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn leases(&self, max: u64) -> Self {
        Self { leases: max, ..self.fork() }
    }

    pub(crate) fn tokens_come_back(&self) {
        if !self.brief.load(Ordering::Relaxed) {
            self.brief.store(true, Ordering::Relaxed);
        }
    }

    /// What waits for a call that is made for several charges at once.
    fn share(&self, of: &Fronted, charge: &Charge<'_>, sent: Sent) -> Option<Reply<Decision>> {
        // Nobody is to wait for the call that tries a store which failed, but who makes it.
        #[cfg(feature = "tokio")]
        if self.leases > 1 && !of.guard.leaves_alone(&charge.account()) {
            return of.wait_with_others(charge, sent);
        }
        let _ = (of, charge, sent);
        None
    }
}

/// A store behind a guard, behind a front.
#[derive(Clone)]
pub(crate) struct Fronted {
    front: Front,
    guard: Guard,
    how: Arc<How>,
    #[cfg(feature = "tokio")]
    owner: leases::Owner,
}

impl Fronted {
    pub(crate) fn new(front: Front, guard: Guard, how: Arc<How>) -> Self {
        #[cfg(feature = "tokio")]
        let owner = leases::Owner::new(&front);
        Self {
            front,
            guard,
            how,
            #[cfg(feature = "tokio")]
            owner,
        }
    }

    fn note(&self, charge: &Charge<'_>, decision: &Decision, sent: Sent) {
        self.front.note(charge, decision, sent, self.how.brief.load(Ordering::Relaxed));
    }

    fn forgetting(&self, account: Account<'_>, change: Change, reply: Reply<()>) -> Reply<()> {
        // Also where nobody waits to the end.
        let forget = Forget::new(&self.front, account, change);
        match reply.into_now() {
            Ok(answer) => Reply(Answer::Now(Some(answer))),
            Err(later) => Reply::later(async move {
                let answer = later.await;
                drop(forget);
                answer
            }),
        }
    }
}

/// Forgets now, and again when it has happened: what was asked in between may have been answered
/// too soon.
struct Forget {
    front: Front,
    account: OwnedAccount,
    change: Change,
}

impl Forget {
    fn new(front: &Front, account: Account<'_>, change: Change) -> Self {
        front.forget(&account, change);
        Self { front: front.clone(), account: account.to_owned(), change }
    }
}

impl Drop for Forget {
    fn drop(&mut self) {
        self.front.forget(&self.account.as_account(), self.change);
    }
}

impl Store for Fronted {
    fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        if charge.is_peek() {
            return self.guard.charge(charge);
        }
        let sent = match self.front.known(&charge, &self.how) {
            Ok(decision) => return Reply::now(decision),
            Err(sent) => sent,
        };
        if let Some(reply) = self.how.share(self, &charge, sent) {
            return reply;
        }
        match self.guard.ask(charge.account(), |store| store.charge(charge)).into_now() {
            Ok(Ok(decision)) => {
                self.note(&charge, &decision, sent);
                Reply::now(decision)
            }
            Ok(Err(error)) => self.guard.stand_in(charge, error),
            Err(later) => {
                let (this, charge) = (self.clone(), charge.to_owned());
                Reply::later(async move {
                    let charge = charge.as_charge();
                    match later.await {
                        Ok(decision) => {
                            this.note(&charge, &decision, sent);
                            Ok(decision)
                        }
                        Err(error) => this.guard.stand_in(charge, error).await,
                    }
                })
            }
        }
    }

    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if adjust.is_local() || !adjust.is_refund() {
            return self.guard.adjust(adjust);
        }
        // If they come back here, they may do so on other nodes.
        self.how.tokens_come_back();
        self.forgetting(adjust.account(), Change::Refund, self.guard.adjust(adjust))
    }

    fn reset(&self, account: Account<'_>) -> Reply<()> {
        self.forgetting(account, Change::Reset, self.guard.reset(account))
    }

    fn is_shared(&self) -> bool {
        self.guard.is_shared()
    }
}
