//! A line: its requests in order of arrival, and what each does next by the store's last answer.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
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
/// Charges of a line in flight. The answers to more of them would come too late.
const MAX_CHARGES: u32 = 64;
/// Requests further behind check no later that those before them are polled.
const RANKS: u64 = 64;
/// Up to here, the requests before a request are counted exactly.
const NEAR: u64 = 16;
/// The longest delay of a charge in favor of other nodes.
const MOST_COURTESY: Duration = Duration::from_millis(50);

/// Requests have numbers in order of arrival.
pub(super) struct LineState {
    requests: BTreeMap<u64, Request>,
    arrivals: u64,
    /// No request before this one waits for its turn, except those that others have passed.
    first_waiting: u64,
    /// No request from this one on is charged, or has been.
    first_unasked: u64,
    /// All requests before this one have been judged by an answer.
    first_unjudged: u64,
    /// The costs of the requests that have no tokens yet.
    requested: Tokens,
    /// Requests that have to wait, by an answer.
    pub(super) waiting: u64,
    answer: Option<LastAnswer>,
    /// When tokens of the line were last returned. Refusals of charges sent before are in doubt.
    returned: Instant,
    pause: Duration,
}

struct Request {
    stage: Stage,
    cost: Tokens,
    terms: Terms,
    arrived: Instant,
    deadline: Instant,
    /// At the latest, unless it is not polled any more.
    next_poll: Instant,
    has_to_wait: bool,
    waker: Option<Waker>,
}

enum Stage {
    Waits,
    /// Called back if a request before it is refused meanwhile.
    Asks {
        sent: Instant,
        called_back: bool,
    },
    Answered,
    /// A request before it was refused: returns its tokens, and waits again.
    Returns,
    Refused(Box<Decision>),
}

pub(super) struct LastAnswer {
    decision: Decision,
    terms: Terms,
    cost: Tokens,
    /// When the charge was sent. Times in the decision count from here: one sent a second later
    /// reaches the store a second later.
    sent: Instant,
    took: Duration,
}

pub(crate) enum Turn {
    /// Once its service is ready.
    Ask,
    Go,
    GiveBack,
    Refused(Box<Decision>),
    Unanswered,
    Closed,
}

/// What follows from a visit is done when the line's lock is released.
pub(super) struct Visit<'a> {
    queue: &'a Queue,
    now: Instant,
    /// Others pass requests that were to be polled by this time, and were not.
    passes: Option<Instant>,
    wakers: Vec<Waker>,
    old_waker: Option<Waker>,
    pub(super) waited: Option<Duration>,
}

impl<'a> Visit<'a> {
    pub(super) fn new(queue: &'a Queue) -> Self {
        let (now, wakers) = (Instant::now(), Vec::new());
        Self { queue, now, passes: None, wakers, old_waker: None, waited: None }
    }

    pub(super) fn wake(self) {
        self.wakers.into_iter().for_each(Waker::wake);
    }
}

impl LastAnswer {
    fn refuses(&self) -> bool {
        !self.decision.allowed()
    }

    /// When these further tokens can have passed, at the earliest; `None`: never.
    fn due(&self, tokens: &Tokens) -> Option<Instant> {
        let exact = self.cost == *tokens;
        let costs = self.cost.costs().zip(tokens.costs());
        let after = self.terms.iter().zip(costs).enumerate().map(|(place, (quotas, costs))| {
            let (cost, tokens) = costs;
            // A limit without a decision is no reason to wait.
            let Some(of) = self.decision.at(place) else { return 0 };
            // Fewer tokens may pass before.
            let retry_at = of.retry_at_ms().filter(|_| cost <= tokens);
            let at = match retry_at {
                Some(retry_at) if exact => retry_at,
                _ => of.earliest_ms(quotas, tokens).max(retry_at.unwrap_or(0)),
            };
            // By the limit's own clock: limits that are charged in turns have different ones.
            at.saturating_sub(of.now_ms())
        });
        let after = after.max().unwrap_or(0).max(0);
        self.sent.checked_add(Duration::from_millis(after as u64))
    }

