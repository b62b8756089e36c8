//! Changes of a limiter at run time, for good or until an instant.

use std::time::{SystemTime, UNIX_EPOCH};

use super::Limiter;
use crate::decision::system_time;
use crate::key::Key;
use crate::observe::Change;
use crate::quota::Quotas;
use crate::store::instant;

impl Limiter {
    /// Returns the current quotas. Of a limit by plan, `0/second`.
    pub fn quotas(&self) -> Quotas {
        self.end_changes();
        self.live.quotas()
    }

    /// Changes the quotas, from the next charge on, for all clones of this limiter and all layers
    /// that were made of it. A raised or lowered limit also applies to what is counted already, and
    /// leaves no debt for the next window. Another window or anchor is another counter.
    ///
    /// ```
    /// use tower_fixed_window::{FixedWindowLayer, Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let api = Limiter::new(Quota::per_minute(60).name("api"));
    /// let layer = FixedWindowLayer::new(&api);
    ///
    /// // From an admin route, or when a file of limits has changed.
    /// api.set_quotas(Quota::per_minute(600));
    /// assert_eq!(api.peek("alice").await?.remaining(), 600);
    /// assert_eq!(api.quotas().to_string(), "600/minute");
    /// # let _ = layer; Ok(()) }
    /// ```
    ///
    /// The quotas of a limit by plan are those of its closure: this changes nothing.
    pub fn set_quotas(&self, quotas: impl Into<Quotas>) {
        let quotas = quotas.into();
        if self.live.limit().plan.is_none() {
            self.live.change(Change::Quotas, |changes| changes.quotas.set(quotas));
            self.note_change(Change::Quotas, None);
        }
    }

    /// Changes the quotas until an instant, by the clock of the store ([`Store::now_ms`]). From
    /// this instant on, the former quotas hold again, without a further call. A later change of the
    /// quotas replaces this one. An instant in the past ends the change at once.
    ///
    /// ```
    /// use std::time::{Duration, UNIX_EPOCH};
    /// use tower_fixed_window::{Limit, ManualClock, MemoryStore, Quota};
    ///
    /// let clock = ManualClock::at_ms(1_700_000_000_000);
    /// let store = MemoryStore::new().clock(clock.clone());
    /// let api = Limit::new(Quota::per_minute(60)).name("api").store(store);
    ///
    /// let tonight = UNIX_EPOCH + Duration::from_secs(1_700_006_400);
    /// api.set_quotas_until(Quota::per_minute(600), tonight);
    /// assert_eq!(api.quotas().to_string(), "600/minute");
    ///
    /// clock.set_ms(1_700_006_400_000);
    /// assert_eq!(api.quotas().to_string(), "60/minute");
    /// ```
    ///
    /// A limit by plan keeps the quotas of its closure.
    ///
    /// [`Store::now_ms`]: crate::store::Store::now_ms
    pub fn set_quotas_until(&self, quotas: impl Into<Quotas>, until: SystemTime) {
        let (quotas, until) = (quotas.into(), ms(until));
        if self.live.limit().plan.is_none() {
            let end =
                self.live.change(Change::Quotas, |changes| changes.quotas.set_until(quotas, until));
            self.note_change(Change::Quotas, end);
        }
    }

