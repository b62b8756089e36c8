//! Receipts that are settled in another process (S14): here, by another limiter on the same store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::FutureExt;
use proptest::prelude::*;
use tower_fixed_window::store::{Remote, Reply, Store};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{
    KeptReceipt, Limit, Limiter, Limits, Line, ManualClock, MemoryStore, OnStoreFailure, Quota,
    Quotas, Receipt,
};

use crate::pairs::Down;

const NOW: u64 = 1_700_000_040_000;

fn answer<T>(reply: Reply<T>) -> T {
    block_on(reply).expect("memory does not fail")
}

fn memory() -> MemoryStore {
    MemoryStore::new().clock(ManualClock::at_ms(NOW))
}

/// A process has a limiter of its own.
fn process(store: &MemoryStore, quotas: impl Into<Quotas>) -> Limiter {
    Limit::new(quotas).name("jobs").store(store.clone())
}

fn to_json(receipt: Receipt) -> String {
    serde_json::to_string(&receipt.keep().expect("it can be kept")).expect("text")
}

fn read(text: &str) -> KeptReceipt {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// A kept receipt also says which tokens came from a count shared with other keys, which can be
/// refunded for another time.
#[test]
fn a_receipt_is_the_same_after_it_was_kept_twice() {
    let store = MemoryStore::with_max_keys(1).clock(ManualClock::at_ms(NOW));
    let quotas = Quota::per_minute(1_000).and(Quota::per_hour(1_000));
    let limiter = Limit::new(quotas).name("jobs").store(store);
    let mut shared = [0; 4];
    for key in 0..100_u64 {
        let kept = to_json(answer(limiter.charge(key, 1)).expect("it passes"));
        assert_eq!(to_json(Receipt::from(read(&kept))), kept);
        let bits = (0..4).find(|bits| kept.contains(&format!("[{NOW},1,{bits},[")));
        shared[bits.expect("a bit for each quota")] += 1;
    }
    // In the end, neither quota has an entry of its own.
    assert!(shared[0] > 0 && shared[3] > 50, "{shared:?}");
}

/// The store knows nothing of what was counted in its place.
#[test]
fn a_receipt_of_a_local_decision_cannot_be_kept() {
    let limiter = Quota::per_day(10).name("jobs").store(Remote::around(Down));
    let receipt = block_on(limiter.charge("alice", 5)).expect("memory answers").expect("it passes");
    assert!(receipt.decision().is_local() && receipt.keep().is_err());
}

#[test]
fn a_receipt_without_a_name_cannot_be_kept() {
    let limiter = Limiter::new(Quota::per_day(10));
    let receipt = answer(limiter.charge("alice", 5)).expect("it passes");
    let receipt = receipt.keep().expect_err("no other process finds the counters");
    answer(limiter.refund(receipt));
    assert_eq!(answer(limiter.peek("alice")).used(), 0, "the receipt itself came back");
}

#[test]
fn a_limiter_of_another_name_does_not_settle_a_receipt() {
    let store = memory();
    let limiter = process(&store, Quota::per_minute(10));
    let other = Quota::per_minute(10).name("other").store(store.clone());
    let receipt = answer(limiter.charge("alice", 5)).expect("it passes");
    let error = other.settle(receipt, 1).now_or_never().expect("at once").expect_err("refused");
    assert!(error.to_string().contains("settle it there"), "{error}");
    assert_eq!(answer(limiter.peek("alice")).used(), 5);
    assert_eq!(answer(other.peek("alice")).used(), 0);
}

/// Each pair of stores of one name: of one memory, of two, far away, behind a pointer.
#[test]
fn a_receipt_is_good_for_the_counters_it_was_taken_from() {
    let (one, two) = (memory(), memory());
    let far = |memory: &MemoryStore| Remote::around(memory.clone());
    let (far_one, far_two) = (far(&one), far(&two));
    let shared: Arc<dyn Store> = Arc::new(one.clone());
    let in_memory = |limit: Limit, of: u8| match of {
        0 => Limits::new([limit]).store(one.clone()),
        1 => Limits::new([limit]).store(two.clone()),
        2 => Limits::new([limit]).store(far_one.clone()),
        3 => Limits::new([limit]).store(far_two.clone().on_failure(OnStoreFailure::Deny)),
        4 => Limits::new([limit]).store(shared.clone()),
        _ => Limits::new([limit]),
    };
    let built = || [0, 1, 2, 3, 4, 5].map(|of| in_memory(Quota::per_hour(5).name("jobs"), of));
    let (charging, settling) = (built(), built());
    for (i, from) in charging.iter().enumerate() {
        for (j, to) in settling.iter().enumerate() {
            let line = || [Line::new("jobs", "alice", 1)];
            let charged = || answer(from.charge(line())).expect("it passes");
            // Of several limits, and of one. The last store is a new one each time.
            let settled = [to.refund(charged()), to.limiter("jobs").refund(charged())];
            for settled in settled.map(|reply| reply.now_or_never().expect("at once")) {
                // A memory is the same behind a `Remote` and behind a pointer.
                let memories = [1, 2, 1, 2, 1];
                let is_same = memories.get(i).is_some() && memories.get(i) == memories.get(j);
                assert_eq!(settled.is_ok(), is_same, "{i} in {j}");
            }
            let own = answer(from.charge(line())).expect("it passes");
            answer(from.clone().refund(own));
            answer(from.limiter("jobs").reset("alice"));
        }
    }
}

#[test]
fn limits_without_a_name_take_no_receipts_of_each_other() {
    let store = memory();
    let one = Limits::new([Quota::per_hour(9)]).store(store.clone());
    let other = Limits::new([Quota::per_hour(9)]).store(store);
    let receipt = answer(one.charge([Line::new("", "alice", 5)])).expect("it passes");
    assert!(other.refund(receipt).now_or_never().expect("at once").is_err());
    let receipt = answer(one.charge([Line::new("", "alice", 1)])).expect("it passes");
    answer(one.refund(receipt));
}

#[test]
fn a_receipt_of_too_many_lines_is_rejected_before_they_are_read() {
    let text = sample();
    let line = &text[3..text.len() - 2].trim_start_matches('[');
    let lines: Vec<_> =
        (0..20_000).map(|i| format!("[{line}").replace("jobs", &format!("l{i}"))).collect();
    let start = Instant::now();
    let error = serde_json::from_str::<KeptReceipt>(&format!("[2,[{}]]", lines.join(",")));
    assert!(error.expect_err("too many").to_string().contains("no charge has such a receipt"));
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

fn sample() -> String {
    let store = memory();
    let quotas = Quota::per_minute(10).reserve_up_to(20).and(Quota::per_hour(100));
    to_json(answer(process(&store, quotas).reserve("alice", 15)).expect("it passes"))
}

#[test]
fn impossible_receipts_are_errors() {
    let text = sample();
    assert_eq!(
        text,
        r#"[2,[["jobs","10/minute reserve-up-to=20, 100/hour",false,"7405616c696365",[1700000040000,15,0,[[1700000040000,1700000100000,15,1700000100000,1700000160000],[1699999200000,1700002800000,15,1699999200000,1700002800000]]]]]]"#,
    );
    for (what, by) in [
        ("[2,", "[1,"),
        ("\"jobs\"", "\"\""),
        ("\"jobs\"", "\"JOBS\""),
        ("\"7405616c696365\"", "\"7406616c696365\""),
        ("\"7405616c696365\"", "\"7404616c696365\""),
        ("\"7405616c696365\"", "\"7405616c69636\""),
        ("\"7405616c696365\"", "\"7405616c6963é5\""),
        (", 100/hour", ""),
        ("100/hour", "100/fortnight"),
        ("[1700000040000,15", "[-1,15"),
        ("[1700000040000,15", "[9223372036854775807,15"),
        ("[1700000040000,15", "[1700000040000,9007199254740992"),
        ("15,1700000100000", "-9223372036854775808,1700000100000"),
        ("1700000100000,15", "1700000039999,15"),
        (",1700000160000", ""),
        ("1700000100000,1700000160000", "1700000100000,1700000099999"),
        ("1700000100000,1700000160000", "1699999980000,1700000040000"),
        // A third quota's count.
        ("15,0,[[", "15,4,[["),
    ] {
        let forged = text.replacen(what, by, 1);
        assert_ne!(forged, text, "{what}");
        let error = serde_json::from_str::<KeptReceipt>(&forged).expect_err(&forged).to_string();
        assert!(!error.contains("616c"), "no key in {error}");
    }
    for wrong in ["[]", "[[1]]", "[2,[]]"] {
        assert!(serde_json::from_str::<KeptReceipt>(wrong).is_err(), "{wrong}");
    }
    for end in 0..text.len() {
        assert!(serde_json::from_str::<KeptReceipt>(&text[..end]).is_err(), "{}", &text[..end]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(500) })]

    #[test]
    fn no_forged_receipt_makes_a_limiter_panic(at in 0..1_000_usize, by in "[0-9]{0,20}|[-a-f,\"\\[\\]]", actual: u64) {
        let text = sample();
        let at = at % text.len();
        let forged = format!("{}{by}{}", &text[..at], &text[at + 1..]);
        if let Ok(kept) = serde_json::from_str::<KeptReceipt>(&forged) {
            let store = memory();
            let limiter = process(&store, Quota::per_minute(10).and(Quota::per_hour(100)));
            let _ = answer(limiter.check("alice"));
            let receipt = Receipt::from(kept);
            let _ = (receipt.decision().ready_after(), receipt.decision().granted());
            let _ = (receipt.decision().ready_at(), format!("{receipt:?}"), receipt.decision().refusing().count());
            let _ = limiter.settle(receipt, actual).now_or_never().expect("at once");
            let _ = answer(limiter.check("alice"));
        }
    }
}
