//! Simulates limits over a log.
//!
//! The windows are the limiter's ([`Account::windows_of`]). Refused requests are not counted: of
//! the requests in a window, a limit of n passes the first n. So a single count per window answers
//! for all limits over the same windows.

use std::time::Duration;

use tower_fixed_window::store::{Account, Scope, Windows};
use tower_fixed_window::{Key, Quota, Quotas};

/// The resolution of bursts: a stretch as long as a window is measured in this many steps.
const STEPS: i64 = 60;

/// Quotas over the same windows.
pub(crate) struct Grid {
    /// Sorted by limit, ascending.
    pub(crate) quotas: Vec<Quota>,
    /// The index of the grid with their second windows, whose quotas are in the same order.
    pub(crate) second: Option<usize>,
    pub(crate) busiest: Busiest,
    /// Refused requests, for each quota.
    pub(crate) refused: Vec<u64>,
    /// The most requests of a client that passed in any stretch as long as a window, for each
    /// quota.
    pub(crate) burst: Vec<u64>,
    /// The limits of `quotas`, contiguous for speed.
    limits: Vec<u64>,
    /// The first quota, which determines the windows.
    windows: Quotas,
    /// Turns the measurement of bursts on.
    pub(crate) bursts: bool,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Busiest {
    pub(crate) requests: u64,
    pub(crate) client: u32,
    pub(crate) from: i64,
}

/// A client's counts on one grid.
#[derive(Clone, Default)]
pub(crate) struct Meter {
    start: i64,
    end: i64,
    used: u32,
    /// Requests in the client's busiest window.
    pub(crate) most: u32,
    /// Requests in the window before, and how many of them are less than a window old.
    before: u32,
    recent: u32,
    /// Refused requests, for each quota up to the last one that refused any.
    pub(crate) refused: Vec<u32>,
    /// Requests that are less than a window old: steps of time, each with a count.
    trail: Vec<(u32, u32)>,
}

pub(crate) struct Simulation {
    /// Staggered windows depend on the name of the limit. The logs have no name, so any will do.
    scope: Scope,
    pub(crate) grids: Vec<Grid>,
    /// The meters of the first client, one for each grid, then those of the next.
    meters: Vec<Meter>,
    pub(crate) requests: u64,
    pub(crate) from: i64,
    pub(crate) to: i64,
}

/// The second quota that the guide recommends against bursts at a boundary: a quarter of the limit
/// in a sixth of the window. `None` for windows of less than six seconds: logs are not that exact.
pub(crate) fn second(quota: &Quota) -> Option<Quota> {
    let window = quota.window().as_secs() / 6;
    (window > 0).then(|| Quota::new(quota.limit().div_ceil(4), Duration::from_secs(window)))
}

impl Simulation {
    pub(crate) fn new(mut quotas: Vec<Quota>) -> Self {
        let counter = |quota: &Quota| quota.counter();
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

    /// Counts a request. Requests come in the order of time.
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

    /// The clients with requests, each with its meters, one for each grid.
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
            let length = self.length();
            match account.windows_of(&self.quotas[0]) {
                Windows::Grid { start } => {
                    let start = now - (now - start as i64).rem_euclid(length);
                    (start, start + length)
                }
                Windows::FromFirstRequest => (now, now + length),
                Windows::OnCalendar(calendar) => {
                    let number = calendar.number(now);
                    (calendar.start_of(number), calendar.start_of(number + 1))
                }
            }
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

    /// Updates `trail`, `recent` and `before` ahead of counting a request at `now`.
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

    /// Raises the bursts of limits. In the window before, a limit passed the first requests; those
    /// of them that are recent share a stretch with the requests that passed in this window.
    fn burst(&mut self, meter: &Meter) {
        let [before, recent, used] = [meter.before, meter.recent, meter.used].map(u64::from);
        // No burst exceeds twice the limit, and bursts grow with the limit.
        let highest = self.burst.partition_point(|burst| *burst < used + recent);
        let bursts = self.limits.iter().zip(&mut self.burst[..highest]).rev();
        for (limit, burst) in bursts.take_while(|(limit, burst)| **burst < 2 * **limit) {
            let carried = before.min(*limit) - before.saturating_sub(recent).min(*limit);
            *burst = (*burst).max(carried + used.min(*limit));
        }
    }
}
