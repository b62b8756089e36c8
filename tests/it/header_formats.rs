//! Reads the headers back as a client does that trusts them, for any quotas, costs and times.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use http::HeaderMap;
use proptest::collection::vec;
use proptest::prelude::*;
use sfv::{Item, ListEntry, Parser};
use tower_fixed_window::store::Reply;

use crate::prelude::*;

fn quota() -> impl Strategy<Value = Quota> {
    let limit = prop_oneof![Just(0_u64), 1..20_u64, 9_990..10_010_u64, Just(Quota::MAX_TOKENS),];
    let window_ms = prop_oneof![
        1..5_u64,
        Just(999),
        Just(1_000),
        Just(1_500),
        Just(10_000),
        Just(60_000),
        Just(3_600_000),
        1..10_000_000_u64,
    ];
    (limit, window_ms, 0..4_u8, 0..3_u64).prop_map(|(limit, ms, anchor, rollover)| {
        let quota = Quota::new(limit, Duration::from_millis(ms));
        let quota = match anchor {
            0 => quota,
            1 => quota.staggered(),
            2 => quota.from_first_request(),
            _ => quota.starting_at(Duration::from_millis(7_777)),
        };
        match limit {
            1..20 if rollover > 0 => quota.rollover_up_to(limit * (1 + rollover)),
            _ => quota,
        }
    })
}

/// Up to four quotas; one that would be the same counter as another is left out.
fn quotas() -> impl Strategy<Value = Quotas> {
    vec(quota(), 1..=4).prop_map(|all| {
        let first = Quotas::from(all[0]);
        all[1..]
            .iter()
            .fold(first, |quotas, quota| format!("{quotas}, {quota}").parse().unwrap_or(quotas))
    })
}

/// The cost of each request, and the time since the one before.
fn asked() -> impl Strategy<Value = Vec<(u64, u64)>> {
    let cost = prop_oneof![8 => 0..4_u64, 2 => 4..50_u64, 1 => 9_000..10_100_u64];
    let wait = prop_oneof![6 => 0..3_u64, 2 => 0..2_000_u64, 1 => 0..4_000_000_u64];
    vec((cost, wait), 1..40)
}

/// A limit whose requests have their cost in the path.
fn limit(quotas: impl Into<Quotas>) -> Limit {
    Limit::new(quotas)
        .key(Key::global())
        .cost_fn(|parts| parts.uri.path()[1..].parse().expect("a cost"))
}

fn layered(limit: Limit, clock: &ManualClock) -> FixedWindowLayer {
    FixedWindowLayer::new(limit.store(MemoryStore::new().clock(clock.clone())))
        .headers(Headers::GitHubAndIetfDraft10)
}

/// A service under these layers, the outermost first.
fn handler<J>(layers: impl IntoIterator<Item = FixedWindowLayer<J>>) -> Limited
where
    J: Reject<Body> + Clone + Send + Sync + 'static,
{
    let layers = layers.into_iter().collect::<Vec<_>>().into_iter().rev();
    layers.fold(Limited::new(service_fn(inner)), |inner, layer| Limited::new(layer.layer(inner)))
}

/// A store in memory answers at once, so a response is there at once.
fn ask(service: &Limited, cost: u64) -> Response<Body> {
    let Ok(response) =
        service.clone().oneshot(get(&format!("/{cost}"))).now_or_never().expect("at once");
    response
}

/// GitHub's headers, one integer each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct GitHub {
    limit: u64,
    remaining: u64,
    used: u64,
    reset: u64,
    retry_after: Option<u64>,
}

/// Digits and nothing else, once.
fn integer(headers: &HeaderMap, name: &str) -> Option<u64> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    assert_eq!(values.next(), None, "{name} comes twice");
    let text = value.to_str().expect("ASCII");
    assert!(text.bytes().all(|byte| byte.is_ascii_digit()), "{name}: {text}");
    assert!(text == "0" || !text.starts_with('0'), "{name}: {text}");
    Some(text.parse().unwrap_or_else(|_| panic!("{name}: {text}")))
}

fn github(headers: &HeaderMap) -> GitHub {
    let of = |name| integer(headers, name).unwrap_or_else(|| panic!("no {name}"));
    GitHub {
        limit: of("x-ratelimit-limit"),
        remaining: of("x-ratelimit-remaining"),
        used: of("x-ratelimit-used"),
        reset: of("x-ratelimit-reset"),
        retry_after: integer(headers, "retry-after"),
    }
}

