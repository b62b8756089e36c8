//! The decisions alone, without HTTP: one client's key goes in, and whether it may pass comes out.
//! Each reads its own clock.

use std::collections::HashMap;
use std::future::Future;
use std::hint::black_box;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum_limit::{FixedWindowPolicy, MemoryBackend, RateLimitBackend};
use governor::RateLimiter;
use limitador::limit::Limit;
use tower_fixed_window::{Limiter, MemoryStore, Quota};
use tower_rate_limiter::FixedWindowStore;

use crate::batch::{Batch, Verdict, address};

const DAY: Duration = Duration::from_secs(86_400);

pub const OURS: &str = "tower-fixed-window";
pub const GOVERNOR: &str = "governor";

/// Who takes part, in the order of the tables.
pub const CONTESTANTS: [&str; 6] =
    [OURS, GOVERNOR, "governor, one lock", "tower-rate-limiter", "limitador", "axum-limit"];

pub fn governor_quota(verdict: Verdict) -> governor::Quota {
    let limit = NonZeroU32::new(verdict.limit()).expect("not zero");
    governor::Quota::with_period(DAY / limit.get()).expect("not zero").allow_burst(limit)
}

/// `keys` is how many the store is made for, where that has to be said.
pub fn contestant(who: &str, verdict: Verdict, keys: u32) -> Box<dyn Batch> {
    match who {
        OURS => {
            let quota = Quota::per_day(u64::from(verdict.limit()));
            let store = MemoryStore::with_max_keys(keys.max(1_000_000) as usize);
            let limiter = Limiter::new(quota).store(store);
            asked(move |client| {
                let decision = limiter.check(client).into_now();
                let decision = decision.unwrap_or_else(|_| panic!("memory answers now"));
                decision.expect("memory doesn't fail").allowed()
            })
        }
        GOVERNOR => {
            let limiter = Arc::new(RateLimiter::keyed(governor_quota(verdict)));
            asked(move |client| limiter.check_key(&client).is_ok())
        }
        "governor, one lock" => {
            let limiter = Arc::new(RateLimiter::hashmap(governor_quota(verdict)));
            asked(move |client: IpAddr| limiter.check_key(&client).is_ok())
        }
        "tower-rate-limiter" => {
            let store = tower_rate_limiter::MemoryStore::new();
            let limit = u64::from(verdict.limit());
            asked(move |client| {
                // Its layer, too, makes a string of policy and client.
                let key = format!("default:{client}");
                let usage = store.increment(&key, DAY).into_inner().expect("memory doesn't fail");
                usage.used <= limit
            })
        }
        "limitador" => {
            let limiter = limitador::RateLimiter::new(u64::from(keys.max(1_000_000)) * 2);
            let client = "client".try_into().expect("an expression");
            let limit = Limit::new(
                "peers",
                u64::from(verdict.limit()),
                DAY.as_secs(),
                vec![],
                vec![client],
            );
            limiter.add_limit(limit);
            let (limiter, namespace) = (Arc::new(limiter), "peers".into());
            asked(move |client| {
                let values = HashMap::from([("client".to_owned(), client.to_string())]);
                let result = limiter.check_rate_limited_and_update(&namespace, &values.into(), 1);
                !result.expect("memory doesn't fail").limited
            })
        }
        "axum-limit" => {
            let store = MemoryBackend::new();
            let quota = axum_limit::Quota::new(verdict.limit() as usize, 86_400_000);
            asked(move |client| {
                let key = axum_limit::build_storage_key::<FixedWindowPolicy>(
                    store.namespace(),
                    &client.to_string(),
                    quota,
                );
                let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
                let asked =
                    store.transact::<FixedWindowPolicy>(&key, quota, now.as_millis() as u64);
                let mut cx = Context::from_waker(Waker::noop());
                let Poll::Ready(answer) = pin!(asked).poll(&mut cx) else {
                    panic!("memory answers at once")
                };
                answer.expect("memory doesn't fail").allowed
            })
        }
        _ => panic!("there is no store {who}"),
    }
}

#[derive(Clone)]
struct Asked<F>(F);

fn asked<F: FnMut(IpAddr) -> bool + Clone + Send + 'static>(ask: F) -> Box<dyn Batch> {
    Box::new(Asked(ask))
}

impl<F: FnMut(IpAddr) -> bool + Clone + Send + 'static> Batch for Asked<F> {
    fn run(&mut self, clients: &[u32]) -> usize {
        let passed = clients.iter().filter(|&&client| black_box((self.0)(address(client)))).count();
        clients.len() - passed
    }

    fn fork(&self) -> Box<dyn Batch> {
        Box::new(self.clone())
    }
}