    /// Gives one key quotas of its own until an instant, in this process: for a customer who needs
    /// more until tonight, or gets nothing until tomorrow (a limit of 0). These quotas replace the
    /// limit's, and the ones that the closure of a limit [by plan](crate::Limit::by_plan) returns.
    /// A charge that names its quotas ([`with_quotas`](Self::with_quotas)) keeps its own, and a
    /// request that waits in a queue keeps the quotas that its key had when it arrived. An instant
    /// in the past ends the change at once.
    ///
    /// Other nodes keep the limit's quotas, and a restart forgets the change. For all nodes, store
    /// the exception in your database and read it in [`by_plan`](crate::Limit::by_plan):
    /// `docs/support.md`.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use tower_fixed_window::{Limiter, Quota};
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_fixed_window::StoreError> {
    /// let api = Limiter::new(Quota::per_hour(100).name("api"));
    /// assert!(!api.check_cost("acme", 150).await?.allowed());
    ///
    /// // With the same window, what is used stays used.
    /// let tonight = SystemTime::now() + Duration::from_secs(6 * 3_600);
    /// api.set_key_quotas_until("acme", Quota::per_hour(1_000), tonight);
    /// assert!(api.check_cost("acme", 150).await?.allowed());
    /// assert_eq!(api.peek("acme").await?.remaining(), 850);
    /// assert_eq!(api.peek("other").await?.remaining(), 100);
    ///
    /// api.clear_key_quotas("acme");
    /// assert_eq!(api.peek("acme").await?.limit(), 100);
    /// # Ok(()) }
    /// ```
    pub fn set_key_quotas_until(
        &self,
        key: impl Into<Key>,
        quotas: impl Into<Quotas>,
        until: SystemTime,
    ) {
        let (key, quotas, until) = (key.into(), quotas.into(), ms(until));
        let end = self.live.change(Change::Key, |changes| changes.set_key(key, quotas, until));
        self.note_change(Change::Key, end);
    }

    /// Ends the quotas of one key's own: those of all keys hold for it again.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use tower_fixed_window::{Key, Limiter, Quota};
    ///
    /// let api = Limiter::new(Quota::per_hour(100).name("api"));
    /// let tonight = SystemTime::now() + Duration::from_secs(6 * 3_600);
    /// api.set_key_quotas_until("acme", Quota::per_hour(1_000), tonight);
    /// let (key, quotas, until) = &api.key_quotas()[0];
    /// assert_eq!((key, quotas.to_string()), (&Key::from("acme"), "1000/hour".to_owned()));
    /// assert!(*until <= tonight);
    ///
    /// api.clear_key_quotas("acme");
    /// assert!(api.key_quotas().is_empty());
    /// ```
    pub fn clear_key_quotas(&self, key: impl Into<Key>) {
        let key = key.into();
        let end = self.live.change(Change::Key, |changes| changes.clear_key(&key));
        self.note_change(Change::Key, end);
    }

    /// Returns the keys that have quotas of their own in this process, with these quotas, and until
    /// when, the first to end first: see the example of
    /// [`clear_key_quotas`](Self::clear_key_quotas).
    pub fn key_quotas(&self) -> Vec<(Key, Quotas, SystemTime)> {
        self.end_changes();
        let own = self.live.key_quotas();
        let own = own.iter().map(|(key, &(quotas, until))| (key.clone(), quotas, until));
        let mut own: Vec<_> = own.collect();
        own.sort_by(|(a, _, first), (b, _, other)| {
            first.cmp(other).then_with(|| a.as_bytes().cmp(b.as_bytes()))
        });
        own.into_iter().map(|(key, quotas, until)| (key, quotas, system_time(until))).collect()
    }

    /// Switches [shadow mode](crate::Limit::shadow) on or off, for all layers that were made of
    /// this limiter. Without HTTP, decisions only tell.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Limiter, Quota};
    ///
    /// let api = Limiter::new(Quota::per_minute(0).name("api").key(global()));
    /// let layer = FixedWindowLayer::new(&api);
    ///
    /// api.set_shadow(true);
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// ```
    pub fn set_shadow(&self, shadow: bool) {
        self.live.change(Change::Shadow, |changes| changes.shadow.set(shadow));
        self.note_change(Change::Shadow, None);
    }

    /// Switches shadow mode on or off until an instant, as
    /// [`set_quotas_until`](Self::set_quotas_until) changes the quotas.
    ///
    /// ```
    /// use std::time::{Duration, SystemTime};
    /// use http::Request;
    /// use tower_fixed_window::key::global;
    /// use tower_fixed_window::testing::ask;
    /// use tower_fixed_window::{FixedWindowLayer, Limiter, Quota};
    ///
    /// let api = Limiter::new(Quota::per_minute(0).name("api").key(global()));
    /// let layer = FixedWindowLayer::new(&api);
    ///
    /// api.set_shadow_until(true, SystemTime::now() + Duration::from_secs(3_600));
    /// assert_eq!(ask(&layer, Request::get("/")).status(), 200);
    /// ```
    pub fn set_shadow_until(&self, shadow: bool, until: SystemTime) {
        let until = ms(until);
        let end =
            self.live.change(Change::Shadow, |changes| changes.shadow.set_until(shadow, until));
        self.note_change(Change::Shadow, end);
    }

    /// Reports a change, and the instant when the last change of its kind ends.
    fn note_change(&self, of: Change, end: Option<i64>) {
        self.scope.observe().changed(of, end);
    }

    /// Ends the changes whose time is over.
    #[inline]
    pub(crate) fn end_changes(&self) {
        if self.live.has_ended(|| self.now()) {
            self.end_due_changes();
        }
    }

    #[cold]
    fn end_due_changes(&self) {
        for (of, end) in self.live.end(self.now()) {
            self.scope.observe().change_ended(of);
            self.scope.observe().changed(of, end);
        }
    }
}

/// Returns milliseconds since the epoch, as the clocks of stores do.
fn ms(at: SystemTime) -> i64 {
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    instant(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
