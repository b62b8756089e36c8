//! Tokens that a node has taken at once, and spends by itself (S34).
//!
//! A lease is taken from the shared count before a token of it is spent, and dies with its window,
//! counted from when it was asked for: so what passes was granted by the store, in that window.
//! What it costs is that tokens in one node's hand are not there for another. So leases are small: a
//! part of what is left, and no more than the key's heat, which doubles while leases are spent at
//! once and halves when they are not; and what is not spent soon is given back.
//!
//! Whoever asks for a key that nothing is in hand for waits with all others who do: one task asks
//! for them, and ends when nobody waits. Another one gives back, and ends when nothing is in hand.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::mem;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::time::timeout;

use super::{Change, Front, Fronted, Known, Sent};
use crate::decision::Decision;
use crate::quota::Quota;
use crate::store::guard::within;
use crate::store::memory::{Entries, Entry};
use crate::store::{Adjust, Charge, OwnedCharge, Reply, StoreError};
use crate::window::{MAX, State};

/// Of what is left, a lease is at most this part.
const SHARE: u64 = 16;
/// A lease that is spent within this part of the window makes the next one larger.
const HOT: i64 = 100;
/// One that is not spent within this part of the window is given back.
const IDLE: i64 = 16;
/// Who waits for others' call has so much more time.
const MOMENT: Duration = Duration::from_millis(10);
/// Keys that tokens may be in hand for: 10 MB of them at most.
const MOST: usize = 16_384;

#[derive(Default)]
pub(super) struct Leases {
    /// Keys that are asked for right now.
    flights: Mutex<HashMap<u64, Flight>>,
    /// Keys that tokens are in hand for.
    loans: Mutex<Loans>,
    sooner: Notify,
}

/// Requests that wait for one call. All are of one limit.
struct Flight {
    limit: u64,
    waiting: Vec<Waiter>,
}

type Waiter = oneshot::Sender<Result<Decision, StoreError>>;
type Answered = oneshot::Receiver<Result<Decision, StoreError>>;

#[derive(Default)]
struct Loans {
    /// By the time at which to look after them.
    due: BTreeMap<(i64, u64), Loan>,
    ids: HashSet<u64>,
    watched: bool,
}

struct Loan {
    of: Fronted,
    charge: OwnedCharge,
}

/// Who may still spend what is in hand: limiters and their requests, not who looks after it.
#[derive(Clone)]
pub(super) struct Owner {
    held: Option<Arc<Held>>,
    alive: Weak<Held>,
}

/// When it is dropped, what is in hand is due.
struct Held(Front);

impl Owner {
    pub(super) fn new(front: &Front) -> Self {
        let held = Arc::new(Held(front.clone()));
        Self { alive: Arc::downgrade(&held), held: Some(held) }
    }

    fn is_gone(&self) -> bool {
        self.alive.strong_count() == 0
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let leases = &self.0.0.leases;
        let mut loans = leases.loans();
        let due = mem::take(&mut loans.due).into_iter();
        let due = due.map(|((due, id), loan)| {
            let due = if loan.of.owner.is_gone() { i64::MIN } else { due };
            ((due, id), loan)
        });
        loans.due = due.collect();
        drop(loans);
        leases.sooner.notify_one();
    }
}

/// What is in hand, in three entries that die with the window.
pub(super) struct Hand {
    dies: i64,
    left: u64,
    /// Under this limit they were taken; a lower one may not spend them.
    limit: u64,
    start: i64,
    used: i64,
    /// By how much the store's clock is ahead of this process's, at least.
    ahead: i64,
    taken: i64,
}

impl Hand {
    const TOKENS: u64 = 0x8b3c_51e7_9d20_f46a;
    const COUNT: u64 = 0x27f0_6ad9_b814_3ec5;
    const TIMES: u64 = 0xc59e_0d42_7163_a8fb;

