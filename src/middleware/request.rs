//! One request's dealings with the limiter: who pays, what was charged, and how that is corrected
//! when the response, or the end of the request, shows what it was.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::request::Parts;
use http::{Extensions, Response};

use super::cost::TrueCost;
use super::headers;
use super::live::{Live, Policy};
use super::queue::Place;
use super::rejection::{Reason, Reject, Rejection};
use super::service::Shared;
use crate::decision::Decision;
use crate::key::{Key, MissingKey};
use crate::limiter::{Limiter, observe_decision};
use crate::observe::{self, Outcome};
use crate::quota::Quotas;
use crate::store::{Account, Charge, OnStoreFailure, OwnedAccount, Reply, StoreError};

pub(crate) struct Ticket<J> {
    shared: Arc<Shared<J>>,
    policy: Arc<Policy>,
    key: Key,
    /// The quotas of this request, where they are not the layer's.
    quotas: Option<Box<Quotas>>,
    /// What was taken and may still be corrected.
    charged: Option<Decision>,
    /// Whether to give it back if the request is dropped now.
    refund_on_drop: bool,
    shadow: bool,
    /// Among those who may have to wait.
    place: Option<Box<Place>>,
}

/// What the store says.
pub(crate) enum Asked {
    Now(Verdict),
    Later(Undecided),
    /// It is asked when those who came before have had their turn.
    InTurn,
}

/// What becomes of a request.
pub(crate) enum Verdict {
    Pass,
    /// It has a reservation that is due then.
    PassIn(Duration),
    Refuse(Refusal),
}

/// Why a request does not pass.
pub(crate) enum Refusal {
    RateLimited(Decision),
    MissingKey(MissingKey),
    StoreFailed,
    /// It waited, and the queue was closed.
    Closed,
}

impl<J> Ticket<J> {
    #[inline]
    pub(crate) fn new(shared: &Arc<Shared<J>>, policy: &Arc<Policy>) -> Self {
        Self {
            shadow: shared.live.shadow(shared.options.shadow),
            shared: Arc::clone(shared),
            policy: Arc::clone(policy),
            key: Key::default(),
            quotas: None,
            charged: None,
            refund_on_drop: false,
            place: None,
        }
    }

    pub(crate) fn shared(&self) -> &Shared<J> {
        &self.shared
    }

    /// Asks the store.
    #[inline]
    pub(crate) fn ask(&mut self, parts: &Parts) -> Asked {
        let options = &self.shared.options;
        if options.skips(parts) {
            return Asked::Now(Verdict::Pass);
        }
        if let Err(missing) = options.key.extract(parts, &mut self.key) {
            if !missing.is_client() {
                observe::mistake(&missing);
            }
            return Asked::Now(match self.shadow {
                true => self.pass(Outcome::ShadowMissingKey),
                false => Verdict::Refuse(Refusal::MissingKey(missing)),
            });
        }
        if let Some(quota_fn) = &options.quota_fn {
            let quotas = quota_fn(parts, &self.key);
            let queue = options.queue.filter(|_| !self.shadow);
            self.quotas = Some(Box::new(queue.map_or(quotas, |tokens| quotas.reserving(tokens))));
        }
        if options.queue.is_some() && !self.shadow {
            let place = Place::new(&self.shared.live.line, &self.key);
            let behind = place.is_late();
            self.place = Some(Box::new(place));
            if behind {
                return Asked::InTurn;
            }
        }
        match self.shared.limiter.send(self.charge(self.cost(parts))).into_now() {
            Ok(answer) => Asked::Now(self.verdict(parts, answer)),
            Err(later) => Asked::Later(self.undecided(later)),
        }
    }

    fn cost(&self, parts: &Parts) -> u64 {
        self.shared.options.cost_fn.as_ref().map_or(1, |cost_fn| cost_fn(parts))
    }

