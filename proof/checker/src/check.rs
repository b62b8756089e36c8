//! By how much a history is above its limit, at least.
//!
//! A request is decided at some instant between its sending and its answer. So requests that were sent and
//! answered within a window were decided in it, whatever the limiter did inside: their sum is a lower bound of
//! what passed there. Nothing is ever held against a limiter that an exact one could have done.

use std::collections::HashMap;

use crate::history::{Answer, Ask};
use crate::spans::spans;

/// Where a limiter's windows are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Windows {
    /// Windows begin at the multiples of their length since the Unix epoch.
    Aligned,
    /// Windows begin at given instants, as a calendar's do.
    Listed,
    /// Each key has a grid of its own, which is not known.
    Regular,
    /// Each begins with a request, when the one before is over.
    OnDemand,
    /// None: a burst of `limit`, and then `limit` for each `window`, evenly (GCRA, token bucket).
    Bucket,
}

/// The promise of a limiter.
#[derive(Clone, Debug)]
pub struct Promise {
    pub windows: Windows,
    /// Tokens.
    pub limit: u64,
    /// Tokens that may be there at once, since those of earlier windows are kept: the limit, or more.
    pub capacity: u64,
    /// Tokens of later windows that may be taken. More than the limit, or any of these, only where it is
    /// known when windows begin.
    pub reserved: u64,
    /// Milliseconds.
    pub length: u64,
    /// When listed windows begin, in microseconds and in order; one is before all of them.
    pub starts: Vec<u64>,
    /// When the store lost what it had counted, each from before that until after it, in microseconds.
    pub losses: Vec<(u64, u64)>,
    /// Nodes may count by themselves while the store is away: one further limit for each.
    pub local: bool,
}

impl Promise {
    /// So many tokens in each window, and nothing else.
    pub fn new(windows: Windows, limit: u64, length: u64) -> Self {
        Self {
            windows,
            limit,
            capacity: limit,
            reserved: 0,
            length,
            starts: Vec::new(),
            losses: Vec::new(),
            local: false,
        }
    }
}

/// The worst of a history.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Most {
    /// By how many tokens more passed than the promise allows, at least; 0: it holds.
    pub above: u64,
    /// Where that was: the key, and when the window begins, in microseconds.
    pub at: Option<(u32, u64)>,
}

/// A pass, in whatever unit its user needs.
#[derive(Clone, Copy)]
pub(crate) struct Pass {
    pub sent: u64,
    pub received: u64,
    pub cost: u64,
    pub returned: Option<u64>,
    pub due: Option<u64>,
}

/// By how much a history is above what is promised, at least.
pub fn above(asks: &[Ask], promise: &Promise) -> Most {
    let mut counts = HashMap::<(u32, Option<u32>), Vec<Pass>>::new();
    // For each key, since when a request of unknown fate may have begun a window.
    let mut unknown = HashMap::<u32, u64>::new();
    for ask in asks {
        if matches!(ask.answer, Answer::Failed | Answer::GaveUp) {
            let since = unknown.entry(ask.key).or_insert(ask.sent);
            *since = ask.sent.min(*since);
        }
        if !ask.passed() {
            continue;
        }
        let local = promise.local && ask.answer == Answer::PassedLocally;
        // Only where the beginning of a window is known, it is known until when tokens were held in it.
        let given_back = ask.returned.is_some() && !promise.has_known_windows();
        let cost = if given_back { 0 } else { ask.cost };
        let Ask { sent, received, returned, due, .. } = *ask;
        let pass = Pass { sent, received, cost, returned, due };
        counts.entry((ask.key, local.then_some(ask.node))).or_default().push(pass);
    }
    let mut most = Most::default();
    for ((key, node), passes) in counts {
        // The store does not lose a node's own count.
        let losses = if node.is_none() { &promise.losses[..] } else { &[] };
        let total: u64 = passes.iter().map(|pass| pass.cost).sum();
        if total <= promise.limit {
            continue;
        }
        let (above, start) = match promise.windows {
            Windows::Aligned | Windows::Listed => spans(&passes, promise, losses),
            Windows::Regular => between(passes, losses, |passes, _| regular(passes, promise)),
            Windows::OnDemand => {
                let unknown = unknown.get(&key).copied();
                between(passes, losses, |passes, from| {
                    // The request that began the first window after a loss may be left out.
                    on_demand(passes, promise, if from > 0 { Some(from) } else { unknown })
                })
            }
            Windows::Bucket => between(passes, losses, |passes, _| bucket(passes, promise)),
        };
        if above > most.above {
            most = Most { above, at: Some((key, start)) };
        }
    }
    most
}

/// Windows that begin anew with each loss: what is not wholly between two is left out.
fn between(
    passes: Vec<Pass>,
    losses: &[(u64, u64)],
    most: impl Fn(&[Pass], u64) -> (u64, u64),
) -> (u64, u64) {
    let starts = [0].into_iter().chain(losses.iter().map(|(_, to)| *to));
    let ends = losses.iter().map(|(from, _)| *from).chain([u64::MAX]);
    let parts = starts.zip(ends).map(|(start, end)| {
        let inside = |pass: &&Pass| pass.sent > start && pass.received < end;
        most(&passes.iter().filter(inside).copied().collect::<Vec<_>>(), start)
    });
    parts.max().unwrap_or_default()
}