    #[inline]
    fn get(entries: &Entries<'_>, quota: &Quota) -> Option<Self> {
        let Entry { until: dies, values: [left, limit] } =
            entries.get(Self::TOKENS ^ quota.identity())?;
        let [start, used] = entries.get(Self::COUNT ^ quota.identity())?.values;
        let [ahead, taken] = entries.get(Self::TIMES ^ quota.identity())?.values;
        Some(Self { dies, left: left as u64, limit: limit as u64, start, used, ahead, taken })
    }

    /// `false`: it could not be kept.
    fn set(&self, entries: &mut Entries<'_>, quota: &Quota) -> bool {
        let mut set =
            |name, values| entries.set(name ^ quota.identity(), Entry { until: self.dies, values });
        set(Self::COUNT, [self.start, self.used])
            && set(Self::TIMES, [self.ahead, self.taken])
            && set(Self::TOKENS, [self.left as i64, self.limit as i64])
    }

    #[inline]
    fn set_left(&self, entries: &mut Entries<'_>, quota: &Quota, left: u64) {
        let values = [left as i64, self.limit as i64];
        entries.set(Self::TOKENS ^ quota.identity(), Entry { until: self.dies, values });
    }

    fn remove(entries: &mut Entries<'_>, quota: &Quota) {
        for name in [Self::TOKENS, Self::COUNT, Self::TIMES] {
            entries.remove(name ^ quota.identity());
        }
    }

    /// What is said of a charge that is paid from it.
    #[inline]
    pub(super) fn decide(&self, now: i64, charge: &Charge<'_>) -> Decision {
        let before =
            State { start: self.start, used: self.used - charge.cost() as i64, until: MAX };
        let now = now + self.ahead;
        let (decision, _) = charge.decide_over::<1>(now, |account, _, quota| {
            account.window(now, quota, |_| Some(before))
        });
        decision
    }
}

/// How fast a key spends, in an entry that outlives the window by another one.
struct Heat {
    heat: u64,
    /// When the last lease was taken.
    taken: i64,
}

impl Heat {
    const NAME: u64 = 0x40d7_e2b9_5f8c_1a36;

    fn get(entries: &Entries<'_>, quota: &Quota) -> Option<Self> {
        let [heat, taken] = entries.get(Self::NAME ^ quota.identity())?.values;
        Some(Self { heat: heat as u64, taken })
    }

    fn set(&self, entries: &mut Entries<'_>, quota: &Quota) {
        let until = self.taken + 2 * quota.window as i64;
        let values = [self.heat as i64, self.taken];
        // Without it the next lease is small.
        entries.set(Self::NAME ^ quota.identity(), Entry { until, values });
    }

    /// What it is when the next lease is asked for.
    fn next(entries: &Entries<'_>, quota: &Quota, max: u64) -> u64 {
        match Self::get(entries, quota) {
            None => 1,
            Some(last) if entries.now() - last.taken <= quota.window as i64 / HOT => {
                last.heat.saturating_mul(2).min(max)
            }
            Some(last) => (last.heat / 2).max(1),
        }
    }
}

/// The quota of a charge that a lease may pay: a single plain one, with room for leases.
#[inline]
fn leasable<'a>(charge: &Charge<'a>) -> Option<&'a Quota> {
    let [quota] = charge.account().quotas().as_slice() else { return None };
    let plain = quota.capacity == quota.limit && !charge.is_peek() && !charge.is_up_to();
    let reserves = charge.may_reserve() && quota.max_reserved > 0;
    (plain && !reserves && quota.limit >= 2 * SHARE && charge.cost() > 0).then_some(quota)
}

/// Pays a charge from what is in hand, if that suffices.
#[inline]
pub(super) fn spend(entries: &mut Entries<'_>, charge: &Charge<'_>) -> Option<Hand> {
    let quota = leasable(charge)?;
    let cost = i64::try_from(charge.cost()).ok()?;
    let pay = |[left, limit]: [i64; 2]| {
        (left >= cost && limit <= quota.limit as i64).then_some([left - cost, limit])
    };
    entries.update(Hand::TOKENS ^ quota.identity(), pay)?;
    charge.account().scope().observe().lease_spent(charge.cost());
    Hand::get(entries, quota)
}

