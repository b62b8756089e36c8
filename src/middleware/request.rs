//! A request on its way through the limits, from its keys to the headers of its response:
//! [`LimitedRequest`].
//!
//! ```text
//! start ──> lines ──> charge ──────────────> answer ──> call, or refuse
//!           keys      the store, in the      report     the response may `correct` the charge,
//!           plans     queue when it is due              and gets the headers
//!           costs
//! ```
//!
//! - A *line* is the request's charge of one limit: its key, its cost, and its plan's quotas. A
//!   limit in shadow mode whose key is missing, and one whose plan is unlimited, have none.
//! - The lines of limits that can refuse are charged together, and the request waits for that.
//!   *Aside* of these, limits in shadow mode are charged one by one once the others have passed,
//!   and the request does not wait. If all limits are in shadow mode, the first one is the charge.

use std::any::TypeId;
use std::fmt::Display;
use std::iter;
use std::mem;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use http::header::CONNECTION;
use http::request::Parts;
use http::{Extensions, HeaderValue, Response, Version};

use super::cost::TrueCost;
use super::rejection::{ProblemJson, Reason, Reject, Rejection};
use super::service::{Current, Settings};
use crate::decision::{Decision, Ruling};
use crate::key::Key;
use crate::limits::{ChargedLine, Limits, Receipt, ReceiptLine, report};
use crate::observe::{self, Event};
use crate::queue::Place;
use crate::quota::Quotas;
#[cfg(feature = "tracing")]
use crate::store::AnyStore;
use crate::store::{Account, Charge, Reply, StoreError};
use crate::sync::Instant;

mod correction;
mod waiting;

use correction::{Actual, AsideCharge, PendingDecision};

pub(crate) struct LimitedRequest {
    pub(super) current: Arc<Current>,
    first: RequestLine,
    decided: Decided,
    /// `true` from the charge to the response: until then the charge may be refunded (S14).
    awaits_response: bool,
    lines: FoundLines,
    /// If the response is to count from when it is handed on (S20).
    called_at: Option<Instant>,
    /// Boxed, since a request of one limit has none of it if the store answers at once.
    rare: Option<Box<Rare>>,
}

#[derive(Default)]
struct RequestLine {
    key: Key,
    cost: u64,
    limit: usize,
    quotas: Option<Box<Quotas>>,
}

#[derive(Default)]
struct Rare {
    others: Vec<RequestLine>,
    /// Limits in shadow mode beside these.
    aside: Vec<(RequestLine, AsideCharge)>,
    /// A charge in flight.
    in_flight: Option<PendingDecision>,
    /// Boxed, since it is taken for each look.
    queued: Option<Box<Place>>,
}

pub(crate) enum Next {
    Call,
    Refuse,
    /// Poll again when it is woken.
    Wait,
    /// Poll again once the service is ready: the request is charged, or called, then.
    AwaitService,
}

/// Kept here from where it is made, since moving a decision is measurable.
enum Decided {
    Not,
    Charged(Decision),
    Refused(Reason),
}

#[derive(Clone, Copy, PartialEq)]
enum FoundLines {
    None,
    /// All are in shadow mode: the first line is the charge.
    Shadow,
    Enforced,
}

impl LimitedRequest {
    #[inline]
    pub(crate) fn new(current: Arc<Current>) -> Self {
        Self {
            current,
            first: RequestLine::default(),
            decided: Decided::Not,
            awaits_response: false,
            lines: FoundLines::None,
            called_at: None,
            rare: None,
        }
    }

    #[inline]
    pub(crate) fn start(&mut self, parts: &Parts) -> Next {
        if self.current.options.skip.iter().any(|skip| skip(parts)) {
            return Next::Call;
        }
        match find_line(&self.current.settings[0], parts, &mut self.first) {
            Ok(lines) => self.lines = lines,
            Err(reason) => return self.refuse(reason),
        }
        for limit in 1..self.current.settings.len() {
            if let Err(reason) = self.find_other(limit, parts) {
                return self.refuse(reason);
            }
        }
        self.begin(parts, None)
    }

    #[inline(always)]
    fn refuse(&mut self, reason: Reason) -> Next {
        self.decided = Decided::Refused(reason);
        Next::Refuse
    }

    /// The request may have waited in the queue since it `arrived`.
    #[inline(always)]
    fn begin(&mut self, parts: &Parts, arrived: Option<Instant>) -> Next {
        match self.lines {
            FoundLines::None => Next::Call,
            FoundLines::Enforced if self.current.options.queue.is_some() && self.may_wait() => {
                self.join_queue(parts, arrived)
            }
            _ => self.charge(parts),
        }
    }

