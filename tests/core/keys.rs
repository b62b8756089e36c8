//! S2, S25, S26: the encoding of keys and the hash of staggered windows are pinned, since deployed
//! counters are found by them. Expected values come from other implementations (Python's hashlib
//! and hmac, and FNV-1a with fmix64 written out there).

use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use http::Request;
use proptest::prelude::*;
use tower_fixed_window::key::header;
use tower_fixed_window::store::{Account, Scope, Windows};
use tower_fixed_window::{
    KeptReceipt, Key, KeyExtractor, Limiter, Limits, Line, ManualClock, MemoryStore, Quota, Quotas,
};

use crate::reference::stagger;
use crate::trace::ms;
use crate::{answer, sized};

const NOW_MS: u64 = 1_700_000_040_000;

fn hex(key: &Key) -> String {
    key.as_bytes().iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes it");
        text
    })
}

fn address(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

#[test]
fn the_encoding_of_each_kind_of_part_is_pinned() {
    let v6 = || address("2001:db8:1:2:3:4:5:6");
    for (key, bytes, readable) in [
        (Key::global(), "", ""),
        (Key::from(""), "7400", "t"),
        (Key::from("alice"), "7405616c696365", "talice"),
        (Key::from(&Key::from("alice")), "7405616c696365", "talice"),
        (Key::from("é"), "7402c3a9", "t%C3%A9"),
        (Key::from(7_u64), "75080000000000000007", "u7"),
        (Key::from(7_i16), "75080000000000000007", "u7"),
        (Key::from(u64::MAX), "7508ffffffffffffffff", "u18446744073709551615"),
        (Key::from(-7_i32), "6e080000000000000007", "n7"),
        (Key::from(i64::MIN), "6e088000000000000000", "n9223372036854775808"),
        (
            Key::from([0xab; 16]),
            "6210abababababababababababababababab",
            "babababababababababababababababab",
        ),
        (Key::from(address("127.0.0.1")), "34047f000001", "127.0.0.1"),
        (Key::from(address("::ffff:127.0.0.1")), "34047f000001", "127.0.0.1"),
        (Key::from_ip(address("::ffff:127.0.0.1"), 1), "34047f000001", "127.0.0.1"),
        (Key::from(v6()), "36094020010db800010002", "2001:db8:1:2::_64"),
        (
            Key::from_ip(v6(), 128),
            "36118020010db8000100020003000400050006",
            "2001:db8:1:2:3:4:5:6_128",
        ),
        (
            Key::from_ip(v6(), 255),
            "36118020010db8000100020003000400050006",
            "2001:db8:1:2:3:4:5:6_128",
        ),
        (Key::from_ip(v6(), 47), "36072f20010db80000", "2001:db8::_47"),
        (
            Key::from(address("fe80::1:2")),
            "361180fe800000000000000000000000010002",
            "fe80::1:2_128",
        ),
        (
            Key::from_ip(address("fd00::1"), 56),
            "361180fd000000000000000000000000000001",
            "fd00::1_128",
        ),
        (Key::from(address("64:ff9b::127.0.0.1")), "34047f000001", "127.0.0.1"),
        (Key::from(address("::ffff:0:127.0.0.1")), "34047f000001", "127.0.0.1"),
        (Key::from(address("::127.0.0.1")), "34047f000001", "127.0.0.1"),
        (Key::from(address("::1")), "3609400000000000000000", "::_64"),
        (Key::from(address("fec0::1")), "360940fec0000000000000", "fec0::_64"),
        (Key::from_ip(v6(), 0), "360100", "::_0"),
        (
            Key::from("x".repeat(65)),
            "6c209537c5fdf120482f7d58d25e9ed583f52c02b4e304ea814db1633ad565aed7e9",
            "l9537c5fdf120482f7d58d25e9ed583f52c02b4e304ea814db1633ad565aed7e9",
        ),
        (
            Key::secret("hunter2"),
            "7320f52fbd32b2b3b86ff88ef6c490628285f482af15ddcb29541f94bcf526a3f6c7",
            "sf52fbd32b2b3b86ff88ef6c490628285f482af15ddcb29541f94bcf526a3f6c7",
        ),
        (
            Key::hmac("pepper", "alice@example.org"),
            "6b200877e330d86909b1c7d6ed92e3b81f8e9ba2b7ea13f0e9409ec11719dc50cc7f",
            "k0877e330d86909b1c7d6ed92e3b81f8e9ba2b7ea13f0e9409ec11719dc50cc7f",
        ),
        (
            Key::from((7_u64, "a/b", address("10.0.0.1"), "")),
            "750800000000000000077403612f6234040a0000017400",
            "u7,ta%2Fb,10.0.0.1,t",
        ),
        (Key::from((7_u64, Key::global())), "750800000000000000072d00", "u7,-"),
        (Key::from((Key::global(), 7_u64)), "2d0075080000000000000007", "-,u7"),
        (Key::from((("a", "b"), "c")), "7401617401622d0102740163", "ta,tb,-02,tc"),
        (Key::from(("a", ("b", "c"))), "7401617401627401632d0102", "ta,tb,tc,-02"),
    ] {
        assert_eq!(hex(&key), bytes, "{readable}");
        assert_eq!(key.readable(), readable);
    }
    assert_eq!(Key::from("x".repeat(64)).as_bytes().len(), 66, "64 bytes are still text");
}

#[test]
fn the_hash_of_staggered_windows_is_pinned() {
    let composite = Key::from((7_u64, "a/b"));
    for (scope, key, hash) in [
        ("login", Key::global(), 0xb293_da51_8402_926b),
        ("login", Key::from("alice"), 0xf536_c20d_51ee_33f9),
        ("login", Key::from(7_u64), 0xaac0_e3da_c960_9343),
        ("login", Key::from(address("127.0.0.1")), 0x9d10_ae9a_b716_c422),
        ("login", composite.clone(), 0x5ab6_924f_e70e_db7a),
        ("api.v1", composite, 0x7e9c_7d71_1dfb_a409),
    ] {
        // The hash modulo the window is where a staggered window begins: for the largest window,
        // and for a prime one.
        for window in [Quota::MAX_WINDOW, std::time::Duration::from_millis(2_147_483_647)] {
            let quotas = Quotas::from(Quota::new(1, window).staggered());
            let scope = Scope::named(scope);
            let account = Account::new(&scope, &quotas, &key);
            let Windows::Grid { start } = account.windows_of(&quotas.as_ref()[0]) else { panic!() };
            let begins = hash % window.as_millis() as u64;
            assert_eq!(start, begins, "{scope:?} {}", key.readable());
        }
    }
    // 0xf536c20d51ee33f9 % 60000 is 8505: alice's minute begins there.
    let store = MemoryStore::new().clock(ManualClock::at_ms(1_700_000_040_000));
    let limiter = Quota::per_minute(1).staggered().name("login").store(store);
    assert_eq!(ms(answer(limiter.peek("alice")).reset_at()), 1_700_000_048_505);
}

#[test]
fn debug_output_does_not_show_a_key() {
    let key = Key::from(("alice", 4_711_u64, address("10.1.2.3")));
    assert_eq!(format!("{key:?}"), "Key(..)");
    let limiter = Limiter::new(Quota::per_minute(1).name("x"));
    let receipt = crate::charge(&limiter, key, 1, false).1;
    let shown = format!("{receipt:?}");
    assert!(
        !shown.contains("alice") && !shown.contains("4711") && !shown.contains("10.1"),
        "{shown}"
    );
}

/// A part of a key. Two parts are equal exactly when their keys should be.
#[derive(Clone, PartialEq, Debug)]
enum Part {
    Text(String),
    Number(i128),
    Bytes([u8; 16]),
    V4(Ipv4Addr),
    /// The address has only zeros after the prefix.
    V6(Ipv6Addr, u8),
    Secret(Vec<u8>),
    Hmac(Vec<u8>),
}

fn part() -> impl Strategy<Value = Part> {
    prop_oneof![
        6 => "[ab,%.:_t0\u{0}\u{1}é]{0,4}".prop_map(Part::Text),
        1 => "a{60,70}".prop_map(Part::Text),
        1 => any::<String>().prop_map(Part::Text),
        2 => (-3..=3_i128).prop_map(Part::Number),
        1 => (i128::from(i64::MIN)..=i128::from(u64::MAX)).prop_map(Part::Number),
        1 => prop_oneof![Just([0; 16]), any::<[u8; 16]>()].prop_map(Part::Bytes),
        1 => prop_oneof![Just(Ipv4Addr::LOCALHOST), any::<Ipv4Addr>()].prop_map(Part::V4),
        2 => (prop_oneof![Just(Ipv6Addr::LOCALHOST), any::<Ipv6Addr>()], 0..=128_u8).prop_map(|(address, prefix)| {
            match address.to_canonical() {
                IpAddr::V4(address) => Part::V4(address),
                IpAddr::V6(address) => {
                    let behind = 128 - u32::from(prefix);
                    let kept = u128::from(address).checked_shr(behind).unwrap_or(0);
                    let kept = kept.checked_shl(behind).unwrap_or(0);
                    Part::V6(Ipv6Addr::from(kept), prefix)
                }
            }
        }),
        1 => prop::collection::vec(any::<u8>(), 0..3).prop_map(Part::Secret),
        1 => prop::collection::vec(any::<u8>(), 0..3).prop_map(Part::Hmac),
    ]
}

fn key(parts: &[Part]) -> Key {
    let mut key = Key::global();
    for part in parts {
        key.append(&match part {
            Part::Text(text) => Key::from(text),
            Part::Number(number) => match u64::try_from(*number) {
                Ok(number) => Key::from(number),
                Err(_) => Key::from(i64::try_from(*number).expect("it is in one of the ranges")),
            },
            Part::Bytes(bytes) => Key::from(*bytes),
            Part::V4(address) => Key::from(IpAddr::from(*address)),
            // A short prefix may leave an address that looks like an IPv4-mapped one.
            Part::V6(address, prefix) => Key::from_ip(IpAddr::from(*address), *prefix),
            Part::Secret(secret) => Key::secret(secret),
            Part::Hmac(value) => Key::hmac("pepper", value),
        });
    }
    key
}

/// What an extractor finds: nothing, a part, or a tuple of those.
#[derive(Clone, PartialEq, Debug)]
enum Tree {
    Absent,
    Part(Part),
    Tuple(Vec<Tree>),
}

fn tree() -> impl Strategy<Value = Tree> {
    let leaf = prop_oneof![
        1 => Just(Tree::Absent),
        1 => (0..3_i128).prop_map(|number| Tree::Part(Part::Number(number))),
        1 => part().prop_map(Tree::Part),
    ];
    leaf.prop_recursive(3, 24, 4, |tree| prop::collection::vec(tree, 2..=4).prop_map(Tree::Tuple))
}

fn extractor(tree: &Tree) -> Arc<dyn KeyExtractor> {
    match tree {
        // The value is optional, and this request has none.
        Tree::Absent => Arc::new(header("x-nobody-sends").or(Key::global())),
        Tree::Part(part) => Arc::new(key(std::slice::from_ref(part))),
        Tree::Tuple(trees) => match trees.iter().map(extractor).collect::<Vec<_>>()[..] {
            [ref a, ref b] => Arc::new((a.clone(), b.clone())),
            [ref a, ref b, ref c] => Arc::new((a.clone(), b.clone(), c.clone())),
            [ref a, ref b, ref c, ref d] => Arc::new((a.clone(), b.clone(), c.clone(), d.clone())),
            _ => unreachable!("two to four"),
        },
    }
}

fn from_tuples(tree: &Tree) -> Key {
    match tree {
        Tree::Absent => Key::global(),
        Tree::Part(part) => key(std::slice::from_ref(part)),
        Tree::Tuple(trees) => match &trees.iter().map(from_tuples).collect::<Vec<_>>()[..] {
            [a, b] => Key::from((a, b)),
            [a, b, c] => Key::from((a, b, c)),
            [a, b, c, d] => Key::from((a, b, c, d)),
            _ => unreachable!("two to four"),
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(sized(8_000, 200_000)) })]

    #[test]
    fn two_requests_have_one_key_only_if_all_parts_are_equal_absent_ones_among_them(
        a in tree(), b in tree(),
    ) {
        let (parts, ()) = Request::get("/").body(()).expect("a request").into_parts();
        let found = |tree| {
            let mut key = Key::default();
            extractor(tree).extract(&parts, &mut key).expect("each has a fallback");
            key
        };
        let (one, other) = (found(&a), found(&b));
        prop_assert_eq!(one == other, a == b);
        prop_assert_eq!(one.as_bytes() == other.as_bytes(), a == b);
        prop_assert_eq!(one.readable() == other.readable(), a == b);
        prop_assert!(one.readable().is_ascii());
        prop_assert_eq!(from_tuples(&a), one);
    }
}

