//! A line: its requests in order of arrival, and what each does next by the store's last answer.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use super::Queue;
use super::answer::LastAnswer;
use super::claim::{Claim, Terms, Tokens};
use crate::decision::Decision;
use crate::store::StoreError;
use crate::timer::Instant;

/// The precision of timers and of the store's clock.
const TICK: Duration = Duration::from_millis(1);
/// How long the requests behind a request wait for it to be polled, before they go first.
const PATIENCE: Duration = Duration::from_millis(100);
/// How often a request is polled that others wait for.
const SIGN_OF_LIFE: Duration = Duration::from_millis(50);
/// When a head that is not due asks again, since tokens may have come back. After each refusal it
/// waits for twice as long, up to a part of the window.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: u32 = 16;
/// Charges of a line in flight. The answers to more of them would come too late.
const MAX_CHARGES: u32 = 64;
/// The highest rank: requests further behind check no later that those before them are polled.
const RANKS: u64 = 64;
/// Up to here, the requests before a request are counted exactly.
const NEAR: u64 = 16;

/// The state of a line, under its lock. Requests have numbers in order of arrival.
pub(super) struct LineState {
    requests: BTreeMap<u64, Request>,
    /// The number of the next request to arrive.
    arrivals: u64,
    /// No request before this one waits for its turn.
    first_waiting: u64,
    /// No request from this one on was charged.
    first_unasked: u64,
    /// The request whose turn it is, and when it is polled next unless it is not polled any more.
    next_turn: (u64, Instant),
    /// All requests before this one have been judged by an answer.
    first_unjudged: u64,
    /// The costs of the requests that have no tokens yet.
    requested: Tokens,
    /// The charges in flight: how many, and the part of these costs that is charged.
    in_flight: InFlight,
    /// The number of requests that have to wait, by an answer.
    waiting: u64,
    answer: Option<LastAnswer>,
    /// When a request has last returned its tokens.
    returned: Option<Instant>,
    /// How long after the last answer the head asks again.
    pause: Duration,
}

struct InFlight {
    charges: u32,
    tokens: Tokens,
}

impl InFlight {
    fn begin(&mut self, cost: &Tokens) {
        self.charges += 1;
        self.tokens.add(cost);
    }

    fn end(&mut self, cost: &Tokens) {
        self.charges -= 1;
        self.tokens.subtract(cost);
    }
}

struct Request {
    stage: Stage,
    cost: Tokens,
    /// The quotas that decide the request's charge.
    terms: Terms,
    arrived: Instant,
    deadline: Instant,
    /// When the request is polled next, at the latest, unless it is not polled any more.
    next_poll: Instant,
    /// `true` if it counts in [`LineState::waiting`].
    has_to_wait: bool,
    waker: Option<Waker>,
}

enum Stage {
    /// It waits for its turn. Requests that are not polled are passed by others, and keep their
    /// places.
    Waits {
        passed: bool,
    },
    /// It is being charged. If it is not polled, its charge does not count as one in flight. It is
    /// called back if a request before it is refused meanwhile.
    Asks {
        polled: bool,
        called_back: bool,
    },
    /// It has its answer, and goes when those before it have gone.
    Answered,
    /// It has tokens, but a request before it was refused: it returns them, and waits again.
    CalledBack,
    Refused(Box<Decision>),
}

/// What a request does that does not wait.
pub(crate) enum Turn {
    /// It is charged, once its service is ready.
    Ask,
    Go,
    /// It returns what it was granted, and waits again.
    GiveBack,
    Refused(Decision),
    /// The store did not answer in time.
    Unanswered,
    /// The queue is closed.
    Closed,
}

/// A request that joins a line, is polled in it, or leaves it, with what follows from that when the
/// line's lock is released.
pub(super) struct Visit<'a> {
    queue: &'a Queue,
    now: Instant,
    wakers: Vec<Waker>,
    /// A waker that was replaced or removed.
    old_waker: Option<Waker>,
    /// The change of the number of requests that have to wait.
    pub(super) more_waiting: i64,
    /// How long a request has waited that leaves.
    pub(super) waited: Option<Duration>,
}

impl<'a> Visit<'a> {
    pub(super) fn new(queue: &'a Queue) -> Self {
        let (now, wakers) = (Instant::now(), Vec::new());
        Self { queue, now, wakers, old_waker: None, more_waiting: 0, waited: None }
    }

    pub(super) fn wake(self) {
        self.wakers.into_iter().for_each(Waker::wake);
    }
}

impl Request {
    fn waits(&self) -> bool {
        matches!(self.stage, Stage::Waits { passed: false })
    }

