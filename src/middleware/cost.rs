//! The true cost of a request, as its response reports it (S15).

use std::fmt;
use std::mem;
use std::sync::Arc;

use crate::observe;
use crate::sync::{Mutex, in_this_runtime, lock};

/// The true cost of a request: model tokens, bytes, rows. The handler puts it into the extensions
/// of the response, and the layer corrects the charges of its [settled](crate::Limit::settled)
/// limits, without delaying the response. A lower cost is refunded, a higher one is taken even
/// beyond the limit.
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
/// A limit that is not named keeps its charge. A name that no settled limit has changes nothing,
/// and is in the log once.
///
/// A streamed body keeps a [`CostMeter`], and the charge is corrected when the meter is dropped: at
/// the end of the body, or when the client disconnects. Update all of its costs with each chunk,
/// since any may be the last one. A limit whose cost the meter was never told keeps its charge,
/// since the service may have paid before the first chunk. Report a cost of 0 by
/// [`set`](CostMeter::set).
#[derive(Clone)]
pub struct TrueCost(Arc<Mutex<CostReport>>);

#[derive(Default)]
struct CostReport {
    costs: Costs,
    is_complete: bool,
    waiting: Vec<Settle>,
    /// The settled limits of the layers that have read the report.
    settled: Option<Vec<Box<str>>>,
}

type Settle = Box<dyn FnOnce(&Costs) + Send>;

#[derive(Clone, Default, Debug)]
pub(crate) struct Costs(Vec<(Box<str>, u64)>);

impl Costs {
    /// If a cost was never reported, the charge stays: the body may have ended before its first
    /// count of what was bought already (S15).
    pub(crate) fn of(&self, name: &str) -> Option<u64> {
        self.0.iter().find(|(other, _)| **other == *name).map(|(_, cost)| *cost)
    }

    fn entry(&mut self, name: &str) -> &mut u64 {
        let at = self.0.iter().position(|(other, _)| **other == *name).unwrap_or_else(|| {
            self.0.push((name.into(), 0));
            self.0.len() - 1
        });
        &mut self.0[at].1
    }
}

impl Drop for CostReport {
    fn drop(&mut self) {
        let Some(settled) = &self.settled else { return };
        for (name, _) in &self.costs.0 {
            if !settled.contains(name) {
                observe::mistake(&format_args!(
                    "a response reports a true cost of {name:?}, and no limit takes it: write \
                     .name(\"tokens\").settled() for the limit, and \
                     TrueCost::of(\"tokens\", cost) for the response"
                ));
            }
        }
    }
}

impl TrueCost {
    fn known(costs: Costs) -> Self {
        let report = CostReport { costs, is_complete: true, waiting: Vec::new(), settled: None };
        Self(Arc::new(Mutex::new(report)))
    }

    /// Creates the cost of the limit of this name.
    pub fn of(name: &str, cost: u64) -> Self {
        Self::known(Costs(vec![(name.into(), cost)]))
    }

    /// Adds the cost of the limit of this name, as in the example of [`TrueCost`].
    #[must_use]
    pub fn and(self, name: &str, cost: u64) -> Self {
        *lock(&self.0).costs.entry(name) = cost;
        self
    }

    /// Creates a cost that a streamed body adds up, as in the example of [`CostMeter`].
    pub fn metered() -> (Self, CostMeter) {
        let report = Arc::<Mutex<CostReport>>::default();
        (Self(Arc::clone(&report)), CostMeter { costs: Costs::default(), report })
    }

    pub(crate) fn note_settled<'a>(&self, names: impl Iterator<Item = &'a str>) {
        let mut report = lock(&self.0);
        report.settled.get_or_insert_default().extend(names.map(Box::from));
    }

    pub(crate) fn costs(&self) -> Option<Costs> {
        let report = lock(&self.0);
        report.is_complete.then(|| report.costs.clone())
    }

    pub(crate) fn settle_at_end(&self, settle: impl FnOnce(&Costs) + Send + 'static) {
        // The body may end on any thread.
        let settle: Settle = Box::new(in_this_runtime(settle));
        let mut report = lock(&self.0);
        if report.is_complete {
            let costs = report.costs.clone();
            drop(report);
            settle(&costs);
        } else {
            report.waiting.push(settle);
        }
    }
}

impl fmt::Debug for TrueCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TrueCost").field(&self.costs()).finish()
    }
}

/// Adds up the costs of a streamed body: see [`TrueCost`].
///
/// ```
/// use tower_fixed_window::TrueCost;
///
/// let (_, mut meter) = TrueCost::metered();
/// meter.add("tokens", 3);
/// meter.add("tokens", 4);
/// meter.set("cents", meter.of("tokens").div_ceil(1_000));
/// assert_eq!((meter.of("tokens"), meter.of("cents")), (7, 1));
/// ```
pub struct CostMeter {
    costs: Costs,
    report: Arc<Mutex<CostReport>>,
}

impl CostMeter {
    /// Adds to the cost of the limit of this name.
    pub fn add(&mut self, name: &str, cost: u64) {
        let entry = self.costs.entry(name);
        *entry = entry.saturating_add(cost);
    }

    /// Sets the cost of the limit of this name.
    pub fn set(&mut self, name: &str, cost: u64) {
        *self.costs.entry(name) = cost;
    }

    /// Returns the cost of the limit of this name so far.
    pub fn of(&self, name: &str) -> u64 {
        self.costs.of(name).unwrap_or(0)
    }
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        let mut report = lock(&self.report);
        report.costs = self.costs.clone();
        report.is_complete = true;
        let waiting = mem::take(&mut report.waiting);
        drop(report);
        waiting.into_iter().for_each(|settle| settle(&self.costs));
    }
}

impl fmt::Debug for CostMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CostMeter").field("costs", &self.costs).finish_non_exhaustive()
    }
}