/// Forgets what is in hand: the count that it was taken from is gone.
pub(super) fn forget(entries: &mut Entries<'_>, quota: &Quota) {
    Hand::remove(entries, quota);
    entries.remove(Heat::NAME ^ quota.identity());
}

impl Fronted {
    /// Waits for the call that asks for this charge's key, from when it is polled: one that never is
    /// has not charged. `None`: it is one to ask for by itself.
    pub(super) fn wait_with_others(
        &self,
        charge: &Charge<'_>,
        sent: Sent,
    ) -> Option<Reply<Decision>> {
        leasable(charge).filter(|_| charge.cost() == 1)?;
        let (this, charge) = (self.clone(), charge.to_owned());
        Some(Reply::later(async move {
            let charge = charge.as_charge();
            let Some(receiver) = this.join(&charge, sent.id) else {
                return this.ask_alone(charge, sent).await;
            };
            let answer = Reply::later(async {
                let given_up = |_| Err(StoreError::new("the task that asks the store has ended"));
                receiver.await.unwrap_or_else(given_up)
            });
            // That task may stand still with its runtime. If not, it is to note its failure first.
            let longest = this.guard.longest().map(|longest| longest.saturating_add(MOMENT));
            match within(longest, answer).await {
                Ok(decision) => Ok(decision),
                Err(error) => this.guard.stand_in(charge, error).await,
            }
        }))
    }

    fn join(&self, charge: &Charge<'_>, id: u64) -> Option<Answered> {
        let limit = leasable(charge)?.limit;
        let runtime = Handle::try_current().ok()?;
        let (sender, receiver) = oneshot::channel();
        let mut flights = self.front.0.leases.flights();
        match flights.get_mut(&id) {
            Some(flight) if flight.limit == limit => flight.waiting.push(sender),
            Some(_) => return None,
            None => {
                flights.insert(id, Flight { limit, waiting: vec![sender] });
                // A task of its own, as the request may be dropped, or not be polled. It has the
                // call from its first moment: it may never be polled either.
                let call = Call {
                    of: self.clone(),
                    id,
                    charge: charge.to_owned(),
                    waiting: VecDeque::new(),
                    short: false,
                    ended: false,
                };
                runtime.spawn(call.run());
            }
        }
        Some(receiver)
    }
}

/// Asks for all who wait for a key, as long as somebody does.
struct Call {
    of: Fronted,
    id: u64,
    /// Of one token.
    charge: OwnedCharge,
    waiting: VecDeque<Waiter>,
    /// Not as much was there as it had seemed.
    short: bool,
    ended: bool,
}

impl Call {
    async fn run(mut self) {
        while self.gather() {
            self.answer_what_is_known();
            if let Some(size) = self.size() {
                self.ask(size).await;
            }
        }
    }

    /// Whether anybody waits; else the flight has ended.
    fn gather(&mut self) -> bool {
        let mut flights = self.of.front.0.leases.flights();
        if let Some(flight) = flights.get_mut(&self.id) {
            self.waiting.extend(flight.waiting.drain(..));
        }
        self.waiting.retain(|waiter| !waiter.is_closed());
        if self.waiting.is_empty() {
            flights.remove(&self.id);
            self.ended = true;
        }
        !self.ended
    }

    /// Tokens may have come into hand since they began to wait, or the refusal.
    fn answer_what_is_known(&mut self) {
        let charge = self.charge.as_charge();
        let mut entries = self.of.front.entries(&charge);
        while !self.waiting.is_empty() {
            let paid = spend(&mut entries, &charge).map(|hand| hand.decide(entries.now(), &charge));
            let refused = || Known::get(&entries, &charge)?.refusal(&charge);
            let Some(decision) = paid.or_else(refused) else { return };
            let waiter = self.waiting.pop_front().expect("not empty");
            // One that has just gone leaves a token that is lost.
            let _ = waiter.send(Ok(decision));
        }
    }

