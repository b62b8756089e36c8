//! What stands before a remote store: it answers what this process knows already (S34).
//!
//! A refusal is remembered as the counts that it was decided on. Later charges are decided on them
//! anew, under the quotas of their own: as counts only grow while their window runs, whom they
//! refuse the store would refuse as well, and whatever else would pass here is for the store to say.
//!
//! A decision doesn't show all that the store keeps: not until when the count is kept, and not whether
//! it was written in an earlier window, under another limit. What is unknown is not assumed: a note
//! has the earliest and the latest end of its state, and the terms that it is valid for, and where an
//! answer would depend on more the store is asked.
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
    Account, Adjust, Charge, Guard, Inner as Answer, MemoryStore, OwnedAccount, Remote, Reply,
    Scope, Store,
};
use crate::clock::Clock;
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::{Anchor, Quota, Quotas, fmix64};
use crate::timer::Instant;
use crate::window::{MAX, State};

#[cfg(feature = "tokio")]
mod leases;

/// How long a refusal is remembered where tokens may come back, in milliseconds.
const BRIEF: i64 = 1_000;
/// Keys share the marks that say that one of them has changed.
const MARKS: usize = 1_024;

/// What a process remembers of a remote store.
///
/// It takes no more memory than a [`MemoryStore`] of as many entries as that has by default, three
/// for each quota of a key that is refused, and forgets what finds no room.
#[derive(Clone)]
pub(crate) struct Front(Arc<Inner>);

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

/// What has happened to a key.
#[derive(Clone)]
enum Change {
    /// Tokens came back.
    Refund(OwnedAccount),
    /// Its counts are gone.
    Reset(Scope, Key),
}

/// How a key is marked as changed.
const REFUND: u64 = 1;
const RESET: u64 = 1 << 32;

impl Front {
    /// One that remembers nothing yet.
    pub(crate) fn new() -> Self {
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
            let last = Note::get(&entries, quota);
            let until = until.or(last.as_ref().map(|last| last.until));
            if let Some(until) = until.filter(|&until| until > entries.now()) {
                let kept = Kept::after(charge, decision, i, quota, last.map(|last| last.kept));
                // What a reset would not find is not remembered.
                if !self.0.notes.know(account.scope(), quota)
                    || !(Note { until, kept, ahead: ahead.clone() }.set(&mut entries, quota))
                {
                    // Half of it is of no use, and is no harm.
                    return;
                }
            }
        }
    }

    fn forget(&self, change: &Change) {
        let (scope, key) = match change {
            Change::Refund(account) => (account.as_account().scope(), account.as_account().key()),
            Change::Reset(scope, key) => (scope, key),
        };
        let mut entries = self.0.notes.entries_of(scope, key);
        let mark = self.mark(&entries);
        match change {
            Change::Refund(account) => {
                mark.fetch_add(REFUND, Ordering::Relaxed);
                for quota in account.as_account().quotas() {
                    Note::remove(&mut entries, quota);
                }
            }
            Change::Reset(..) => {
                mark.fetch_add(RESET, Ordering::Relaxed);
                self.0.notes.known(scope, |counters, _| {
                    for quota in counters {
                        Note::remove(&mut entries, quota);
                        #[cfg(feature = "tokio")]
                        leases::forget(&mut entries, quota);
                    }
                });
            }
        }
    }
}

impl fmt::Debug for Front {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Front").finish_non_exhaustive()
    }
}

/// How the store said that a quota stands, in three entries.
struct Note {
    /// By this process's clock.
    until: i64,
    kept: Kept,
    /// By how much the store's clock is ahead of this process's: at least, and at most.
    ahead: Range<i64>,
}

impl Note {
    const COUNT: u64 = 0x6e91_2b5f_03c4_d7a8;
    const TIMES: u64 = 0x1d4f_86c3_e07a_5b92;
    const TERMS: u64 = 0xb2a7_4d19_6c85_e03f;
    /// What is later than that is not remembered.
    const ROUND_TRIP: i64 = 1 << 10;