    /// Returns whether its cost is no longer a part of [`LineState::requested`].
    fn is_decided(&self) -> bool {
        matches!(self.stage, Stage::Answered | Stage::Refused(_))
    }

    fn answer<'a>(&self, last: &'a Option<LastAnswer>) -> Option<&'a LastAnswer> {
        last.as_ref()
            .filter(|last| Arc::ptr_eq(&last.terms, &self.terms) || last.terms == self.terms)
    }

    /// Returns whether the request has to wait, if it is due when these tokens have passed, or its
    /// refusal. By an answer of other quotas than its own it waits if others do.
    fn judge(
        &self,
        answer: &LastAnswer,
        tokens: &Tokens,
        waiting: u64,
        visit: &Visit<'_>,
    ) -> Result<bool, Decision> {
        let due = match answer.terms == self.terms {
            _ if answer.doubtful => Some(visit.now),
            true => answer.due(tokens),
            false if waiting > 0 || answer.refuses() => Some(visit.now + TICK),
            false => Some(visit.now),
        };
        match due {
            Some(due) if due <= visit.now => Ok(false),
            Some(due) if waiting < visit.queue.most && due <= self.deadline + TICK => Ok(true),
            _ => Err(answer.refusal(tokens, visit.now)),
        }
    }

    fn wake(&mut self, visit: &mut Visit<'_>) {
        self.next_poll = self.next_poll.min(visit.now);
        visit.wakers.extend(self.waker.take());
    }
}

impl LineState {
    /// Creates the state of a line whose requests are charged under as many limits as `cost` has.
    pub(super) fn new(cost: &Tokens) -> Self {
        Self {
            requests: BTreeMap::new(),
            arrivals: 0,
            first_waiting: 0,
            first_unasked: 0,
            next_turn: (0, Instant::now()),
            first_unjudged: 0,
            requested: cost.zeroed(),
            in_flight: InFlight { charges: 0, tokens: cost.zeroed() },
            waiting: 0,
            answer: None,
            returned: None,
            pause: Duration::ZERO,
        }
    }

    /// Adds a request as the last one. Returns its number, and whether the last answer says that it
    /// has to wait. It is refused then if the line is full or the wait would be too long.
    pub(super) fn join(
        &mut self,
        claim: &Claim,
        visit: &mut Visit<'_>,
    ) -> Result<(u64, bool), Decision> {
        let Visit { queue, now, .. } = *visit;
        let deadline = now.checked_add(queue.max_wait);
        let mut request = Request {
            stage: Stage::Waits { passed: false },
            cost: claim.cost.clone(),
            terms: Arc::clone(&claim.terms),
            arrived: now,
            deadline: deadline.unwrap_or(now + Duration::from_secs(1 << 32)),
            next_poll: now,
            has_to_wait: false,
            waker: None,
        };
        if let Some(answer) = &self.answer {
            let mut tokens = self.requested.clone();
            tokens.add(&request.cost);
            request.has_to_wait = request.judge(answer, &tokens, self.waiting, visit)?;
            self.waiting += u64::from(request.has_to_wait);
            visit.more_waiting += i64::from(request.has_to_wait);
        }
        let (number, has_to_wait) = (self.arrivals, request.has_to_wait);
        self.arrivals += 1;
        self.requested.add(&request.cost);
        self.requests.insert(number, request);
        Ok((number, has_to_wait))
    }

    /// Returns what the request does next, unless it waits, and when it is to be polled again.
    /// `changed` are its quotas, if they have changed.
    pub(super) fn turn(
        &mut self,
        me: u64,
        changed: Option<Terms>,
        waker: Option<&Waker>,
        visit: &mut Visit<'_>,
    ) -> (Option<Turn>, Instant) {
        let now = visit.now;
        // A request that has just joined may ask in any case.
        let (request, joins) = (find(&mut self.requests, me), waker.is_none());
        if let Some(changed) = changed {
            request.terms = changed;
        }
        if let Some(waker) = waker
            && !request.waker.as_ref().is_some_and(|there| there.will_wake(waker))
        {
            visit.old_waker = request.waker.replace(waker.clone());
        }
        // If the request itself is polled late, the runtime is slow, and the others get more time.
        let late = request.next_poll + SIGN_OF_LIFE < now;
        request.next_poll = now + SIGN_OF_LIFE;
        let turn = match &mut request.stage {
            Stage::Waits { passed } => {
                *passed = false;
                let times = (request.arrived, request.deadline);
                self.first_waiting = self.first_waiting.min(me);
                return self.wait(me, times, late, joins, visit);
            }
            Stage::Asks { polled: true, .. } => None,
            Stage::Asks { polled, .. } => {
                *polled = true;
                self.in_flight.begin(&request.cost);
                None
            }
            Stage::Answered => {
                self.pass_unpolled_charges(late, now);
                let is_going = |request: &Request| match request.stage {
                    Stage::Asks { polled, .. } => polled,
                    Stage::Answered => now < request.next_poll + PATIENCE,
                    _ => false,
                };
                let is_first = !self.requests.range(..me).any(|(_, before)| is_going(before));
                is_first.then_some(Turn::Go)
            }
            stage @ Stage::CalledBack => {
                *stage = Stage::Waits { passed: false };
                self.returned = Some(now);
                self.first_waiting = self.first_waiting.min(me);
                if !request.has_to_wait && self.waiting < visit.queue.most {
                    // Not judged: answers may be of the tokens that it returns.
                    (request.has_to_wait, self.waiting) = (true, self.waiting + 1);
                    visit.more_waiting += 1;
                } else if !request.has_to_wait {
                    self.first_unjudged = self.first_unjudged.min(me);
                }
                Some(Turn::GiveBack)
            }
            Stage::Refused(_) => Some(self.end(me, now)),
        };
        (turn, now + SIGN_OF_LIFE)
    }

