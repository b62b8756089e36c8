//! The true cost of a request, as its response reports it (S15).

use std::collections::BTreeMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::limits::{Limiter, Limits};
use crate::observe;
use crate::sync::{Mutex, in_this_runtime, lock};

/// The true cost of a request: model tokens, bytes, rows. The handler puts it into the response's
/// extensions, and the layer corrects the charges of its [settled](crate::Limit::settled) limits,
/// without delaying the response. A lower cost is refunded; a higher one is charged even beyond the
/// limit.
///
/// ```
/// use http::Response;
/// use tower_fixed_window::TrueCost;
///
/// // By the names of the limits, whatever the estimates were.
/// let mut response = Response::new("an answer");
/// response.extensions_mut().insert(TrueCost::of("tokens", 812).and("cents", 4));
/// ```
///
/// A limit that the report does not name keeps its charge. A name of no settled limit changes
/// nothing, and is logged once.
///
/// For a streamed body, move a [`CostMeter`] into the stream. The charge is corrected when the
/// meter is dropped: at the end of the body, or when the client disconnects. Update all costs with
/// each chunk, because any chunk may be the last. A limit whose cost was never set on the meter
/// keeps its charge, because the service may have paid before the first chunk; if it has not, set
/// the cost to 0.
///
/// Clones are independent: [`and`](Self::and) changes one of them only.
#[derive(Clone)]
pub struct TrueCost {
    report: Report,
    meter: Option<Arc<Mutex<Metered>>>,
}

#[derive(Default)]
struct Report {
    costs: Costs,
    /// The limits of the layers that have read it, each once.
    readers: Vec<Limits>,
}

impl Report {
    fn note_reader(&mut self, limits: &Limits) {
        if !self.readers.iter().any(|of| Arc::ptr_eq(&of.limiters, &limits.limiters)) {
            self.readers.push(limits.clone());
        }
    }
}

// A clone is another report.
impl Clone for Report {
    fn clone(&self) -> Self {
        Self { costs: self.costs.clone(), readers: Vec::new() }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        for name in self.costs.keys() {
            let takes = |of: &Limiter| of.name() == &**name && of.live.limit.settled;
            if !self.readers.is_empty() && !self.readers.iter().flatten().any(takes) {
                observe::mistake(&format_args!(
                    "a response reports a true cost of {name:?}, and no limit takes it: write \
                     .name(\"tokens\").settled() for the limit, and \
                     TrueCost::of(\"tokens\", cost) for the response"
                ));
            }
        }
    }
}

struct Metered {
    report: Report,
    /// `None` once the meter has ended.
    waiting: Option<Vec<Settle>>,
}

type Settle = Box<dyn FnOnce(&Costs) + Send>;

/// By the names of limits.
pub(crate) type Costs = BTreeMap<Box<str>, u64>;

fn with_metered(costs: &Costs, metered: &Costs) -> Costs {
    costs.iter().chain(metered).map(|(name, cost)| (name.clone(), *cost)).collect()
}

impl TrueCost {
    /// Creates a report of the cost of the limit with this name.
    pub fn of(name: &str, cost: u64) -> Self {
        Self { report: Report::default(), meter: None }.and(name, cost)
    }

    /// Adds the cost of the limit with this name, as in the example of [`TrueCost`]. If a meter has
    /// a cost for the same limit, the meter's applies.
    #[must_use]
    pub fn and(mut self, name: &str, cost: u64) -> Self {
        self.report.costs.insert(name.into(), cost);
        self
    }

    /// Creates a cost that a streamed body reports while it is sent, with its meter, as in the
    /// example of [`CostMeter`].
    pub fn metered() -> (Self, CostMeter) {
        let metered = Metered { report: Report::default(), waiting: Some(Vec::new()) };
        let meter = CostMeter(Arc::new(Mutex::new(metered)));
        (Self { report: Report::default(), meter: Some(Arc::clone(&meter.0)) }, meter)
    }

    pub(crate) fn read_by(&mut self, limits: &Limits) {
        self.report.note_reader(limits);
        if let Some(meter) = &self.meter {
            lock(meter).report.note_reader(limits);
        }
    }

    /// `None` while a meter runs.
    pub(crate) fn costs(&self) -> Option<Costs> {
        let Some(meter) = &self.meter else { return Some(self.report.costs.clone()) };
        let metered = lock(meter);
        let has_ended = metered.waiting.is_none();
        has_ended.then(|| with_metered(&self.report.costs, &metered.report.costs))
    }

    pub(crate) fn settle_at_end(&self, settle: impl FnOnce(&Costs) + Send + 'static) {
        let (Some(meter), costs) = (&self.meter, self.report.costs.clone()) else { return };
        // The body may end on any thread.
        let settle = in_this_runtime(settle);
        let settle: Settle = Box::new(move |metered| settle(&with_metered(&costs, metered)));
        let mut metered = lock(meter);
        if let Some(waiting) = &mut metered.waiting {
            return waiting.push(settle);
        }
        let costs = metered.report.costs.clone();
        drop(metered);
        settle(&costs);
    }
}

impl fmt::Debug for TrueCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TrueCost").field(&self.costs()).finish()
    }
}

/// The cost so far of a streamed body: see [`TrueCost`].
///
/// ```
/// use tower_fixed_window::TrueCost;
///
/// let (_, mut meter) = TrueCost::metered();
/// let mut tokens = 0;
/// for of_chunk in [3, 4] {
///     tokens += of_chunk;
///     meter.set("tokens", tokens);
///     meter.set("cents", tokens.div_ceil(1_000));
/// }
/// ```
pub struct CostMeter(Arc<Mutex<Metered>>);

impl CostMeter {
    /// Sets the cost so far of the limit with this name.
    pub fn set(&mut self, name: &str, cost: u64) {
        lock(&self.0).report.costs.insert(name.into(), cost);
    }
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        let mut metered = lock(&self.0);
        let (costs, waiting) = (metered.report.costs.clone(), metered.waiting.take());
        drop(metered);
        for settle in waiting.into_iter().flatten() {
            // A body may be dropped while another panic unwinds.
            let _panicked = catch_unwind(AssertUnwindSafe(|| settle(&costs)));
        }
    }
}

impl fmt::Debug for CostMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CostMeter").field(&lock(&self.0).report.costs).finish()
    }
}
