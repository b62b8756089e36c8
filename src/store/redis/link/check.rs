//! Tries a connection that was silent for a while, or that has missed a deadline.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::handle::{Handle, first, is_alive, probe};
use super::renewal::renew;
use super::shards::{Health, Slots};
use super::upkeep::{ATTEMPT, LATE, Status, Upkeep};
use crate::observe;

pub(super) struct Check {
    upkeep: Weak<Upkeep>,
    /// Of the shard to be tried, where there are shards.
    key: Option<Arc<[u8]>>,
    connection: Option<Box<dyn Handle>>,
    health: Arc<Health>,
    /// Answers which shard that is, if a call has failed.
    slots: Option<Slots>,
    /// Since when it is missed, if it is.
    since: u64,
    grace: Duration,
    pub(super) ends: u64,
    made: u64,
}

impl Check {
    /// `sent`: a call that was sent at that time has failed.
    pub(super) fn new(
        upkeep: &Arc<Upkeep>,
        key: Option<Arc<[u8]>>,
        current: &Status,
        sent: Option<u64>,
    ) -> Self {
        let (grace, now) = (upkeep.grace(), upkeep.source.now());
        let slots = sent.and_then(|_| current.shards.slots.clone());
        let lasts = grace * if slots.is_some() { 2 } else { 1 } + LATE;
        Self {
            upkeep: Arc::downgrade(upkeep),
            health: Arc::clone(current.shards.of(key.as_deref())),
            key,
            connection: current.connection.as_ref().map(|connection| connection.boxed()),
            slots,
            since: sent.unwrap_or(now),
            grace,
            ends: now + lasts.as_millis() as u64,
            made: current.made,
        }
    }

    /// Whether the shard is still the one to be tried. Slots may have moved since the library was
    /// asked for them, and it has followed.
    async fn is_of_key(&mut self) -> bool {
        let Some(slots) = self.slots.take() else { return true };
        let Ok(Ok(ranges)) = timeout(self.grace, slots()).await else { return true };
        let Some(upkeep) = self.upkeep.upgrade() else { return false };
        upkeep.found(ranges);
        let health = upkeep.shard(self.key.as_deref());
        if health.node == self.health.node {
            return true;
        }
        upkeep.acquit(&self.health);
        self.health = health;
        // Or another task tries it.
        self.health.suspect(self.since, self.ends)
    }

    pub(super) async fn run(mut self) {
        if !self.is_of_key().await {
            return;
        }
        let Self { upkeep, key, connection, health, since, grace, made, .. } = self;
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
                return upkeep.well(&health);
            }
            health.lose_once(since);
            match upkeep.source.connect {
                Some(_) => renew(&upkeep),
                None => _work = upkeep.begin_work(),
            }
            upkeep.ill(&health);
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
            upkeep.well(&health);
        }
    }
}
