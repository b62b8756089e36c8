//! What limits would have done.
//!
//! The windows are the limiter's ([`Account::window_at`]). Refused requests are not counted, so of
//! the requests in a window a limit of n passes the first n and refuses the others: one count
//! answers for all limits over the same windows.

use std::time::Duration;

use tower_fixed_window::store::{Account, Scope};
use tower_fixed_window::{Key, Quota, Quotas};

/// Steps in which a period as long as a window is measured.
const STEPS: i64 = 60;

/// Quotas over the same windows.
pub(crate) struct Grid {
    /// By limit, ascending.
    pub(crate) quotas: Vec<Quota>,
    /// The grid of their second windows, whose quotas stand in the same order.
    pub(crate) second: Option<usize>,
    pub(crate) busiest: Busiest,
    /// By quota.
    pub(crate) refused: Vec<u64>,
    /// By quota, the most that passed a client in any stretch as long as a window.
    pub(crate) burst: Vec<u64>,
    /// Of the quotas, side by side.
    limits: Vec<u64>,
    /// The first of the quotas, for the windows.
    windows: Quotas,
    /// Whether bursts are measured.
    pub(crate) bursts: bool,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Busiest {
    pub(crate) requests: u64,
    pub(crate) client: u32,
    pub(crate) from: i64,
}

/// A client on a grid.
#[derive(Clone, Default)]
pub(crate) struct Meter {
    start: i64,
    end: i64,
    used: u32,
    /// In the client's busiest window.
    pub(crate) most: u32,
    /// In the window before, and how many of those are less than a window old.
    before: u32,
    recent: u32,
    /// By quota, as far as there are any.
    pub(crate) refused: Vec<u32>,
    /// Requests that are less than a window old: the step of time, and how many.
    trail: Vec<(u32, u32)>,
}

pub(crate) struct Simulation {
    /// A staggered quota's windows depend on the name of the layer: here it is any.
    scope: Scope,
    pub(crate) grids: Vec<Grid>,
    /// By client, and then by grid.
    meters: Vec<Meter>,
    pub(crate) requests: u64,
    pub(crate) from: i64,
    pub(crate) to: i64,
}

/// What the guide adds to a quota against bursts at the boundary: a quarter of the limit in a sixth
/// of the window. `None` for windows of less than six seconds: logs are not that exact.
pub(crate) fn second(quota: &Quota) -> Option<Quota> {
    let window = quota.window().as_secs() / 6;
    (window > 0).then(|| Quota::new(quota.limit().div_ceil(4), Duration::from_secs(window)))
}

impl Simulation {
    pub(crate) fn new(mut quotas: Vec<Quota>) -> Self {
        let counter = |quota: &Quota| quota.counter().to_string();
        quotas.sort_by_key(|quota| (quota.window(), counter(quota), quota.limit()));
        quotas.dedup();
        let mut grids = Vec::new();
        for quotas in quotas.chunk_by(|a, b| counter(a) == counter(b)) {
            let seconds: Vec<_> = quotas.iter().filter_map(second).collect();
            let first = grids.len();
            grids.push(Grid::new(quotas.to_vec(), true));
            if !seconds.is_empty() {
                grids[first].second = Some(first + 1);
                grids.push(Grid::new(seconds, false));
            }
        }
        Self {
            scope: Scope::named("any"),
            grids,
            meters: Vec::new(),
            requests: 0,
            from: i64::MAX,
            to: 0,
        }
    }

    /// A request, none earlier than the one before.
    pub(crate) fn request(&mut self, now: i64, client: u32) {
        self.requests += 1;
        self.from = self.from.min(now);
        self.to = self.to.max(now);
        let first = client as usize * self.grids.len();
        if self.meters.len() < first + self.grids.len() {
            self.meters.resize(first + self.grids.len(), Meter::default());
        }
        for (grid, meter) in self.grids.iter_mut().zip(&mut self.meters[first..]) {
            grid.count(now, client, &self.scope, meter);
        }
    }

