//! A seed is all there is to a run, and seeds that found a defect find nothing any more.

use tower_fixed_window_sim::check::check;
use tower_fixed_window_sim::run::run;

fn history(seed: u64) -> Vec<String> {
    let show = |(at, event): &(i64, _)| format!("{at} {event}");
    run(seed).history.iter().map(show).collect()
}

#[test]
fn a_seed_replays() {
    for seed in 1..40 {
        let (first, again) = (history(seed), history(seed));
        assert!(first.len() > 10, "seed {seed} does nothing");
        let differs = first.iter().zip(&again).find(|(first, again)| first != again);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(first.len(), again.len(), "seed {seed}");
    }
}

/// The slots of a master had moved to another one before a master failed (S36). Each of these finds one
/// of the faults of slots, shards and stale connections; most are beyond the seeds of CI.
#[test]
fn a_master_that_fails_after_slots_moved_fails_no_keys_of_others() {
    for seed in [152, 1_578, 5_629, 10_215, 37_349] {
        let findings = check(&run(seed));
        assert!(findings.is_empty(), "seed {seed}: {} findings", findings.len());
    }
}

/// The client library of a cluster, which has lost all connections, spins in this seed.
#[test]
fn a_task_that_spins_stops_no_clock() {
    assert!(check(&run(46_997)).is_empty());
}

/// The client library holds all calls of a cluster's connection in this seed, until it is replaced. What
/// a frozen master executes later had come over the connection before: no call goes over that one.
#[test]
fn a_node_never_goes_back_to_an_earlier_connection() {
    assert!(check(&run(11_773)).is_empty());
}