/// The items of a structured list whose members are strings with integers as parameters.
fn items(headers: &HeaderMap, name: &str) -> Vec<(String, BTreeMap<String, u64>)> {
    // Recipients join all lines of a header.
    let lines: Vec<_> = headers.get_all(name).iter().map(|line| line.as_bytes()).collect();
    let list: sfv::List =
        Parser::new(&lines.join(&b", "[..])).parse().unwrap_or_else(|e| panic!("{name}: {e}"));
    let item = |entry| match entry {
        ListEntry::Item(Item { bare_item, params }) => {
            let integers = params.into_iter().map(|(key, value)| {
                let integer = value.as_integer().expect("an integer");
                (key.to_string(), i64::from(integer).try_into().expect("not below 0"))
            });
            (bare_item.as_string().expect("a string").as_str().to_owned(), integers.collect())
        }
        ListEntry::InnerList(list) => panic!("{name} has an inner list: {list:?}"),
    };
    list.into_iter().map(item).collect()
}

/// Asserts what the draft requires: an item for each quota, of the same names in both headers.
fn assert_ietf(headers: &HeaderMap, quotas: &[Quota], refused: bool) {
    let policies = items(headers, "ratelimit-policy");
    let limits = items(headers, "ratelimit");
    assert_eq!((policies.len(), limits.len()), (quotas.len(), quotas.len()));
    for ((policy, limit), quota) in policies.iter().zip(&limits).zip(quotas) {
        assert_eq!(policy.0, limit.0);
        // Integers of structured fields have at most 15 digits.
        assert_eq!(policy.1["q"], quota.limit().min(999_999_999_999_999));
        let whole = quota.window().subsec_nanos() == 0;
        assert_eq!(policy.1.get("w").copied(), whole.then(|| quota.window().as_secs()));
        assert!(policy.1.keys().all(|key| ["q", "w"].contains(&&**key)));
        assert!(limit.1.keys().eq(["r", "t"]));
        assert!(limit.1["r"] <= quota.capacity());
        assert!(refused || limit.1["t"] <= quota.window().as_secs() + 1);
    }
}

proptest! {
    #[test]
    fn headers_predict_the_next_decisions(
        quotas in quotas(), asked in asked(), believes in 0..3_u8,
    ) {
        let clock = ManualClock::at_ms(NOW_MS);
        let mut now = NOW_MS;
        let service = handler([layered(limit(quotas), &clock)]);
        let capacity = quotas.into_iter().map(Quota::capacity).min().expect("a quota");
        let rollover = quotas.into_iter().any(|quota| quota.capacity() > quota.limit());
        for (cost, wait) in asked {
            now += wait;
            clock.set_ms(now);
            let response = ask(&service, cost);
            let told = github(response.headers());
            let refused = response.status() == StatusCode::TOO_MANY_REQUESTS;
            assert_ietf(response.headers(), quotas.as_ref(), refused);
            prop_assert!(told.reset * 1_000 > now, "a window that has not ended");
            if refused {
                prop_assert_eq!(told.remaining, 0);
                prop_assert_eq!(&response.headers()["cache-control"], "no-store");
                prop_assert_eq!(told.retry_after.is_none(), cost > capacity, "unless it never fits");
            } else {
                prop_assert_eq!(response.status(), StatusCode::OK);
                prop_assert_eq!(told.retry_after, None);
                prop_assert!(response.headers().get("cache-control").is_none());
                if !rollover {
                    prop_assert_eq!(told.limit, told.used + told.remaining);
                }
            }
            if let Some(seconds) = told.retry_after {
                prop_assert!(seconds >= 1);
                let ietf = items(response.headers(), "ratelimit");
                let ietf = ietf.iter().map(|(_, item)| item["t"]).max().expect("an item");
                now = match believes {
                    0 => told.reset * 1_000,
                    1 => now + seconds * 1_000,
                    _ => now + ietf * 1_000,
                };
                clock.set_ms(now);
                prop_assert_eq!(ask(&service, cost).status(), StatusCode::OK, "{:?}", told);
            }
        }
    }

    #[test]
    fn stacked_layers_send_the_tightest_standing_and_append_policy_items(
        all in [quotas(), quotas(), quotas()], asked in asked(),
    ) {
        let clock = ManualClock::at_ms(NOW_MS);
        let mut now = NOW_MS;
        let names = ["a", "b", "c"];
        let layers = [0, 1, 2].map(|i| layered(limit(all[i]).name(names[i]), &clock));
        let limiters = [0, 1, 2].map(|i| Limits::from(&layers[i]).limiter(names[i]).clone());
        let service = handler(layers);
        for (cost, wait) in asked {
            now += wait;
            clock.set_ms(now);
            let response = ask(&service, cost);
            let told = github(response.headers());
            let speaker = limit_headers(&response)["resource"].to_owned();
            let after = limiters.each_ref().map(standing);
            let speaking = names.iter().position(|name| *name == speaker).expect("one of them");
            if response.status() == StatusCode::OK {
                let tightness = |s: &GitHub| (s.remaining, Reverse(s.reset));
                let tightest = after.iter().min_by_key(|s| tightness(s)).expect("three");
                prop_assert_eq!(tightness(&told), tightness(tightest), "{:?}", after);
                prop_assert_eq!(told, after[speaking], "one set, and not a mixture");
                // Inner layers come first.
                let quotas: Vec<_> = all.iter().rev().flatten().copied().collect();
                assert_ietf(response.headers(), &quotas, false);
            } else {
                prop_assert_eq!(told.remaining, 0);
                let limits = all[speaking].into_iter().map(Quota::limit).collect::<Vec<_>>();
                prop_assert!(limits.contains(&told.limit), "the refusing one's");
                let names = items(response.headers(), "ratelimit");
                prop_assert!(names.iter().all(|(name, _)| name.starts_with(&speaker)));
                assert_ietf(response.headers(), all[speaking].as_ref(), true);
            }
        }
    }
}

