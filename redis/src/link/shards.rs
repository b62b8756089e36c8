//! The parts of a store that fail independently: [`Shards`] of a cluster, each with its [`Health`].
//! Any other store is a single shard.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use redis::RedisResult;

use crate::sync;

/// The first slot of each range by its last one, and the range's node: a hash of its address.
pub(crate) type Ranges = BTreeMap<u16, (u16, u64)>;
pub(crate) type Answering<T> = Pin<Box<dyn Future<Output = RedisResult<T>> + Send>>;
pub(crate) type Slots = Arc<dyn Fn(Vec<u16>) -> Answering<Ranges> + Send + Sync>;

/// Scripts that were missing again until none is expected to be kept.
const FORGOTTEN: u64 = 3;
/// Milliseconds after an answer in which a connection is taken to be open.
const FRESH: u64 = 10;

pub(crate) struct Shards {
    pub(super) ranges: Ranges,
    pub(super) nodes: Vec<Arc<Health>>,
    /// Asks the nodes that have these slots for them: they may move.
    slots: Option<Slots>,
}

/// As seen over one connection. Times are milliseconds of the link's clock.
#[derive(Default)]
pub(crate) struct Health {
    pub(crate) node: u64,
    pub(super) answered_at: AtomicU64,
    /// Of the first call since then, plus 1; 0 if none was sent.
    answer_due: AtomicU64,
    /// Plus 1; 0 if the shard is not lost.
    pub(super) lost_since: AtomicU64,
    /// When the task that tests the shard is given up.
    pub(super) check_ends: AtomicU64,
    /// A call was answered as it should be.
    pub(super) is_proved: AtomicBool,
    pub(super) led_to_replica: AtomicBool,
    /// How often in a row a script was missing that had been sent before.
    missing_scripts: AtomicU64,
    /// When a script was last sent.
    script_sent: AtomicU64,
    probe_key: Mutex<Option<Arc<[u8]>>>,
}

impl Shards {
    pub(crate) fn new(ranges: Ranges, slots: Option<Slots>) -> Self {
        Self { ranges: Ranges::new(), nodes: Vec::new(), slots }.with_slots(ranges, 0)
    }

    pub(crate) fn single() -> Self {
        Self::new(Ranges::new(), None)
    }

    /// The connection leads to all shards.
    pub(crate) fn mark_reachable(&self, now: u64) {
        self.nodes.iter().for_each(|health| health.note_answer(now, false));
    }

    /// Nodes that stay keep their health.
    pub(crate) fn with_slots(&self, ranges: Ranges, now: u64) -> Self {
        let mut nodes = Vec::new();
        // Node 0 is a shard of its own: slots that no node has, or a store that is no cluster.
        for node in ranges.values().map(|(_, node)| *node).chain([0]) {
            if find_node(&nodes, node).is_none() {
                let new =
                    || Arc::new(Health { node, answered_at: now.into(), ..Health::default() });
                nodes.push(find_node(&self.nodes, node).map_or_else(new, Arc::clone));
            }
        }
        Self { ranges, nodes, slots: self.slots.clone() }
    }

    /// The library sends each question to the node that has the slot now. A part of a node's slots
    /// may have moved to a silent one, usually the first ones: so the calls go to both ends of each
    /// node's slots.
    pub(crate) fn ask_slots(&self) -> Option<Answering<Ranges>> {
        let mut ends = BTreeMap::new();
        for (last, (first, node)) in &self.ranges {
            ends.entry(node).or_insert([*first, *last])[1] = *last;
        }
        self.slots.as_ref().map(|ask| ask(ends.into_values().flatten().collect()))
    }

    /// By default the first one.
    pub(crate) fn shard_of(&self, key: Option<&[u8]>) -> &Arc<Health> {
        let node = key
            .filter(|_| self.nodes.len() > 1)
            .map(|key| owner_of(&self.ranges, slot_of(key)).unwrap_or(0));
        node.and_then(|node| find_node(&self.nodes, node)).unwrap_or(&self.nodes[0])
    }

    pub(crate) fn are_well(&self) -> bool {
        self.nodes.iter().all(|health| health.is_well())
    }

    pub(crate) fn is_proved(&self) -> bool {
        self.nodes.iter().any(|health| health.is_proved.load(Relaxed))
    }

    pub(crate) fn led_to_replica(&self) -> bool {
        self.nodes.iter().any(|health| health.led_to_replica.load(Relaxed))
    }

    pub(crate) fn lost_keys(&self) -> Vec<Arc<[u8]>> {
        let lost = self.nodes.iter().filter(|health| !health.is_well());
        lost.filter_map(|health| health.probe_key()).collect()
    }

