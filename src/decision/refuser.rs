//! The limit that refused, for a response that is not made by a layer: [`Refuser`].

use std::num::NonZero;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::quota::Quotas;

/// The limit that refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Refuser {
    pub(crate) name: Box<str>,
    pub(crate) quotas: Quotas,
}

/// The number of a limit that is kept for as long as the process runs, so that its refusals refer
/// to it without an allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct KeptRefuser(NonZero<u16>);

impl KeptRefuser {
    /// Returns the number of a limit. `None`: as many limits are kept as may be, and refusals of
    /// others take a copy.
    pub(crate) fn of(name: &str, quotas: &Quotas) -> Option<Self> {
        /// More than an app writes down, in some 240 kB.
        const MOST: usize = 1_024;

        let mut kept = kept();
        let known = kept.iter().position(|of| *of.name == *name && of.quotas == *quotas);
        let index = match known {
            Some(index) => index,
            None if kept.len() < MOST => {
                kept.push(Refuser { name: name.into(), quotas: *quotas });
                kept.len() - 1
            }
            None => return None,
        };
        NonZero::new(index as u16 + 1).map(Self)
    }

    pub(super) fn refuser(self) -> Option<Refuser> {
        kept().get(usize::from(self.0.get()) - 1).cloned()
    }
}

fn kept() -> MutexGuard<'static, Vec<Refuser>> {
    static KEPT: Mutex<Vec<Refuser>> = Mutex::new(Vec::new());
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}
