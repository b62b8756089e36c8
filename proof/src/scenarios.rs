//! Scenarios: load on a limiter, and harm to its store, network and nodes.

use crate::check::{Promise, Windows};
use crate::limiter::{Beside, Contestant, Setup, Store};

/// A few seconds of load, and the harm done in them.
#[derive(Clone, Debug)]
pub struct Scenario {
    pub name: &'static str,
    /// The description in the table.
    pub what: &'static str,
    pub who: Who,
    /// The number of processes; limiters that count in memory have one.
    pub nodes: u32,
    /// The number of clients in each process.
    pub clients: u32,
    pub keys: u32,
    pub flood: bool,
    /// The longest pause between two requests of a client, in microseconds.
    pub pause: u64,
    pub cost: u64,
    /// Limits that are charged together: a request asks for both, or for one.
    pub limits: usize,
    pub beside: Beside,
    /// Windows without requests after each window with requests.
    pub rests: u64,
    /// Drops one of `drops` requests, and refunds one of `refunds` passes, at random; 0: none.
    pub drops: u64,
    pub refunds: u64,
    /// Tokens in each window, and its milliseconds.
    pub limit: u64,
    pub length: u64,
    pub millis: u64,
    /// The network between the nodes and Redis can be harmed.
    pub proxied: bool,
    pub replica: bool,
    /// The limiter's clock steps.
    pub steps_clock: bool,
    /// The scenario is part of the smoke.
    pub smoke: bool,
    pub steps: Vec<(u64, Step)>,
}

/// The limiters that take part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Who {
    All,
    /// Limiters that count in a server.
    Server,
    /// Ours, since others have no such thing: receipts, costs, a clock that can be replaced.
    Ours,
    OursInMemory,
    /// Ours, for several limits in one charge.
    OursTogether,
    /// Ours, if the beginnings of windows are known.
    OursKnown,
}

/// A harmful event, at a time in milliseconds.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    KillStore,
    StartStore,
    FreezeStore,
    ThawStore,
    EmptyStore,
    FlushScripts,
    /// Connections that are idle for more than a second are closed by the server.
    CloseIdle,
    /// A failover to the replica, which has all counts.
    HandOver,
    /// A failover after the master was killed: the replica has the counts that were sent to it.
    FailOver,
    Silent(bool),
    /// The delay in each direction, in milliseconds.
    Delay(u64),
    Cut,
    KillNode(usize),
    StartNode(usize),
    PauseNode(usize),
    ResumeNode(usize),
}

/// The limiter that charges several limits in order, and all that charge several limits.
const IN_ORDER: &str = "ours-redis-in-order";
const TOGETHER: [&str; 5] = ["ours", "ours-redis", "ours-redis-local", IN_ORDER, "ours-postgres"];
const KNOWN: [&str; 4] = ["ours", "ours-redis", "ours-redis-local", "ours-postgres"];

impl Scenario {
    /// Returns `true` if a limiter takes part.
    pub fn is_for(&self, contestant: &Contestant) -> bool {
        let ours = contestant.name.starts_with("ours");
        if contestant.store == Store::Postgres && self.is_of_redis() {
            return false;
        }
        if contestant.name == IN_ORDER && self.who != Who::OursTogether {
            return false;
        }
        match self.who {
            Who::All => true,
            Who::Server => contestant.store != Store::Memory,
            Who::Ours => ours,
            Who::OursInMemory => contestant.name == "ours",
            Who::OursTogether => TOGETHER.contains(&contestant.name) && !self.harms(contestant),
            // A line's decisions in memory can't be seen from outside.
            Who::OursKnown if self.max_wait() > 0 => KNOWN[..2].contains(&contestant.name),
            Who::OursKnown => KNOWN.contains(&contestant.name) && !self.harms(contestant),
        }
    }

    /// Returns `true` if only Redis knows what happens.
    fn is_of_redis(&self) -> bool {
        let is_of_redis =
            |step: &Step| matches!(step, Step::EmptyStore | Step::FlushScripts | Step::CloseIdle);
        self.replica || self.steps.iter().any(|(_, step)| is_of_redis(step))
    }

    /// Returns `true` if the scenario harms a network that the limiter does not have.
    fn harms(&self, contestant: &Contestant) -> bool {
        self.proxied && contestant.store == Store::Memory
    }

    /// The longest time that a request may wait in line, in milliseconds.
    pub fn max_wait(&self) -> u64 {
        match self.beside {
            Beside::Line { max_wait, .. } => max_wait,
            _ => 0,
        }
    }