    /// How much to ask for: the lease with its heat. `None`: nobody waits.
    fn size(&self) -> Option<Asked> {
        let charge = self.charge.as_charge();
        let (quota, max) = (leasable(&charge)?, self.of.how.leases);
        let entries = self.of.front.entries(&charge);
        let heat = Heat::next(&entries, quota, max);
        let used = Hand::get(&entries, quota).map_or(0, |hand| hand.used.max(0) as u64);
        let remaining = quota.limit.saturating_sub(used);
        let lease = heat.min(remaining / SHARE).min(max);
        let tokens = lease.max(self.waiting.len() as u64);
        // Mostly all of them are there, and that is the simpler question.
        let up_to = tokens > 1 && (self.short || tokens > remaining / 2);
        let sent = self.of.front.sent(&entries, charge.account());
        (!self.waiting.is_empty()).then_some(Asked { tokens, up_to, heat, sent })
    }

    async fn ask(&mut self, Asked { tokens, up_to, heat, sent }: Asked) {
        let answer = {
            let charge = Charge::new(self.charge.as_charge().account(), tokens);
            let charge = if up_to { charge.up_to() } else { charge };
            let reply = self.of.guard.charge_only(charge);
            let charge = charge.to_owned();
            let answer = reply.await;
            if let Ok(decision) = &answer {
                self.of.note(&charge.as_charge(), decision, sent);
            }
            answer
        };
        match answer {
            Ok(decision) if decision.allowed() => {
                self.short = false;
                self.take(&decision, heat, sent);
            }
            // Fewer may be there.
            Ok(_) if tokens > 1 && !up_to => self.short = true,
            answer => {
                if answer.is_err() {
                    // Whoever has come meanwhile has waited long enough.
                    if let Some(flight) = self.of.front.0.leases.flights().get_mut(&self.id) {
                        self.waiting.extend(flight.waiting.drain(..));
                    }
                }
                for waiter in self.waiting.drain(..) {
                    let _ = waiter.send(answer.clone());
                }
            }
        }
    }

    /// Answers those who wait, and keeps the rest.
    fn take(&mut self, decision: &Decision, heat: u64, sent: Sent) {
        let charge = self.charge.as_charge();
        let Some(quota) = leasable(&charge) else { return };
        let (front, scope) = (&self.of.front, charge.account().scope());
        let ahead = front.ahead(decision, sent);
        let (start, used) = decision.standings()[0].count();
        let mut entries = front.entries(&charge);
        let now = entries.now();
        let mut hand = Hand {
            dies: decision.reset_at_ms() - ahead.end,
            left: decision.granted(),
            limit: quota.limit,
            start,
            used,
            ahead: ahead.start,
            taken: now,
        };
        scope.observe().lease_taken(hand.left);
        let one = hand.decide(now, &charge);
        while hand.left > 0
            && let Some(waiter) = self.waiting.pop_front()
        {
            hand.left -= u64::from(waiter.send(Ok(one.clone())).is_ok());
        }
        // What a reset would not find is not kept.
        let known = front.0.notes.know(scope, quota);
        if known {
            Heat { heat, taken: now }.set(&mut entries, quota);
        }
        let reset = front.mark(&entries).load(Ordering::Relaxed) >> 32 != sent.mark >> 32;
        if reset || now >= hand.dies {
            // The rest is of a count that is gone.
            return;
        }
        // What was left may have been less than this node thought.
        let before = quota.limit.saturating_sub(used.max(0) as u64) + decision.granted();
        let mut excess = hand.left.saturating_sub((before / SHARE).max(1) - 1);
        hand.left -= excess;
        if let Some(last) = Hand::get(&entries, quota).filter(|last| last.start == start) {
            hand.left += last.left;
            hand.limit = hand.limit.max(last.limit);
            hand.used = hand.used.max(last.used);
        }
        if !known
            || hand.left > 0 && !self.of.look_after(self.id, &self.charge, now, quota)
            || !hand.set(&mut entries, quota)
        {
            excess += hand.left;
            Hand::remove(&mut entries, quota);
        }
        drop(entries);
        self.of.give_back(&charge, &one, excess);
    }
}

