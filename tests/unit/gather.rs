use super::*;

/// The distance may grow: the calls that may be in flight then are those of the new one.
#[test]
fn the_least_round_trip_is_forgotten() {
    let (mut queue, start) = (Batches::default(), Instant::now());
    queue.in_flight = 1_000;
    assert!(queue.has_room(), "nothing is known");
    for (seconds, ms, has_room) in [(0, 1, false), (6, 100, false), (12, 100, true)] {
        let took = Duration::from_millis(ms);
        queue.note_round_trip(start + Duration::from_secs(seconds), took);
        assert_eq!(queue.has_room(), has_room, "after {seconds} s");
    }
}
