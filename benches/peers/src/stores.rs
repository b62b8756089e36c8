//! The decisions alone, without HTTP: the address of a client goes in, and whether its request passes
//! comes out. Each reads its own clock.

use std::hint::black_box;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use tower_fixed_window::store::Reply;
use tower_fixed_window::{Decision, Limit, Limits, Line, MemoryStore, Quota};

use crate::{Limiter, address, each};

pub fn governor_quota(limit: u32, window: Duration) -> governor::Quota {
    let limit = NonZeroU32::new(limit).expect("not zero");
    governor::Quota::with_period(window / limit.get()).expect("not zero").allow_burst(limit)
}

fn ours(check: impl Fn(IpAddr) -> Reply<Decision> + Clone + Send + 'static) -> Limiter {
    each(move |client| {
        let Ok(decision) = check(address(client)).into_now() else { panic!("memory answers now") };
        black_box(decision.expect("memory doesn't fail").is_allowed())
    })
}

/// Charges a client's address in each of these limits, in one charge.
fn limits<const N: usize>(quota: Quota, store: MemoryStore, names: [&'static str; N]) -> Limiter {
    let limits = Limits::new(names.map(|name| quota.clone().name(name))).store(store);
    ours(move |key| limits.check(names.map(|name| Line::new(name, key, 1))))
}

/// `keys` is what the store is made for, where that has to be said.
pub(crate) fn limiter(name: &str, limit: u32, window: Duration, keys: u32) -> Limiter {
    let many = u64::from(limit);
    let store = || MemoryStore::with_max_keys(keys.max(1_000_000) as usize);
    let quota = Quota::new(many, window);
    match name {
        "tower-fixed-window" => {
            let limiter = Limit::new(quota).store(store());
            ours(move |key| limiter.check(key))
        }
        "tower-fixed-window, two quotas" => {
            let limiter = Limit::new(quota.and(Quota::per_hour(many))).store(store());
            ours(move |key| limiter.check(key))
        }
        "tower-fixed-window, two limits" => limits(quota, store(), ["a", "b"]),
        "tower-fixed-window, three limits" => limits(quota, store(), ["a", "b", "c"]),
        "governor" => {
            let limiter = Arc::new(governor::RateLimiter::keyed(governor_quota(limit, window)));
            each(move |client| black_box(limiter.check_key(&address(client)).is_ok()))
        }
        "governor, one lock" => {
            let limiter = Arc::new(governor::RateLimiter::hashmap(governor_quota(limit, window)));
            each(move |client| black_box(limiter.check_key(&address(client)).is_ok()))
        }
        #[cfg(feature = "others")]
        _ => others(name, limit, window, keys),
        #[cfg(not(feature = "others"))]
        _ => panic!("there is no store {name}"),
    }
}

#[cfg(feature = "others")]
fn others(name: &str, limit: u32, window: Duration, keys: u32) -> Limiter {
    use std::collections::HashMap;
    use std::time::{SystemTime, UNIX_EPOCH};

    use axum_limit::{FixedWindowPolicy, MemoryBackend, RateLimitBackend};
    use tower_rate_limiter::FixedWindowStore;

    use crate::now;

    let many = u64::from(limit);
    match name {
        "tower-rate-limiter" => {
            let store = tower_rate_limiter::MemoryStore::new();
            each(move |client| {
                // Its layer, too, makes a string of policy and client.
                let key = format!("default:{}", address(client));
                store.increment(&key, window).into_inner().expect("memory doesn't fail").used
                    <= many
            })
        }
        "limitador" => {
            let limiter = limitador::RateLimiter::new(u64::from(keys.max(1_000_000)) * 2);
            let variable = "client".try_into().expect("an expression");
            let seconds = window.as_secs();
            let quota = limitador::limit::Limit::new("peers", many, seconds, [], [variable]);
            limiter.add_limit(quota);
            let (limiter, namespace) = (Arc::new(limiter), "peers".into());
            each(move |client| {
                let values = HashMap::from([("client".to_owned(), address(client).to_string())]);
                let result = limiter.check_rate_limited_and_update(&namespace, &values.into(), 1);
                !result.expect("memory doesn't fail").limited
            })
        }
        "axum-limit" => {
            let store = MemoryBackend::new();
            let quota = axum_limit::Quota::new(limit as usize, window.as_millis() as u64);
            let key = axum_limit::build_storage_key::<FixedWindowPolicy>;
            each(move |client| {
                let key = key(store.namespace(), &address(client).to_string(), quota);
                let time = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
                let time = time.as_millis() as u64;
                let charged = now(store.transact::<FixedWindowPolicy>(&key, quota, time));
                charged.expect("memory doesn't fail").allowed
            })
        }
        _ => panic!("there is no store {name}"),
    }
}