struct Asked {
    tokens: u64,
    /// Whether fewer are acceptable.
    up_to: bool,
    heat: u64,
    sent: Sent,
}

impl Drop for Call {
    /// With the runtime that it ran in: who waits elsewhere is told, and who comes asks anew.
    fn drop(&mut self) {
        if !self.ended {
            self.of.front.0.leases.flights().remove(&self.id);
        }
    }
}

impl Fronted {
    /// Returns tokens that were not spent.
    fn give_back(&self, charge: &Charge<'_>, decision: &Decision, tokens: u64) {
        if tokens > 0 {
            let account = charge.account();
            account.scope().observe().lease_returned(tokens);
            let adjust = Adjust::refund(account, tokens, decision);
            self.forgetting(
                Change::Refund(account.to_owned()),
                self.guard.ask(account.scope(), account.key(), |store| store.adjust(adjust)),
            )
            .detach();
        }
    }

    /// Has what is in hand given back when it has not been spent for a while. `false`: there is too
    /// much in hand to look after.
    fn look_after(&self, id: u64, charge: &OwnedCharge, now: i64, quota: &Quota) -> bool {
        let leases = &self.front.0.leases;
        let mut loans = leases.loans();
        if loans.ids.contains(&id) {
            return true;
        }
        if loans.ids.len() >= MOST {
            return false;
        }
        let due = now + idle(quota);
        let first = loans.due.first_key_value().is_none_or(|((first, _), _)| due < *first);
        let mut of = self.clone();
        of.owner.held = None;
        loans.due.insert((due, id), Loan { of, charge: charge.clone() });
        loans.ids.insert(id);
        if !loans.watched {
            loans.watched = true;
            tokio::spawn(Watch { front: self.front.clone(), ended: false }.run());
        } else if first {
            leases.sooner.notify_one();
        }
        true
    }
}

/// For how long a lease may lie, in milliseconds.
fn idle(quota: &Quota) -> i64 {
    (quota.window as i64 / IDLE).max(1)
}

/// Gives back what lies in hand, as long as anything does.
struct Watch {
    front: Front,
    ended: bool,
}

impl Watch {
    async fn run(mut self) {
        while let Some(wait) = self.look() {
            // Until then, or until something is due sooner.
            let _ = timeout(wait, self.front.0.leases.sooner.notified()).await;
        }
    }

    /// Looks after what is due. How long the next one has time, if there is any.
    fn look(&mut self) -> Option<Duration> {
        let now = self.front.now();
        loop {
            let mut loans = self.front.0.leases.loans();
            let Some(((due, _), _)) = loans.due.first_key_value() else {
                loans.watched = false;
                self.ended = true;
                return None;
            };
            if *due > now {
                return Some(Duration::from_millis((due - now) as u64));
            }
            let ((_, id), loan) = loans.due.pop_first().expect("there is a first");
            loans.ids.remove(&id);
            // What comes into hand from here on is looked after anew.
            drop(loans);
            loan.look(id);
        }
    }
}

impl Drop for Watch {
    /// With the runtime that it ran in: the next lease has another one started.
    fn drop(&mut self) {
        if !self.ended {
            self.front.0.leases.loans().watched = false;
        }
    }
}

impl Loan {
    fn look(self, id: u64) {
        let charge = self.charge.as_charge();
        let Some(quota) = leasable(&charge) else { return };
        let mut entries = self.of.front.entries(&charge);
        let now = entries.now();
        let Some(hand) = Hand::get(&entries, quota).filter(|hand| hand.left > 0) else { return };
        if now - hand.taken >= idle(quota) || self.of.owner.is_gone() {
            hand.set_left(&mut entries, quota, 0);
            drop(entries);
            self.of.give_back(&charge, &hand.decide(now, &charge), hand.left);
        } else {
            drop(entries);
            self.of.look_after(id, &self.charge, hand.taken, quota);
        }
    }
}

impl Leases {
    fn flights(&self) -> MutexGuard<'_, HashMap<u64, Flight>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn loans(&self) -> MutexGuard<'_, Loans> {
        self.loans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