    /// Those that this connection has not proved.
    pub(crate) fn inherit_losses(&self, before: &Self) {
        for lost in before.nodes.iter().filter(|health| !health.is_well()) {
            let Some(key) = lost.probe_key() else { continue };
            let health = self.shard_of(Some(&key));
            if !health.is_proved.load(Relaxed) {
                let since = lost.lost_since.load(Relaxed);
                health.lost_since.store(since, Relaxed);
                health.set_probe_key(Some(&key));
            }
        }
    }
}

impl Health {
    pub(crate) fn is_well(&self) -> bool {
        self.lost_since.load(Relaxed) == 0
    }

    pub(crate) fn note_sent(&self, until: u64) {
        if self.answer_due.load(Relaxed) == 0 {
            self.answer_due.store(until + 1, Relaxed);
        }
    }

    /// A server or proxy that never keeps scripts gets them with each call.
    pub(crate) fn keeps_scripts(&self) -> bool {
        self.missing_scripts.load(Relaxed) < FORGOTTEN
    }

    pub(crate) fn note_script_sent(&self, now: u64) {
        self.script_sent.store(now, Relaxed);
    }

    /// Notes a call by a script's hash, which was sent at this time.
    pub(crate) fn note_script(&self, at: u64, is_missing: bool) {
        let sent = self.script_sent.load(Relaxed);
        if is_missing && sent > 0 && at > sent {
            self.missing_scripts.fetch_add(1, Relaxed);
        } else if !is_missing && self.missing_scripts.load(Relaxed) > 0 {
            self.missing_scripts.store(0, Relaxed);
        }
    }

    /// No call is in flight, of which the loss would be known, and the last answer is not of now.
    pub(crate) fn rests_since(&self, now: u64) -> bool {
        self.answer_due().is_none() && now >= self.answered_at.load(Relaxed) + FRESH
    }

    /// When the first call since the last answer is overdue.
    pub(crate) fn answer_due(&self) -> Option<u64> {
        self.answer_due.load(Relaxed).checked_sub(1)
    }

    pub(crate) fn note_answer(&self, now: u64, proves: bool) {
        self.answer_due.store(0, Relaxed);
        self.answered_at.fetch_max(now, Relaxed);
        if proves && !self.is_proved.load(Relaxed) {
            self.is_proved.store(true, Relaxed);
        }
    }

    pub(crate) fn lost_since(&self) -> u64 {
        self.lost_since.load(Relaxed).saturating_sub(1)
    }

    /// From now on, even if the shard was lost before.
    pub(crate) fn mark_lost(&self, now: u64) {
        self.lost_since.store(now + 1, Relaxed);
    }

    /// Returns `false` if the shard was lost already.
    pub(crate) fn mark_lost_once(&self, now: u64) -> bool {
        self.lost_since.compare_exchange(0, now + 1, Relaxed, Relaxed).is_ok()
    }

    /// Until the shard is tested. Returns `true` for the first caller, which tests it.
    pub(crate) fn mark_suspect(&self, now: u64, check_ends: u64) -> bool {
        let first = self.mark_lost_once(now);
        if first {
            self.check_ends.store(check_ends, Relaxed);
        }
        first
    }

    fn probe_key(&self) -> Option<Arc<[u8]>> {
        sync::lock(&self.probe_key).clone()
    }

    pub(crate) fn set_probe_key(&self, key: Option<&Arc<[u8]>>) {
        if let Some(key) = key {
            *sync::lock(&self.probe_key) = Some(Arc::clone(key));
        }
    }
}

pub(crate) fn owner_of(ranges: &Ranges, slot: u16) -> Option<u64> {
    let (_, (first, node)) = ranges.range(slot..).next()?;
    (*first <= slot).then_some(*node)
}

pub(super) fn find_node(nodes: &[Arc<Health>], node: u64) -> Option<&Arc<Health>> {
    nodes.iter().find(|health| health.node == node)
}

/// In a cluster: CRC-16 (XMODEM) over the text in the key's first braces.
fn slot_of(key: &[u8]) -> u16 {
    let tag = key.iter().position(|&byte| byte == b'{').and_then(|start| {
        let rest = &key[start + 1..];
        let end = rest.iter().position(|&byte| byte == b'}').filter(|&end| end > 0)?;
        Some(&rest[..end])
    });
    let crc = tag.unwrap_or(key).iter().fold(0_u16, |crc, &byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 { crc << 1 } else { crc << 1 ^ 0x1021 }
        })
    });
    crc % 16_384
}

#[cfg(test)]
#[path = "../../../tests/unit/shards.rs"]
mod tests;
