//! Detects a layer that is applied twice on the way of a request, and so charges it twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::Extensions;

use super::options::Options;
use crate::key::Key;
use crate::limits::Limiter;
use crate::observe;

/// The number of requests of a service that are marked. After these, most services have had a
/// request on each route, and later requests cost nothing.
const MARKED: u32 = 256;

/// Counts the marked requests of a service.
#[derive(Default)]
pub(crate) struct Watch(AtomicU32);

/// The charges of a request so far, in its extensions.
#[derive(Default)]
struct Charges(Vec<(Layer, Key)>);

/// Cloned extensions belong to another request, such as a part of a batch.
impl Clone for Charges {
    fn clone(&self) -> Self {
        Self::default()
    }
}

/// Identifies a layer: equal for layers of one limit. A clone with another `count_if` differs, also
/// if it shares the counters.
type Layer = [usize; 2];

impl Watch {
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed) < MARKED
    }

    /// Marks a request that was charged. If the same layer has marked it before, this is logged.
    pub(crate) fn mark(
        &self,
        limiter: &Limiter,
        options: &Options,
        key: &Key,
        extensions: &mut Extensions,
    ) {
        self.0.fetch_add(1, Ordering::Relaxed);
        let charge = (layer(limiter, options), key.clone());
        let Charges(charges) = extensions.get_or_insert_default();
        if charges.contains(&charge) {
            let name = limiter.name();
            let name = if name.is_empty() { String::new() } else { format!(" `{name}`") };
            observe::mistake(&format_args!(
                "the same rate limit{name} is applied twice on the way of a request and charges it \
                 twice: remove one of the two `.layer(..)` calls, on the app or on a route or router \
                 in it, or make it another limit with another name"
            ));
        }
        charges.push(charge);
    }
}

fn layer(limiter: &Limiter, options: &Options) -> Layer {
    fn address<T: ?Sized>(arc: &Arc<T>) -> usize {
        Arc::as_ptr(arc).cast::<()>().addr()
    }
    [address(limiter.live()), options.count_if.as_ref().map_or(0, address)]
}