/// A key in each way that it can be built: from its parts, copied, by a fallback after an extractor
/// that had found other parts and then failed, and appended to what is left of those.
fn in_each_way(wanted: &[Part], found: &[Part]) -> Vec<Key> {
    let (head, ()) = Request::get("/").body(()).unwrap().into_parts();
    let extracted = |extractor: &dyn KeyExtractor| {
        let mut key = Key::default();
        extractor.extract(&head, &mut key).expect("there is a fallback");
        key
    };
    let (wanted, found) = (key(wanted), key(found));
    let failing = || (found.clone(), header("x-user"));
    let mut appended = extracted(&failing().or(Key::global()));
    appended.append(&wanted);
    let mut ways = vec![(&wanted).into(), appended, extracted(&failing().or(wanted.clone()))];
    let cut = (wanted.clone(), found.clone(), header("x-user"));
    ways.push(extracted(&cut.or(failing()).or(wanted.clone())));
    ways.push(wanted);
    ways
}

/// Wherever keys are used: in tables, by resets, receipts, the quotas of one key, and files.
fn assert_is_one_key(ways: &[Key]) {
    let hash = RandomState::new();
    for (one, other) in ways.iter().flat_map(|one| ways.iter().map(move |other| (one, other))) {
        assert_eq!((one, hash.hash_one(one)), (other, hash.hash_one(other)));
    }
    let folder = crate::saved::folder();
    let limiter = || {
        let store = MemoryStore::with_max_keys(16).clock(ManualClock::at_ms(NOW_MS));
        let store = store.saved_to(folder.path().join("counts"), Duration::MAX).expect("opens");
        Quota::per_hour(100).name("x").store(store)
    };
    let mut first = limiter();
    for (i, key) in ways.iter().enumerate() {
        assert_eq!(answer(first.check(key)).used(), 2 * i as u64 + 1);
        let receipt =
            answer(first.charge(key, 5)).expect("it passes").keep().expect("it has a name");
        let text = serde_json::to_string(&receipt).expect("text");
        answer(first.settle(serde_json::from_str::<KeptReceipt>(&text).expect("a receipt"), 1));
        // The receipt knows its store, whose file is closed with the last handle.
        drop((first, receipt));
        first = limiter();
    }
    for key in ways {
        assert_eq!(answer(first.peek(key)).used(), 2 * ways.len() as u64);
        first.set_key_quotas_until(key, Quota::per_hour(7), UNIX_EPOCH + Duration::MAX / 4);
        assert_eq!(first.key_quotas().len(), 1);
        assert!(ways.iter().all(|other| answer(first.peek(other)).limit() == 7));
    }
    for key in ways {
        answer(first.reset(key));
        assert!(ways.iter().all(|other| answer(first.peek(other)).used() == 0));
        assert!(answer(first.check(&ways[0])).is_allowed());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(sized(200, 5_000)) })]

    #[test]
    fn keys_of_the_same_bytes_are_one_key_however_they_were_built(
        wanted in prop::collection::vec(part(), 0..3), found in prop::collection::vec(part(), 0..5),
    ) {
        assert_is_one_key(&in_each_way(&wanted, &found));
    }
}

