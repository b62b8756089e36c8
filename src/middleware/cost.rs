//! The true cost of a request, as its response reports it (S15).

use std::collections::BTreeMap;
use std::fmt;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::limits::Limits;
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
///
/// Clones are independent: [`and`](Self::and) changes one report alone.
pub struct TrueCost {
    costs: Costs,
    meter: Option<Arc<Mutex<Metered>>>,
    readers: Readers,
}

// A clone is another report.
impl Clone for TrueCost {
    fn clone(&self) -> Self {
        let (costs, meter) = (self.costs.clone(), self.meter.clone());
        Self { costs, meter, readers: Readers::new() }
    }
}

#[derive(Default)]
struct Metered {
    /// `None` while the meter runs.
    costs: Option<Costs>,
    waiting: Vec<Settle>,
    readers: Readers,
}

type Settle = Box<dyn FnOnce(&Costs) + Send>;

/// The limits of the layers that have read a report, each once.
type Readers = Vec<Limits>;

fn note_reader(readers: &mut Readers, limits: &Limits) {
    if !readers.iter().any(|of| of.is_same(limits)) {
        readers.push(limits.clone());
    }
}

fn tell_unknown(readers: &Readers, costs: &Costs) {
    for name in costs.keys() {
        if !readers.is_empty() && !readers.iter().any(|limits| limits.settles(name)) {
            observe::mistake(&format_args!(
                "a response reports a true cost of {name:?}, and no limit takes it: write \
                 .name(\"tokens\").settled() for the limit, and \
                 TrueCost::of(\"tokens\", cost) for the response"
            ));
        }
    }
}

/// By the names of limits.
pub(crate) type Costs = BTreeMap<Box<str>, u64>;

fn with_metered(costs: &Costs, metered: &Costs) -> Costs {
    costs.iter().chain(metered).map(|(name, cost)| (name.clone(), *cost)).collect()
}

impl TrueCost {
    /// Creates the cost of the limit of this name.
    pub fn of(name: &str, cost: u64) -> Self {
        let costs = Costs::from([(name.into(), cost)]);
        Self { costs, meter: None, readers: Readers::new() }
    }

    /// Adds the cost of the limit of this name, as in the example of [`TrueCost`]. If a meter
    /// counts the same, the meter's number applies.
    #[must_use]
    pub fn and(mut self, name: &str, cost: u64) -> Self {
        self.costs.insert(name.into(), cost);
        self
    }

    /// Creates a cost that a streamed body adds up, as in the example of [`CostMeter`].
    pub fn metered() -> (Self, CostMeter) {
        let metered = Arc::<Mutex<Metered>>::default();
        let meter = CostMeter { costs: Costs::default(), metered: Arc::clone(&metered) };
        (Self { costs: Costs::default(), meter: Some(metered), readers: Readers::new() }, meter)
    }

    pub(crate) fn read_by(&mut self, limits: &Limits) {
        note_reader(&mut self.readers, limits);
        if let Some(meter) = &self.meter {
            note_reader(&mut lock(meter).readers, limits);
        }
    }

    /// `None` while a meter runs.
    pub(crate) fn costs(&self) -> Option<Costs> {
        match &self.meter {
            None => Some(self.costs.clone()),
            Some(meter) => {
                lock(meter).costs.as_ref().map(|metered| with_metered(&self.costs, metered))
            }
        }
    }

    pub(crate) fn settle_at_end(&self, settle: impl FnOnce(&Costs) + Send + 'static) {
        let (Some(meter), costs) = (&self.meter, self.costs.clone()) else { return };
        // The body may end on any thread.
        let settle = in_this_runtime(settle);
        let settle: Settle = Box::new(move |metered| settle(&with_metered(&costs, metered)));
        let mut metered = lock(meter);
        match metered.costs.clone() {
            Some(costs) => {
                drop(metered);
                settle(&costs);
            }
            None => metered.waiting.push(settle),
        }
    }
}

impl Drop for TrueCost {
    fn drop(&mut self) {
        tell_unknown(&self.readers, &self.costs);
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        self.costs.iter().for_each(|costs| tell_unknown(&self.readers, costs));
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
/// meter.set("cents", meter.cost("tokens").div_ceil(1_000));
/// assert_eq!((meter.cost("tokens"), meter.cost("cents")), (7, 1));
/// ```
pub struct CostMeter {
    costs: Costs,
    metered: Arc<Mutex<Metered>>,
}

impl CostMeter {
    /// Adds to the cost of the limit of this name.
    pub fn add(&mut self, name: &str, cost: u64) {
        self.set(name, self.cost(name).saturating_add(cost));
    }

    /// Sets the cost of the limit of this name.
    pub fn set(&mut self, name: &str, cost: u64) {
        self.costs.insert(name.into(), cost);
    }

    /// Returns the cost of the limit of this name so far.
    pub fn cost(&self, name: &str) -> u64 {
        self.costs.get(name).copied().unwrap_or(0)
    }
}

impl Drop for CostMeter {
    fn drop(&mut self) {
        let mut metered = lock(&self.metered);
        metered.costs = Some(self.costs.clone());
        let waiting = mem::take(&mut metered.waiting);
        drop(metered);
        for settle in waiting {
            // A body may be dropped while another panic unwinds.
            let _panicked = catch_unwind(AssertUnwindSafe(|| settle(&self.costs)));
        }
    }
}

impl fmt::Debug for CostMeter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CostMeter").field("costs", &self.costs).finish_non_exhaustive()
    }
}
