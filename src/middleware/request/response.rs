//! The response: what it shows of the charge, and the headers that it gets.

use http::Response;

use super::LimitedRequest;
use crate::decision::Decision;
use crate::middleware::cost::TrueCost;
use crate::middleware::headers::is_refused_inside;

impl<J> LimitedRequest<J> {
    /// Returns what was taken of a request that an inner layer has refused, before its response
    /// (S9): [`correct`](Self::correct) sees whether it stays returned.
    pub(crate) fn return_early(&mut self) {
        if let Some(decision) = &self.charged {
            self.settled(decision, 0).detach();
        }
        self.refund_on_drop = false;
    }

    /// Whether a response may show that the charge was wrong: then it has to be
    /// [corrected](Self::correct).
    #[inline]
    pub(crate) fn is_corrected_by<R>(&self, response: &Response<R>) -> bool {
        self.current.shared.options.count_if.is_some()
            || self.shadow
            || !response.extensions().is_empty()
    }

    /// Adds the headers to the response.
    #[inline]
    pub(crate) fn stamp<R>(&mut self, response: &mut Response<R>) {
        if let Some(decision) = &self.charged
            && !self.current.settings.headers.stamp_passed(response, &self.account(), decision)
        {
            // This layer does not count what an inner layer of this crate has refused (S9).
            self.give_back();
        }
        // Whatever happens to the response now, the charge stands.
        self.refund_on_drop = false;
    }

    /// Corrects the charge by what the response shows, and adds the headers.
    #[inline(never)]
    pub(crate) fn correct<R>(&mut self, mut response: Response<R>, returned: bool) -> Response<R> {
        if self.charged.is_none() {
            return response;
        }
        if is_refused_inside(&response) {
            if !returned {
                self.give_back();
            }
            return response;
        }
        // What was taken stays where it can be refunded from, as a closure may panic.
        let cost;
        (response, cost) = self.true_cost(response);
        // What was returned is taken anew: a layer in between has answered otherwise.
        let taken = self.charged.as_ref().filter(|_| returned).map(Decision::granted);
        if let Some(cost) = cost.or(taken)
            && let Some(mut decision) = self.charged.take()
        {
            if returned {
                decision = decision.with_cost(0);
            }
            self.settled(&decision, cost).detach();
            self.charged = Some(decision.with_cost(cost));
        }
        if !self.shadow {
            self.stamp(&mut response);
        }
        self.refund_on_drop = false;
        response
    }

    /// The cost that the response shows, where it is another than was charged; one that is still
    /// adding up is settled when it is known.
    fn true_cost<R>(&self, response: Response<R>) -> (Response<R>, Option<u64>) {
        let (parts, body) = response.into_parts();
        let counts =
            self.current.shared.options.count_if.as_ref().is_none_or(|count_if| count_if(&parts));
        let reported =
            parts.extensions.get::<TrueCost>().filter(|_| self.current.shared.options.settle);
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
}