/// The headers that a request at a cost of 0 would get.
fn standing(limiter: &Limiter) -> GitHub {
    let decision = limiter.peek(Key::global()).now_or_never().expect("at once").expect("memory");
    let tightest = decision.usage().iter().min_by_key(|s| (s.remaining(), Reverse(s.reset_at())));
    let tightest = tightest.expect("a quota");
    let reset = tightest.reset_at().duration_since(UNIX_EPOCH).expect("after 1970");
    GitHub {
        limit: tightest.limit(),
        remaining: tightest.remaining(),
        used: tightest.used(),
        reset: (reset.as_millis() as u64).div_ceil(1_000),
        retry_after: None,
    }
}

/// The rate-limit headers of a response, by name.
fn sent(response: &Response<Body>) -> Vec<String> {
    let names = response.headers().keys().map(|name| name.as_str().to_owned());
    let mut names: Vec<_> = names.filter(|name| name.contains("ratelimit")).collect();
    names.sort();
    names
}

const GITHUB: [&str; 4] =
    ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "x-ratelimit-used"];
const IETF: [&str; 2] = ["ratelimit", "ratelimit-policy"];

#[test]
fn a_layer_sends_only_the_configured_headers() {
    let both = [&IETF[..], &GITHUB[..]].concat();
    for (style, names) in [
        (Headers::GitHub, &GITHUB[..]),
        (Headers::IetfDraft10, &IETF[..]),
        (Headers::GitHubAndIetfDraft10, &both[..]),
        (Headers::None, &[]),
    ] {
        let clock = ManualClock::at_ms(NOW_MS);
        let service = handler([layered(limit(Quota::per_minute(1)), &clock).headers(style)]);
        assert_eq!(sent(&ask(&service, 1)), names);
        let refused = ask(&service, 1);
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(sent(&refused), names);
        // These headers keep clients from retrying and caching a refusal, in any style.
        assert_eq!(refused.headers()["retry-after"], "40");
        assert_eq!(refused.headers()["cache-control"], "no-store");
    }
}

#[test]
fn a_limiter_without_a_layer_has_the_headers_of_a_layer() {
    let quotas = Quota::per_minute(3).and(Quota::per_hour(20_000));
    for style in
        [Headers::GitHub, Headers::IetfDraft10, Headers::GitHubAndIetfDraft10, Headers::None]
    {
        for name in ["", "api"] {
            let clock = ManualClock::at_ms(NOW_MS);
            let (mut limit, mut alone) = (limit(quotas), Limit::new(quotas));
            if !name.is_empty() {
                (limit, alone) = (limit.name(name), alone.name(name));
            }
            let service = handler([layered(limit, &clock).reject(EmptyBody).headers(style)]);
            let limiter = alone.store(MemoryStore::new().clock(clock));
            // Passed, refused for now, refused for good.
            for (cost, allowed) in [(2, true), (2, false), (4, false)] {
                let response = ask(&service, cost);
                let decision = charged(&limiter, Key::global(), cost);
                assert_eq!(decision.is_allowed(), allowed);
                let headers = limiter.headers(&decision, style);
                assert_eq!(&headers, response.headers(), "{style:?}, {cost} tokens");
            }
        }
    }
}

