//! The true cost of a request, as its response reports it (S15).

use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::timer::Runtime;

/// The true cost of a request: model tokens, bytes, rows. The handler puts it into the extensions
/// of the response, and the layer corrects its charge without delaying the response. A lower cost
/// is refunded, a higher one is taken even beyond the limit.
///
/// ```
/// use http::Response;
/// use tower_fixed_window::TrueCost;
///
/// // 250 tokens, whatever the estimate was.
/// let mut response = Response::new("an answer");
/// response.extensions_mut().insert(TrueCost::of(250));
/// ```
///
/// A streamed body determines its cost as it goes. It keeps a [`CostMeter`], and the charge is
/// corrected when the meter is dropped: at the end of the body, or when the client disconnects.
///
/// ```
/// use http::Response;
/// use tower_fixed_window::TrueCost;
///
/// let (cost, mut meter) = TrueCost::metered();
/// let chunks = ["one", "two"].into_iter().inspect(move |chunk| meter.add(chunk.len() as u64));
///
/// let mut response = Response::new(chunks);
/// response.extensions_mut().insert(cost);
/// ```
#[derive(Clone)]
pub struct TrueCost(Kind);

#[derive(Clone)]
enum Kind {
    Known(u64),
    Metered(Arc<Meter>),
}

type Settle = Box<dyn FnOnce(u64) + Send>;

/// Connects the layers, which know the charge, and the body, which knows the cost.
#[derive(Default)]
struct Meter(Mutex<Settlements>);

#[derive(Default)]
struct Settlements {
    waiting: Vec<Settle>,
    /// The cost of a body that has ended.
    cost: Option<u64>,
}

impl Meter {
    fn settle(&self, settle: Settle) {
        let mut settlements = self.lock();
        match settlements.cost {
            Some(cost) => {
                drop(settlements);
                settle(cost);
            }
            None => settlements.waiting.push(settle),
        }
    }

    fn end(&self, cost: u64) {
        let mut settlements = self.lock();
        settlements.cost = Some(cost);
        let waiting = mem::take(&mut settlements.waiting);
        drop(settlements);
        waiting.into_iter().for_each(|settle| settle(cost));
    }

    fn lock(&self) -> MutexGuard<'_, Settlements> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TrueCost {
    /// Creates a cost that is known already.
    pub fn of(cost: u64) -> Self {
        Self(Kind::Known(cost))
    }

    /// Creates a cost that a streamed body adds up.
    pub fn metered() -> (Self, CostMeter) {
        let meter = Arc::new(Meter::default());
        (Self(Kind::Metered(Arc::clone(&meter))), CostMeter { cost: 0, meter })
    }

    /// The cost, if it is known by now.
    pub(crate) fn known(&self) -> Option<u64> {
        match self.0 {
            Kind::Known(cost) => Some(cost),
            Kind::Metered(_) => None,
        }
    }

    /// Corrects the charge when the body has ended.
    pub(crate) fn settle_at_end(&self, settle: impl FnOnce(u64) + Send + 'static) {
        if let Kind::Metered(meter) = &self.0 {
            // The body may end on any thread.
            let runtime = Runtime::current();
            meter.settle(Box::new(move |cost| runtime.run(|| settle(cost))));
        }
    }
}

impl fmt::Debug for TrueCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TrueCost").field(&self.known()).finish()
    }
}

/// Adds up the cost of a streamed body: see [`TrueCost`].
///
/// ```
/// use tower_fixed_window::TrueCost;
///
/// let (_, mut meter) = TrueCost::metered();
/// meter.add(3);
/// meter.add(4);
/// assert_eq!(meter.cost(), 7);
/// ```
pub struct CostMeter {
    cost: u64,
    meter: Arc<Meter>,
}

impl CostMeter {
    /// Adds to the cost.
    pub fn add(&mut self, cost: u64) {
        self.cost = self.cost.saturating_add(cost);
    }

    /// Returns the cost so far.
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        self.meter.end(self.cost);
    }
}

impl fmt::Debug for CostMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CostMeter").field("cost", &self.cost).finish_non_exhaustive()
    }
}