    /// How long a head that is due delays its charge in favor of other nodes: the older, the less.
    /// So the store's nearest node does not serve all of its line first.
    fn courtesy(&self, age: Duration, max_wait: Duration) -> Duration {
        let window = self.window();
        let most = (window / 16).min(MOST_COURTESY).min(max_wait / 2);
        most.div_f64(1.0 + age.div_duration_f64(window))
    }

    fn window(&self) -> Duration {
        self.decision.usage()[self.decision.governing()].window()
    }

    fn refusal(&self, tokens: &Tokens, now: Instant) -> Decision {
        let later = now.saturating_duration_since(self.sent).as_millis() as i64;
        let ahead = |place| Some((self.terms.get(place)?, tokens.costs().nth(place)?));
        self.decision.refusal_behind(ahead, later)
    }
}

impl Request {
    /// It may have to return its tokens first.
    fn waits(&self) -> bool {
        matches!(self.stage, Stage::Waits | Stage::Returns)
    }

    /// Its cost is no longer a part of [`LineState::requested`].
    fn is_decided(&self) -> bool {
        matches!(self.stage, Stage::Answered | Stage::Refused(_))
    }

    fn is_in_flight(&self) -> bool {
        matches!(self.stage, Stage::Asks { .. } | Stage::Returns)
    }

    fn is_passed(&self, passes: Option<Instant>) -> bool {
        passes.is_some_and(|by| self.next_poll <= by)
    }

    fn answer<'a>(&self, last: &'a Option<LastAnswer>) -> Option<&'a LastAnswer> {
        last.as_ref()
            .filter(|last| Arc::ptr_eq(&last.terms, &self.terms) || last.terms == self.terms)
    }

    /// Returns whether the request has to wait, or its refusal. By an answer of other quotas than
    /// its own it waits if others do.
    fn judge(
        &self,
        answer: &LastAnswer,
        tokens: &Tokens,
        waiting: u64,
        visit: &Visit<'_>,
    ) -> Result<bool, Box<Decision>> {
        let due = match answer.terms == self.terms {
            true => answer.due(tokens),
            false if waiting > 0 || answer.refuses() => Some(visit.now + TICK),
            false => Some(visit.now),
        };
        match due {
            Some(due) if due <= visit.now => Ok(false),
            Some(due) if waiting < visit.queue.most && due <= self.deadline + TICK => Ok(true),
            _ => Err(Box::new(answer.refusal(tokens, visit.now))),
        }
    }

    fn wake(&mut self, visit: &mut Visit<'_>) {
        self.next_poll = self.next_poll.min(visit.now);
        visit.wakers.extend(self.waker.take());
    }
}

impl LineState {
    pub(super) fn new(cost: &Tokens) -> Self {
        Self {
            requests: BTreeMap::new(),
            arrivals: 0,
            first_waiting: 0,
            first_unasked: 0,
            first_unjudged: 0,
            requested: cost.zeroed(),
            waiting: 0,
            answer: None,
            returned: Instant::now(),
            pause: Duration::ZERO,
        }
    }

    pub(super) fn join(
        &mut self,
        claim: &Claim,
        visit: &Visit<'_>,
    ) -> Result<(u64, bool), Box<Decision>> {
        let Visit { queue, now, .. } = *visit;
        let deadline = claim.arrived.checked_add(queue.max_wait);
        let mut request = Request {
            stage: Stage::Waits,
            cost: claim.cost.clone(),
            terms: Arc::clone(&claim.terms),
            arrived: claim.arrived,
            deadline: deadline.unwrap_or(now + Duration::from_secs(1 << 32)),
            next_poll: now,
            has_to_wait: false,
            waker: None,
        };
        self.requested.add(&request.cost);
        if let Some(answer) = self.answer.as_ref().filter(|answer| self.is_reliable(answer, visit))
        {
            match request.judge(answer, &self.requested, self.waiting, visit) {
                Ok(has_to_wait) => request.has_to_wait = has_to_wait,
                Err(refusal) => {
                    self.requested.subtract(&request.cost);
                    return Err(refusal);
                }
            }
        }
        let (number, has_to_wait) = (self.arrivals, request.has_to_wait);
        self.arrivals += 1;
        self.waiting += u64::from(has_to_wait);
        self.requests.insert(number, request);
        Ok((number, has_to_wait))
    }

