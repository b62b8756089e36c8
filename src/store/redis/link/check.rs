//! Tests a connection that was silent for a while, or that has missed a deadline: [`Check`].

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::handle::{Handle, is_alive, probe_for, unless_ended};
use super::renewal::renew;
use super::shards::{Answering, Health, Ranges};
use super::upkeep::{ATTEMPT, LATE, Status, Upkeep};
use crate::observe;

pub(super) struct Check {
    upkeep: Weak<Upkeep>,
    /// A key of the shard to test, in a cluster.
    key: Option<Arc<[u8]>>,
    connection: Option<Box<dyn Handle>>,
    health: Arc<Health>,
    /// Asks which shard that is, if a call has failed.
    slots: Option<Answering<Ranges>>,
    /// Since when the shard is lost, if it is.
    lost_since: u64,
    grace: Duration,
    pub(super) ends_at: u64,
    made: u64,
}

impl Check {
    /// Creates a check. `sent`: when the call was sent that has failed, if one has.
    pub(super) fn new(
        upkeep: &Arc<Upkeep>,
        key: Option<Arc<[u8]>>,
        current: &Status,
        sent: Option<u64>,
    ) -> Self {
        let (grace, now) = (upkeep.grace(), upkeep.source.now());
        let slots = sent.and_then(|_| current.shards.ask_slots());
        let lasts = grace * if slots.is_some() { 2 } else { 1 } + LATE;
        Self {
            upkeep: Arc::downgrade(upkeep),
            health: Arc::clone(current.shards.shard_of(key.as_deref())),
            key,
            connection: current.connection.as_ref().map(|connection| connection.boxed()),
            slots,
            lost_since: sent.unwrap_or(now),
            grace,
            ends_at: now + lasts.as_millis() as u64,
            made: current.made,
        }
    }

    /// Finds the shard that has the key now: slots may have moved, and the library follows
    /// redirections. Returns `false` if another task tests that shard.
    async fn find_shard(&mut self) -> bool {
        let Some(slots) = self.slots.take() else { return true };
        let Ok(Ok(ranges)) = timeout(self.grace, slots).await else { return true };
        let Some(upkeep) = self.upkeep.upgrade() else { return false };
        upkeep.set_slots(ranges);
        if upkeep.current.borrow().is_stale {
            // Over this connection, the call may have gone to any node.
            upkeep.clear_loss(&self.health);
            renew(&upkeep);
            return false;
        }
        let health = upkeep.shard_of(self.key.as_deref());
        if health.node == self.health.node {
            return true;
        }
        upkeep.clear_loss(&self.health);
        self.health = health;
        self.health.mark_suspect(self.lost_since, self.ends_at)
    }

    pub(super) async fn run(mut self) {
        if !self.find_shard().await {
            return;
        }
        let Self { upkeep, key, connection, health, lost_since, grace, made, .. } = self;
        let Some(mut connection) = connection else { return };
        let mut changes = match upkeep.upgrade() {
            Some(upkeep) => upkeep.current.subscribe(),
            None => return,
        };
        observe::store_checked();
        let start = Instant::now();
        let probe = probe_for(key.as_deref());
        let mut alive = pin!(async {
            // A connection that reconnects by itself may do so at the first probe.
            is_alive(&mut connection, &probe).await || is_alive(&mut connection, &probe).await
        });
        let mut answer = timeout(grace, alive.as_mut()).await.ok();
        let mut _work = None;
        if answer != Some(true) {
            let Some(upkeep) = upkeep.upgrade() else { return };
            if upkeep.source.connect.is_none() && answer.is_some() {
                // Let the next call return the real error.
                return upkeep.note_well(&health);
            }
            health.mark_lost_once(lost_since);
            match upkeep.source.connect {
                Some(_) => renew(&upkeep),
                None => _work = upkeep.begin_work(),
            }
            upkeep.note_failed_check(&health);
        }
        if answer.is_none() {
            // The answer may only be late. Wait until the connection is replaced or the store gone.
            let replaced = async {
                while changes.changed().await.is_ok() && changes.borrow_and_update().made == made {}
            };
            answer =
                unless_ended(timeout(ATTEMPT, alive.as_mut()), replaced).await.and_then(Result::ok);
        }
        if let Some(upkeep) = upkeep.upgrade()
            && answer == Some(true)
        {
            upkeep.note_round_trip(start.elapsed());
            upkeep.note_well(&health);
        }
    }
}
