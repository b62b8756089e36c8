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
fn a_node_is_found_by_the_slot_of_its_key() {
    let nobody = |_: &str| {
        Origin::connecting(|_| async { Err::<redis::aio::MultiplexedConnection, _>(silence()) })
    };
    let Servers::Cluster(cluster) = Servers::cluster(vec!["h0:1".to_owned()], nobody) else {
        unreachable!("it is one")
    };
    let nodes = || {
        let known = cluster.known.borrow();
        ["b", "{}a", "a"].map(|key| known.node_of(key.as_bytes()).name.get().expect("a name"))
    };
    assert_eq!(nodes().map(|name| name.to_string()), ["h0:1"; 3]);
    let all = [(10_923, 16_383, "h3:1"), (0, 5_460, "h1:1"), (5_461, 10_922, "h2:1")];
    cluster.set_slots(all.map(|(first, last, name)| (first, last, name.to_owned())).into());
    assert_eq!(nodes().map(|name| name.to_string()), ["h1:1", "h2:1", "h3:1"]);
    cluster.node_at("h4:1", Some(slot_of(b"a")));
    cluster.node_at("h5:1", None);
    assert_eq!(nodes().map(|name| name.to_string()), ["h1:1", "h2:1", "h4:1"]);
}