    fn get(entries: &Entries<'_>, quota: &Quota) -> Option<Self> {
        let count = entries.get(Self::COUNT ^ quota.identity())?;
        let times = entries.get(Self::TIMES ^ quota.identity())?;
        let terms = entries.get(Self::TERMS ^ quota.identity())?;
        let ([start, used], [end, ahead]) = (count.values, times.values);
        let (least, more) =
            (ahead.div_euclid(Self::ROUND_TRIP), ahead.rem_euclid(Self::ROUND_TRIP));
        let kept = Kept {
            state: State { start, used, until: end },
            exact: terms.values[0] & 1 == 1,
            terms: [terms.values[0] as u64 & !1, terms.values[1] as u64],
        };
        Some(Self { until: count.until, kept, ahead: least..least + more })
    }

    /// `false`: it could not be kept.
    fn set(self, entries: &mut Entries<'_>, quota: &Quota) -> bool {
        let Self { until, kept: Kept { state, exact, terms }, ahead } = self;
        let more = ahead.end - ahead.start;
        let Some(least) = ahead.start.checked_mul(Self::ROUND_TRIP) else { return false };
        let mut set = |name, values| entries.set(name ^ quota.identity(), Entry { until, values });
        more < Self::ROUND_TRIP
            && set(Self::COUNT, [state.start, state.used])
            && set(Self::TIMES, [state.until, least + more])
            && set(Self::TERMS, [(terms[0] | u64::from(exact)) as i64, terms[1] as i64])
    }

    fn remove(entries: &mut Entries<'_>, quota: &Quota) {
        for name in [Self::COUNT, Self::TIMES, Self::TERMS] {
            entries.remove(name ^ quota.identity());
        }
    }
}

/// What the store keeps for a quota, as far as its decisions show.
#[derive(Clone, Copy)]
struct Kept {
    /// With the earliest `until` that it can have.
    state: State,
    /// Whether that is the only one.
    exact: bool,
    /// The limits and capacities under which it looks like this. Under others it may look different,
    /// if it was written in an earlier window.
    terms: [u64; 2],
}

impl Kept {
    /// It is the state itself, under whatever terms.
    const ANY: [u64; 2] = [0; 2];

    /// What is kept of the `i`th quota after a decision, given what was known before.
    fn after(
        charge: &Charge<'_>,
        decision: &Decision,
        i: usize,
        quota: &Quota,
        last: Option<Self>,
    ) -> Self {
        let (account, now) = (charge.account(), decision.now_ms());
        let window = |state| account.window(now, quota, |_| Some(state));
        let standing = &decision.standings()[i];
        let ((start, used), end) = (standing.count(), standing.end());
        let state = State { start, used, until: end };
        let exactly = |state| Self { state, exact: true, terms: Self::ANY };
        let known = last.filter(|last| last.exact && last.terms == Self::ANY);
        if decision.granted() > 0 {
            let written = known.map(|known| window(known.state).take(decision.granted()));
            return match written.filter(|written| (written.start, written.used) == (start, used)) {
                Some(written) => exactly(written),
                // Without debt and rollover a count ends with its window.
                None if quota.capacity == quota.limit && used <= quota.limit as i64 => {
                    exactly(state)
                }
                None => Self { state, exact: false, terms: Self::terms(quota) },
            };
        }
        // Nothing was written, by nobody else either: the same as before.
        let same = |known: &Self| {
            let window = window(known.state);
            (window.start(), window.used()) == (start, used)
        };
        if let Some(known) = known.filter(same) {
            return known;
        }
        let mut kept = Self { state, exact: false, terms: Self::terms(quota) };
        if used <= account.window(now, quota, |_| None).used() {
            // No state, or one that makes no difference; but a window may be open since its first
            // request. If it began just now, that is known when it does so again.
            let open = quota.anchor == Anchor::FirstRequest;
            if !open || start >= now {
                let none = |last: Self| last.state.until == -MAX && last.state.start < now;
                kept.state.until = -MAX;
                kept.exact = !open || last.is_some_and(none);
            }
            return kept;
        }
        let cost = if charge.is_up_to() { 1 } else { charge.cost() };
        if let Some(said) = decision.retry_at_ms()
            && i == decision.speaking()
            && cost <= quota.capacity
            && !charge.may_reserve()
        {
            // When the count has come down so far, or when it ends, whichever is earlier. It ends then
            // if it would otherwise last longer, unless what is rolled over leaves room before.
            let lasting = window(State { until: MAX, ..state }).retry_at(cost, false);
            kept.exact = lasting.is_some_and(|at| at > said) && quota.capacity - cost < quota.limit;
            kept.state.until = said.max(end);
        }
        if let Some(last) = last.filter(|last| {
            now < last.state.until && (last.state.start, last.state.used) == (start, used)
        }) {
            if last.exact || last.state.until > kept.state.until {
                (kept.exact, kept.state.until) = (last.exact, last.state.until);
            }
            if last.holds_under(quota) {
                kept.terms = last.terms;
            } else {
                kept.terms[1] = last.terms[0];
            }
        }
        kept
    }

