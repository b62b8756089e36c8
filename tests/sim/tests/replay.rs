//! A seed is all there is to a run.

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
