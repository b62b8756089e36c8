//! Tries a connection that was silent for a while, or that has missed a deadline.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::handle::{Handle, Slots, first, is_alive, probe};
use super::renewal::renew;
use super::shards::Shards;
use super::upkeep::{ATTEMPT, LATE, Status, Upkeep, Work};
use crate::observe;

pub(super) struct Check {
    upkeep: Weak<Upkeep>,
    /// Of the shard to be tried, where there are shards.
    key: Option<Arc<[u8]>>,
    connection: Option<Box<dyn Handle>>,
    shards: Arc<Shards>,
    part: usize,
    /// Answers which shard that is, if a call has failed.
    slots: Option<Slots>,
    /// Since when it is missed, if it is.
    since: u64,
    grace: Duration,
    ends: u64,
    made: u64,
}

impl Check {
    pub(super) fn of(
        upkeep: &Arc<Upkeep>,
        key: Option<Arc<[u8]>>,
        current: &Status,
        part: usize,
    ) -> Self {
        let (grace, now) = (upkeep.grace(), upkeep.now());
        Self {
            upkeep: Arc::downgrade(upkeep),
            key,
            connection: current.connection.as_ref().map(|connection| connection.boxed()),
            shards: Arc::clone(&current.shards),
            part,
            slots: None,
            since: now,
            grace,
            ends: now + (grace + LATE).as_millis() as u64,
            made: current.made,
        }
    }

    /// After a call that was sent at that time, and has failed.
    pub(super) fn after_failure(mut self, current: &Status, sent: u64) -> Self {
        self.slots = current.slots.clone();
        self.since = sent;
        if self.slots.is_some() {
            self.ends += self.grace.as_millis() as u64;
        }
        self
    }

    pub(super) fn ends(&self) -> u64 {
        self.ends
    }

    /// Whether the shard is still the one to be tried. Slots may have moved since the library was
    /// asked for them, and it has followed.
    async fn is_of_key(&mut self) -> bool {
        let Some(slots) = self.slots.take() else { return true };
        let Ok(Ok(ranges)) = timeout(self.grace, slots()).await else { return true };
        let Some(upkeep) = self.upkeep.upgrade() else { return false };
        let shards = upkeep.found(ranges);
        let part = shards.of(self.key.as_deref());
        if shards.node(part) == self.shards.node(self.part) {
            return true;
        }
        upkeep.acquit(&self.shards, self.part);
        (self.shards, self.part) = (shards, part);
        // Or another task tries it.
        self.shards.health(part).suspect(self.since, self.ends)
    }

    pub(super) async fn run(mut self) {
        if !self.is_of_key().await {
            return;
        }
        let Self { upkeep, key, connection, shards, part, since, grace, made, .. } = self;
        let Some(mut connection) = connection else { return };
        let mut changes = match upkeep.upgrade() {
            Some(upkeep) => upkeep.current.subscribe(),
            None => return,
        };
        observe::store_checked();
        let start = Instant::now();
        let probe = probe(key.as_deref());
        let mut alive = pin!(async {
            // What connects by itself may do so at the first one.
            is_alive(&mut connection, &probe).await || is_alive(&mut connection, &probe).await
        });
        let mut answer = timeout(grace, alive.as_mut()).await.ok();
        let mut _work = None;
        if answer != Some(true) {
            let Some(upkeep) = upkeep.upgrade() else { return };
            if upkeep.source.connect.is_none() && answer.is_some() {
                // Calls are to say what is wrong with it.
                return upkeep.well(&shards, part);
            }
            shards.health(part).lose_once(since);
            match upkeep.source.connect {
                Some(_) => renew(&upkeep),
                None => _work = Work::begin(&upkeep),
            }
            upkeep.ill(&shards, part);
        }
        if answer.is_none() {
            // It may only be late. Until there is another one, and as long as there is the store.
            let replaced = async {
                while changes.changed().await.is_ok() && changes.borrow_and_update().made == made {}
            };
            answer = first(timeout(ATTEMPT, alive.as_mut()), replaced).await.and_then(Result::ok);
        }
        if let Some(upkeep) = upkeep.upgrade()
            && answer == Some(true)
        {
            upkeep.took(start.elapsed());
            upkeep.well(&shards, part);
        }
    }
}
