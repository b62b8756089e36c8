//! The state of a line: its requests in order of arrival, the last answer, and tokens granted.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::claim::{Claim, LimitSet, Terms, Tokens};
use super::tokens::{ChargeInFlight, Grant, LastAnswer};
use crate::decision::Decision;
use crate::store::{Reply, StoreError};
use crate::timer::Instant;

/// The precision of timers and of the store's clock.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// The state of a line, under its lock. Requests have numbers in order of arrival.
pub(super) struct LineState {
    /// The number of the next request to arrive.
    pub(super) arrivals: u64,
    pub(super) waiters: BTreeMap<u64, Waiter>,
    /// Waiters that others have passed since they were not polled. Each returns to `waiters` when
    /// it is polled.
    pub(super) passed_over: BTreeMap<u64, Waiter>,
    /// Refusals of requests that have not been polled since.
    pub(super) refusals: BTreeMap<u64, Decision>,
    /// The sum of the costs of all requests in the line.
    pub(super) requested: Tokens,
    /// The number of waiters that have to wait, by an answer of the store.
    pub(super) waiting: u64,
    /// The first number from which on there are waiters not yet judged by an answer.
    pub(super) first_unjudged: u64,
    /// The last answer.
    pub(super) answer: Option<LastAnswer>,
    /// When the last charge that granted tokens was sent.
    pub(super) last_grant: Option<Instant>,
    pub(super) in_flight: Option<ChargeInFlight>,
    pub(super) grant: Option<Grant>,
    /// The error of a charge that failed, and the last request that it covered.
    pub(super) failure: Option<(u64, StoreError)>,
}

/// A request in a line.
pub(super) struct Waiter {
    /// Zero once the request has its tokens.
    pub(super) cost: Tokens,
    /// The request's own quotas, if they are not the layer's.
    pub(super) own_terms: Option<Terms>,
    pub(super) arrived: Instant,
    pub(super) deadline: Instant,
    /// When the request is polled next, at the latest, unless its task is not polled any more.
    pub(super) next_poll: Instant,
    /// `true` if the request counts in [`LineState::waiting`].
    pub(super) has_to_wait: bool,
    /// `true` if it is the request's turn, and its service is not ready yet.
    pub(super) readying: bool,
    pub(super) waker: Option<Waker>,
}

impl Waiter {
    pub(super) fn start_waiting(&mut self, waiting: &mut u64, effects: &mut Effects) {
        self.has_to_wait = true;
        *waiting += 1;
        effects.more_waiting += 1;
    }
}

/// A request that joins a line or is polled, with the settings of its queue.
pub(super) struct Poller<'a> {
    /// The quotas that decide the request's charge.
    pub(super) terms: &'a Terms,
    pub(super) now: Instant,
    /// How many requests may wait in the line.
    pub(super) max_waiting: u64,
    pub(super) max_wait: Duration,
    /// `true` if a charge takes a while, so that it covers requests behind the head, too.
    pub(super) covers_neighbors: bool,
    /// `true` if several limits are charged together.
    pub(super) of_several: bool,
    /// `true` if other nodes charge the same keys.
    pub(super) shared: bool,
    /// `true` if the queue is closed: no request may wait any longer.
    pub(super) closed: bool,
}

impl Poller<'_> {
    /// Returns whether all limits could ever grant these tokens at once.
    pub(super) fn can_be_granted(&self, tokens: &Tokens) -> bool {
        let mut limits = self.terms.iter().zip(tokens.costs());
        limits.all(|(term, tokens)| term.quotas.can_grant(tokens))
    }
}

/// Why a request is not charged.
pub(crate) enum End {
    /// The request is not due yet, and releases its service.
    LetGo,
    Refused(Decision),
    Failed(StoreError),
    /// The store did not answer in time.
    Unanswered,
    Closed,
}

/// Effects of a change to a line, which are applied after its lock is released.
#[derive(Default)]
pub(super) struct Effects {
    wakers: Vec<Waker>,
    /// Decisions whose tokens are returned.
    pub(super) returns: Vec<(Decision, Terms)>,
    /// A charge in flight that no request waits for.
    pub(super) abandoned: Option<(Reply<Decision>, Terms)>,
    /// A waker that was replaced or removed.
    old_waker: Option<Waker>,
    /// The change of the number of requests that have to wait.
    pub(super) more_waiting: i64,
    /// How long the requests waited that have left.
    pub(super) wait_times: Vec<Duration>,
}

impl Effects {
    pub(super) fn wake(self) {
        self.wakers.into_iter().for_each(Waker::wake);
    }
}

impl LineState {
    /// Creates the state of a line whose requests are charged under as many limits as `cost` has.
    pub(super) fn new(cost: &Tokens) -> Self {
        Self {
            arrivals: 0,
            waiters: BTreeMap::new(),
            passed_over: BTreeMap::new(),
            refusals: BTreeMap::new(),
            requested: cost.zeroed(),
            waiting: 0,
            first_unjudged: 0,
            answer: None,
            last_grant: None,
            in_flight: None,
            grant: None,
            failure: None,
        }
    }

