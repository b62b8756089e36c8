//! A [`Limit`]: quotas, with a name, a key and a cost; and what it warns of, [`NearLimit`].

use std::any::type_name;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use http::request::Parts;

use super::{Limiter, Limits};
use crate::decision::{Decision, Usage};
use crate::key::{Key, KeyExtractor, PeerIp, key_fn};
use crate::observe::Event;
use crate::quota::{Plan, Quota, Quotas};
use crate::store::Scope;

pub(crate) type PlanFn = Arc<dyn Fn(&Parts, &Key) -> Option<Plan> + Send + Sync>;
pub(crate) type CostFn = Arc<dyn Fn(&Parts) -> u64 + Send + Sync>;

/// Quotas with a name, a key that requests are counted by, and what a request costs. You build
/// a [`FixedWindowLayer`](crate::FixedWindowLayer), a [`Limiter`](crate::Limiter) or
/// [`Limits`](crate::Limits) from limits.
///
/// A [`Quota`] becomes a `Limit` by `name`, `key`, `key_fn` or [`Limit::new`]. Options of the limit
/// follow, and `store` comes last, because it returns a [`Limiter`](crate::Limiter):
/// `Quota::per_minute(60).name("api").shadow().store(store)`. A layer takes any of the three.
///
/// ```
/// use tower_fixed_window::key::client_ip;
/// use tower_fixed_window::{FixedWindowLayer, Quota};
///
/// let search = Quota::per_minute(30).and(Quota::per_hour(2_000)).name("search").key(client_ip());
/// let layer = FixedWindowLayer::new(search);
/// # let _ = layer;
/// ```
///
/// By default, a limit has no name, counts by the client's address
/// ([`peer_ip`](crate::key::peer_ip)), and each request costs 1. A layer reads key and cost from
/// the request. Without HTTP, you pass them to each call.
#[derive(Clone)]
#[must_use = "a limit does nothing until it is part of a layer, a limiter or several limits"]
pub struct Limit {
    pub(crate) scope: Scope,
    pub(crate) quotas: Quotas,
    pub(crate) plan: Option<PlanFn>,
    pub(crate) key: Arc<dyn KeyExtractor>,
    /// The type of the extractor, for the log.
    #[cfg_attr(not(feature = "tracing"), allow(dead_code))]
    pub(crate) key_type: &'static str,
    pub(crate) cost: Option<CostFn>,
    pub(crate) shadow: bool,
    pub(crate) settled: bool,
    pub(crate) tracked: Option<usize>,
    pub(crate) warnings: Vec<(u8, WarnFn)>,
}

impl Limit {
    /// Creates a limit without a name, which counts by the peer's address. Use it if the first
    /// option is not `name`, `key` or `key_fn`, which quotas also have:
    ///
    /// ```
    /// use tower_fixed_window::{FixedWindowLayer, Limit, MemoryStore, Quota};
    ///
    /// let watched = FixedWindowLayer::new(Limit::new(Quota::per_minute(60)).shadow());
    /// let jobs = Limit::new(Quota::per_hour(9).and(Quota::per_day(99))).store(MemoryStore::new());
    /// # let _ = (watched, jobs);
    /// ```
    pub fn new(quotas: impl Into<Quotas>) -> Self {
        Self {
            scope: Scope::unnamed(),
            quotas: quotas.into(),
            plan: None,
            key: Arc::new(PeerIp),
            key_type: type_name::<PeerIp>(),
            cost: None,
            shadow: false,
            settled: false,
            tracked: None,
            warnings: Vec::new(),
        }
    }

    /// Creates a limit whose quotas differ between requests, such as free and paid plans under one
    /// name. The closure gets the request's parts and key.
    ///
    /// Plans with the same windows share a counter, so a customer who upgrades keeps the count.
    /// With [`Plan::UNLIMITED`], a request passes uncounted and without headers; in other arms of
    /// the same `match`, write `quota.into()`. A limit of 0 refuses each request, as a ban. The
    /// closure can't await. If plans are in a database, let the authentication layer look the plan
    /// up, and put it into the request's extensions.
    ///
    /// Without a request, there is no plan: pass the quotas to
    /// [`Limiter::with_quotas`](crate::Limiter::with_quotas).
    /// [`Limiter::quotas`](crate::Limiter::quotas) returns `None`, and
    /// [`Limiter::set_quotas`](crate::Limiter::set_quotas) has no effect. The guide has [an
    /// example](crate::guide::configuration#limits-by-plan).
    #[doc(alias("ban", "unlimited", "quota_fn", "dynamic"))]
    pub fn by_plan<F, Q>(plan: F) -> Self
    where
        F: Fn(&Parts, &Key) -> Q + Send + Sync + 'static,
        // The compiler shows this line where the bound is not met.
        Q: Into<Plan>, // not async: let a layer around it put the plan into the extensions
    {
        let plan: PlanFn = Arc::new(move |parts, key| Some(plan(parts, key).into()));
        Self { plan: Some(plan), ..Self::new(Quota::per_second(0)) }
    }

