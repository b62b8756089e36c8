//! Decisions that are watched: refusals that are counted by key, and charges that reach a share of
//! the limit.

use std::borrow::Cow;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Limiter;
use super::refused::Tracker;
use crate::decision::Decision;
use crate::key::Key;
use crate::quota::Quotas;
use crate::store::{Account, Charge, Reply, StoreError};

impl Limiter {
    /// Counts a refusal, if these are counted, and warns of the share that a charge has reached.
    #[inline(always)]
    pub(crate) fn watch<'a>(
        &self,
        key: &Key,
        quotas: &Quotas,
        decision: &Decision,
        route: impl FnOnce(&Tracker) -> Option<Cow<'a, str>>,
    ) {
        if let Some(tracker) = self.live().tracker()
            && !decision.allowed()
            && let Some(weight) = tracker.weight(decision)
        {
            let route = route(tracker);
            tracker.note(weight, key, quotas, decision, route.as_deref());
        } else if decision.allowed() {
            self.warn(key, quotas, decision);
        }
    }

    /// Warns of the share that a charge has reached.
    #[cold]
    pub(crate) fn warn(&self, key: &Key, quotas: &Quotas, decision: &Decision) {
        self.live().limit().warn(key, quotas, decision, decision.granted());
    }

    /// Warns of the share that tokens beyond a charge have reached. A peek shows where they have
    /// led, in the memory that has counted them if the store failed.
    pub(super) fn warn_after(
        &self,
        taken: Reply<()>,
        account: Account<'_>,
        more: u64,
        is_local: bool,
    ) -> Reply<()> {
        let (this, account) = (self.clone(), account.to_owned());
        let look = move || {
            let peek = Charge::new(account.as_account(), 0).peeking();
            let peek = match is_local {
                true => this.stand_in(peek, StoreError::new("the store failed before")),
                false => this.send(peek),
            };
            peek.map(move |decision| {
                let account = account.as_account();
                let warn =
                    || this.live().limit().warn(account.key(), account.quotas(), &decision, more);
                // No request waits for this: a panic would only keep the corrections of other
                // limits from being made, and in a stream that is dropped end the process.
                let _panicked = catch_unwind(AssertUnwindSafe(warn));
            })
        };
        // The correction is made, even if the store does not answer the peek.
        match taken.into_now() {
            Ok(Ok(())) => look().detach(),
            Ok(Err(error)) => return Reply::failed(error),
            Err(later) => {
                return Reply::later(async move {
                    later.await?;
                    let _ = look().await;
                    Ok(())
                });
            }
        }
        Reply::now(())
    }

    /// Charges, and looks at the decision.
    #[inline]
    pub(super) fn ask_watched(&self, charge: Charge<'_>) -> Reply<Decision> {
        let mut reply = self.ask_by(charge);
        if charge.is_peek() || !self.live().is_watched() {
            return reply;
        }
        let account = charge.account();
        match reply.as_now() {
            Some(Ok(decision)) => self.watch(account.key(), account.quotas(), decision, |_| None),
            Some(Err(_)) => {}
            None => {
                let (this, charge) = (self.clone(), charge.to_owned());
                reply.map_in_place(move |decision| {
                    let account = charge.account().as_account();
                    this.watch(account.key(), account.quotas(), decision, |_| None);
                });
            }
        }
        reply
    }
}