    /// When it is midnight in the zone of a scenario that begins at `from`, in seconds.
    pub fn midnight(&self, from: u64) -> u64 {
        from / 1_000_000 + 2
    }

    /// The promise for each quota of a key.
    pub fn promises(&self, windows: Windows, from: u64) -> Vec<Promise> {
        let first = Promise::new(windows, self.limit, self.length);
        match self.beside {
            Beside::Nothing | Beside::Line { .. } => vec![first],
            Beside::Kept { capacity } => vec![Promise { capacity, ..first }],
            Beside::Quota { limit, length } => vec![first, Promise::new(windows, limit, length)],
            Beside::Reserved { most: reserved, limit, length } => {
                vec![Promise { reserved, ..first }, Promise::new(windows, limit, length)]
            }
            Beside::Day { limit } => {
                let starts = vec![self.midnight(from) * 1_000_000];
                let day = Promise::new(Windows::Listed, limit, 86_400_000);
                vec![first, Promise { starts, ..day }]
            }
        }
    }

    /// The set-up of a limiter for this scenario, which begins at `from`, in microseconds since the epoch.
    pub fn setup(&self, limiter: &str, url: &str, from: u64) -> Setup {
        Setup {
            name: limiter.to_owned(),
            url: url.to_owned(),
            limit: self.limit,
            length: self.length,
            // The store is small, so that a flood fills it.
            max_keys: 1_000,
            limits: self.limits,
            beside: self.beside,
            receipts: self.refunds > 0,
            clock_steps_from: self.steps_clock.then_some(from),
        }
    }
}

fn base(name: &'static str, what: &'static str) -> Scenario {
    Scenario {
        name,
        what,
        who: Who::Server,
        nodes: 3,
        clients: 8,
        keys: 2,
        flood: false,
        pause: 2_000,
        cost: 1,
        limits: 1,
        beside: Beside::Nothing,
        rests: 0,
        drops: 0,
        refunds: 0,
        limit: 50,
        length: 1_000,
        millis: 4_000,
        proxied: false,
        replica: false,
        steps_clock: false,
        smoke: false,
        steps: Vec::new(),
    }
}

/// Windows are longer than what a node knows of another's refusals.
fn several(name: &'static str, what: &'static str) -> Scenario {
    Scenario {
        who: Who::OursTogether,
        limits: 2,
        keys: 4,
        cost: 3,
        drops: 20,
        limit: 200,
        length: 4_000,
        millis: 13_000,
        ..base(name, what)
    }
}

const TWO: Beside = Beside::Quota { limit: 120, length: 4_000 };

/// A key has more than tokens in a window. It is seen over many of them.
fn quotas(name: &'static str, what: &'static str, beside: Beside) -> Scenario {
    Scenario { who: Who::OursKnown, cost: 3, drops: 20, millis: 10_000, beside, ..base(name, what) }
}

/// Redis is killed and frozen for a second each, then connections are cut.
fn harm() -> Vec<(u64, Step)> {
    use Step::*;
    let stops = [(1_000, KillStore), (2_000, StartStore), (4_500, FreezeStore), (5_500, ThawStore)];
    stops.into_iter().chain((8_000..9_000).step_by(250).map(|at| (at, Cut))).collect()
}

