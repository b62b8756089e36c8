//! The parts of a store that fail by themselves: the shards of a cluster. Any other store is one.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use redis::RedisResult;

/// By the last slot of each range the first one, and the node that has them: a hash of its address.
pub(crate) type Ranges = BTreeMap<u16, (u16, u64)>;
pub(crate) type Answering<T> = Pin<Box<dyn Future<Output = RedisResult<T>> + Send>>;
pub(crate) type Slots = Arc<dyn Fn() -> Answering<Ranges> + Send + Sync>;

pub(crate) struct Shards {
    ranges: Ranges,
    nodes: Vec<Arc<Health>>,
    /// Asks which node has which slots, as they may move.
    pub(crate) slots: Option<Slots>,
}

/// What is known of a shard, over one connection. Times are milliseconds of the link's clock.
#[derive(Default)]
pub(crate) struct Health {
    pub(crate) node: u64,
    heard: AtomicU64,
    /// Until when the first call since then is to be answered, plus 1; 0: none was sent.
    unanswered: AtomicU64,
    /// Since when it is missed, plus 1; 0: it is well.
    lost: AtomicU64,
    /// When the task that tries it is given up.
    checked_by: AtomicU64,
    /// Whether a call was answered as it should be.
    proved: AtomicBool,
    /// Whether it has led to a replica.
    replica: AtomicBool,
    /// What to try it with.
    key: Mutex<Option<Arc<[u8]>>>,
}

impl Shards {
    pub(crate) fn new(ranges: Ranges, slots: Option<Slots>) -> Self {
        Self { ranges: Ranges::new(), nodes: Vec::new(), slots }.after_moves(ranges, 0)
    }

    /// A store that is no cluster.
    pub(crate) fn one() -> Self {
        Self::new(Ranges::new(), None)
    }

    /// The connection is known to lead to all of them.
    pub(crate) fn begin(&self, now: u64) {
        self.nodes.iter().for_each(|health| health.hear(now, false));
    }

    /// The same nodes, and others, with these slots.
    pub(crate) fn after_moves(&self, ranges: Ranges, now: u64) -> Self {
        let mut nodes = Vec::new();
        // Slots that no node has fail by themselves; what has no slots is one.
        for node in ranges.values().map(|(_, node)| *node).chain([0]) {
            if find(&nodes, node).is_none() {
                let new = || Arc::new(Health { node, heard: now.into(), ..Health::default() });
                nodes.push(find(&self.nodes, node).map_or_else(new, Arc::clone));
            }
        }
        Self { ranges, nodes, slots: self.slots.clone() }
    }

    /// That which has a key.
    pub(crate) fn of(&self, key: Option<&[u8]>) -> &Arc<Health> {
        let node = key.filter(|_| self.nodes.len() > 1).map(|key| {
            let slot = slot(key);
            match self.ranges.range(slot..).next() {
                Some((_, (first, node))) if *first <= slot => *node,
                _ => 0,
            }
        });
        node.and_then(|node| find(&self.nodes, node)).unwrap_or(&self.nodes[0])
    }

    pub(crate) fn are_well(&self) -> bool {
        self.nodes.iter().all(|health| health.is_well())
    }

    /// Nodes that are none of the others.
    pub(crate) fn left_by<'a>(&'a self, others: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let nodes = self.nodes.iter().map(|health| health.node);
        nodes.filter(|node| find(&others.nodes, *node).is_none())
    }

    /// Those that calls can be sent to.
    pub(crate) fn well(&self) -> impl Iterator<Item = u64> {
        self.nodes.iter().filter(|health| health.is_well()).map(|health| health.node)
    }

    pub(crate) fn is_proved(&self) -> bool {
        self.nodes.iter().any(|health| health.proved.load(Ordering::Relaxed))
    }

    pub(crate) fn led_to_replica(&self) -> bool {
        self.nodes.iter().any(|health| health.replica.load(Ordering::Relaxed))
    }

    /// A key of each that is missed.
    pub(crate) fn missed(&self) -> Vec<Arc<[u8]>> {
        let missed = self.nodes.iter().filter(|health| !health.is_well());
        missed.filter_map(|health| health.key()).collect()
    }

    /// It is there again.
    pub(crate) fn found(&self, key: &[u8]) {
        self.of(Some(key)).proved.store(true, Ordering::Relaxed);
    }

    /// What the connection before has missed, and this one has not found, is still missed.
    pub(crate) fn inherit(&self, before: &Self) {
        for missed in before.nodes.iter().filter(|health| !health.is_well()) {
            let Some(key) = missed.key() else { continue };
            let health = self.of(Some(&key));
            if !health.proved.load(Ordering::Relaxed) {
                health.lost.store(missed.lost.load(Ordering::Relaxed), Ordering::Relaxed);
                health.set_key(Some(&key));
            }
        }
    }
}