    /// For a request that has waited, some of whose limits were lifted or are in shadow mode by now.
    fn restart(&mut self, parts: &Parts, arrived: Instant, cx: Option<&mut Context<'_>>) -> Next {
        let Rare { others, aside, .. } = mem::take(self.rare());
        let first = mem::take(&mut self.first);
        let before = iter::once(first).chain(others).map(|line| (line, false));
        let aside = aside.into_iter().map(|(line, _)| (line, true));
        self.lines = FoundLines::None;
        for (line, is_aside) in before.chain(aside) {
            if self.is_lifted(&line) {
                continue;
            }
            let is_shadow = is_aside || self.settings_of(&line).limiter.live.is_shadow();
            self.add(line, if is_shadow { FoundLines::Shadow } else { FoundLines::Enforced });
        }
        match self.begin(parts, Some(arrived)) {
            // Something else will wake it.
            Next::Wait if cx.is_some() => self.poll(parts, true, cx),
            next => next,
        }
    }

    #[inline(never)]
    fn find_other(&mut self, limit: usize, parts: &Parts) -> Result<(), Reason> {
        let mut line = RequestLine { limit, ..RequestLine::default() };
        match find_line(&self.current.settings[limit], parts, &mut line) {
            Ok(FoundLines::None) => {}
            Ok(found) => self.add(line, found),
            Err(reason) => {
                // The limit that refuses.
                self.first = line;
                return Err(reason);
            }
        }
        Ok(())
    }

    fn add(&mut self, line: RequestLine, is: FoundLines) {
        match (self.lines, is) {
            (FoundLines::None, _) => self.first = line,
            (_, FoundLines::Shadow) => {
                return self.rare().aside.push((line, AsideCharge::default()));
            }
            (FoundLines::Shadow, _) => {
                let shadow = mem::replace(&mut self.first, line);
                self.rare().aside.insert(0, (shadow, AsideCharge::default()));
            }
            _ => self.rare().others.push(line),
        }
        self.lines = is;
    }

    #[inline(always)]
    fn charge(&mut self, parts: &Parts) -> Next {
        match self.rule() {
            Ok(ruling) if ruling.passed() => {
                let decision = self.decision(ruling).with_shadow(self.is_shadow());
                self.decided = Decided::Charged(decision);
                self.pass_charged(parts)
            }
            Ok(ruling) if !self.is_shadow() => {
                self.refuse(Reason::RateLimited(self.decision(ruling)))
            }
            Ok(ruling) => self.take_answer(parts, Ok(self.decision(ruling))),
            Err(reply) => match reply.into_now() {
                Ok(answer) => self.take_answer(parts, answer),
                Err(later) => {
                    // For a request that is dropped while the store decides (S14).
                    let refunds = self.current.options.refund_dropped;
                    let refund = refunds.then(|| self.refundable());
                    self.rare().in_flight = Some(PendingDecision::new(later, refund));
                    Next::Wait
                }
            },
        }
    }

    #[inline(always)]
    fn rule(&self) -> Result<Ruling, Reply<Decision>> {
        let others = match self.others() {
            // To collect nothing is measurable, here and below.
            [] => Vec::new(),
            others => others.iter().map(|line| (self.account(line), line.cost)).collect(),
        };
        let charge = Charge::of_lines((self.account(&self.first), self.first.cost), &others);
        self.current.settings[0].limiter.store.rule(charge)
    }

    fn send(&self) -> Reply<Decision> {
        self.rule().map_or_else(|reply| reply, |ruling| Reply::now(self.decision(ruling)))
    }

    #[inline(always)]
    fn decision(&self, ruling: Ruling) -> Decision {
        ruling.into_decision(self.account(&self.first).label())
    }

    fn take_answer(&mut self, parts: &Parts, answer: Result<Decision, StoreError>) -> Next {
        let shadow = self.is_shadow();
        match answer.map(|decision| decision.with_shadow(shadow)) {
            Ok(decision) if decision.is_allowed() => {
                self.decided = Decided::Charged(decision);
                self.pass_charged(parts)
            }
            Ok(decision) if shadow => {
                self.awaits_response = true;
                self.charge_aside(parts);
                self.report(parts, &decision);
                Next::Call
            }
            Ok(decision) => self.refuse(Reason::RateLimited(decision)),
            // Without an answer there is no standing to report (S23).
            Err(error) if error.allows() || shadow => self.fail_open(parts),
            Err(error) => {
                if !error.denies() {
                    observe::mistake(&format_args!(
                        "{error}: requests are refused with 503, since this limit's store has no \
                         policy. Write .store(Remote::around(..)), which counts in memory meanwhile"
                    ));
                }
                self.refuse(Reason::StoreFailed)
            }
        }
    }