/// All scenarios.
pub fn scenarios() -> Vec<Scenario> {
    use Step::*;
    // Repeats a harmful event.
    let often = |every: usize, step: Step| (200..3_800).step_by(every).map(move |at| (at, step));
    vec![
        Scenario {
            who: Who::All,
            clients: 32,
            pause: 0,
            smoke: true,
            ..base("edges", "as fast as they can, over the edges of windows")
        },
        Scenario {
            who: Who::All,
            flood: true,
            pause: 200,
            ..base("flood", "a new key with every second request")
        },
        Scenario {
            who: Who::All,
            drops: 3,
            ..base("dropped", "every third request is dropped within 3 ms")
        },
        Scenario {
            who: Who::Ours,
            drops: 5,
            refunds: 2,
            cost: 3,
            smoke: true,
            ..base("refunds", "half of what passes is refunded, also after the end of its window")
        },
        Scenario {
            who: Who::OursInMemory,
            keys: 1,
            steps_clock: true,
            smoke: true,
            ..base("clock", "the clock steps by up to half a window, forwards and back")
        },
        Scenario {
            smoke: true,
            steps: vec![
                (900, KillStore),
                (1_900, StartStore),
                (2_700, KillStore),
                (3_000, StartStore),
            ],
            ..base(
                "killed",
                "Redis is killed twice, and starts again with all that it has acknowledged",
            )
        },
        Scenario {
            steps: vec![
                (700, FreezeStore),
                (1_900, ThawStore),
                (2_600, FreezeStore),
                (2_900, ThawStore),
            ],
            ..base("frozen", "Redis is frozen for 1.2 s, and for 0.3 s")
        },
        Scenario {
            steps: vec![(700, EmptyStore), (1_500, EmptyStore), (2_500, EmptyStore)],
            ..base("emptied", "Redis loses everything (FLUSHALL), three times")
        },
        Scenario {
            steps: often(10, FlushScripts).collect(),
            ..base("scripts", "Redis forgets its scripts every 10 ms")
        },
        Scenario {
            proxied: true,
            replica: true,
            steps: vec![(1_500, HandOver)],
            ..base("handed over", "the replica takes over, with all that was counted")
        },
        Scenario {
            proxied: true,
            replica: true,
            steps: vec![(1_500, FailOver)],
            ..base("failed over", "the master is killed, and its replica takes over")
        },
        Scenario {
            proxied: true,
            steps: vec![
                (700, Silent(true)),
                (1_700, Silent(false)),
                (2_500, Silent(true)),
                (2_800, Silent(false)),
            ],
            ..base("silent", "the network is silent for 1 s, and for 0.3 s, and then delivers")
        },
        Scenario {
            proxied: true,
            steps: often(300, Cut).collect(),
            ..base("cut", "all connections end, every 300 ms")
        },
        Scenario {
            proxied: true,
            steps: vec![(0, Delay(40)), (2_000, Delay(90)), (3_000, Delay(15))],
            ..base("far", "Redis is 40, 90 and 15 ms away, each way")
        },
        Scenario {
            nodes: 2,
            clients: 1,
            keys: 1,
            pause: 4_000_000,
            limit: 3,
            length: 10_000,
            millis: 12_000,
            steps: vec![(0, CloseIdle)],
            ..base("idle", "a request every 2 s, and Redis closes connections after 1 s")
        },
        Scenario {
            steps: often(400, KillNode(1))
                .chain(often(400, StartNode(1)).map(|(at, step)| (at + 100, step)))
                .collect(),
            ..base("nodes killed", "a node is killed and started again, every 400 ms")
        },
        Scenario {
            refunds: 4,
            ..quotas("several quotas", "a key has a quota for 1 s and one for 4 s", TWO)
        },
        Scenario {
            proxied: true,
            steps: harm(),
            ..quotas(
                "several quotas, harmed",
                "the same; Redis is killed and frozen, then connections are cut",
                TWO,
            )
        },
        Scenario {
            rests: 2,
            ..quotas(
                "rollover",
                "up to three windows' tokens are kept; clients rest for two of three seconds",
                Beside::Kept { capacity: 150 },
            )
        },
        Scenario {
            refunds: 6,
            limit: 20,
            ..quotas(
                "reservations",
                "tokens of two later seconds may be taken, beside a quota for 4 s",
                Beside::Reserved { most: 40, limit: 70, length: 4_000 },
            )
        },
        Scenario {
            millis: 4_000,
            ..quotas(
                "calendar",
                "midnight passes, with a quota for each day beside one for each second",
                Beside::Day { limit: 80 },
            )
        },
        Scenario {
            clients: 24,
            pause: 50_000,
            limit: 30,
            ..quotas(
                "line",
                "requests wait in line for up to 2.5 s; one in 20 is dropped while it does",
                Beside::Line { places: 16, max_wait: 2_500 },
            )
        },
        several("several limits", "two limits in one charge, or one of them alone"),
        Scenario {
            proxied: true,
            steps: harm(),
            ..several(
                "several limits, harmed",
                "the same; Redis is killed and frozen for a second each, then connections are cut",
            )
        },
        Scenario {
            smoke: true,
            steps: vec![
                (600, PauseNode(0)),
                (1_100, PauseNode(1)),
                (1_500, ResumeNode(0)),
                (2_300, ResumeNode(1)),
                (2_700, PauseNode(2)),
                (3_300, ResumeNode(2)),
            ],
            ..base(
                "nodes paused",
                "each node is frozen for 0.6 to 1.2 s, over the edge of a window",
            )
        },
    ]
}