    /// Lets the first request that waits ask when it is due. The further back another one is, the
    /// later it checks that those before it are polled.
    fn wait(
        &mut self,
        me: u64,
        (arrived, deadline): (Instant, Instant),
        late: bool,
        joins: bool,
        visit: &mut Visit<'_>,
    ) -> (Option<Turn>, Instant) {
        let now = visit.now;
        if !joins && visit.queue.is_closed() {
            return (Some(Turn::Closed), now);
        }
        let first = self.first_waiting();
        let rank = match me - self.first_waiting {
            near @ 0..NEAR => self.requests.range(me - near..me).count() as u32,
            // An estimate: numbers have gaps, but counting takes time.
            far => far.min(RANKS) as u32,
        };
        let mut until = self.next_turn.1.max(arrived) + PATIENCE * rank;
        let passes = until <= now && !late;
        if passes {
            for (_, request) in self.requests.range_mut(self.first_waiting..me) {
                if let Stage::Waits { passed } = &mut request.stage {
                    *passed = true;
                }
            }
            self.first_waiting = me;
        }
        let is_first = passes || first == Some(me);
        if is_first {
            self.pass_unpolled_charges(late, now);
            until = now + SIGN_OF_LIFE;
            match self.due(me, visit) {
                Some(due) if due <= now => {
                    let in_time = now < deadline || self.is_about_to_go(deadline, now);
                    if self.in_flight.charges < MAX_CHARGES && in_time {
                        self.next_turn = (me, until);
                        let last = if now < deadline { deadline } else { deadline + PATIENCE };
                        return (Some(Turn::Ask), until.min(last));
                    }
                }
                due => {
                    self.judge_newcomers(visit);
                    if matches!(self.requests[&me].stage, Stage::Refused(_)) {
                        return (Some(self.end(me, now)), now);
                    }
                    until = due.unwrap_or(deadline);
                    if self.in_flight.charges > 0 {
                        // It may not be polled any more.
                        until = until.min(now + SIGN_OF_LIFE);
                    }
                }
            }
        }
        if now < deadline {
            until = until.min(deadline);
        } else if self.is_about_to_go(deadline, now) {
            until = until.min(deadline + PATIENCE);
        } else {
            return (Some(self.end(me, now)), now);
        }
        until = until.max(now + TICK);
        find(&mut self.requests, me).next_poll = until;
        if is_first {
            self.next_turn = (me, until);
        }
        (None, until)
    }

    /// Returns when the first request that waits is due; `None`: never.
    fn due(&self, me: u64, visit: &Visit<'_>) -> Option<Instant> {
        let Visit { queue, now, .. } = *visit;
        let request = &self.requests[&me];
        let mut tokens = self.in_flight.tokens.clone();
        tokens.add(&request.cost);
        let Some(answer) = request.answer(&self.answer) else {
            // Without an answer, as many ask as a new window has room for.
            let asks = self.in_flight.charges == 0 || tokens.can_be_granted(&request.terms);
            return Some(if asks { request.arrived } else { now + SIGN_OF_LIFE });
        };
        let mut due = answer.due(&tokens);
        if self.in_flight.charges == 0 {
            let again = answer.sent + self.pause;
            // Not if those behind it are due before its answer: they would return their tokens.
            due = due.filter(|due| *due < again + answer.took * 2).or(Some(again));
        }
        let due = due?;
        if !queue.is_shared() || due <= answer.sent {
            return Some(due);
        }
        let age = due.saturating_duration_since(request.arrived);
        Some(due + answer.courtesy(age, queue.max_wait))
    }