    #[inline(always)]
    fn pass_charged(&mut self, parts: &Parts) -> Next {
        // Before hooks, which may panic.
        self.awaits_response = true;
        if self.rare.is_some() {
            self.charge_aside(parts);
        }
        if let Some(decision) = self.charged() {
            self.report(parts, decision);
        }
        Next::Call
    }

    #[cold]
    fn fail_open(&mut self, parts: &Parts) -> Next {
        let observed = self.lines().map(|line| self.settings_of(line).limiter.scope.observe());
        observed.for_each(|of| of.event(Event::FailedOpen, 1));
        // The store of limits aside may be well.
        self.pass_charged(parts)
    }

    #[inline]
    pub(crate) fn prepare_call(&mut self, extensions: &mut Extensions) {
        let current = &self.current;
        if current.options.headers.are_for_each() {
            self.called_at = Some(Instant::now());
        }
        if current.options.expose_decision {
            self.charged().map(|decision| extensions.insert(decision.clone()));
        }
        if current.marks() {
            self.mark(extensions);
        }
    }

    #[cold]
    fn mark(&self, extensions: &mut Extensions) {
        #[cfg(feature = "tracing")]
        self.log_first();
        if self.charged().is_some() {
            let limiter = &self.settings_of(&self.first).limiter;
            self.current.mark(limiter, &self.first.key, extensions);
        }
    }

    /// Logs the first request of a limit: that it does something, and under what.
    #[cfg(feature = "tracing")]
    fn log_first(&self) {
        let lines = || self.lines().chain(self.aside().iter().map(|(line, _)| line));
        for (limit, Settings { limiter, .. }) in self.current.settings.iter().enumerate() {
            if !limiter.live.is_new() {
                continue;
            }
            let line = lines().find(|of| self.lines != FoundLines::None && of.limit == limit);
            let store = match &limiter.store {
                AnyStore::Memory(_) => "memory",
                store if store.is_shared() => "shared",
                _ => "other",
            };
            limiter.scope.observe().first_request(
                line.map(|line| self.quotas_of(line)),
                line.map(|line| line.cost),
                limiter.live.limit.key_type,
                store,
                limiter.live.is_shadow(),
            );
        }
    }

    /// At once, whatever becomes of the response: by the limit whose key is missing, or by all.
    #[inline]
    pub(crate) fn note_refused(&self, parts: &Parts) {
        let Decided::Refused(reason) = &self.decided else { return };
        let (outcome, missing, lines) = match reason {
            Reason::RateLimited(decision) => return self.report(parts, decision),
            Reason::MissingKey(missing) if missing.is_client() => {
                (Event::MissingKey, Some(missing as &dyn Display), 1)
            }
            Reason::MissingKey(_) => (Event::MissingKey, None, 1),
            Reason::StoreFailed => (Event::FailedClosed, None, self.count()),
            Reason::QueueClosed => return,
        };
        for line in self.lines().take(lines) {
            let observed = self.settings_of(line).limiter.scope.observe();
            observed.event(outcome, 1);
            observed.log_refusal(outcome, None, missing);
        }
    }

    /// The response, this `late` after the decision. Over HTTP/1, what is unread would be taken for
    /// the next request.
    #[inline(always)]
    pub(crate) fn make_refusal<R, J: Reject<R>>(
        &mut self,
        reject: &J,
        parts: &Parts,
        late: Duration,
        is_unread: bool,
    ) -> Response<R> {
        if !late.is_zero()
            && let Decided::Refused(Reason::RateLimited(decision)) = &mut self.decided
        {
            decision.pass_time(late);
        }
        let Decided::Refused(reason) = &self.decided else { unreachable!("it was refused") };
        let Settings { limiter, headers, .. } = self.settings_for(reason.decision());
        let (layer_status, name) = (self.current.options.status, limiter.name());
        let why = Rejection { reason, layer_status, name, headers };
        let mut response = reject.reject(parts, &why);
        // The default answer has its headers from the start, which avoids a header map that is only
        // replaced. The type decides: a mark in a closure's response may be that of another limiter.
        match reason.decision().filter(|_| TypeId::of::<J>() == TypeId::of::<ProblemJson>()) {
            Some(decision) => headers.finish_refused(&mut response, decision),
            None => why.stamp(&mut response),
        }
        if is_unread && parts.version < Version::HTTP_2 {
            response.headers_mut().insert(CONNECTION, const { HeaderValue::from_static("close") });
        }
        response
    }

