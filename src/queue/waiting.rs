//! The requests of a key that wait, in order of arrival, and what each does next by the store's
//! last answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use super::{Claim, Queue, Terms, Tokens};
use crate::decision::Decision;
use crate::store::StoreError;
use crate::sync::Instant;

/// The precision of timers and of the store's clock.
const TICK: Duration = Duration::from_millis(1);
/// How long those behind a request wait for it to be polled, before they go first.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often a request is polled that others wait for.
const SIGN_OF_LIFE: Duration = Duration::from_millis(50);
/// When a head that is not due asks again, since tokens may have come back. The pause doubles with
/// each refusal, up to a part of the window.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: u32 = 16;
/// Charges of a key in flight. The answers to more of them would come too late.
const MAX_CHARGES: usize = 64;
/// Requests further behind check no later that those before them are polled.
const RANKS: u32 = 64;
/// The longest delay of a charge in favor of other nodes.
const MOST_COURTESY: Duration = Duration::from_millis(50);

/// Requests have numbers in order of arrival. One that was not polled in its turn is in neither map
/// until it is polled, and so is one that is about to be refused.
#[derive(Default)]
pub(super) struct Waiting {
    /// Boxed, so that the maps move pointers.
    requests: BTreeMap<u64, Box<Request>>,
    /// Those whose charges are in flight.
    in_flight: BTreeMap<u64, Box<Request>>,
    arrivals: u64,
    /// The sum of the requests in both maps.
    costs: Tokens,
    /// How many of these have to wait, by an answer.
    pub(super) have_to_wait: u64,
    answer: Option<LastAnswer>,
    /// The one before, until there is another, and the first request that does not know it: others
    /// whose time is over are refused by it.
    former: Option<(u64, Box<LastAnswer>)>,
    pause: Duration,
}

struct Request {
    claim: Claim,
    /// At the latest, unless it is not polled any more.
    next_poll: Instant,
    has_to_wait: bool,
    waker: Option<Waker>,
}

struct LastAnswer {
    decision: Decision,
    terms: Terms,
    cost: Tokens,
    /// When the charge was sent. Times in the decision count from here: one sent a second later
    /// reaches the store a second later.
    sent: Instant,
    took: Duration,
}

pub(crate) enum Turn {
    Wait,
    /// Once its service is ready.
    Ask,
    Refused(Box<Decision>),
    Unanswered,
    Closed,
}

/// How a request looks whether it is its turn.
pub(super) struct Look<'a> {
    pub(super) waker: Option<&'a Waker>,
    /// Its service is, so that it asks if it is its turn.
    pub(super) is_ready: bool,
    /// There are timers.
    pub(super) can_wait: bool,
    /// The request's quotas are others than at its last look.
    pub(super) has_changed: bool,
}

/// The effects of a visit follow when the lock is released.
pub(super) struct Visit<'a> {
    queue: &'a Queue,
    pub(super) now: Instant,
    wakers: Vec<Waker>,
    old_waker: Option<Waker>,
    pub(super) waited: Option<Duration>,
    pub(super) cannot_wait: bool,
}

impl<'a> Visit<'a> {
    pub(super) fn new(queue: &'a Queue) -> Self {
        let (now, wakers) = (Instant::now(), Vec::new());
        Self { queue, now, wakers, old_waker: None, waited: None, cannot_wait: false }
    }

    pub(super) fn wake(self) {
        self.wakers.into_iter().for_each(Waker::wake);
    }
}

impl LastAnswer {
    fn refuses(&self) -> bool {
        !self.decision.is_allowed()
    }

    fn is_of(&self, terms: &Terms) -> bool {
        Arc::ptr_eq(&self.terms, terms) || self.terms == *terms
    }

    /// When these further tokens can have passed, at the earliest; `None`: never.
    fn passes_at(&self, tokens: &Tokens) -> Option<Instant> {
        self.sent.checked_add(Duration::from_millis(self.last_to_pass(tokens).0 as u64))
    }