    /// Also returns when to poll the request again. `changed` are its quotas, if they are others
    /// now.
    pub(super) fn turn(
        &mut self,
        me: u64,
        changed: Option<Terms>,
        waker: Option<&Waker>,
        visit: &mut Visit<'_>,
    ) -> (Option<Turn>, Instant) {
        let now = visit.now;
        let request = find(&mut self.requests, me);
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
        visit.passes = if late { None } else { now.checked_sub(PATIENCE) };
        request.next_poll = now + SIGN_OF_LIFE;
        let times = (request.arrived, request.deadline);
        let turn = match request.stage {
            // A request that has just joined may ask in any case.
            Stage::Waits if waker.is_some() && visit.queue.is_closed() => Some(Turn::Closed),
            Stage::Waits => return self.wait(me, times, visit),
            Stage::Asks { .. } => None,
            Stage::Answered => {
                let is_going = |before: &Request| {
                    matches!(before.stage, Stage::Asks { .. } | Stage::Answered)
                        && !before.is_passed(visit.passes)
                };
                let is_first = !self.requests.range(..me).any(|(_, before)| is_going(before));
                is_first.then_some(Turn::Go)
            }
            Stage::Returns => Some(Turn::GiveBack),
            Stage::Refused(_) => Some(self.end(me, now)),
        };
        (turn, now + SIGN_OF_LIFE)
    }

    /// The further back a request is, the later it checks that those before it are polled.
    fn wait(
        &mut self,
        me: u64,
        (arrived, deadline): (Instant, Instant),
        visit: &mut Visit<'_>,
    ) -> (Option<Turn>, Instant) {
        let now = visit.now;
        self.first_waiting = self.first_waiting.min(me);
        // A newcomer gives those before it their time.
        let passes = visit.passes.filter(|by| arrived <= *by);
        let (first, next_poll) = self.first_waiting(passes).unwrap_or((me, now));
        let last = if now < deadline { deadline } else { deadline + PATIENCE };
        if now >= deadline && (now >= last || !self.is_due_by(deadline, first, visit)) {
            return (Some(self.end(me, now)), now);
        }
        let until = if first != me {
            let rank = match me - first {
                near @ 0..NEAR => self.requests.range(me - near..me).count() as u32,
                // An estimate: numbers have gaps, but counting takes time.
                far => far.min(RANKS) as u32,
            };
            next_poll.max(arrived) + PATIENCE * rank
        } else {
            let (soon, request) = (now + SIGN_OF_LIFE, &self.requests[&me]);
            let (in_flight, tokens) = self.in_flight(request, visit);
            match self.due(request, in_flight, &tokens, visit) {
                Some(due) if due <= now && in_flight < MAX_CHARGES => {
                    return (Some(Turn::Ask), soon.min(last));
                }
                Some(due) if due <= now => soon,
                due => {
                    self.judge_newcomers(visit);
                    if !self.requests[&me].waits() {
                        return (Some(self.end(me, now)), now);
                    }
                    let due = due.unwrap_or(deadline);
                    // Those in flight may not be polled any more.
                    if in_flight > 0 { due.min(soon) } else { due }
                }
            }
        };
        let until = until.min(last).max(now + TICK);
        find(&mut self.requests, me).next_poll = until;
        (None, until)
    }