    fn terms(quota: &Quota) -> [u64; 2] {
        // Neither 0 nor odd.
        [(fmix64(fmix64(quota.limit) ^ quota.capacity) | 2) & !1, 0]
    }

    fn holds_under(&self, quota: &Quota) -> bool {
        self.terms == Self::ANY || self.terms.contains(&Self::terms(quota)[0])
    }
}

/// What is remembered of all quotas of a charge.
struct Known {
    states: [State; Quotas::MAX],
    /// Those with the latest ends that they can have.
    lasting: [State; Quotas::MAX],
    /// The time, by the store's clock: at least, and at most.
    now: Range<i64>,
}

impl Known {
    #[inline]
    fn get(entries: &Entries<'_>, charge: &Charge<'_>) -> Option<Self> {
        let mut states = [State::default(); Quotas::MAX];
        let mut lasting = states;
        let (mut least, mut most) = (MAX, -MAX);
        for (i, quota) in charge.account().quotas().iter().enumerate() {
            let note = Note::get(entries, quota).filter(|note| note.kept.holds_under(quota))?;
            (states[i], lasting[i]) = (note.kept.state, note.kept.state);
            if !note.kept.exact {
                lasting[i].until = MAX;
            }
            least = least.min(note.ahead.start);
            most = most.max(note.ahead.end);
        }
        Some(Self { states, lasting, now: entries.now() + least..entries.now() + most })
    }

    /// The refusal that follows from it.
    fn refusal(&self, charge: &Charge<'_>) -> Option<Decision> {
        let decision = self.decide(charge, &self.states);
        let refused = !decision.allowed()
            && self.now.end < holds_until(charge, &decision)
            // Whenever the states end.
            && (self.states == self.lasting || self.decide(charge, &self.lasting) == decision);
        refused.then(|| {
            charge.account().scope().observe().refused_from_memory();
            decision
        })
    }

    fn decide(&self, charge: &Charge<'_>, states: &[State; Quotas::MAX]) -> Decision {
        let now = self.now.start;
        let (decision, _) = charge.decide_over::<{ Quotas::MAX }>(now, |account, i, quota| {
            account.window(now, quota, |_| Some(states[i]))
        });
        decision
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

    fn ask_alone(&self, charge: Charge<'_>, sent: Sent) -> Reply<Decision> {
        match self.guard.charge_only(charge).into_now() {
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

    fn forgetting(&self, change: Change, reply: Reply<()>) -> Reply<()> {
        // Also where nobody waits to the end.
        let forget = Forget::new(&self.front, change);
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
    change: Change,
}

impl Forget {
    fn new(front: &Front, change: Change) -> Self {
        front.forget(&change);
        Self { front: front.clone(), change }
    }
}

impl Drop for Forget {
    fn drop(&mut self) {
        self.front.forget(&self.change);
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
        match self.how.share(self, &charge, sent) {
            Some(reply) => reply,
            None => self.ask_alone(charge, sent),
        }
    }
    fn adjust(&self, adjust: Adjust<'_>) -> Reply<()> {
        if adjust.is_local() || !adjust.is_refund() {
            return self.guard.adjust(adjust);
        }
        // If they come back here, they may do so on other nodes.
        self.how.tokens_come_back();
        let change = Change::Refund(adjust.account().to_owned());
        self.forgetting(change, self.guard.adjust(adjust))
    }

    fn reset(&self, scope: &Scope, key: &Key) -> Reply<()> {
        self.forgetting(Change::Reset(scope.clone(), key.clone()), self.guard.reset(scope, key))
    }

    fn is_shared(&self) -> bool {
        self.guard.is_shared()
    }

    fn remote(&self) -> Option<&Remote> {
        self.guard.remote()
    }
}