    /// How many milliseconds after the answer that is, and the limit that lets them pass last.
    fn last_to_pass(&self, tokens: &Tokens) -> (i64, usize) {
        let after = |place| {
            // A limit without a decision is no reason to wait.
            let of = self.decision.at(place)?;
            // By the limit's own clock: limits that are charged in turns have different ones.
            Some((self.limit_passes_at(place, of, tokens).0.saturating_sub(of.now_ms()), place))
        };
        let last = (0..self.terms.len()).filter_map(after).max().filter(|(after, _)| *after > 0);
        last.unwrap_or((0, self.decision.governing_line()))
    }

    /// When a limit lets them pass, and which quota of it last.
    fn limit_passes_at(&self, place: usize, of: &Decision, tokens: &Tokens) -> (i64, usize) {
        // Fewer tokens may pass before.
        let retry_at = of.retry_at_ms().filter(|_| self.cost.0[place] <= tokens.0[place]);
        let retry = retry_at.map(|at| (at, of.governing_index()));
        let earliest = || of.earliest_ms(&self.terms[place], tokens.0[place]);
        let exact = retry.filter(|_| self.cost == *tokens);
        exact.unwrap_or_else(|| earliest().max(retry.unwrap_or_default()))
    }

    /// When a request is due behind others that ask for the rest of the tokens. By an answer of
    /// other quotas than its own it waits if others do.
    fn due_behind(
        &self,
        terms: &Terms,
        tokens: &Tokens,
        others_wait: bool,
        now: Instant,
    ) -> Option<Instant> {
        match self.is_of(terms) {
            true => self.passes_at(tokens),
            false if others_wait || self.refuses() => Some(now + TICK),
            false => Some(now),
        }
    }

    /// How long a head that is due delays its charge in favor of other nodes: the older, the less.
    /// So the store's nearest node does not serve all of its requests first.
    fn courtesy(&self, age: Duration, max_wait: Duration) -> Duration {
        let window = self.window();
        let most = (window / 16).min(MOST_COURTESY).min(max_wait / 2);
        most.div_f64(1.0 + age.div_duration_f64(window))
    }

    fn window(&self) -> Duration {
        self.decision.usage()[self.decision.governing_index()].window()
    }

    fn refusal(&self, tokens: &Tokens, now: Instant) -> Decision {
        let (_, last) = self.last_to_pass(tokens);
        self.decision.map_lines(|place, mut of| {
            let passes_at = self.limit_passes_at(place, &of, tokens);
            of.pass_time(now.saturating_duration_since(self.sent));
            of.behind(passes_at, tokens.0[place], place == last)
        })
    }
}

impl Request {
    fn wait(&mut self, until: Instant, look: &Look<'_>, visit: &mut Visit<'_>) {
        self.next_poll = until;
        if let Some(waker) = look.waker
            && !self.waker.as_ref().is_some_and(|there| there.will_wake(waker))
        {
            visit.old_waker = self.waker.replace(waker.clone());
        }
    }

    fn wake(&mut self, visit: &mut Visit<'_>) {
        self.next_poll = self.next_poll.min(visit.now);
        visit.wakers.extend(self.waker.take());
    }
}

impl Waiting {
    /// A request whose turn it is asks at once, or looks again: one look, one turn. Also returns
    /// when it has to look again.
    pub(super) fn look(
        &mut self,
        number: &mut Option<u64>,
        claim: &Claim,
        look: &Look<'_>,
        visit: &mut Visit<'_>,
    ) -> (Turn, Instant) {
        let now = visit.now;
        let is_new = number.is_none();
        self.arrivals += u64::from(is_new);
        let me = *number.get_or_insert(self.arrivals);
        if look.has_changed
            && let Some(request) = self.requests.get_mut(&me)
        {
            request.claim.terms = Arc::clone(&claim.terms);
        }
        self.pass_unpolled(me, visit);
        // One that is not polled keeps no answer, by which newcomers would be refused.
        if is_new && self.requests.is_empty() && self.in_flight.is_empty() {
            self.former = self.answer.take().map(|of| (me, Box::new(of))).or(self.former.take());
        }
        // A request that has just come may ask in any case.
        if look.waker.is_some() && visit.queue.closed.load(Ordering::Acquire) {
            return (Turn::Closed, now);
        }
        // A search of the map takes longer, the more wait: one that waits already is found once.
        let mut found = if is_new { None } else { self.turn(me, claim, look, visit) };
        if found.is_none() {
            self.enter(me, claim, visit);
            found = self.turn(me, claim, look, visit);
        }
        let (mut turn, until) = found.unwrap_or_else(|| (self.refusal(me, claim, now), now));
        if matches!(turn, Turn::Wait) && !look.can_wait {
            visit.cannot_wait = true;
            turn = if self.answer.is_some() { self.refusal(me, claim, now) } else { Turn::Ask };
        }
        let until = until.max(now + TICK);
        match turn {
            Turn::Ask if look.is_ready => {
                if let Some(mut request) = self.requests.remove(&me) {
                    request.next_poll = now + SIGN_OF_LIFE;
                    visit.old_waker = request.waker.take();
                    self.in_flight.insert(me, request);
                }
                self.wake_next(visit);
            }
            Turn::Ask | Turn::Wait => {
                // The others wait behind it, until then.
                if let Some(mut first) = self.requests.first_entry()
                    && *first.key() == me
                {
                    first.get_mut().wait(until, look, visit);
                }
            }
            _ => {}
        }
        (turn, until)
    }

