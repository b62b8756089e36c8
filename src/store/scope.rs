//! The name of counters: [`Scope`].

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::decision::LimitName;
use crate::observe::{Meters, Observed};
use crate::quota::fmix64;
use crate::window::stagger;

/// The name of counters. It is cheap to clone.
///
/// ```
/// use tower_fixed_window::store::Scope;
///
/// assert_eq!(Scope::named("api").name(), "api");
/// ```
#[derive(Clone)]
pub struct Scope(Arc<Named>);

struct Named {
    name: Box<str>,
    limit_name: LimitName,
    id: u64,
    meters: Meters,
}

impl Scope {
    /// Creates a scope with a name of 1 to 64 characters of `[a-z0-9_.-]`.
    ///
    /// # Panics
    /// If the name is not valid.
    #[track_caller]
    pub fn named(name: &str) -> Self {
        assert!(
            Self::is_name(name),
            "{name:?} can't name a rate limit: write 1 to 64 of a-z, 0-9, '_', '.', '-', as in .name(\"login\")"
        );
        let id = stagger(name, b"");
        Self::new(name, id)
    }

    /// Returns whether a scope can have this name.
    pub(crate) fn is_name(name: &str) -> bool {
        let is_valid = |b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-');
        (1..=64).contains(&name.len()) && name.bytes().all(is_valid)
    }

    /// Creates a scope that no other limiter can find, a new one at each call.
    pub(crate) fn unnamed() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = fmix64(NEXT.fetch_add(1, Ordering::Relaxed));
        Self::new("", id)
    }

    fn new(name: &str, id: u64) -> Self {
        let (limit_name, meters) = (LimitName::of(name), Meters::default());
        Self(Arc::new(Named { name: name.into(), limit_name, id, meters }))
    }

    /// Returns the name. It is empty if the scope has none.
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Returns the name, as decisions have it.
    #[inline]
    pub(crate) fn limit_name(&self) -> LimitName {
        self.0.limit_name
    }

    /// Returns the scope's log and metrics.
    pub(crate) fn observe(&self) -> Observed<'_> {
        Observed::new(&self.0.name, &self.0.meters)
    }

    /// Returns a number that is the same for equal names, and another for each unnamed scope.
    pub(crate) fn id(&self) -> u64 {
        self.0.id
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?})", self.name())
    }
}