    fn charge(&self, cost: u64) -> Charge<'_> {
        let charge = Charge::new(self.account(), cost);
        if self.place.is_some() { charge.reserving() } else { charge }
    }

    /// Whether what it has waited for is over.
    pub(crate) fn is_late(&self) -> bool {
        self.place.as_ref().is_some_and(|place| place.is_late())
    }

    /// Ready when it may ask anew: those who were late before it go first.
    pub(crate) fn turn(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.place.as_mut().map_or(Poll::Ready(()), |place| place.turn(cx))
    }

    /// Takes tokens of another window than the one that is over.
    pub(crate) fn ask_again(&mut self, parts: &Parts) -> Result<Verdict, Undecided> {
        // It may panic: what was taken is given back then, too.
        let cost = self.cost(parts);
        // Other quotas may have windows that still run.
        let returned = self.charged.take().map(|decision| self.settled(&decision, 0));
        if self.quotas.is_none() {
            self.policy = self.shared.policy();
        }
        self.place.iter_mut().for_each(|place| place.asks());
        let limiter = &self.shared.limiter;
        match returned.and_then(|reply| reply.into_now().err()) {
            None => match limiter.send(self.charge(cost)).into_now() {
                Ok(answer) => Ok(self.verdict(parts, answer)),
                Err(later) => Err(self.undecided(later)),
            },
            Some(returned) => {
                let (limiter, charge) = (limiter.clone(), self.charge(cost).to_owned());
                let withdrawn = Arc::new(AtomicBool::new(false));
                let is_withdrawn = Arc::clone(&withdrawn);
                let reply = Reply::later(async move {
                    let _counted_if_it_fails = returned.await;
                    if is_withdrawn.load(Ordering::Acquire) {
                        return Err(StoreError::new("nobody waits for the answer any more"));
                    }
                    limiter.send(charge.as_charge()).await
                });
                let mut undecided = self.undecided(reply);
                undecided.withdrawn = Some(withdrawn);
                Err(undecided)
            }
        }
    }

    /// A question under way, which is undone if the request is dropped, where that is promised.
    fn undecided(&self, reply: Reply<Decision>) -> Undecided {
        let always = self.shared.options.refund_dropped;
        let undo = (always || self.place.is_some())
            .then(|| Box::new(Undo { correction: self.correction(), always }));
        Undecided { reply: Some(reply), sent: false, withdrawn: None, undo }
    }

    #[inline]
    pub(crate) fn verdict(
        &mut self,
        parts: &Parts,
        answer: Result<Decision, StoreError>,
    ) -> Verdict {
        let options = &self.shared.options;
        let decision = match answer {
            Ok(decision) => decision,
            // A standing that is unknown is not reported (S23).
            Err(_) if options.on_store_failure == OnStoreFailure::Deny && !self.shadow => {
                return Verdict::Refuse(Refusal::StoreFailed);
            }
            Err(_) => return self.pass(Outcome::FailedOpen),
        };
        if !decision.allowed() {
            return match self.shadow {
                true => self.pass_in_shadow(parts, decision),
                false => Verdict::Refuse(Refusal::RateLimited(decision)),
            };
        }
        if self.place.is_some() || decision.ready_at_ms().is_some() {
            return self.verdict_in_line(parts, decision);
        }
        // Before anything that may panic.
        self.refund_on_drop = options.refund_dropped;
        self.charged = Some(decision);
        self.charged.iter().for_each(|decision| self.decided(parts, decision));
        Verdict::Pass
    }

    /// One who may have to wait has got tokens.
    #[inline(never)]
    fn verdict_in_line(&mut self, parts: &Parts, decision: Decision) -> Verdict {
        let options = &self.shared.options;
        let waited = self.place.as_ref().and_then(|place| place.has_waited());
        let wait = decision.ready_after();
        if wait > options.max_wait.saturating_sub(waited.unwrap_or_default()) {
            self.settle(&decision, 0);
            return Verdict::Refuse(Refusal::RateLimited(decision.into_refusal()));
        }
        // Before anything that may panic.
        self.refund_on_drop = !wait.is_zero() || options.refund_dropped;
        self.charged = Some(decision);
        // One that was told that it waits is told again only if it is refused.
        if self.place.as_ref().is_none_or(|place| !place.reserved) {
            self.charged.iter().for_each(|decision| self.decided(parts, decision));
        }
        if wait.is_zero() {
            return Verdict::Pass;
        }
        if let (Some(place), Some(decision)) = (&mut self.place, &self.charged) {
            place.hold(good_for(decision));
            place.reserved = true;
        }
        Verdict::PassIn(wait)
    }

    #[inline(never)]
    fn leave_line(&mut self) {
        self.place = None;
    }

    /// The service is called: what was reserved is used now.
    #[inline]
    pub(crate) fn calling(&mut self, extensions: &mut Extensions) {
        if self.place.is_some() {
            self.leave_line();
        }
        let options = &self.shared.options;
        self.refund_on_drop = options.refund_dropped;
        if options.expose_decision {
            self.charged.clone().map(|decision| extensions.insert(decision));
        }
    }

    /// Whether a response may show that the charge was wrong: then it has to be
    /// [corrected](Self::correct).
    #[inline]
    pub(crate) fn is_corrected_by<R>(&self, response: &Response<R>) -> bool {
        self.shared.options.count_if.is_some() || self.shadow || !response.extensions().is_empty()
    }

    /// Tells the standing.
    #[inline]
    pub(crate) fn tell<R>(&mut self, response: &mut Response<R>) {
        if let Some(decision) = &self.charged
            && !headers::stamp_passed(response, &self.account(), decision, &self.policy.fixed)
        {
            // Whom an inner layer of ours refused, this one has not counted (S9).
            self.give_back();
        }
        // Whatever becomes of the response now, the charge stands.
        self.refund_on_drop = false;
    }

    /// Corrects the charge by what the response shows, and tells the standing.
    #[inline(never)]
    pub(crate) fn correct<R>(&mut self, mut response: Response<R>) -> Response<R> {
        if self.charged.is_none() {
            return response;
        }
        if headers::is_refused_inside(&response) {
            self.give_back();
            return response;
        }
        // What was taken stays where it is given back from, as a closure may panic.
        let cost;
        (response, cost) = self.true_cost(response);
        if let Some(cost) = cost
            && let Some(decision) = self.charged.take()
        {
            self.settle(&decision, cost);
            self.charged = Some(decision.with_cost(cost));
        }
        if !self.shadow {
            self.tell(&mut response);
        }
        self.refund_on_drop = false;
        response
    }

    /// The cost that the response shows, where it is another than was charged; one that is still
    /// adding up is settled when it is known.
    fn true_cost<R>(&self, response: Response<R>) -> (Response<R>, Option<u64>) {
        let (parts, body) = response.into_parts();
        let counts = self.shared.options.count_if.as_ref().is_none_or(|count_if| count_if(&parts));
        let reported = parts.extensions.get::<TrueCost>().filter(|_| self.shared.options.settle);
        let cost = match (reported, &self.charged) {
            _ if !counts => Some(0),
            (Some(cost), Some(decision)) => cost.known().or_else(|| {
                let (correction, decision) = (self.correction(), decision.clone());
                cost.settle_at_end(move |cost| correction.make(&decision, cost).detach());
                None
            }),
            _ => None,
        };
        (Response::from_parts(parts, body), cost)
    }

    /// Returns what was taken, if anything was.
    pub(crate) fn give_back(&mut self) {
        if let Some(decision) = self.charged.take() {
            self.settle(&decision, 0);
        }
    }

    /// Corrects what was charged, without waiting for that (S14).
    fn settle(&self, decision: &Decision, actual: u64) {
        self.settled(decision, actual).detach();
    }

    fn settled(&self, decision: &Decision, actual: u64) -> Reply<()> {
        match self.shared.live.is_current(&self.policy) {
            true => self.shared.limiter.settle_account(self.account(), decision, actual),
            false => self.correction().make(decision, actual),
        }
    }

    /// How it is corrected later.
    fn correction(&self) -> Correction {
        Correction {
            limiter: self.shared.limiter.clone(),
            account: self.account().to_owned(),
            live: self.quotas.is_none().then(|| Arc::clone(&self.shared.live)),
        }
    }

    /// Tells the operator of a decision, and whoever else wants to know. It is where it stays, by
    /// then: a decision is large enough for each move of it to be felt.
    #[inline(always)]
    fn decided(&self, parts: &Parts, decision: &Decision) {
        observe_decision(self.shared.limiter.scope(), self.quotas(), decision, self.shadow);
        if let Some(on_decision) = &self.shared.options.on_decision {
            on_decision(parts, decision);
        }
    }

    #[inline]
    fn pass_in_shadow(&self, parts: &Parts, decision: Decision) -> Verdict {
        self.decided(parts, &decision);
        Verdict::Pass
    }

    /// Passes it without a decision.
    #[inline]
    fn pass(&self, outcome: Outcome) -> Verdict {
        self.shared.limiter.scope().observe().answered(outcome);
        Verdict::Pass
    }

    /// A request does not pass.
    #[inline]
    pub(crate) fn refused(&mut self, parts: &Parts, refusal: &Refusal) {
        if self.place.is_some() {
            self.leave_line();
        }
        let observed = self.shared.limiter.scope().observe();
        match refusal {
            Refusal::RateLimited(decision) => self.decided(parts, decision),
            Refusal::MissingKey(_) => observed.answered(Outcome::MissingKey),
            Refusal::StoreFailed => observed.answered(Outcome::FailedClosed),
            // It was told when it got its reservation.
            Refusal::Closed => {}
        }
    }

    fn quotas(&self) -> &Quotas {
        self.quotas.as_deref().unwrap_or(&self.policy.quotas)
    }

    fn account(&self) -> Account<'_> {
        Account::new(self.shared.limiter.scope(), self.quotas(), &self.key)
    }

    /// The response to a request that does not pass.
    pub(crate) fn refuse<R>(&self, refusal: &Refusal) -> Response<R>
    where
        J: Reject<R>,
    {
        let reason = match refusal {
            Refusal::RateLimited(decision) => Reason::RateLimited(decision),
            Refusal::MissingKey(missing) => Reason::MissingKey(missing),
            Refusal::StoreFailed => Reason::StoreFailed,
            Refusal::Closed => Reason::QueueClosed,
        };
        let why = Rejection::new(
            reason,
            self.shared.options.status,
            self.account(),
            Some(&self.policy.body).filter(|_| self.quotas.is_none()),
            &self.policy.fixed,
        );
        let mut response = self.shared.reject.reject(&why);
        match reason {
            Reason::RateLimited(decision) => {
                let fixed = &self.policy.fixed;
                headers::stamp_refusal(&mut response, &self.account(), decision, fixed);
            }
            Reason::MissingKey(_) => headers::stamp_failure(&mut response, false),
            _ => headers::stamp_failure(&mut response, true),
        }
        response
    }
}

