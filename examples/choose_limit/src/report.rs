//! The results, for people and as JSON.

use serde::Serialize;
use tower_fixed_window::Quota;

use crate::client::Names;
use crate::simulate::{Grid, Meter, Simulation};
use crate::time::utc;

/// The number of clients that are named for each quota.
const NAMED: usize = 5;

#[derive(Serialize)]
pub(crate) struct Report {
    pub(crate) requests: u64,
    /// Lines that could not be read or used; `notes` has the reasons.
    pub(crate) skipped: u64,
    pub(crate) clients: u64,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) quotas: Vec<Judged>,
    /// Quotas in the syntax that `Quotas` parses.
    pub(crate) recommended: Option<String>,
    pub(crate) why: String,
    pub(crate) notes: Vec<String>,
    #[serde(skip)]
    pub(crate) windows: Vec<Windows>,
    #[serde(skip)]
    pub(crate) tolerated: f64,
}

/// The results of one quota.
#[derive(Serialize)]
pub(crate) struct Judged {
    pub(crate) quota: String,
    /// Refused requests.
    pub(crate) refused: u64,
    /// Clients that were refused at least once.
    pub(crate) clients_refused: u64,
    /// Percentiles of the clients' busiest windows.
    pub(crate) p99: u32,
    pub(crate) p99_9: u32,
    pub(crate) busiest_window: BusiestWindow,
    pub(crate) boundary: Boundary,
    pub(crate) second_window: Option<SecondWindow>,
    pub(crate) refused_most: Vec<Refused>,
    #[serde(skip)]
    pub(crate) limit: u64,
    /// The index of the quota's windows in `Report::windows`.
    #[serde(skip)]
    pub(crate) windows: usize,
}

/// The most requests of a client in one window.
#[derive(Serialize, Clone)]
pub(crate) struct BusiestWindow {
    pub(crate) client: String,
    pub(crate) from: String,
    pub(crate) requests: u64,
}

/// The most requests of a client that would have passed in any stretch as long as a window.
#[derive(Serialize)]
pub(crate) struct Boundary {
    pub(crate) passed: u64,
    pub(crate) times_limit: f64,
}

/// The additional refusals by a second window: of clients that the quota alone never refused.
#[derive(Serialize)]
pub(crate) struct SecondWindow {
    pub(crate) quota: String,
    pub(crate) refused: u64,
    pub(crate) clients_refused: u64,
}

#[derive(Serialize)]
pub(crate) struct Refused {
    pub(crate) client: String,
    pub(crate) refused: u32,
}

/// The busiest windows of all clients, for windows of one length.
pub(crate) struct Windows {
    /// `minute`, `10s`.
    pub(crate) name: String,
    /// Each client's busiest window, ascending.
    pub(crate) most: Vec<u32>,
    pub(crate) busiest: BusiestWindow,
    /// The index in `Simulation::grids`.
    pub(crate) grid: usize,
}

impl Windows {
    fn new(simulation: &Simulation, grid: usize, names: &Names<'_>) -> Self {
        let mut most: Vec<_> = simulation.clients().map(|(_, meters)| meters[grid].most).collect();
        most.sort_unstable();
        let Grid { quotas, busiest, .. } = &simulation.grids[grid];
        let text = quotas[0].to_string();
        Self {
            name: text.split_once('/').map_or("", |(_, window)| window).to_owned(),
            most,
            busiest: BusiestWindow {
                client: names.name(busiest.client),
                from: utc(busiest.from),
                requests: busiest.requests,
            },
            grid,
        }
    }

    /// The requests that `n` of 1,000 clients never exceeded in a window: the nearest rank.
    pub(crate) fn permille(&self, n: usize) -> u32 {
        self.most[(self.most.len() * n).div_ceil(1_000).saturating_sub(1)]
    }

    /// Counts the clients that exceeded the limit.
    pub(crate) fn above(&self, limit: u64) -> u64 {
        (self.most.len() - self.most.partition_point(|most| u64::from(*most) <= limit)) as u64
    }
}

