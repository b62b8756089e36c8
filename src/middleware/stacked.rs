//! Layers around each other: those around one that refuses learn of it at once, since its response
//! may wait for the rest of an upload (S9).

use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use http::Extensions;

use super::options::Options;
use super::twice;
use crate::limiter::Limiter;

/// In the extensions of a request that layers of this crate may have charged: whether a layer has
/// refused it.
#[derive(Default)]
struct Refused(Arc<AtomicBool>);

/// Cloned extensions belong to another request, such as a second try.
impl Clone for Refused {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// What a layer learns of a request that it has passed on.
pub(crate) struct Inside {
    refused: Arc<AtomicBool>,
    seen: bool,
}

impl Inside {
    pub(crate) fn of(extensions: &mut Extensions) -> Self {
        let Refused(refused) = extensions.get_or_insert_default();
        Self { refused: Arc::clone(refused), seen: false }
    }

    /// Whether a layer has refused it since this was asked before.
    pub(crate) fn refuses(&mut self) -> bool {
        let before = mem::replace(&mut self.seen, self.refused.load(Ordering::Acquire));
        self.seen && !before
    }

    /// Whether that was [seen](Self::refuses).
    pub(crate) fn has_refused(&self) -> bool {
        self.seen
    }
}

/// Lets the layers around this one know that it has refused.
#[inline]
pub(crate) fn note_refused(extensions: &Extensions) {
    if are_possible()
        && let Some(Refused(refused)) = extensions.get()
    {
        refused.store(true, Ordering::Release);
    }
}

static SEVERAL: AtomicBool = AtomicBool::new(false);

/// Whether this process has applied layers that are different limits. Where all are the same one,
/// requests don't pay for others.
#[inline]
pub(crate) fn are_possible() -> bool {
    SEVERAL.load(Ordering::Relaxed)
}

/// Notes a layer that is applied.
pub(crate) fn note_applied(limiter: &Limiter, options: &Options) {
    static FIRST: OnceLock<twice::Layer> = OnceLock::new();

    let layer = twice::layer(limiter, options);
    if *FIRST.get_or_init(|| layer) != layer {
        SEVERAL.store(true, Ordering::Relaxed);
    }
}