impl Health {
    pub(crate) fn is_well(&self) -> bool {
        self.lost.load(Ordering::Relaxed) == 0
    }

    pub(crate) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    /// A call is sent that is to be answered until then.
    pub(crate) fn send(&self, until: u64) {
        if self.unanswered.load(Ordering::Relaxed) == 0 {
            self.unanswered.store(until + 1, Ordering::Relaxed);
        }
    }

    /// Until when the first call is to be answered of those that nothing was heard after.
    pub(crate) fn unanswered(&self) -> Option<u64> {
        self.unanswered.load(Ordering::Relaxed).checked_sub(1)
    }

    pub(crate) fn hear(&self, now: u64, proved: bool) {
        self.unanswered.store(0, Ordering::Relaxed);
        self.heard.fetch_max(now, Ordering::Relaxed);
        if proved && !self.proved.load(Ordering::Relaxed) {
            self.proved.store(true, Ordering::Relaxed);
        }
    }

    /// A replica has refused a call.
    pub(crate) fn found_replica(&self) {
        self.replica.store(true, Ordering::Relaxed);
    }

    /// Since when it is missed.
    pub(crate) fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed).saturating_sub(1)
    }

    /// It is missed from now on.
    pub(crate) fn lose(&self, now: u64) {
        self.lost.store(now + 1, Ordering::Relaxed);
    }

    /// The same, unless it is missed already.
    pub(crate) fn lose_once(&self, now: u64) -> bool {
        self.lost.compare_exchange(0, now + 1, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// It has to be tried, which is for one to do.
    pub(crate) fn suspect(&self, now: u64, checked_by: u64) -> bool {
        let first = self.lose_once(now);
        if first {
            self.checked_until(checked_by);
        }
        first
    }

    pub(crate) fn recover(&self, now: u64) {
        self.hear(now, true);
        self.acquit();
    }

    /// What was missed was another one.
    pub(crate) fn acquit(&self) {
        self.checked_by.store(0, Ordering::Relaxed);
        self.lost.store(0, Ordering::Relaxed);
    }

    pub(crate) fn checked_by(&self) -> u64 {
        self.checked_by.load(Ordering::Relaxed)
    }

    pub(crate) fn checked_until(&self, until: u64) {
        self.checked_by.store(until, Ordering::Relaxed);
    }

    fn key(&self) -> Option<Arc<[u8]>> {
        self.key.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_key(&self, key: Option<&Arc<[u8]>>) {
        if let Some(key) = key {
            *self.key.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(key));
        }
    }
}

fn find(nodes: &[Arc<Health>], node: u64) -> Option<&Arc<Health>> {
    nodes.iter().find(|health| health.node == node)
}

/// The slot of a key in a cluster: CRC-16 (XMODEM) over what is in its first braces.
fn slot(key: &[u8]) -> u16 {
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
mod tests {
    use super::*;

    #[test]
    fn slots_are_those_of_redis() {
        // By `CLUSTER KEYSLOT`.
        for (key, of) in [("123456789", 12_739), ("a", 15_495), ("b", 3_300), ("{}a", 10_875)] {
            assert_eq!(slot(key.as_bytes()), of, "{key}");
        }
        assert_eq!(slot(b"shop:tfw1:{a}"), slot(b"a"));
    }

    #[test]
    fn a_shard_is_found_by_the_slot_of_its_key() {
        let all = [(16_383, (10_923, 3)), (5_460, (0, 1)), (10_922, (5_461, 2))];
        let nodes = |ranges: &[_]| {
            let shards = Shards::new(ranges.iter().copied().collect(), None);
            assert!(Arc::ptr_eq(shards.of(None), &shards.nodes[0]));
            ["b", "{}a", "a"].map(|key| shards.of(Some(key.as_bytes())).node)
        };
        assert_eq!(nodes(&all), [1, 2, 3]);
        // Slots that no node has share no breaker with those of a node.
        assert_eq!(nodes(&all[..2]), [1, 0, 3]);
        assert_eq!(nodes(&all[1..]), [1, 2, 0]);
        assert_eq!(nodes(&all[..1]), [0, 0, 3]);
    }
}