/// Under a hash that can be turned back, such as FNV-1a, these have one value.
#[test]
fn names_chosen_for_a_hash_are_two_names() {
    let store = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
    let names = ["rk4qisfchb53c", "7ounphphekkik"];
    assert_eq!(stagger(names[0], b""), stagger(names[1], b""));
    let limits = names.map(|name| Quota::per_hour(5).name(name));
    let limits = Limits::new(limits).store(store.clone());
    let both = |cost| answer(limits.check(names.map(|name| Line::new(name, "alice", cost))));
    let used = || names.map(|name| answer(limits.limiter(name).peek("alice")).used());
    assert!(both(2).is_allowed());
    assert!(answer(limits.limiter(names[0]).charge("alice", 3)).is_ok());
    assert_eq!(used(), [5, 2]);
    answer(limits.limiter(names[0]).reset("alice"));
    assert_eq!(used(), [0, 2]);
    // Nor where keys share counts.
    let full = MemoryStore::with_max_keys(1).clock(ManualClock::at_ms(NOW_MS));
    let flood = Quota::per_week(1).name("flood").store(full.clone());
    (0..1_000_u64).for_each(|key| drop(answer(flood.check(key))));
    let passed = names.map(|name| {
        let limiter = Quota::per_hour(5).name(name).store(full.clone());
        (0..9).filter(|_| answer(limiter.check("alice")).is_allowed()).count()
    });
    assert_eq!(passed, [5, 5]);
}

/// Under a number that is made of a window and its start by a known product, these have one value.
#[test]
fn windows_chosen_for_a_hash_are_two_windows() {
    let long = Quota::new(5, Duration::from_millis(130_429_417_290));
    let day = Quota::per_day(5).starting_at(Duration::from_millis(63_245_986));
    let store = MemoryStore::new().clock(ManualClock::at_ms(NOW_MS));
    let both = long.and(day).name("api").store(store);
    let used = || {
        let decision = answer(both.peek("alice"));
        decision.usage().iter().map(|usage| usage.used()).collect::<Vec<_>>()
    };
    let by_day = both.with_quotas(day);
    assert!((0..2).all(|_| answer(both.check("alice")).is_allowed()));
    assert!((0..3).all(|_| answer(by_day.check("alice")).is_allowed()));
    assert_eq!(used(), [2, 5]);
    answer(by_day.reset("alice"));
    assert_eq!(used(), [0, 0]);
}