    /// Adds a request as the last one, and returns its number. If the last answer says that the
    /// request has to wait, it is refused when the line is full or the wait would be too long.
    pub(super) fn join_line(
        &mut self,
        claim: &Claim,
        poller: &Poller<'_>,
        effects: &mut Effects,
    ) -> Result<u64, Decision> {
        let Claim { cost, own, .. } = claim;
        let Poller { terms, now, max_waiting, max_wait, .. } = *poller;
        let deadline = now.checked_add(max_wait).unwrap_or(now + Duration::from_secs(1 << 32));
        let answer = self.answer.as_ref().filter(|answer| !answer.stale && answer.terms == *terms);
        let has_to_wait = match answer {
            Some(answer) => {
                let mut tokens = self.beyond_grant(&self.requested);
                tokens += cost;
                match answer.due(&tokens) {
                    Some(due) if due <= now => false,
                    Some(due) if self.waiting < max_waiting && due <= deadline + TICK => true,
                    _ => return Err(answer.refusal(&tokens, now)),
                }
            }
            None => false,
        };
        let number = self.arrivals;
        self.arrivals += 1;
        if self.waiters.is_empty() {
            self.first_unjudged = number;
        }
        self.requested += cost;
        let (cost, own_terms) = (cost.clone(), own.then(|| Arc::clone(terms)));
        let (arrived, next_poll, readying, waker) = (now, now + TICK, false, None);
        let mut waiter = Waiter {
            cost,
            own_terms,
            arrived,
            deadline,
            next_poll,
            has_to_wait: false,
            readying,
            waker,
        };
        if has_to_wait {
            waiter.start_waiting(&mut self.waiting, effects);
        }
        self.waiters.insert(number, waiter);
        Ok(number)
    }

    pub(super) fn set_waker(&mut self, me: u64, waker: &Waker, effects: &mut Effects) {
        let waiter = self.waiters.get_mut(&me).or_else(|| self.passed_over.get_mut(&me));
        if let Some(waiter) = waiter
            && !waiter.waker.as_ref().is_some_and(|there| there.will_wake(waker))
        {
            effects.old_waker = waiter.waker.replace(waker.clone());
        }
    }

    pub(super) fn head(&self) -> Option<u64> {
        self.waiters.first_key_value().map(|(number, _)| *number)
    }

    pub(super) fn wake_head(&mut self, now: Instant, effects: &mut Effects) {
        if let Some(mut head) = self.waiters.first_entry() {
            let head = head.get_mut();
            head.next_poll = head.next_poll.min(now);
            effects.wakers.extend(head.waker.take());
        }
    }

    pub(super) fn wake_all(&mut self, effects: &mut Effects) {
        effects.wakers.extend(self.waiters.values_mut().filter_map(|waiter| waiter.waker.take()));
    }

    /// Returns the cost of the first request that has no tokens yet.
    pub(super) fn first_without_tokens(&self) -> Option<&Tokens> {
        self.waiters.values().map(|waiter| &waiter.cost).find(|cost| !cost.is_zero())
    }

    /// Lets the head charge at once if it waits for one of these limits, which may have tokens now.
    pub(super) fn retry_head(&mut self, limits: LimitSet, effects: &mut Effects) {
        if let Some(charge) = &mut self.in_flight {
            charge.freed = charge.freed.union(limits);
        }
        let (Some(answer), Some(first)) = (&self.answer, self.first_without_tokens()) else {
            return;
        };
        if answer.waits_for(limits, first) {
            self.answer.iter_mut().for_each(|answer| answer.stale = true);
            self.wake_head(Instant::now(), effects);
        }
    }

    /// Returns these tokens less those that were granted and are not used yet.
    pub(super) fn beyond_grant(&self, tokens: &Tokens) -> Tokens {
        self.grant.as_ref().map_or_else(|| tokens.clone(), |grant| tokens - &grant.left)
    }

    /// Returns the unused tokens of the grant to the store.
    pub(super) fn return_unused(&mut self, effects: &mut Effects) {
        let Some(grant) = self.grant.take().filter(|grant| !grant.left.is_zero()) else { return };
        if let Some(answer) = &mut self.answer {
            answer.decision = grant.used_part();
        }
        effects.returns.push((grant.unused_part(), grant.terms));
    }

    pub(super) fn refuse_waiter(
        &mut self,
        number: u64,
        refusal: Decision,
        now: Instant,
        effects: &mut Effects,
    ) {
        let was_head = self.head() == Some(number);
        let Some(waiter) = self.remove_waiter(number, now, effects) else { return };
        self.refusals.insert(number, refusal);
        effects.wakers.extend(waiter.waker);
        if was_head {
            self.wake_head(now, effects);
        }
    }

    fn remove_waiter(
        &mut self,
        number: u64,
        now: Instant,
        effects: &mut Effects,
    ) -> Option<Waiter> {
        let waiter = self.waiters.remove(&number).or_else(|| self.passed_over.remove(&number))?;
        self.requested -= &waiter.cost;
        if waiter.has_to_wait {
            self.waiting -= 1;
            effects.more_waiting -= 1;
            effects.wait_times.push(now.saturating_duration_since(waiter.arrived));
        }
        Some(waiter)
    }

    /// Removes a request that is served, refused or dropped.
    pub(super) fn leave_line(&mut self, me: u64, effects: &mut Effects) {
        let (was_head, now) = (self.head() == Some(me), Instant::now());
        self.refusals.remove(&me);
        effects.old_waker = self.remove_waiter(me, now, effects).and_then(|waiter| waiter.waker);
        let polled = self.in_flight.as_ref().filter(|charge| charge.polled_by == Some(me));
        let (is_mine, is_lost) =
            (polled.is_some(), polled.is_some_and(|charge| charge.reply.is_none()));
        if self.waiters.is_empty() || is_lost {
            // A charge that was not sent has taken nothing, and one whose poll panicked has no
            // reply.
            if let Some(ChargeInFlight { reply: Some(reply), terms, polled_by: Some(_), .. }) =
                self.in_flight.take()
            {
                effects.abandoned = Some((reply, terms));
            }
        }
        if self.waiters.is_empty() {
            self.return_unused(effects);
        } else if was_head || is_mine {
            self.wake_head(now, effects);
        }
    }
}
