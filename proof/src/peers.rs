//! Other limiters, each set up as its documentation says.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Body;
use axum::extract::ConnectInfo;
use axum_limit::{FixedWindowPolicy, MemoryBackend, RateLimitBackend, RedisBackend};
use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use http::{Request, Response, StatusCode};
use limitador::RateLimiter;
use limitador::limit::{Limit, Namespace};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};
use tower_fixed_window::Receipt;
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;

use crate::check::Windows;
use crate::history::Answer;
use crate::limiter::{Contestant, Later, Limiter, Setup, Store};

const PEER: Contestant = Contestant {
    name: "",
    version: "",
    store: Store::Memory,
    windows: Windows::OnDemand,
    local: false,
};

pub(crate) const CONTESTANTS: [Contestant; 6] = [
    Contestant { name: "limitador", version: "0.14.0", ..PEER },
    Contestant { name: "axum-limit", version: "0.1.0", ..PEER },
    Contestant { name: "governor", version: "0.10.4", windows: Windows::Bucket, ..PEER },
    Contestant { name: "tower_governor", version: "0.8.0", windows: Windows::Bucket, ..PEER },
    Contestant { name: "axum-limit-redis", version: "0.1.0", store: Store::Redis, ..PEER },
    Contestant { name: "actix-limitation", version: "0.6.0", store: Store::Redis, ..PEER },
];

pub(crate) async fn make(setup: &Setup) -> Box<dyn Limiter> {
    let limit = NonZeroU32::new(setup.limit as u32).expect("not zero");
    let length = Duration::from_millis(setup.length);
    match &setup.name[..] {
        "limitador" => {
            let limiter = RateLimiter::new(setup.max_keys as u64);
            limiter.add_limit(limitador_limit(setup));
            Box::new(Limitador { limiter, namespace: "proof".into() })
        }
        "axum-limit" => Box::new(AxumLimit { backend: MemoryBackend::new(), quota: quota(setup) }),
        "axum-limit-redis" => {
            let backend = RedisBackend::connect(&setup.url).await.expect("Redis is there");
            Box::new(AxumLimit { backend, quota: quota(setup) })
        }
        "actix-limitation" => {
            let limiter = actix_limitation::Limiter::builder(setup.url.clone())
                .limit(setup.limit as usize)
                .period(length)
                .build();
            Box::new(Actix(limiter.expect("it is an address")))
        }
        "governor" => {
            let quota = governor::Quota::with_period(length / limit.get()).expect("not zero");
            Box::new(Governor(governor::RateLimiter::keyed(quota.allow_burst(limit))))
        }
        "tower_governor" => {
            let config = GovernorConfigBuilder::default()
                .period(length / limit.get())
                .burst_size(limit.get())
                .finish()
                .expect("neither is zero");
            let service = service_fn(async |_: Request<Body>| {
                Ok::<_, Infallible>(Response::new(Body::empty()))
            });
            Box::new(TowerGovernor(BoxCloneSyncService::new(
                GovernorLayer::new(config).layer(service),
            )))
        }
        other => panic!("there is no {other}"),
    }
}

fn passed(passed: bool) -> (Answer, Option<Receipt>) {
    (if passed { Answer::Passed } else { Answer::Refused }, None)
}

fn limitador_limit(setup: &Setup) -> Limit {
    let client = "client".try_into().expect("an expression");
    Limit::new("proof", setup.limit, setup.length / 1_000, vec![], vec![client])
}

fn limitador_context(key: u32) -> limitador::limit::Context<'static> {
    HashMap::from([("client".to_owned(), key.to_string())]).into()
}

struct Limitador {
    limiter: RateLimiter,
    namespace: Namespace,
}

impl Limiter for Limitador {
    fn ask(&self, key: u32, cost: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        Box::pin(async move {
            let context = limitador_context(key);
            match self.limiter.check_rate_limited_and_update(&self.namespace, &context, cost) {
                Ok(result) => passed(!result.limited),
                Err(_) => (Answer::Failed, None),
            }
        })
    }
}

fn quota(setup: &Setup) -> axum_limit::Quota {
    axum_limit::Quota::new(setup.limit as usize, setup.length)
}

struct AxumLimit<B> {
    backend: B,
    quota: axum_limit::Quota,
}

impl<B: RateLimitBackend + Send + Sync + 'static> Limiter for AxumLimit<B> {
    fn ask(&self, key: u32, _: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        Box::pin(async move {
            let key = axum_limit::build_storage_key::<FixedWindowPolicy>(
                self.backend.namespace(),
                &key.to_string(),
                self.quota,
            );
            // The crate's extractor reads the time like this.
            let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
            let now = now.as_millis() as u64;
            match self.backend.transact::<FixedWindowPolicy>(&key, self.quota, now).await {
                Ok(snapshot) => passed(snapshot.allowed),
                Err(_) => (Answer::Failed, None),
            }
        })
    }
}

struct Actix(actix_limitation::Limiter);

impl Limiter for Actix {
    fn ask(&self, key: u32, _: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        Box::pin(async move {
            match self.0.count(key.to_string()).await {
                Ok(_) => passed(true),
                Err(actix_limitation::Error::LimitExceeded(_)) => passed(false),
                Err(_) => (Answer::Failed, None),
            }
        })
    }
}

struct Governor(governor::RateLimiter<u32, DefaultKeyedStateStore<u32>, DefaultClock>);

impl Limiter for Governor {
    fn ask(&self, key: u32, _: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        let answer = passed(self.0.check_key(&key).is_ok());
        Box::pin(async move { answer })
    }
}

struct TowerGovernor(BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>);

impl Limiter for TowerGovernor {
    fn ask(&self, key: u32, _: u64) -> Later<'_, (Answer, Option<Receipt>)> {
        let mut request = Request::new(Body::empty());
        let peer = SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(key)), 4711);
        request.extensions_mut().insert(ConnectInfo(peer));
        let service = self.0.clone();
        Box::pin(async move {
            let Ok(response) = service.oneshot(request).await;
            match response.status() {
                StatusCode::OK => passed(true),
                StatusCode::TOO_MANY_REQUESTS => passed(false),
                _ => (Answer::Failed, None),
            }
        })
    }
}