    /// The requests enter again when they are polled.
    fn pass_unpolled(&mut self, me: u64, visit: &mut Visit<'_>) {
        let now = visit.now;
        let next_poll = self.requests.first_key_value().map(|(_, first)| first.next_poll);
        let Some(by) = now.checked_sub(PATIENCE) else { return };
        if self.in_flight.is_empty() && next_poll.is_none_or(|next_poll| next_poll > now) {
            return;
        }
        // If it is polled late itself, the runtime is slow.
        let is_late = self.requests.get(&me).is_some_and(|of| of.next_poll + SIGN_OF_LIFE < now);
        if let Some(mut first) = self.requests.first_entry().filter(|_| is_late) {
            let first = first.get_mut();
            first.next_poll = first.next_poll.max(now);
            return;
        }
        let before = self.requests.len();
        while let Some(first) = self.requests.first_entry()
            && *first.key() != me
            && first.get().next_poll <= by
        {
            let request = first.remove();
            self.subtract(&request);
            visit.wakers.extend(request.waker);
        }
        while let Some((&unpolled, _)) = self.in_flight.iter().find(|(_, of)| of.next_poll <= by)
            && let Some(request) = self.in_flight.remove(&unpolled)
        {
            self.subtract(&request);
        }
        if self.requests.len() < before {
            self.wake_next(visit);
        }
    }

    /// Unless it would be due too late, or the queue is full of requests before it.
    fn enter(&mut self, me: u64, claim: &Claim, visit: &mut Visit<'_>) {
        let (queue, now) = (visit.queue, visit.now);
        let deadline = claim.deadline(queue);
        let mut has_to_wait = false;
        if let Some(answer) = &self.answer {
            let others_wait = self.have_to_wait > 0;
            let tokens = self.tokens_up_to(me, claim);
            match answer.due_behind(&claim.terms, &tokens, others_wait, now) {
                Some(due) if due <= now => {}
                Some(due) if due <= deadline + TICK => has_to_wait = true,
                _ => return,
            }
        }
        self.costs.add(&claim.cost);
        self.have_to_wait += u64::from(has_to_wait);
        let (claim, next_poll, waker) = (claim.clone(), now, None);
        self.requests.insert(me, Box::new(Request { claim, next_poll, has_to_wait, waker }));
        self.turn_away_last(visit);
    }

    /// `None`: the request is not among those that wait.
    fn turn(
        &mut self,
        me: u64,
        claim: &Claim,
        look: &Look<'_>,
        visit: &mut Visit<'_>,
    ) -> Option<(Turn, Instant)> {
        let (now, deadline) = (visit.now, claim.deadline(visit.queue));
        let is_first_due = now < deadline || self.is_first_due_by(deadline);
        let first_poll = self.requests.first_key_value()?.1.next_poll;
        let mut up_to = self.requests.range_mut(..=me);
        let (_, request) = up_to.next_back().filter(|(number, _)| **number == me)?;
        // Requests before it that are due with it go first.
        let last = if now < deadline { deadline } else { deadline + PATIENCE };
        if now >= last || !is_first_due {
            return Some((self.refusal(me, claim, now), now));
        }
        if let Some((_, before)) = up_to.next_back() {
            // A request before it that is not polled is not waited for, as long as the first one is.
            let before = before.next_poll.clamp(first_poll, first_poll + PATIENCE * (RANKS - 1));
            let until = (before + PATIENCE).min(last).max(now + TICK);
            if look.can_wait {
                request.wait(until, look, visit);
            }
            return Some((Turn::Wait, until));
        }
        let soon = now + SIGN_OF_LIFE;
        let until = match self.due(claim, visit) {
            Some(due) if due <= now && self.in_flight.len() < MAX_CHARGES => {
                return Some((Turn::Ask, soon.min(last)));
            }
            Some(due) if due <= now => soon,
            due => {
                self.make_wait(visit);
                if !self.requests.contains_key(&me) {
                    return Some((self.refusal(me, claim, now), now));
                }
                let due = due.unwrap_or(last);
                // Requests in flight may not be polled any more.
                if self.in_flight.is_empty() { due } else { due.min(soon) }
            }
        };
        Some((Turn::Wait, until.min(last)))
    }