    #[inline]
    pub(crate) fn is_corrected_by<R>(&self, response: &Response<R>) -> bool {
        self.current.options.count_if.is_some()
            || self.is_shadow()
            || !response.extensions().is_empty()
    }

    #[inline]
    pub(crate) fn stamp<R>(&mut self, response: &mut Response<R>) {
        if let Some(decision) = self.charged() {
            let now = || self.current.settings[0].limiter.now();
            self.settings_for(Some(decision)).headers.stamp_passed(
                response,
                decision,
                now,
                self.called_at,
            );
        }
        // The charge stands from here on, even if the response is dropped.
        self.awaits_response = false;
    }

    #[inline(never)]
    pub(crate) fn correct<R>(&mut self, response: Response<R>) -> Response<R> {
        let mut response = response;
        if let Some(cost) = response.extensions_mut().get_mut::<TrueCost>() {
            cost.read_by(&self.current.limits);
        }
        if self.charged().is_none() && self.aside().is_empty() {
            return response;
        }
        // The charge stays until `count_if` has returned: if that panics, dropping the request
        // refunds the charge where that is set.
        let (parts, body) = response.into_parts();
        let count_if = self.current.options.count_if.as_ref();
        let settles = |_: &_| self.current.limits.limiters.iter().any(|of| of.live.limit.settled);
        let cost = parts.extensions.get::<TrueCost>().filter(settles);
        let counts = count_if.is_none_or(|counts| counts(&parts));
        let actual = match (cost, counts) {
            (None, true) => None,
            (None, false) => Some(Actual::nothing()),
            (Some(cost), _) => cost.costs().map(|costs| Actual { costs, counts }),
        };
        let waits = cost.filter(|_| actual.is_none()).cloned();
        let mut response = Response::from_parts(parts, body);
        if let Some(actual) = actual {
            self.correct_by(&actual);
        }
        if !self.is_shadow() {
            self.stamp(&mut response);
        }
        self.awaits_response = false;
        // Last, since until here a closure or a clock of the app may panic, and the request be
        // refunded.
        if let Some(cost) = waits {
            self.settle_at_end(&cost, counts);
        }
        response
    }

    /// Corrects the limits when the body ends.
    fn settle_at_end(&self, cost: &TrueCost, counts: bool) {
        let (charged, limits) = (self.charged().cloned(), self.current.limits.clone());
        let charged = charged.map(|decision| self.receipt(decision));
        let aside: Vec<_> = self.aside().iter().map(|(_, aside)| aside.clone()).collect();
        cost.settle_at_end(move |costs| {
            let actual = Actual { costs: costs.clone(), counts };
            if let Some(charged) = charged {
                actual.correct(&charged, &limits).0.detach();
            }
            aside.iter().for_each(|aside| aside.correct(&actual, &limits));
        });
    }

    #[cold]
    fn charge_aside(&self, parts: &Parts) {
        for (line, aside) in self.aside() {
            let (limiter, account, cost) = self.charged_line(line);
            let reply = limiter.store.charge(Charge::new(account, cost));
            // Copied only if they are counted later.
            let is_seen = limiter.is_watched;
            let (receipt, limiter) = (self.receipt_line(line), limiter.clone());
            let (aside, limits) = (aside.clone(), self.current.limits.clone());
            let note = move |parts: Option<&Parts>, answer: Result<Decision, _>| match answer {
                Ok(decision) => {
                    let decision = decision.with_shadow(true);
                    let account = receipt.account.clone();
                    aside.note(Receipt::new(vec![receipt], decision.clone()), &limits);
                    let line = (&limiter, account.as_account(), cost);
                    report(&decision, 1, |_| line, parts);
                }
                Err(_) => limiter.scope.observe().event(Event::FailedOpen, 1),
            };
            match reply.into_now() {
                Ok(answer) => note(Some(parts), answer),
                Err(later) => {
                    let parts = is_seen.then(|| parts.clone());
                    let noted = Reply::later(async move {
                        note(parts.as_ref(), later.await);
                        Ok(())
                    });
                    noted.detach();
                }
            }
        }
    }

    fn aside(&self) -> &[(RequestLine, AsideCharge)] {
        self.rare.as_ref().map_or(&[], |rare| &rare.aside)
    }