fn charged(limiter: &Limiter, key: Key, cost: u64) -> Decision {
    let charged = limiter.charge(key, cost).now_or_never().expect("at once").expect("memory");
    match charged {
        Ok(receipt) => receipt.decision().clone(),
        Err(refused) => refused.decision().clone(),
    }
}

/// The quotas may be a plan's, a key's, or have changed since the decision.
#[test]
fn a_limiters_headers_are_of_the_quotas_that_decided() {
    let clock = ManualClock::at_ms(NOW_MS);
    let store = MemoryStore::new().clock(clock.clone());
    let text = |limiter: &Limiter, decision: Decision| {
        let headers = limiter.headers(&decision, Headers::IetfDraft10);
        headers["ratelimit-policy"].to_str().expect("text").to_owned()
    };
    let policy = |limiter: &Limiter, decision: Reply<Decision>| {
        text(limiter, decision.now_or_never().expect("at once").expect("memory"))
    };
    let api = Quota::per_minute(1).and(Quota::per_month(9)).name("api").store(store.clone());
    let usual = r#""api:1/minute";q=1;w=60, "api:9/month";q=9;w=2592000"#;
    assert_eq!(policy(&api, api.check("alice")), usual);
    assert_eq!(policy(&api, api.check("alice")), usual, "refused");

    // Twice the same length, in windows that begin at different times.
    let own = Quota::per_month(20).and(Quota::per_hour(7)).and(Quota::per_hour(8).staggered());
    let tonight = UNIX_EPOCH + ms(NOW_MS + 1_000);
    api.set_key_quotas_until("acme", own, tonight);
    let of_acme =
        r#""api:20/month";q=20;w=2592000, "api:7/hour";q=7;w=3600, "api:8/hour";q=8;w=3600"#;
    for cost in [7, 1] {
        assert_eq!(text(&api, charged(&api, Key::from("acme"), cost)), of_acme, "{cost} tokens");
    }
    let before = api.peek("bob");
    api.set_quotas(Quota::per_second(5));
    assert_eq!(policy(&api, before), usual, "as it was decided");
    assert_eq!(policy(&api, api.peek("bob")), r#""api:5/second";q=5;w=1"#);

    let by_plan = Limit::by_plan(|_, _| Quota::per_day(1)).name("plans").store(store.clone());
    let pro = by_plan.with_quotas(Quota::per_hour(5_000));
    let of_pro = r#""plans:5000/hour";q=5000;w=3600"#;
    assert_eq!(policy(&pro, pro.check("alice")), of_pro);
    assert_eq!(policy(&by_plan, pro.check("alice")), of_pro);

    let limits =
        Limits::new([Quota::per_minute(9).name("requests"), Quota::per_hour(100).name("tokens")]);
    let limits = limits.store(store);
    let plan = Quota::per_day(200).into();
    let lines =
        [Line::new("requests", "acme", 1), Line::new("tokens", "acme", 1).with_quotas(&plan)];
    let tokens = limits.limiter("tokens");
    assert_eq!(policy(tokens, limits.check(lines)), r#""tokens:200/day";q=200;w=86400"#);
}

#[test]
fn the_headers_of_the_ietf_draft_have_this_format() {
    let clock = ManualClock::at_ms(NOW_MS);
    let quotas = Quota::per_minute(2).and(Quota::new(7, ms(1_500)));
    let service = handler([layered(limit(quotas).name("api"), &clock)]);
    let passed = ask(&service, 2);
    let field =
        |response: &Response<Body>, name| response.headers()[name].to_str().unwrap().to_owned();
    let policy = r#""api:2/minute";q=2;w=60, "api:7/1500ms";q=7"#;
    assert_eq!(field(&passed, "ratelimit-policy"), policy);
    assert_eq!(field(&passed, "ratelimit"), r#""api:2/minute";r=0;t=40, "api:7/1500ms";r=5;t=1"#);
    let refused = ask(&service, 6);
    assert_eq!(field(&refused, "ratelimit-policy"), policy);
    // The second quota can grant six tokens in its next window, the first one never.
    assert_eq!(field(&refused, "ratelimit"), r#""api:2/minute";r=0;t=40, "api:7/1500ms";r=5;t=1"#);
    // After all that can be carried over, 18 tokens are there in the fourth minute from now.
    let quotas = Quota::per_minute(5).rollover_up_to(20).and(Quota::per_second(100));
    let service = handler([layered(limit(quotas).name("api"), &clock)]);
    assert_eq!(ask(&service, 20).status(), StatusCode::OK);
    let refused = ask(&service, 18);
    let says = r#""api:5/minute";r=0;t=220, "api:100/second";r=80;t=1"#;
    assert_eq!(field(&refused, "ratelimit"), says);
}

#[test]
fn layers_with_different_header_formats_do_not_contradict_each_other() {
    let styles =
        [Headers::GitHub, Headers::IetfDraft10, Headers::GitHubAndIetfDraft10, Headers::None];
    for outer_style in styles {
        for inner_style in styles {
            let clock = ManualClock::at_ms(NOW_MS);
            let of = |n, name| layered(limit(Quota::per_minute(n)).name(name), &clock);
            let outer = of(5, "outer").headers(outer_style);
            let inner = of(1, "inner").headers(inner_style);
            let limiter = Limits::from(&outer).limiter("outer").clone();
            let service = handler([outer, inner.clone()]);
            let alone = handler([inner]);
            ask(&service, 1);
            // A refusal has only the refusing layer's headers.
            let (refused, its_own) = (ask(&service, 1), ask(&alone, 2));
            assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(sent(&refused), sent(&its_own), "{outer_style:?} around {inner_style:?}");
            assert_eq!(standing(&limiter).used, 2, "{outer_style:?} around {inner_style:?}");
        }
    }
}

#[test]
fn each_limit_has_the_headers_of_openais_api() {
    let clock = ManualClock::at_ms(NOW_MS);
    let tokens = Quota::per_minute(100).and(Quota::per_hour(150)).name("tokens");
    let limits = Limits::new([
        Quota::per_minute(3).name("requests").key(Key::global()),
        tokens.key(Key::global()).cost_fn(|_| 40).settled(),
    ]);
    let layer = FixedWindowLayer::new(limits.store(MemoryStore::new().clock(clock.clone())));
    let layer = layer.headers(Headers::OpenAi);
    let all = [
        "retry-after",
        "x-ratelimit-limit-requests",
        "x-ratelimit-remaining-requests",
        "x-ratelimit-reset-requests",
        "x-ratelimit-limit-tokens",
        "x-ratelimit-remaining-tokens",
        "x-ratelimit-reset-tokens",
    ];
    assert_eq!(layer.header_names(), all);

    // The true cost, and another server's headers of these names.
    let inner = service_fn(async |_| {
        let response = Response::builder()
            .header("x-ratelimit-limit-tokens", "9")
            .extension(TrueCost::of("tokens", 60));
        Ok(response.body(Body::empty()).expect("a response"))
    });
    let service = Limited::new(layer.layer(Limited::new(inner)));
    let shown = |response: &Response<Body>| -> Vec<String> {
        let value = |name: &&str| {
            let mut values = response.headers().get_all(*name).iter();
            let value = values.next().map_or("", |value| value.to_str().expect("ASCII"));
            assert_eq!(values.next(), None, "{name} is there twice");
            value.to_owned()
        };
        all.iter().map(value).collect()
    };
    // It is 22:14:20.5.
    assert_eq!(shown(&ask(&service, 0)), ["", "3", "2", "40s", "100", "40", "40s"]);
    // The quota with the fewest tokens left, and the one that refuses.
    clock.advance(ms(39_500));
    assert_eq!(shown(&ask(&service, 0)), ["", "3", "2", "1m0s", "150", "30", "45m0s"]);
    let refused = ask(&service, 0);
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(shown(&refused), ["2700", "3", "2", "1m0s", "150", "30", "45m0s"]);
    assert!(!refused.headers().contains_key("x-ratelimit-limit"));
    clock.advance(ms(59_880));
    assert_eq!(shown(&ask(&service, 0))[3], "120ms");
}

#[test]
#[should_panic = "write Quota::per_minute(60).name"]
fn headers_of_openais_api_need_the_limits_names() {
    let _ = FixedWindowLayer::new(Quota::per_minute(60)).headers(Headers::OpenAi);
}
