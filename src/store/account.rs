//! The counters of a key, [`Account`], and their name, [`Scope`].

use std::array;
use std::fmt;
use std::sync::Arc;

use crate::decision::{Label, LimitName};
use crate::key::Key;
use crate::observe::{Meters, Observed};
use crate::quota::{Anchor, Calendar, Quota, Quotas};
use crate::sync::unique_number;
use crate::window::{State, Window, stagger};

/// The counters of a key, under a scope, for a set of quotas.
///
/// ```
/// use tower_fixed_window::store::{Account, Scope};
/// use tower_fixed_window::{Key, Quota};
///
/// let (scope, key) = (Scope::named("api"), Key::from("alice"));
/// let quotas = Quota::per_minute(60).and(Quota::per_month(9_000));
/// let account = Account::new(&scope, &quotas, &key);
/// assert_eq!(account.scope.name(), "api");
/// assert_eq!((account.quotas, account.key), (&quotas, &key));
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Account<'a> {
    /// The name of the counters.
    pub scope: &'a Scope,
    /// The quotas.
    pub quotas: &'a Quotas,
    /// The key.
    pub key: &'a Key,
}

impl<'a> Account<'a> {
    /// Returns the counters of `key` under `scope` for `quotas`.
    pub fn new(scope: &'a Scope, quotas: &'a Quotas, key: &'a Key) -> Self {
        Self { scope, quotas, key }
    }

    pub(crate) fn label(&self) -> Label {
        Label { name: self.scope.limit_name(), periods: self.quotas.periods }
    }

    pub(crate) fn to_owned(self) -> OwnedAccount {
        OwnedAccount { scope: self.scope.clone(), quotas: *self.quotas, key: self.key.clone() }
    }

    /// 0 unless the quota is staggered.
    pub(crate) fn shift(&self, quota: &Quota) -> u64 {
        match quota.anchor {
            Anchor::Staggered => stagger(self.scope.name(), self.key.as_bytes()),
            _ => 0,
        }
    }

    /// Returns how the windows of a quota follow each other for this key, for a store that decides
    /// on its server: see [`Windows`].
    pub fn windows_of(&self, quota: &Quota) -> Windows {
        match quota.anchor {
            Anchor::Grid { offset, .. } => Windows::Grid { start: offset },
            Anchor::Staggered => Windows::Grid { start: self.shift(quota) % quota.window },
            Anchor::FirstRequest => Windows::FromFirstRequest,
            Anchor::Calendar(calendar) => Windows::OnCalendar(calendar),
        }
    }

    /// The first quota's window fills the unused places up to `N`.
    #[inline(always)]
    pub(super) fn windows<const N: usize>(
        &self,
        mut window: impl FnMut(usize, &'a Quota) -> Window<'a>,
    ) -> [Window<'a>; N] {
        let quotas = self.quotas.as_slice();
        let mut windows = [window(0, &quotas[0]); N];
        if N > 1 {
            for (i, quota) in quotas.iter().enumerate().skip(1) {
                windows[i] = window(i, quota);
            }
        }
        windows
    }

    #[inline(always)]
    pub(super) fn window(&self, now: i64, quota: &'a Quota, state: Option<State>) -> Window<'a> {
        Window::at(now, state, quota, self.shift(quota))
    }
}

/// How the windows of a quota follow each other for a key: [`Account::windows_of`].
///
/// ```
/// use tower_fixed_window::store::{Account, Scope, Windows};
/// use tower_fixed_window::{Key, Quota};
///
/// let (scope, key) = (Scope::named("api"), Key::from("alice"));
/// let quotas = Quota::per_minute(60).and(Quota::per_month(9_000));
/// let account = Account::new(&scope, &quotas, &key);
/// let [minute, month] = [0, 1].map(|i| account.windows_of(&quotas.as_ref()[i]));
/// assert!(matches!(minute, Windows::Grid { start: 0 }));
///
/// let Windows::OnCalendar(months) = month else { panic!() };
/// let number = months.number(1_700_000_050_000); // 14 November 2023
/// assert_eq!(months.start_of(number), 1_698_796_800_000);
/// assert_eq!(months.start_of(number + 1), 1_701_388_800_000);
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Windows {
    /// All have the quota's length, and one begins at this time, less than a window after the
    /// epoch.
    Grid {
        /// In milliseconds since the epoch.
        start: u64,
    },
    /// All windows have the quota's length. A window begins with the first charge that finds no
    /// state.
    FromFirstRequest,
    /// On a calendar: see [`Quota::in_zone`].
    OnCalendar(Calendar),
}

#[derive(Clone, Debug)]
pub(crate) struct OwnedAccount {
    scope: Scope,
    quotas: Quotas,
    key: Key,
}

impl OwnedAccount {
    pub(super) fn share(&mut self, nodes: u64) {
        self.quotas = self.quotas.share(nodes);
    }

    pub(crate) fn as_account(&self) -> Account<'_> {
        Account::new(&self.scope, &self.quotas, &self.key)
    }
}

pub(crate) fn instant(now: u64) -> i64 {
    // Stays 1 below the latest `until`, which is never reached.
    now.min(Quota::MAX_TOKENS - 1) as i64
}

/// The name of counters, which is that of their limit. It is cheap to clone.
///
/// ```
/// use tower_fixed_window::store::Scope;
///
/// assert_eq!(Scope::named("api").name(), "api");
/// ```
#[derive(Clone)]
pub struct Scope(Arc<Named>);

/// Half of a name's SHA-256: two names of one id can't be found.
pub(crate) type ScopeId = [u64; 2];

struct Named {
    observed: Observed,
    limit_name: LimitName,
    id: ScopeId,
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
        let hash = hmac_sha256::Hash::hash(name.as_bytes());
        let half = |at: usize| array::from_fn(|i| hash[at + i]);
        // An id of a scope without a name has a 0 there.
        let id = [u64::from_le_bytes(half(0)), u64::from_le_bytes(half(8)) | 1];
        Self::new(name, id)
    }

    pub(crate) fn is_name(name: &str) -> bool {
        let is_valid = |b| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-');
        (1..=64).contains(&name.len()) && name.bytes().all(is_valid)
    }

    /// Creates a scope that no other limiter can find, a new one at each call.
    pub(crate) fn unnamed() -> Self {
        Self::new("", [unique_number(), 0])
    }

    fn new(name: &str, id: ScopeId) -> Self {
        let observed = Observed { name: name.into(), meters: Meters::default() };
        Self(Arc::new(Named { observed, limit_name: LimitName::interned(name), id }))
    }

    #[cfg(feature = "tokio")]
    pub(super) fn shared_name(&self) -> Arc<str> {
        Arc::clone(&self.0.observed.name)
    }

    /// Returns the name, or the empty string if the scope has none.
    pub fn name(&self) -> &str {
        &self.0.observed.name
    }

    pub(crate) fn limit_name(&self) -> LimitName {
        self.0.limit_name
    }

    pub(crate) fn observe(&self) -> &Observed {
        &self.0.observed
    }

    /// The same for equal names, and another for each unnamed scope.
    pub(crate) fn id(&self) -> ScopeId {
        self.0.id
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?})", self.name())
    }
}