    /// By the tokens in flight with the head's own. `None`: never.
    fn due(&self, head: &Claim, visit: &Visit<'_>) -> Option<Instant> {
        let Visit { queue, now, .. } = *visit;
        let tokens = self.in_flight_and(&head.cost);
        let Some(answer) = self.answer.as_ref().filter(|answer| answer.is_of(&head.terms)) else {
            // Without an answer, as many ask as a new window has room for.
            let asks = self.in_flight.is_empty() || tokens.can_be_granted(&head.terms);
            return Some(if asks { now } else { now + SIGN_OF_LIFE });
        };
        let mut due = answer.passes_at(&tokens);
        if self.in_flight.is_empty() {
            let again = answer.sent + self.pause;
            // Not if those behind it are due before its answer: they would overtake it.
            due = due.filter(|due| *due < again + answer.took * 2).or(Some(again));
        }
        let due = due?;
        if !queue.is_shared() || due <= answer.sent {
            return Some(due);
        }
        let age = due.saturating_duration_since(head.arrived);
        Some(due + answer.courtesy(age, queue.max_wait))
    }

    fn is_first_due_by(&self, deadline: Instant) -> bool {
        let Some((_, first)) = self.requests.first_key_value() else { return false };
        let answer = self.answer.as_ref().filter(|answer| answer.is_of(&first.claim.terms));
        answer.is_none_or(|answer| {
            let due = answer.passes_at(&self.in_flight_and(&first.claim.cost));
            due.is_some_and(|due| due <= deadline + TICK)
        })
    }

    /// The answer to a charge. Returns `false` if the request no longer waits.
    pub(super) fn note(
        &mut self,
        me: u64,
        claim: &Claim,
        sent: Instant,
        answer: &Result<Decision, StoreError>,
        visit: &mut Visit<'_>,
    ) -> bool {
        // A request may never pass any more: the limits were lowered.
        let waits = answer.as_ref().is_ok_and(|of| of.retry_at_ms().is_some());
        if let Some(decision) = answer.as_ref().ok().cloned() {
            let (terms, cost) = (Arc::clone(&claim.terms), claim.cost.clone());
            let took = visit.now.saturating_duration_since(sent);
            self.note_answer(LastAnswer { decision, terms, cost, sent, took }, visit);
        }
        match self.in_flight.remove(&me) {
            Some(request) if waits => _ = self.requests.insert(me, request),
            Some(request) => self.leave(&request, visit),
            None => {}
        }
        self.wake_next(visit);
        waits
    }

    #[inline]
    fn note_answer(&mut self, answer: LastAnswer, visit: &Visit<'_>) {
        let first_pause = FIRST_PAUSE.min(visit.queue.max_wait / 2).max(TICK);
        let before = self.answer.as_ref().filter(|last| answer.refuses() && last.refuses());
        self.pause = match before {
            None => first_pause,
            // Charges in flight at the same time are refused once.
            Some(before) if answer.sent < before.sent + self.pause => self.pause,
            Some(_) => (self.pause * 2).min(answer.window() / LONGEST_PAUSE).max(first_pause),
        };
        self.answer = Some(answer);
    }