    /// Names the limit. Clients see the name as `x-ratelimit-resource`, and operators see it in
    /// metrics and log lines. Nodes that share a store find the counters by it.
    ///
    /// # Panics
    /// If the name is not 1 to 64 characters of `[a-z0-9_.-]`.
    #[track_caller]
    pub fn name(mut self, name: &str) -> Self {
        self.scope = Scope::named(name);
        self
    }

    /// Sets the key that requests are counted by, such as `.key(header("x-api-key"))` or
    /// `.key(extension::<User>().or(peer_ip()))`. The functions that make extractors are in the
    /// module [`key`](crate::key); for a type of your own, implement [`KeyExtractor`]. The default
    /// is [`peer_ip`](crate::key::peer_ip).
    #[doc(alias = "key_extractor")]
    pub fn key<K: KeyExtractor>(mut self, key: K) -> Self {
        self.key_type = type_name::<K>();
        self.key = Arc::new(key);
        self
    }

    /// Sets the key that requests are counted by, with a closure:
    /// `.key_fn(|parts| Some(Key::from(parts.extensions.get::<Session>()?.user_id)))`. It gets
    /// `http::request::Parts`, whose `method`, `uri`, `headers` and `extensions` are fields. If it
    /// returns `None`, the request is refused with 400. A client can write a path, a host or a
    /// header in many ways: count by [the value that your app
    /// uses](crate::guide::keys#different-spellings-of-one-value).
    pub fn key_fn<F>(self, key: F) -> Self
    where
        F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
    {
        self.key(key_fn(key))
    }

