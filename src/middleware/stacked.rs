//! Stacked layers: when an inner layer refuses a request, the outer layers learn of the refusal at
//! once. The response itself may be delayed until the rest of an upload is read (S9).

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use http::Extensions;

use super::options::Options;
use super::twice;
use crate::limiter::Limiter;

/// An extension of a request, `true` once a layer has refused it.
#[derive(Default)]
struct RefusedOnce(Arc<AtomicBool>);

/// Cloned extensions belong to another request, such as a retry, which is not refused yet.
impl Clone for RefusedOnce {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// Shows an outer layer whether an inner one has refused the request.
pub(crate) struct Inside {
    refused: Arc<AtomicBool>,
    seen: bool,
}

impl Inside {
    pub(crate) fn of(extensions: &mut Extensions) -> Self {
        let RefusedOnce(refused) = extensions.get_or_insert_default();
        Self { refused: Arc::clone(refused), seen: false }
    }

    /// Returns `true` once, at the first call after an inner layer has refused the request.
    pub(crate) fn refuses(&mut self) -> bool {
        let before = mem::replace(&mut self.seen, self.refused.load(Ordering::Acquire));
        self.seen && !before
    }

    /// Returns whether [`refuses`](Self::refuses) has returned `true`.
    pub(crate) fn has_refused(&self) -> bool {
        self.seen
    }
}

/// Informs the outer layers that this layer has refused the request.
#[inline]
pub(crate) fn note_refused(extensions: &Extensions) {
    if are_possible()
        && let Some(RefusedOnce(refused)) = extensions.get()
    {
        refused.store(true, Ordering::Release);
    }
}

static SEVERAL: AtomicBool = AtomicBool::new(false);

/// Returns whether this process has applied layers with different limits. If all layers have the
/// same one, requests skip the checks for stacked layers.
#[inline]
pub(crate) fn are_possible() -> bool {
    SEVERAL.load(Ordering::Relaxed)
}

/// Records that a layer is applied to a service.
pub(crate) fn note_applied(limiter: &Limiter, options: &Options) {
    static FIRST: OnceLock<twice::Layer> = OnceLock::new();

    let layer = twice::layer(limiter, options);
    if *FIRST.get_or_init(|| layer) != layer {
        SEVERAL.store(true, Ordering::Relaxed);
    }
}