impl<J> Drop for Ticket<J> {
    fn drop(&mut self) {
        if self.refund_on_drop {
            self.give_back();
        }
    }
}

/// For how long after it was decided a reservation is that of a window which is not over.
fn good_for(decision: &Decision) -> Duration {
    // One less: it was a fraction of a millisecond later than the store says.
    let left = decision.good_until_ms().saturating_sub(decision.now_ms()).saturating_sub(1);
    Duration::from_millis(left.max(0) as u64)
}

/// Corrects a charge after its request has ended.
struct Correction {
    limiter: Limiter,
    account: OwnedAccount,
    /// Whose limits hold, if they were changed meanwhile; not where the request had its own.
    live: Option<Arc<Live>>,
}

impl Correction {
    fn make(self, decision: &Decision, actual: u64) -> Reply<()> {
        let account = match self.live {
            Some(live) => self.account.updated(&live.quotas()),
            None => self.account,
        };
        self.limiter.settle_account(account.as_account(), decision, actual)
    }
}

/// A question that the store has not answered yet. If nobody waits for the answer any more, one that
/// was not sent is withdrawn, and the tokens of one that was are given back (S14).
pub(crate) struct Undecided {
    reply: Option<Reply<Decision>>,
    sent: bool,
    /// Told to a question that is sent only when other tokens were returned.
    withdrawn: Option<Arc<AtomicBool>>,
    undo: Option<Box<Undo>>,
}

struct Undo {
    correction: Correction,
    /// Also what need not have waited.
    always: bool,
}

impl Undecided {
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Decision, StoreError>> {
        self.sent = true;
        let reply = self.reply.as_mut().expect("polled after it was done");
        let answer = ready!(Pin::new(reply).poll(cx));
        self.reply = None;
        Poll::Ready(answer)
    }
}

impl Drop for Undecided {
    fn drop(&mut self) {
        let Some(reply) = self.reply.take().filter(|_| self.sent) else { return };
        self.withdrawn.iter().for_each(|withdrawn| withdrawn.store(true, Ordering::Release));
        let Some(Undo { correction, always }) = self.undo.take().map(|undo| *undo) else { return };
        let undone = Reply::later(async move {
            let decision = reply.await?;
            if decision.allowed() && (always || decision.ready_at_ms().is_some()) {
                correction.make(&decision, 0).await?;
            }
            Ok(())
        });
        undone.detach();
    }
}