    /// By the tokens in flight with the request's own. `None`: never.
    fn due(
        &self,
        request: &Request,
        in_flight: u32,
        tokens: &Tokens,
        visit: &Visit<'_>,
    ) -> Option<Instant> {
        let Visit { queue, now, .. } = *visit;
        let Some(answer) = request.answer(&self.answer) else {
            // Without an answer, as many ask as a new window has room for.
            let asks = in_flight == 0 || tokens.can_be_granted(&request.terms);
            return Some(if asks { request.arrived } else { now + SIGN_OF_LIFE });
        };
        let mut due = answer.due(tokens);
        if in_flight == 0 {
            let is_outdated = answer.sent < self.returned;
            let again = if is_outdated { answer.sent } else { answer.sent + self.pause };
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

    fn is_due_by(&self, deadline: Instant, number: u64, visit: &Visit<'_>) -> bool {
        let request = &self.requests[&number];
        let (_, tokens) = self.in_flight(request, visit);
        let answer = request.answer(&self.answer);
        let due = answer.map_or(Some(request.arrived), |answer| answer.due(&tokens));
        due.is_some_and(|due| due <= deadline + TICK)
    }

    /// Returns `false` if the request was refused since its turn came.
    pub(super) fn ask(&mut self, me: u64, visit: &mut Visit<'_>) -> bool {
        let request = find(&mut self.requests, me);
        if !request.waits() {
            return false;
        }
        request.stage = Stage::Asks { sent: visit.now, called_back: false };
        self.first_unasked = self.first_unasked.max(me + 1);
        self.wake_next(visit);
        true
    }

    pub(super) fn note(
        &mut self,
        me: u64,
        answer: &Result<Decision, StoreError>,
        visit: &mut Visit<'_>,
    ) {
        let request = find(&mut self.requests, me);
        let Stage::Asks { sent, called_back } = request.stage else { return };
        let decision = answer.as_ref().ok();
        let refusal = decision.filter(|decision| !decision.allowed());
        request.stage = match refusal {
            // It can never pass any more: the limits were lowered.
            Some(refusal) if refusal.retry_at_ms().is_none() => {
                Stage::Refused(Box::new(refusal.clone()))
            }
            Some(_) => Stage::Waits,
            None if called_back => Stage::Returns,
            None => Stage::Answered,
        };
        if request.is_decided() {
            self.requested.subtract(&request.cost);
        }
        // What is returned soon is in the counts of its answer, and not in those of the refusal.
        if let Some(decision) = decision.filter(|_| refusal.is_some() || !called_back) {
            let first_pause = FIRST_PAUSE.min(visit.queue.max_wait / 2);
            let before = self.answer.as_ref().filter(|last| refusal.is_some() && last.refuses());
            let (terms, cost) = (Arc::clone(&request.terms), request.cost.clone());
            let took = visit.now.saturating_duration_since(sent);
            let answer = LastAnswer { decision: decision.clone(), terms, cost, sent, took };
            self.pause = match before {
                None => first_pause,
                // Charges in flight at the same time are refused once.
                Some(before) if sent < before.sent + self.pause => self.pause,
                Some(_) => (self.pause * 2).min(answer.window() / LONGEST_PAUSE).max(first_pause),
            };
            self.answer = Some(answer);
        }
        if self.requests[&me].waits() {
            self.wait_again(me, visit);
        }
        if refusal.is_some() {
            self.judge_newcomers(visit);
        }
        self.wake_next(visit);
    }

    pub(super) fn note_returned(&mut self, me: u64, visit: &mut Visit<'_>) {
        find(&mut self.requests, me).stage = Stage::Waits;
        self.returned = visit.now;
        self.wait_again(me, visit);
        self.wake_next(visit);
    }

    /// Calls back those behind it.
    fn wait_again(&mut self, me: u64, visit: &mut Visit<'_>) {
        let request = &self.requests[&me];
        self.first_waiting = self.first_waiting.min(me);
        if !request.has_to_wait {
            self.first_unjudged = self.first_unjudged.min(me);
        }
        if !request.is_in_flight() && self.first_unasked == me + 1 {
            self.first_unasked = me;
        }
        let behind = me + 1..self.first_unasked.max(me + 1);
        for request in self.requests.range_mut(behind).map(|(_, request)| request) {
            match &mut request.stage {
                Stage::Asks { called_back, .. } => *called_back = true,
                stage @ Stage::Answered => {
                    *stage = Stage::Returns;
                    self.requested.add(&request.cost);
                    request.wake(visit);
                }
                _ => {}
            }
        }
    }

    fn judge_newcomers(&mut self, visit: &mut Visit<'_>) {
        let Some(answer) = self.answer.as_ref().filter(|answer| self.is_reliable(answer, visit))
        else {
            return;
        };
        let from = mem::replace(&mut self.first_unjudged, self.arrivals);
        let (mut tokens, mut waiting) = (self.requested.clone(), self.waiting);
        for (_, request) in self.requests.range(from..) {
            waiting -= u64::from(request.has_to_wait);
            if !request.is_decided() {
                tokens.subtract(&request.cost);
            }
        }
        for (number, request) in self.requests.range_mut(from..) {
            if !request.is_decided() {
                tokens.add(&request.cost);
            }
            // If one before it has to wait again, and the line was full, the last one is refused.
            let keeps_place = request.has_to_wait && waiting < visit.queue.most;
            if keeps_place || request.is_decided() || request.is_in_flight() {
                waiting += u64::from(request.has_to_wait);
                continue;
            }
            match request.judge(answer, &tokens, waiting, visit) {
                Ok(false) => self.first_unjudged = self.first_unjudged.min(*number),
                Ok(true) => {
                    request.has_to_wait = true;
                    (self.waiting, waiting) = (self.waiting + 1, waiting + 1);
                }
                Err(refusal) => {
                    request.stage = Stage::Refused(refusal);
                    request.wake(visit);
                    self.requested.subtract(&request.cost);
                    tokens.subtract(&request.cost);
                }
            }
        }
    }

    /// Unless the last answer is a refusal by tokens of requests that return them.
    fn is_reliable(&self, answer: &LastAnswer, visit: &Visit<'_>) -> bool {
        let may_free = |one: &Request| one.is_in_flight() && visit.now < one.next_poll + PATIENCE;
        let (from, until) = (self.first_waiting, self.first_unasked);
        let may_free = || self.requests.range(from..until).any(|(_, one)| may_free(one));
        answer.sent >= self.returned && !(answer.refuses() && from < until && may_free())
    }

    pub(super) fn leave(&mut self, me: u64, visit: &mut Visit<'_>) {
        let Some(request) = self.requests.remove(&me) else { return };
        if !request.is_decided() {
            self.requested.subtract(&request.cost);
        }
        if request.has_to_wait {
            self.waiting -= 1;
            visit.waited = Some(visit.now.saturating_duration_since(request.arrived));
        }
        // If it waited behind others, it is still their turn.
        if me <= self.first_waiting || !matches!(request.stage, Stage::Waits) {
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
        let mut going = self.requests.range_mut(..self.first_unasked).map(|(_, request)| request);
        let answered = going.find(|request| matches!(request.stage, Stage::Answered));
        answered.into_iter().for_each(|request| request.wake(visit));
        if let Some((first, _)) = self.first_waiting(None) {
            let waiting = self.requests.range_mut(first..).map(|(_, request)| request);
            waiting.filter(|one| one.waits()).take(2).for_each(|one| one.wake(visit));
        }
    }

    /// Passes those that are not polled; they keep their places.
    fn first_waiting(&mut self, passes: Option<Instant>) -> Option<(u64, Instant)> {
        let may_ask = |one: &Request| one.waits() && !one.is_passed(passes);
        // A range takes longer.
        let known = self.requests.get_key_value(&self.first_waiting);
        let known = known.filter(|(_, one)| may_ask(one));
        let all = || self.requests.range(self.first_waiting..);
        let first = known.or_else(|| all().find(|(_, one)| may_ask(one)));
        let first = first.map(|(number, one)| (*number, one.next_poll));
        self.first_waiting = first.map_or(self.arrivals, |(number, _)| number);
        first
    }

    /// Also returns their tokens, with those of a request behind them. Requests that are not polled
    /// don't count: their answers may never be received.
    fn in_flight(&self, behind: &Request, visit: &Visit<'_>) -> (u32, Tokens) {
        let mut in_flight = (0, behind.cost.clone());
        let asked = self.requests.range(..self.first_unasked).map(|(_, request)| request);
        for one in asked.filter(|one| one.is_in_flight() && !one.is_passed(visit.passes)) {
            in_flight.0 += 1;
            in_flight.1.add(&one.cost);
        }
        in_flight
    }

    fn end(&mut self, me: u64, now: Instant) -> Turn {
        if let Stage::Refused(refusal) = &self.requests[&me].stage {
            return Turn::Refused(refusal.clone());
        }
        let Some(answer) = &self.answer else { return Turn::Unanswered };
        let mut tokens = self.requested.zeroed();
        let before = self.requests.range(..=me).map(|(_, request)| request);
        before.filter(|request| !request.is_decided()).for_each(|one| tokens.add(&one.cost));
        Turn::Refused(Box::new(answer.refusal(&tokens, now)))
    }
}

fn find(requests: &mut BTreeMap<u64, Request>, number: u64) -> &mut Request {
    requests.get_mut(&number).expect("its place is dropped later")
}