    fn correct_by(&mut self, actual: &Actual) {
        // Once, also if an app's clock panics after it: another refund would be of this cost, even if
        // it was not taken.
        self.awaits_response = false;
        self.aside().iter().for_each(|(_, aside)| aside.correct(actual, &self.current.limits));
        // Taken before it is corrected: if that panics, it is not made twice.
        if let Decided::Charged(decision) = mem::replace(&mut self.decided, Decided::Not) {
            let (settled, corrected) =
                actual.correct(&self.receipt(decision), &self.current.limits);
            settled.detach();
            self.decided = Decided::Charged(corrected);
        }
    }

    fn refundable(&self) -> (Limits, Vec<ReceiptLine>) {
        let lines = self.lines().map(|line| self.receipt_line(line));
        (self.current.limits.clone(), lines.collect())
    }

    fn receipt(&self, decision: Decision) -> Receipt {
        Receipt::new(self.refundable().1, decision)
    }

    fn receipt_line(&self, line: &RequestLine) -> ReceiptLine {
        ReceiptLine { account: self.account(line).to_owned(), own: line.quotas.is_some() }
    }

    #[inline(always)]
    fn charged(&self) -> Option<&Decision> {
        match &self.decided {
            Decided::Charged(decision) => Some(decision),
            _ => None,
        }
    }

    #[inline]
    fn is_shadow(&self) -> bool {
        self.lines == FoundLines::Shadow
    }

    #[inline(always)]
    fn report(&self, parts: &Parts, decision: &Decision) {
        let line = |place| self.charged_line(self.line(place));
        report(decision, self.count(), line, Some(parts));
        for on_decision in &self.current.options.on_decision {
            on_decision(parts, decision);
        }
    }

    #[inline(always)]
    fn charged_line<'a>(&'a self, line: &'a RequestLine) -> ChargedLine<'a> {
        (&self.settings_of(line).limiter, self.account(line), line.cost)
    }

    #[inline(always)]
    fn lines(&self) -> impl Iterator<Item = &RequestLine> + Clone {
        iter::once(&self.first).chain(self.others())
    }

    #[inline]
    fn count(&self) -> usize {
        1 + self.others().len()
    }

    #[inline]
    fn line(&self, place: usize) -> &RequestLine {
        if place == 0 { &self.first } else { &self.others()[place - 1] }
    }

    #[inline]
    fn others(&self) -> &[RequestLine] {
        self.rare.as_ref().map_or(&[], |rare| &rare.others)
    }

    #[inline]
    fn settings_for(&self, decision: Option<&Decision>) -> &Settings {
        self.settings_of(self.line(decision.map_or(0, Decision::governing_line)))
    }

    #[inline]
    fn settings_of(&self, line: &RequestLine) -> &Settings {
        &self.current.settings[line.limit]
    }

    #[inline]
    fn quotas_of<'a>(&'a self, line: &'a RequestLine) -> &'a Quotas {
        line.quotas.as_deref().unwrap_or(&self.settings_of(line).quotas)
    }

    #[inline]
    fn account<'a>(&'a self, line: &'a RequestLine) -> Account<'a> {
        let scope = &self.settings_of(line).limiter.scope;
        Account::new(scope, self.quotas_of(line), &line.key)
    }

    #[cold]
    fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    #[cold]
    fn abandon(&mut self) {
        if self.awaits_response && self.current.options.refund_dropped {
            self.correct_by(&Actual::nothing());
        }
        let taken = self.rare.take().map(|rare| (rare.in_flight, rare.queued));
        if let Some((Some(mut charge), Some(queued))) = taken {
            // The next one would be refused by its tokens before they are back.
            charge.abandon(queued);
        }
    }
}

#[inline(always)]
fn find_line(
    settings: &Settings,
    parts: &Parts,
    line: &mut RequestLine,
) -> Result<FoundLines, Reason> {
    let live = &settings.limiter.live;
    let shadow = live.is_shadow();
    if let Err(missing) = live.limit.key.extract(parts, &mut line.key) {
        missing.log_mistake();
        if !shadow {
            return Err(Reason::MissingKey(missing));
        }
        settings.limiter.scope.observe().event(Event::ShadowMissingKey, 1);
        return Ok(FoundLines::None);
    }
    if let Some(plan) = &settings.plan
        && let Some(plan) = plan(parts, &line.key)
    {
        match plan.quotas() {
            None => return Ok(FoundLines::None),
            Some(&quotas) => line.quotas = Some(Box::new(quotas)),
        }
    }
    line.cost = live.limit.cost.as_ref().map_or(1, |cost| cost(parts));
    Ok(if shadow { FoundLines::Shadow } else { FoundLines::Enforced })
}

impl Drop for LimitedRequest {
    fn drop(&mut self) {
        if self.awaits_response || self.rare.is_some() {
            self.abandon();
        }
    }
}