/// The tokens that passed in a window that begins within a millisecond, for each millisecond from
/// the first relevant one on.
///
/// True windows begin at any instant. The window of millisecond `m` counts only passes that are in
/// every window that begins within `m`. So the least over milliseconds is at most the least over
/// instants.
struct Starts {
    first: u64,
    passed: Vec<u64>,
    /// For each millisecond, the time of the first answer to a request that was sent after it.
    answered: Vec<u64>,
}

impl Starts {
    fn new(passes: &[Pass], length: u64) -> Self {
        let millis: Vec<_> = passes
            .iter()
            .map(|pass| (pass.sent / 1_000, pass.received.div_ceil(1_000), pass.cost))
            .collect();
        let first = millis.iter().map(|pass| pass.0).min().unwrap_or(0).saturating_sub(length);
        let last = millis.iter().map(|pass| pass.1).max().unwrap_or(0) + 1;
        let starts = (last - first + 1) as usize;
        // The pass is in the windows that begin from `received - length` to `sent - 1`.
        let mut changes = vec![0; starts + 1];
        for &(sent, received, cost) in &millis {
            let from = (received.saturating_sub(length)).max(first);
            if from < sent {
                changes[(from - first) as usize] += cost as i64;
                changes[(sent - first) as usize] -= cost as i64;
            }
        }
        let mut answered = vec![u64::MAX; starts + 1];
        for pass in passes.iter().filter(|pass| pass.sent / 1_000 > first) {
            let answered = &mut answered[(pass.sent / 1_000 - first - 1) as usize];
            *answered = (*answered).min(pass.received / 1_000);
        }
        for i in (0..starts).rev() {
            answered[i] = answered[i].min(answered[i + 1]);
        }
        let passed = changes.iter().take(starts).scan(0_i64, |passed, change| {
            *passed += change;
            Some(passed.cast_unsigned())
        });
        Self { first, passed: passed.collect(), answered }
    }

    fn passed(&self, start: u64) -> u64 {
        let i = start.checked_sub(self.first).map(|i| i as usize);
        i.and_then(|i| self.passed.get(i)).copied().unwrap_or(0)
    }

    /// The first answer to a request that was sent after a millisecond: no later window is the first one
    /// that it can be in.
    fn answered_after(&self, instant: u64) -> u64 {
        let i = instant.saturating_sub(self.first) as usize;
        self.answered.get(i).copied().unwrap_or(u64::MAX)
    }

    fn end(&self) -> u64 {
        self.first + self.passed.len() as u64
    }
}

/// The least over all grids.
fn regular(passes: &[Pass], promise: &Promise) -> (u64, u64) {
    let starts = Starts::new(passes, promise.length);
    let grid = |phase: u64| {
        let each = (starts.first + phase..starts.end()).step_by(promise.length as usize);
        each.map(|start| (starts.passed(start), start)).max().unwrap_or_default()
    };
    let (passed, start) = (0..promise.length).map(grid).min().unwrap_or_default();
    (passed.saturating_sub(promise.limit), start * 1_000)
}

/// The least over all windows that begin with a pass, but not before the one before is over, and leave out
/// no pass. Since `unknown`, others may have begun one, too.
fn on_demand(passes: &[Pass], promise: &Promise, unknown: Option<u64>) -> (u64, u64) {
    if passes.is_empty() {
        return (0, 0);
    }
    let starts = Starts::new(passes, promise.length);
    let len = starts.passed.len();
    // The least that the request that began a window took from it: that one is not among those that
    // were sent after its beginning.
    let free = unknown.map_or(u64::MAX, |since| since / 1_000);
    let mut took: Vec<_> =
        (starts.first..starts.end()).map(|start| (start >= free).then_some(0)).collect();
    for pass in passes {
        let span = pass.sent / 1_000 - starts.first..=pass.received / 1_000 - starts.first;
        for i in span {
            let took = &mut took[i as usize];
            *took = Some(took.unwrap_or(u64::MAX).min(pass.cost));
        }
    }
    const NEVER: (u64, u64) = (u64::MAX, 0);
    // The worst window from here on, and where it begins.
    let mut worst = vec![NEVER; len];
    for i in (0..len).rev() {
        let Some(took) = took[i] else { continue };
        let start = starts.first + i as u64;
        let next = start + promise.length;
        let rest = match starts.answered_after(next) {
            // Nothing passes any more.
            u64::MAX => (0, 0),
            latest => {
                let range = (next - starts.first) as usize..=(latest - starts.first) as usize;
                worst.get(range).and_then(|worst| worst.iter().min()).copied().unwrap_or(NEVER)
            }
        };
        worst[i] = rest.max((took + starts.passed(start), start));
    }
    let latest = starts.answered[0].saturating_sub(starts.first) as usize;
    let (passed, start) = worst.iter().take(latest + 1).min().copied().unwrap_or_default();
    (passed.saturating_sub(promise.limit), start * 1_000)
}

/// In no span of time more than the burst and what flows in meanwhile. Clocks run within a millisecond.
fn bucket(passes: &[Pass], promise: &Promise) -> (u64, u64) {
    let mut by_answer = passes.to_vec();
    by_answer.sort_unstable_by_key(|pass| pass.received);
    let mut most = (0, 0);
    for first in passes {
        let mut passed = 0;
        for last in by_answer.iter().filter(|pass| pass.sent >= first.sent) {
            passed += last.cost;
            let span = last.received - first.sent + 1_000;
            let flown = span * promise.limit / (promise.length * 1_000);
            most = most.max((passed.saturating_sub(promise.limit + flown), first.sent));
        }
    }
    most
}
