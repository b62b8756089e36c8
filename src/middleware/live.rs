//! What can be changed at run time, and the [`Control`] to do it.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

use super::headers::PreparedHeaders;
use super::options::Options;
use super::rejection::prepare;
use crate::decision::Decision;
use crate::key::Key;
use crate::limiter::Limiter;
use crate::line::Lines;
use crate::quota::Quotas;
use crate::store::{Reply, StoreError};

/// The settings of a layer, shared by all its clones and services.
pub(crate) struct Live {
    /// Increases with each change of the quotas.
    generation: AtomicU64,
    quotas: Mutex<Quotas>,
    /// Whether requests have quotas of their own.
    by_request: AtomicBool,
    /// Whether a control was taken.
    controlled: AtomicBool,
    /// Whether it was switched at run time, and how.
    shadow: AtomicU8,
    pub(crate) lines: Arc<Lines>,
}

const AS_BUILT: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

impl Live {
    pub(crate) fn new(quotas: Quotas) -> Self {
        Self {
            generation: AtomicU64::new(0),
            quotas: Mutex::new(quotas),
            by_request: AtomicBool::new(false),
            controlled: AtomicBool::new(false),
            shadow: AtomicU8::new(AS_BUILT),
            lines: Arc::default(),
        }
    }

    pub(crate) fn quotas(&self) -> Quotas {
        *self.quotas.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note_control(&self) {
        self.controlled.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_controlled(&self) -> bool {
        self.controlled.load(Ordering::Relaxed)
    }

    /// Learns from the options of a layer whether its requests have quotas of their own.
    pub(crate) fn follow(&self, options: &Options) {
        self.by_request.fetch_or(options.quota_fn.is_some(), Ordering::Relaxed);
    }

    fn set_quotas(&self, quotas: Quotas) {
        let mut current = self.quotas.lock().unwrap_or_else(PoisonError::into_inner);
        *current = quotas;
        // Under the lock: a reader that sees the new generation reads the new quotas.
        self.generation.fetch_add(1, Ordering::Release);
        drop(current);
        self.lines.change_all();
    }

    #[inline]
    pub(crate) fn shadow(&self, as_built: bool) -> bool {
        match self.shadow.load(Ordering::Relaxed) {
            AS_BUILT => as_built,
            switched => switched == ON,
        }
    }

    /// Whether settings were made from these quotas.
    #[inline]
    pub(crate) fn is_current(&self, settings: &Settings) -> bool {
        self.generation.load(Ordering::Acquire) == settings.generation
    }

    /// The quotas in force, prepared for requests.
    pub(crate) fn settings(&self, name: &str, options: &Options) -> Settings {
        let generation = self.generation.load(Ordering::Acquire);
        let quotas = self.quotas();
        Settings {
            generation,
            headers: PreparedHeaders::new(options.headers, name, quotas.as_slice()[0].limit()),
            body: prepare(name, &quotas, options.status),
            quotas,
        }
    }
}

/// The quotas in force, with what responses under them have in common.
pub(crate) struct Settings {
    generation: u64,
    pub(crate) quotas: Quotas,
    pub(crate) headers: PreparedHeaders,
    pub(crate) body: Bytes,
}

/// Changes a [`FixedWindowLayer`](crate::FixedWindowLayer) at run time: from an admin route, or
/// when a file of limits has changed. All clones of the layer, and all services created from them,
/// apply the change from the next request on.
///
/// ```
/// use tower_fixed_window::{FixedWindowLayer, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let layer = FixedWindowLayer::new(Quota::per_minute(60)).name("api");
/// let control = layer.control();
///
/// // What this window has counted already stays counted.
/// control.set_quotas(Quota::per_minute(600));
/// assert_eq!(control.peek("alice").await?.remaining(), 600);
/// assert_eq!(control.quotas().to_string(), "600/minute");
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Control {
    live: Arc<Live>,
    limiter: Limiter,
}

impl Control {
    pub(crate) fn new(live: Arc<Live>, limiter: Limiter) -> Self {
        Self { live, limiter }
    }

    /// Returns the current quotas.
    pub fn quotas(&self) -> Quotas {
        self.live.quotas()
    }

    /// Changes the quotas, from the next request on. A raised or lowered limit also applies to what
    /// is counted already, and leaves no debt for the next window. Another window or anchor is
    /// another counter.
    pub fn set_quotas(&self, quotas: impl Into<Quotas>) {
        self.live.set_quotas(quotas.into());
    }

    /// Switches [shadow mode](crate::FixedWindowLayer::shadow) on or off.
    pub fn set_shadow(&self, shadow: bool) {
        self.live.shadow.store(if shadow { ON } else { OFF }, Ordering::Relaxed);
    }

    /// Returns the standing of a key under the current quotas, and whether one token would pass.
    /// Takes nothing.
    ///
    /// # Errors
    /// If the layer's quotas differ between requests
    /// ([`quota_fn`](crate::FixedWindowLayer::quota_fn)): name them with
    /// [`peek_with`](Self::peek_with). If the store fails.
    pub fn peek(&self, key: impl Into<Key>) -> Reply<Decision> {
        if self.live.by_request.load(Ordering::Relaxed) {
            return Reply::failed(StoreError::new(
                "this layer's quotas differ per request: write control.peek_with(key, quotas)",
            ));
        }
        self.peek_with(key, self.quotas())
    }

    /// Returns the standing of a key under these quotas, and whether one token would pass. Takes
    /// nothing.
    ///
    /// ```
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::{FixedWindowLayer, Key, Quota, Quotas};
    ///
    /// fn plan(_user: &Key) -> Quotas {
    ///     Quota::per_hour(5_000).into() // from your database
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let layer =
    ///     FixedWindowLayer::new(Quota::per_hour(60)).key(global()).quota_fn(|_, key| plan(key));
    /// let control = layer.control();
    /// let user = Key::global();
    /// assert_eq!(control.peek_with(user.clone(), plan(&user)).await?.remaining(), 5_000);
    /// assert!(control.peek(user).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn peek_with(&self, key: impl Into<Key>, quotas: impl Into<Quotas>) -> Reply<Decision> {
        self.limiter.with_quotas(quotas).peek(key)
    }

    /// Clears the counters of a key under all quotas: those of a plan, and those before
    /// [`set_quotas`](Self::set_quotas). For errors, see [`Limiter::reset`](crate::Limiter::reset).
    pub fn reset(&self, key: impl Into<Key>) -> Reply<()> {
        self.limiter.reset(key)
    }

    /// Ends the waiting of all requests in the layer's [`queue`](crate::FixedWindowLayer::queue)
    /// with 503. Later requests don't wait. Call it for a graceful shutdown.
    #[cfg(feature = "tokio")]
    pub fn close_queue(&self) {
        self.live.lines.close();
    }
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Control")
            .field("limiter", &self.limiter)
            .field("quotas", &self.quotas())
            .finish_non_exhaustive()
    }
}