    /// Sets how many tokens a request costs, such as `.cost_fn(|_| 5)`. The default is 1. A request
    /// of cost 0 passes and takes nothing, even if nothing is left; if its
    /// [true cost](Self::settled) may be higher, return at least 1.
    #[doc(alias = "weight")]
    pub fn cost_fn<F>(mut self, cost: F) -> Self
    where
        F: Fn(&Parts) -> u64 + Send + Sync + 'static,
    {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Corrects the charge to the [`TrueCost`](crate::TrueCost) that the response reports under the
    /// limit's name. A lower cost is refunded; a higher one is charged even beyond the limit.
    /// Without this, the limit ignores the report. [The guide](crate::guide::ai_api#tokens) has an
    /// example.
    #[doc(alias("true_cost", "actual cost", "response cost", "settle"))]
    pub fn settled(mut self) -> Self {
        self.settled = true;
        self
    }

    /// Turns on shadow mode: the limit decides and counts, but refuses no request and sends no
    /// headers. Use it to try out a limit. [`Limiter::set_shadow`](crate::Limiter::set_shadow)
    /// switches it at run time.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Limiter, Quota};
    ///
    /// let api = Limiter::new(Quota::per_minute(0).name("api").key(Key::global()).shadow());
    /// let layer = FixedWindowLayer::new(&api);
    ///
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// api.set_shadow(false);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 429);
    /// ```
    #[doc(alias = "dry_run")]
    pub fn shadow(mut self) -> Self {
        self.shadow = true;
        self
    }

    /// Calls a closure when a key has used `percent` of the limit, for example to write to a
    /// customer before they are limited. Call this again to add another percentage.
    ///
    /// ```
    /// use std::sync::mpsc;
    /// use tower_fixed_window::{Key, Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let (sender, warnings) = mpsc::channel();
    /// let api = Quota::per_day(10).name("api").warn_at(80, move |near| {
    ///     let _ = sender.send((near.key.clone(), near.usage.remaining()));
    /// });
    /// let api = Limiter::new(api);
    /// for _ in 0..20 {
    ///     let _ = api.check("acme").await?;
    /// }
    /// assert_eq!(warnings.try_iter().collect::<Vec<_>>(), [(Key::from("acme"), 2)]);
    /// # Ok(()) }
    /// ```
    ///
    /// The charge that reaches the percentage calls the closure: once for each key, quota and
    /// window, on any number of nodes, and again if tokens were refunded and charged again ([S41]).
    /// While a store fails, each process warns by its own counts. There is no warning if a window
    /// begins above the percentage, if the limit is lowered, or if one of several limits refuses
    /// the charge. Tokens saved by rollover are spent first and don't count.
    ///
    /// [S41]:
    ///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s41
    ///
    /// The closure must not block, because the request waits for it. If it panics, the charge
    /// remains, and the request continues.
    ///
    /// # Panics
    /// If `percent` is not 1 to 100.
    #[track_caller]
    pub fn warn_at<F>(mut self, percent: u8, warn: F) -> Self
    where
        F: Fn(&NearLimit<'_>) + Send + Sync + 'static,
    {
        assert!(
            (1..=100).contains(&percent),
            "{percent}% is no share of a limit: write .warn_at(80, ..)"
        );
        self.warnings.push((percent, Arc::new(warn)));
        self
    }

    /// Tracks which keys are refused (in shadow mode, which would be), for
    /// [`Limiter::refused`](crate::Limiter::refused): about `keys` of them, those with the most
    /// refusals.
    ///
    /// ```
    /// use tower_fixed_window::{Key, Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let api = Limiter::new(Quota::per_hour(1).name("api").track_refused(100));
    /// for user in ["ann", "bob", "ann", "ann"] {
    ///     let _ = api.check(user).await?;
    /// }
    ///
    /// let refused = api.refused().expect("they are counted");
    /// let ann = &refused.keys[0];
    /// assert_eq!((&ann.key, ann.count), (&Key::from("ann"), 2));
    /// assert_eq!((ann.share, refused.keys.len()), (1.0, 1));
    /// assert_eq!(ann.quota.to_string(), "1/hour");
    /// # Ok(()) }
    /// ```
    ///
    /// Counts are those of this process, in the current quarter of an hour and the one before
    /// ([S39]). A count is too high by at most `total / keys` for each quarter, and every key with
    /// more refusals than that is in the list, even under a flood of invented keys. Each key takes
    /// about 1 kB.
    ///
    /// [S39]:
    ///     https://docs.rs/tower-fixed-window-conformance/latest/tower_fixed_window_conformance/rules/#s39
    ///
    /// A layer also tracks refusals by route ([`Refused::routes`](crate::Refused::routes)), for up
    /// to `keys` routes: what exceeds the limit may be a page with many files, rather than a
    /// client.
    pub fn track_refused(self, keys: usize) -> Self {
        Self { tracked: Some(keys), ..self }
    }

    pub(crate) fn warns(&self) -> bool {
        !self.warnings.is_empty()
    }

    pub(crate) fn warn(&self, key: &Key, quotas: &Quotas, decision: &Decision, taken: u64) {
        let name = self.scope.name();
        for &(percent, ref warn) in &self.warnings {
            for (&quota, &usage) in quotas.iter().zip(decision.usage()) {
                if usage.has_reached(percent, taken) {
                    self.scope.observe().event(Event::Warned, 1);
                    let near = NearLimit { name, key, quota, usage, percent };
                    // A panic would keep other limits from being warned of, charged or corrected.
                    let _panicked = catch_unwind(AssertUnwindSafe(|| warn(&near)));
                }
            }
        }
    }
}

macro_rules! begin_a_limit {
    ($quotas:ty) => {
        impl $quotas {
            /// Makes a [`Limit`] with this name: see [`Limit::name`].
            ///
            /// # Panics
            /// If the name is not 1 to 64 characters of `[a-z0-9_.-]`.
            #[track_caller]
            pub fn name(self, name: &str) -> Limit {
                Limit::new(self).name(name)
            }

            /// Makes a [`Limit`] that counts by this key: see [`Limit::key`].
            pub fn key(self, key: impl KeyExtractor) -> Limit {
                Limit::new(self).key(key)
            }

            /// Makes a [`Limit`] that counts by this closure's key: see [`Limit::key_fn`].
            pub fn key_fn<F>(self, key: F) -> Limit
            where
                F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
            {
                Limit::new(self).key_fn(key)
            }
        }
    };
}

macro_rules! is_a_limit {
    ($($quotas:ty),*) => {$(
        impl From<$quotas> for Limit {
            fn from(quotas: $quotas) -> Self {
                Self::new(quotas)
            }
        }

        impl From<$quotas> for Limiter {
            fn from(quotas: $quotas) -> Self {
                Limit::from(quotas).into()
            }
        }

        impl From<$quotas> for Limits {
            fn from(quotas: $quotas) -> Self {
                Limit::from(quotas).into()
            }
        }
    )*};
}

begin_a_limit!(Quota);
begin_a_limit!(Quotas);
is_a_limit!(Quota, Quotas, &Quotas);

impl fmt::Debug for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Limit");
        debug.field("name", &self.scope.name());
        if self.plan.is_none() {
            debug.field("quotas", &self.quotas);
        }
        debug.finish_non_exhaustive()
    }
}

/// A warning that [`Limit::warn_at`](crate::Limit::warn_at) passes to its closure: a key has just
/// used a percentage of a limit. A key may be an address or an id, so `Debug` shows no key.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct NearLimit<'a> {
    /// The name of the limit, or the empty string if it has none.
    pub name: &'a str,
    /// The key: [`Key::readable`] shows it.
    pub key: &'a Key,
    /// The quota whose percentage is used.
    pub quota: Quota,
    /// The key's use of this quota, after the charge.
    pub usage: Usage,
    /// The percentage that was given to [`Limit::warn_at`](crate::Limit::warn_at).
    pub percent: u8,
}

pub(crate) type WarnFn = Arc<dyn Fn(&NearLimit<'_>) + Send + Sync>;
