//! The decisions alone, without HTTP: the address of a client goes in, and whether its request passes
//! comes out. Each reads its own clock.

use std::collections::HashMap;
use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum_limit::{FixedWindowPolicy, MemoryBackend, RateLimitBackend};
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{Limit, MemoryStore, Quota};
#[cfg(feature = "tower-rate-limiter")]
use tower_rate_limiter::FixedWindowStore;

use crate::{Limiter, address, each};

pub fn governor_quota(limit: u32, window: Duration) -> governor::Quota {
    let limit = NonZeroU32::new(limit).expect("not zero");
    governor::Quota::with_period(window / limit.get()).expect("not zero").allow_burst(limit)
}

/// `keys` is what the store is made for, where that has to be said.
pub(crate) fn limiter(name: &str, limit: u32, window: Duration, keys: u32) -> Limiter {
    let many = u64::from(limit);
    match name {
        "tower-fixed-window" => {
            let store = MemoryStore::with_max_keys(keys.max(1_000_000) as usize);
            let limiter = Limit::new(Quota::new(many, window)).store(store);
            each(move |client| {
                let Ok(decision) = limiter.check(address(client)).into_now() else {
                    panic!("memory answers now")
                };
                black_box(decision.expect("memory doesn't fail").allowed())
            })
        }
        "governor" => {
            let limiter = Arc::new(governor::RateLimiter::keyed(governor_quota(limit, window)));
            each(move |client| black_box(limiter.check_key(&address(client)).is_ok()))
        }
        "governor, one lock" => {
            let limiter = Arc::new(governor::RateLimiter::hashmap(governor_quota(limit, window)));
            each(move |client| black_box(limiter.check_key(&address(client)).is_ok()))
        }
        #[cfg(feature = "tower-rate-limiter")]
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
                let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
                let now = now.as_millis() as u64;
                let charged = block_on(store.transact::<FixedWindowPolicy>(&key, quota, now));
                charged.expect("memory doesn't fail").allowed
            })
        }
        _ => panic!("there is no store {name}"),
    }
}