    /// The head is not due, so that all those behind it have to wait.
    fn make_wait(&mut self, visit: &mut Visit<'_>) {
        let mut tokens = self.in_flight_and(&Tokens::default());
        // Some may not have been told to wait, by an answer that had room or for lack of one.
        let all = (self.requests.len() + self.in_flight.len()) as u64;
        let Some(answer) = self.answer.as_ref().filter(|_| self.have_to_wait < all) else { return };
        let mut late = Vec::new();
        for (number, request) in &mut self.requests {
            tokens.add(&request.claim.cost);
            if !request.has_to_wait {
                self.have_to_wait += 1;
                request.has_to_wait = true;
                let due = answer.due_behind(&request.claim.terms, &tokens, true, visit.now);
                if due.is_none_or(|due| due > request.claim.deadline(visit.queue) + TICK) {
                    tokens.subtract(&request.claim.cost);
                    late.push(*number);
                }
            }
        }
        late.into_iter().for_each(|number| self.turn_away(number, visit));
        self.turn_away_last(visit);
    }

    /// If more wait than may, since others wait again.
    fn turn_away_last(&mut self, visit: &mut Visit<'_>) {
        while self.have_to_wait > visit.queue.most
            && let Some((&last, _)) = self.requests.iter().rfind(|(_, one)| one.has_to_wait)
        {
            self.turn_away(last, visit);
        }
    }

    /// The request finds out when it is polled.
    fn turn_away(&mut self, number: u64, visit: &mut Visit<'_>) {
        if let Some(request) = self.requests.remove(&number) {
            self.subtract(&request);
            visit.wakers.extend(request.waker);
        }
    }

    /// Returns when the request is polled again, at the latest.
    pub(super) fn note_polled(&mut self, me: u64, visit: &Visit<'_>) -> Instant {
        let next_poll = visit.now + SIGN_OF_LIFE;
        self.in_flight.entry(me).and_modify(|request| request.next_poll = next_poll);
        next_poll
    }

    pub(super) fn remove(&mut self, me: u64, visit: &mut Visit<'_>) {
        let asked = self.in_flight.remove(&me);
        if asked.is_some() {
            // Its tokens are refunded: the last refusal may be by them.
            self.pause = Duration::ZERO;
        }
        let Some(request) = asked.or_else(|| self.requests.remove(&me)) else { return };
        self.leave(&request, visit);
        visit.old_waker = request.waker;
        if self.requests.first_key_value().is_some_and(|(first, _)| *first > me) {
            self.wake_next(visit);
        }
    }

    fn subtract(&mut self, request: &Request) {
        self.costs.subtract(&request.claim.cost);
        self.have_to_wait -= u64::from(request.has_to_wait);
    }

    fn leave(&mut self, request: &Request, visit: &mut Visit<'_>) {
        self.subtract(request);
        if request.has_to_wait {
            visit.waited = Some(visit.now.saturating_duration_since(request.claim.arrived));
        }
    }

    pub(super) fn take_wakers(&mut self) -> Vec<Waker> {
        self.requests.values_mut().filter_map(|request| request.waker.take()).collect()
    }

    /// The second one notices if the first one is not polled.
    fn wake_next(&mut self, visit: &mut Visit<'_>) {
        self.requests.values_mut().take(2).for_each(|request| request.wake(visit));
    }

    fn in_flight_and(&self, cost: &Tokens) -> Tokens {
        let mut tokens = cost.clone();
        self.in_flight.values().for_each(|request| tokens.add(&request.claim.cost));
        tokens
    }

    /// The costs of all that come before a request, and its own.
    fn tokens_up_to(&self, me: u64, claim: &Claim) -> Tokens {
        if self.requests.last_key_value().is_none_or(|(last, _)| *last < me) {
            let mut tokens = self.costs.clone();
            tokens.add(&claim.cost);
            return tokens;
        }
        let mut tokens = self.in_flight_and(&claim.cost);
        self.requests.range(..me).for_each(|(_, before)| tokens.add(&before.claim.cost));
        tokens
    }

    fn refusal(&self, me: u64, claim: &Claim, now: Instant) -> Turn {
        let former = || self.former.as_ref().filter(|(other, _)| me < *other).map(|(_, of)| &**of);
        let Some(answer) = self.answer.as_ref().or_else(former) else { return Turn::Unanswered };
        Turn::Refused(Box::new(answer.refusal(&self.tokens_up_to(me, claim), now)))
    }
}