    /// Returns whether the first request that waits was due by this deadline, and goes shortly.
    fn is_about_to_go(&mut self, deadline: Instant, now: Instant) -> bool {
        let Some(first) = self.first_waiting().filter(|_| now < deadline + PATIENCE) else {
            return false;
        };
        let first = &self.requests[&first];
        let mut tokens = self.in_flight.tokens.clone();
        tokens.add(&first.cost);
        let answer = first.answer(&self.answer);
        let due = answer.map_or(Some(first.arrived), |answer| answer.due(&tokens));
        due.is_some_and(|due| due <= deadline + TICK)
    }

    /// Notes that the request is being charged, unless it was refused since its turn came.
    pub(super) fn ask(&mut self, me: u64, visit: &mut Visit<'_>) -> bool {
        let request = find(&mut self.requests, me);
        if !matches!(request.stage, Stage::Waits { .. }) {
            return false;
        }
        request.stage = Stage::Asks { polled: true, called_back: false };
        self.in_flight.begin(&request.cost);
        self.first_unasked = self.first_unasked.max(me + 1);
        self.wake_next(visit);
        true
    }

    /// Notes the answer to a charge that was sent at this time.
    pub(super) fn note(
        &mut self,
        me: u64,
        answer: &Result<Decision, StoreError>,
        sent: Instant,
        visit: &mut Visit<'_>,
    ) {
        let request = find(&mut self.requests, me);
        let Stage::Asks { polled, called_back } = request.stage else { return };
        let decision = answer.as_ref().ok();
        let refused = decision.is_some_and(|decision| !decision.allowed());
        request.stage = match (refused, called_back) {
            (true, _) if decision.is_some_and(|of| of.retry_at_ms().is_none()) => {
                // It can never pass any more: the limits were lowered.
                decision.map_or(Stage::Answered, |of| Stage::Refused(Box::new(of.clone())))
            }
            (true, _) => Stage::Waits { passed: false },
            (false, true) if decision.is_some() => Stage::CalledBack,
            _ => Stage::Answered,
        };
        if polled {
            self.in_flight.end(&request.cost);
        }
        if request.is_decided() {
            self.requested.subtract(&request.cost);
        }
        // What is returned soon is in the counts of its answer, and not in those of the refusal.
        if let Some(decision) = decision.filter(|_| refused || !called_back) {
            let first_pause = FIRST_PAUSE.min(visit.queue.max_wait / 2);
            let refused_before = self.answer.as_ref().filter(|last| refused && last.refuses());
            let refused_before = refused_before.map(|last| last.sent);
            let (terms, cost) = (Arc::clone(&request.terms), request.cost.clone());
            let took = visit.now.saturating_duration_since(sent);
            let doubtful = refused && self.returned.is_some_and(|at| sent < at + PATIENCE);
            let decision = decision.clone();
            let answer = LastAnswer { decision, terms, cost, sent, took, doubtful };
            let longest_pause = answer.window() / LONGEST_PAUSE;
            self.pause = match refused_before {
                _ if doubtful => first_pause.min(PATIENCE),
                None => first_pause,
                // Charges in flight at the same time are refused once.
                Some(before) if sent < before + self.pause => self.pause,
                Some(_) => (self.pause * 2).min(longest_pause).max(first_pause),
            };
            self.answer = Some(answer);
        }
        if refused {
            self.first_waiting = self.first_waiting.min(me);
            if !self.requests[&me].has_to_wait {
                self.first_unjudged = self.first_unjudged.min(me);
            }
            self.judge_newcomers(visit);
        }
        if matches!(self.requests[&me].stage, Stage::Waits { .. } | Stage::CalledBack) {
            self.call_back_from(me, visit);
        }
        self.wake_next(visit);
    }

    /// Calls back the requests behind this one that are charged, or have tokens and have not gone.
    fn call_back_from(&mut self, me: u64, visit: &mut Visit<'_>) {
        let behind = me + 1..self.first_unasked.max(me + 1);
        for request in self.requests.range_mut(behind).map(|(_, request)| request) {
            match &mut request.stage {
                Stage::Asks { called_back, .. } => *called_back = true,
                stage @ Stage::Answered => {
                    *stage = Stage::CalledBack;
                    self.requested.add(&request.cost);
                    request.wake(visit);
                }
                _ => {}
            }
        }
    }

