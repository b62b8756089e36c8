//! A store as limiters hold it: [`AnyStore`].

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;

use super::charge::Charge;
use super::memory::MemoryStore;
use super::reply::Reply;
use super::{Store, in_order};
use crate::decision::{Decision, Ruling};

/// A store of any type. Most limiters count in memory, and charge that store without a call through
/// a pointer.
#[derive(Clone)]
pub(crate) enum AnyStore {
    Memory(MemoryStore),
    Other(Arc<dyn Store>),
}

impl AnyStore {
    pub(crate) fn new(store: impl Store) -> Self {
        let any: &dyn Any = &store;
        match any.downcast_ref::<MemoryStore>() {
            Some(memory) => Self::Memory(memory.clone()),
            None => Self::Other(Arc::new(store)),
        }
    }

    /// The same as [`charge`](Self::charge), but returns the ruling of a usual charge in memory:
    /// [`MemoryStore::rule`].
    #[inline(always)]
    pub(crate) fn rule(&self, charge: Charge<'_>) -> Result<Ruling, Reply<Decision>> {
        match self {
            Self::Memory(store) => store.rule(charge),
            Self::Other(_) => Err(self.charge(charge)),
        }
    }

    /// Charges all lines, or none.
    #[inline(always)]
    pub(crate) fn charge(&self, charge: Charge<'_>) -> Reply<Decision> {
        match self {
            Self::Memory(store) => store.charge(charge),
            Self::Other(store) if charge.is_single() => store.charge(charge),
            Self::Other(store) => in_order::charge_lines(store, charge),
        }
    }
}

impl Deref for AnyStore {
    type Target = dyn Store;

    fn deref(&self) -> &(dyn Store + 'static) {
        match self {
            Self::Memory(store) => store,
            Self::Other(store) => &**store,
        }
    }
}
