use super::*;

#[test]
fn slots_are_those_of_redis() {
    // By `CLUSTER KEYSLOT`.
    for (key, of) in [("123456789", 12_739), ("a", 15_495), ("b", 3_300), ("{}a", 10_875)] {
        assert_eq!(slot_of(key.as_bytes()), of, "{key}");
    }
    assert_eq!(slot_of(b"shop:tfw1:{a}"), slot_of(b"a"));
}

#[test]
fn a_shard_is_found_by_the_slot_of_its_key() {
    let all = [(16_383, (10_923, 3)), (5_460, (0, 1)), (10_922, (5_461, 2))];
    let nodes = |ranges: &[_]| {
        let shards = Shards::new(ranges.iter().copied().collect(), None);
        assert!(Arc::ptr_eq(shards.shard_of(None), &shards.nodes[0]));
        ["b", "{}a", "a"].map(|key| shards.shard_of(Some(key.as_bytes())).node)
    };
    assert_eq!(nodes(&all), [1, 2, 3]);
    // Slots that no node has share no breaker with those of a node.
    assert_eq!(nodes(&all[..2]), [1, 0, 3]);
    assert_eq!(nodes(&all[1..]), [1, 2, 0]);
    assert_eq!(nodes(&all[..1]), [0, 0, 3]);
}
