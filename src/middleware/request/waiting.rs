//! A request that waits in the line of its key.

use std::task::{Context, Poll, ready};

use http::request::Parts;

use super::charges::LimitCharge;
use super::{LimitedRequest, Next, Rare};
use crate::limiter::Limiter;
use crate::line::{Claim, Counter, End, Place, Term, Terms, Tokens};
use crate::middleware::reason::Reason;
use crate::middleware::shared::Current;
use crate::quota::Quotas;

impl<J> LimitedRequest<J> {
    /// Puts the request in the line of its key, or of its combination of keys.
    #[inline(never)]
    pub(super) fn join_line(&mut self, parts: &Parts, cost: u64) -> Next {
        let Some(queue) = &self.current.shared.queue else { return Next::Call };
        match Place::join(queue, self.claim(cost)) {
            Ok(place) => {
                self.rare().place = Some(place);
                match self.poll_charge(parts, None) {
                    Poll::Ready(next) => next,
                    Poll::Pending => Next::Charge,
                }
            }
            Err(refusal) => Next::Refuse(Reason::RateLimited(refusal)),
        }
    }

    /// Returns the request's claim. `cost` is the cost for the only limit.
    fn claim(&self, cost: u64) -> Claim {
        let terms = self.terms_now();
        let Some(charges) = self.limit_charges() else {
            let scope = self.shared().limiter.scope().id();
            let counters = [Counter { limit: 0, scope, key: self.key.clone() }].into();
            return Claim {
                counters,
                terms,
                own: self.has_own_quotas(),
                cost: Tokens::One(cost.into()),
            };
        };
        let counter = |charge: &LimitCharge| Counter {
            limit: charge.limit,
            scope: self.limiter_of(charge.limit).scope().id(),
            key: charge.key.clone(),
        };
        let costs: Vec<_> = charges.enforced.iter().map(|charge| charge.cost).collect();
        Claim {
            counters: charges.enforced.iter().map(counter).collect(),
            terms,
            own: charges.enforced.iter().any(|charge| charge.quotas.is_some()),
            cost: Tokens::of(&costs),
        }
    }

    /// Is ready with `None` when the request is the head of its line, and with the next step if its
    /// wait ended otherwise.
    pub(crate) fn poll_turn(&mut self, parts: &Parts, cx: &mut Context<'_>) -> Poll<Option<Next>> {
        let changed = self.changed_terms();
        let Some(place) = self.place() else { return Poll::Ready(Some(Next::Call)) };
        match ready!(place.poll_turn(changed, cx)) {
            Ok(()) => Poll::Ready(None),
            Err(end) => Poll::Ready(Some(self.end_wait(parts, end))),
        }
    }

    /// Charges the head of the line, once the service is ready.
    pub(crate) fn poll_charge(
        &mut self,
        parts: &Parts,
        cx: Option<&mut Context<'_>>,
    ) -> Poll<Next> {
        let changed = self.changed_terms();
        let Some(place) = self.place() else { return Poll::Ready(Next::Call) };
        Poll::Ready(match ready!(place.poll_charge(changed, cx)) {
            Ok(decision) => {
                self.renew();
                self.decide(parts, Ok(decision))
            }
            Err(end) => self.end_wait(parts, end),
        })
    }

    fn end_wait(&mut self, parts: &Parts, end: End) -> Next {
        match end {
            End::LetGo => Next::Wait,
            End::Refused(refusal) => {
                // The refusal is reported by the quotas that it was decided by.
                self.renew();
                Next::Refuse(Reason::RateLimited(refusal))
            }
            End::Failed(error) => self.decide(parts, Err(error)),
            End::Unanswered => Next::Refuse(Reason::StoreFailed),
            End::Closed => Next::Refuse(Reason::QueueClosed),
        }
    }

    /// Returns the quotas in force, if they have changed since the request arrived.
    fn changed_terms(&self) -> Option<Terms> {
        (!self.current.is_current_now(self.shared())).then(|| self.terms_now())
    }

    fn terms_now(&self) -> Terms {
        let term = |limiter: &Limiter, own: Option<&Quotas>| Term {
            name: limiter.scope().shared_name().clone(),
            quotas: own.copied().unwrap_or_else(|| limiter.quotas()),
        };
        match self.limit_charges() {
            None => [term(&self.current.shared.limiter, self.own_quotas())].into(),
            Some(charges) => {
                let of = |charge: &LimitCharge| {
                    term(self.limiter_of(charge.limit), charge.quotas.as_ref())
                };
                charges.enforced.iter().map(of).collect()
            }
        }
    }

    /// Replaces the settings if they have changed while the request waited.
    fn renew(&mut self) {
        let shared = &self.current.shared;
        if !self.current.is_current_now(shared) {
            self.current = Current::new(shared);
        }
    }

    /// Leaves the line, so that the next request becomes its head.
    #[inline]
    pub(crate) fn leave_line(&mut self) {
        #[inline(never)]
        fn leave(rare: &mut Rare) {
            rare.place = None;
        }
        if let Some(rare) = &mut self.rare {
            leave(rare);
        }
    }

    fn place(&mut self) -> Option<&mut Place> {
        self.rare.as_mut()?.place.as_mut()
    }
}