impl Report {
    /// `all` reports every simulated quota, even above the first one that refuses no client.
    pub(crate) fn new(simulation: &Simulation, names: &Names<'_>, all: bool) -> Self {
        let firsts = simulation.grids.iter().enumerate().filter(|(_, grid)| grid.bursts);
        let windows: Vec<_> =
            firsts.map(|(grid, _)| Windows::new(simulation, grid, names)).collect();
        let mut quotas = Vec::new();
        for (i, windows) in windows.iter().enumerate() {
            let grid = &simulation.grids[windows.grid];
            let enough = grid.refused.iter().position(|refused| *refused == 0);
            let count = enough.filter(|_| !all).map_or(grid.quotas.len(), |last| last + 1);
            quotas.extend((0..count).map(|place| judged(simulation, windows, i, place, names)));
        }
        Self {
            requests: simulation.requests,
            skipped: 0,
            clients: windows[0].most.len() as u64,
            from: utc(simulation.from),
            to: utc(simulation.to),
            quotas,
            recommended: None,
            why: String::new(),
            notes: Vec::new(),
            windows,
            tolerated: 0.0,
        }
    }
}

fn judged(
    simulation: &Simulation,
    windows: &Windows,
    index: usize,
    place: usize,
    names: &Names<'_>,
) -> Judged {
    let grid = &simulation.grids[windows.grid];
    let quota = grid.quotas[place];
    let passed = grid.burst[place];
    let second = grid.second.map(|second| {
        let quota = simulation.grids[second].quotas[place];
        cost_of_second(simulation, windows.grid, second, place, quota)
    });
    Judged {
        quota: quota.to_string(),
        refused: grid.refused[place],
        clients_refused: windows.above(quota.limit()),
        p99: windows.permille(990),
        p99_9: windows.permille(999),
        busiest_window: windows.busiest.clone(),
        boundary: Boundary { passed, times_limit: round(passed as f64 / quota.limit() as f64) },
        second_window: second,
        refused_most: refused_most(simulation, windows.grid, place, names),
        limit: quota.limit(),
        windows: index,
    }
}

/// Counts what a second quota refuses of clients that the first one never refuses: for them, the
/// second decides as if it were alone.
fn cost_of_second(
    simulation: &Simulation,
    first: usize,
    second: usize,
    place: usize,
    quota: Quota,
) -> SecondWindow {
    let mut cost = SecondWindow { quota: quota.to_string(), refused: 0, clients_refused: 0 };
    for (_, meters) in simulation.clients() {
        if refused(&meters[first], place) == 0 && refused(&meters[second], place) > 0 {
            cost.refused += u64::from(refused(&meters[second], place));
            cost.clients_refused += 1;
        }
    }
    cost
}

fn refused(meter: &Meter, place: usize) -> u32 {
    meter.refused.get(place).copied().unwrap_or(0)
}

fn refused_most(
    simulation: &Simulation,
    grid: usize,
    place: usize,
    names: &Names<'_>,
) -> Vec<Refused> {
    let mut most: Vec<(u32, u32)> = Vec::new();
    for (client, meters) in simulation.clients() {
        let refused = refused(&meters[grid], place);
        let rank = most.partition_point(|(other, _)| *other >= refused);
        if refused > 0 && rank < NAMED {
            most.insert(rank, (refused, client));
            most.truncate(NAMED);
        }
    }
    let named = |(refused, client)| Refused { client: names.name(client), refused };
    most.into_iter().map(named).collect()
}

fn round(number: f64) -> f64 {
    if number.is_finite() { (number * 100.0).round() / 100.0 } else { 0.0 }
}

impl Report {
    /// Returns whether the recommendation includes the quota.
    pub(crate) fn recommends(&self, judged: &Judged) -> bool {
        self.recommended.iter().any(|quotas| quotas.split(", ").any(|quota| quota == judged.quota))
    }
}