    /// Each client that asked for anything, as a meter for each grid.
    pub(crate) fn clients(&self) -> impl Iterator<Item = (u32, &[Meter])> {
        let clients = self.meters.chunks(self.grids.len().max(1)).enumerate();
        clients.map(|(client, meters)| (client as u32, meters)).filter(|(_, m)| m[0].most > 0)
    }
}

impl Grid {
    fn new(quotas: Vec<Quota>, bursts: bool) -> Self {
        Self {
            windows: quotas[0].into(),
            second: None,
            busiest: Busiest::default(),
            refused: vec![0; quotas.len()],
            burst: vec![0; quotas.len()],
            limits: quotas.iter().map(Quota::limit).collect(),
            quotas,
            bursts,
        }
    }

    fn length(&self) -> i64 {
        self.quotas[0].window().as_millis() as i64
    }

    fn count(&mut self, now: i64, client: u32, scope: &Scope, meter: &mut Meter) {
        let is_new = meter.used == 0 || now >= meter.end;
        let (start, end) = if is_new {
            let key = Key::from(client);
            let account = Account::new(scope, &self.windows, &key);
            let window = account.window_at(&self.quotas[0], now.max(0) as u64);
            (window.start, window.end)
        } else {
            (meter.start, meter.end)
        };
        if self.bursts {
            self.follow(now, start, meter);
        }
        (meter.start, meter.end) = (start, end);
        meter.used = if is_new { 1 } else { meter.used.saturating_add(1) };
        meter.most = meter.most.max(meter.used);
        if u64::from(meter.used) > self.busiest.requests {
            self.busiest = Busiest { requests: meter.used.into(), client, from: meter.start };
        }
        let refusing = self.limits.partition_point(|limit| *limit < meter.used.into());
        if meter.refused.len() < refusing {
            meter.refused.reserve_exact(refusing - meter.refused.len());
            meter.refused.resize(refusing, 0);
        }
        for (total, own) in self.refused.iter_mut().zip(&mut meter.refused[..refusing]) {
            *total += 1;
            *own = own.saturating_add(1);
        }
        if self.bursts {
            self.burst(meter);
        }
    }

    /// Keeps the trail of what is less than a window old, before a request at `now` is counted.
    fn follow(&self, now: i64, start: i64, meter: &mut Meter) {
        let step = (self.length() / STEPS).max(1);
        let (steps, slot) = ((self.length() / step) as u32, (now / step) as u32);
        let turned = meter.used == 0 || start != meter.start;
        if turned && start - meter.start >= 2 * self.length() {
            meter.trail.clear();
        }
        let old = meter.trail.partition_point(|(then, _)| slot.wrapping_sub(*then) >= steps);
        let gone: u32 = meter.trail.drain(..old).map(|(_, count)| count).sum();
        meter.recent = meter.recent.saturating_sub(gone);
        if turned {
            meter.before = meter.used;
            meter.recent = meter.trail.iter().map(|(_, count)| count).sum();
        }
        match meter.trail.last_mut() {
            Some((last, count)) if *last == slot => *count = count.saturating_add(1),
            _ => meter.trail.push((slot, 1)),
        }
    }

    /// Of the window before the limit passed the first ones, and of those only what is recent is in
    /// one stretch with what has passed in this window.
    fn burst(&mut self, meter: &Meter) {
        let [before, recent, used] = [meter.before, meter.recent, meter.used].map(u64::from);
        // Twice the limit is the most, and the higher the limit the longer the burst.
        let highest = self.burst.partition_point(|burst| *burst < used + recent);
        let bursts = self.limits.iter().zip(&mut self.burst[..highest]).rev();
        for (limit, burst) in bursts.take_while(|(limit, burst)| **burst < 2 * **limit) {
            let carried = before.min(*limit) - before.saturating_sub(recent).min(*limit);
            *burst = (*burst).max(carried + used.min(*limit));
        }
    }
}