    /// Judges the requests that joined before the last answer: each may be due, has to wait, or is
    /// refused since the line is full or the wait would be too long.
    fn judge_newcomers(&mut self, visit: &mut Visit<'_>) {
        let Some(answer) = self.answer.take() else { return };
        let from = mem::replace(&mut self.first_unjudged, self.arrivals);
        let mut tokens = self.requested.clone();
        let unjudged = self.requests.range(from..).map(|(_, request)| request);
        unjudged.filter(|request| !request.is_decided()).for_each(|one| tokens.subtract(&one.cost));
        for (number, request) in self.requests.range_mut(from..) {
            if request.is_decided() {
                continue;
            }
            tokens.add(&request.cost);
            if request.has_to_wait || !matches!(request.stage, Stage::Waits { .. }) {
                continue;
            }
            match request.judge(&answer, &tokens, self.waiting, visit) {
                Ok(false) => self.first_unjudged = self.first_unjudged.min(*number),
                Ok(true) => {
                    (request.has_to_wait, self.waiting) = (true, self.waiting + 1);
                    visit.more_waiting += 1;
                }
                Err(refusal) => {
                    request.stage = Stage::Refused(Box::new(refusal));
                    request.wake(visit);
                    self.requested.subtract(&request.cost);
                    tokens.subtract(&request.cost);
                }
            }
        }
        self.answer = Some(answer);
    }

    /// Removes a request that goes, is refused, or was dropped.
    pub(super) fn leave(&mut self, me: u64, visit: &mut Visit<'_>) {
        let Some(request) = self.requests.remove(&me) else { return };
        if !request.is_decided() {
            self.requested.subtract(&request.cost);
        }
        if let Stage::Asks { polled: true, .. } = request.stage {
            self.in_flight.end(&request.cost);
        }
        if request.has_to_wait {
            self.waiting -= 1;
            visit.more_waiting -= 1;
            visit.waited = Some(visit.now.saturating_duration_since(request.arrived));
        }
        // If it waited behind others, it is still their turn.
        if self.next_turn.0 >= me || !request.waits() {
            self.wake_next(visit);
        }
        visit.old_waker = request.waker;
    }

    pub(super) fn take_wakers(&mut self) -> Vec<Waker> {
        self.requests.values_mut().filter_map(|request| request.waker.take()).collect()
    }

    /// Wakes the first request that has its answer, and the first two that wait: the second one
    /// notices if the first one is not polled.
    fn wake_next(&mut self, visit: &mut Visit<'_>) {
        let first = self.first_waiting();
        let mut going = self.requests.range_mut(..self.first_unasked).map(|(_, request)| request);
        let answered = going.find(|request| matches!(request.stage, Stage::Answered));
        answered.into_iter().for_each(|request| request.wake(visit));
        if let Some(first) = first {
            let (last, next_turn) = self.next_turn;
            self.next_turn =
                (first, if first == last { next_turn.min(visit.now) } else { visit.now });
            let waiting = self.requests.range_mut(first..).map(|(_, request)| request);
            waiting.filter(|one| one.waits()).take(2).for_each(|one| one.wake(visit));
        }
    }

    /// Returns the number of the first request that waits for its turn.
    fn first_waiting(&mut self) -> Option<u64> {
        let mut waiting = self.requests.range(self.first_waiting..);
        let first = waiting.find(|(_, request)| request.waits()).map(|(number, _)| *number);
        self.first_waiting = first.unwrap_or(self.arrivals);
        first
    }

    /// No longer counts charges as in flight whose requests are not polled: their answers may never
    /// be received.
    fn pass_unpolled_charges(&mut self, late: bool, now: Instant) {
        if late || self.in_flight.charges == 0 {
            return;
        }
        for (_, request) in self.requests.range_mut(..self.first_unasked) {
            if request.next_poll + PATIENCE <= now
                && let Stage::Asks { polled: polled @ true, .. } = &mut request.stage
            {
                *polled = false;
                self.in_flight.end(&request.cost);
            }
        }
    }

    /// Ends the wait of a request that is refused, or has reached its deadline.
    fn end(&mut self, me: u64, now: Instant) -> Turn {
        if let Stage::Refused(refusal) = &self.requests[&me].stage {
            return Turn::Refused(Decision::clone(refusal));
        }
        let Some(answer) = &self.answer else { return Turn::Unanswered };
        let mut tokens = self.requested.zeroed();
        let before = self.requests.range(..=me).map(|(_, request)| request);
        before.filter(|request| !request.is_decided()).for_each(|one| tokens.add(&one.cost));
        Turn::Refused(answer.refusal(&tokens, now))
    }
}

fn find(requests: &mut BTreeMap<u64, Request>, number: u64) -> &mut Request {
    requests.get_mut(&number).expect("its place is dropped later")
}
