//! A seed stands for a plan: nodes, limits, callers, and faults with their times.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use tower_fixed_window::{OnStoreFailure, Quota, Quotas};

use crate::cluster::PARTS;
use crate::sentinel::Health;

/// The name of the limit of single charges.
pub const SCOPE: &str = "sim";

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Kind {
    /// Nothing goes wrong.
    Healthy,
    /// Nothing goes wrong, but connections that nobody uses for a while end.
    Idle,
    /// Nothing goes wrong, but one key holds somebody else's value.
    Poisoned,
    /// Connections are closed now and then, of a node or of all, and the server is well.
    Cut,
    /// A master of a cluster fails, and the others are well.
    Shard,
    Stormy,
}

impl Kind {
    /// Returns whether a server is harmed, or all that leads to it.
    pub fn harms_servers(self) -> bool {
        matches!(self, Self::Stormy | Self::Shard)
    }
}

/// The servers that the stores connect to.
#[derive(Clone, PartialEq, Debug)]
pub enum Servers {
    /// A master, and its replica, at one address.
    One,
    /// The same, and Sentinels that name the master.
    Watched(Vec<Health>),
    /// Masters that share the slots. One of them has a replica, and what goes wrong does there.
    /// The others hear of changes after so many milliseconds.
    Cluster { masters: usize, victim: usize, gossip: u64 },
}

#[derive(Debug)]
pub struct Plan {
    pub kind: Kind,
    pub servers: Servers,
    /// The first is that of single charges. Several may be in one charge.
    pub limits: Vec<Limit>,
    pub nodes: Vec<Node>,
    /// Keys that many ask for.
    pub keys: usize,
    /// The server's clock at the start, in microseconds.
    pub epoch: i64,
    /// The time of one way, in milliseconds.
    pub delay: u64,
    pub jitter: u64,
    pub closes_idle: Option<Duration>,
    pub forgets_idle: Option<Duration>,
    pub lookup: Duration,
    /// How often the replica is brought up to date.
    pub lag: Duration,
    pub faults: Vec<(Duration, Fault)>,
    /// `true` if some charges may take tokens of later windows.
    pub reserves: bool,
    /// When all that goes wrong has ended.
    pub heals: Duration,
}

#[derive(Clone, Debug)]
pub struct Limit {
    pub name: &'static str,
    pub quotas: Quotas,
    /// The quotas of some keys.
    pub plan: Option<Quotas>,
}

impl Limit {
    /// By which a key is counted.
    pub fn quotas(&self, key: &str) -> &Quotas {
        self.plan(key).unwrap_or(&self.quotas)
    }

    /// A plan that a key has.
    pub fn plan(&self, key: &str) -> Option<&Quotas> {
        self.plan.as_ref().filter(|_| key.ends_with(['0', '2', '4', '6', '8']))
    }
}

#[derive(Clone, Debug)]
pub struct Node {
    pub deadline: Duration,
    pub one_by_one: bool,
    pub door: Door,
    /// How long it remembers refusals.
    pub remembers: Duration,
    /// Charges several limits one after the other.
    pub in_order: bool,
    /// Between two requests, in milliseconds.
    pub gap: u64,
    /// A crowd comes with each of so many requests.
    pub crowd: u64,
    /// Some callers wait no longer than this, or all of them until the last seconds. Not 0: who sends
    /// nothing learns nothing.
    pub patience: Option<u64>,
    pub all_impatient: bool,
    /// Some callers don't come for their answer for this long.
    pub lazy: Option<u64>,
    /// When it does.
    pub starts: Duration,
}

/// How a node's requests come.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Door {
    Limiter { fallback: bool },
    Layer { policy: OnStoreFailure, refund_dropped: bool },
}

#[derive(Clone, PartialEq, Debug)]
pub struct Ask {
    pub what: What,
    /// The lines of a charge: one or several.
    pub lines: Vec<Line>,
    /// Dropped after so many milliseconds.
    pub patience: Option<u64>,
    /// Not polled for so many milliseconds after the first time.
    pub lazy: Option<u64>,
}

/// A question to one limit.
#[derive(Clone, PartialEq, Debug)]
pub struct Line {
    /// The number of a limit of the plan.
    pub limit: usize,
    pub key: String,
    pub cost: u64,
    /// The true cost of a charge that is settled.
    pub actual: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum What {
    /// Through the layer, if the node has one. The service takes so many milliseconds.
    Check {
        work: u64,
    },
    /// With a receipt, and what it has really cost so many milliseconds later.
    Charge {
        work: u64,
        /// `true` if the charge may take tokens of later windows.
        reserves: bool,
    },
    Peek,
    Reset,
}

#[derive(Clone, PartialEq, Debug)]
pub enum Fault {
    /// Connections of a node, or of all, are closed; with the answers that are on their way, or not.
    Close {
        node: Option<usize>,
        answers: bool,
    },
    /// Connections vanish without a word.
    Silence {
        node: Option<usize>,
    },
    /// Nothing gets through for so many milliseconds; connections survive it, or vanish.
    Partition {
        node: Option<usize>,
        lasts: u64,
        forgets: bool,
    },
    /// The server dies, and comes back with its data or without.
    Kill {
        lasts: u64,
        keeps: bool,
        loading: u64,
    },
    Freeze {
        lasts: u64,
    },
    /// The replica takes over. The address leads there some time later; who is connected to the old
    /// master may write there meanwhile, for nothing.
    Failover {
        leads: u64,
        split: u64,
    },
    /// The servers' clock steps, by milliseconds.
    Step {
        by: i64,
    },
    FlushScripts,
    FlushAll,
    Refuse {
        lasts: u64,
        error: &'static str,
    },
    /// Everything takes longer.
    Slow {
        lasts: u64,
        delay: u64,
    },
    /// A key gets a value that is no count.
    Poison {
        key: String,
    },
    /// Parts of a cluster's slots move to another master, which takes so many milliseconds.
    Reshard {
        parts: Vec<usize>,
        to: usize,
        lasts: u64,
    },
}

impl fmt::Display for Ask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, lines, patience, lazy } = self;
        write!(f, "{what:?}")?;
        for (i, Line { limit, key, cost, actual }) in lines.iter().enumerate() {
            let and = if i > 0 { " and" } else { "" };
            write!(f, "{and} of {cost} for {key} in limit {limit}")?;
            actual.map_or(Ok(()), |actual| write!(f, " (really {actual})"))?;
        }
        patience.map_or(Ok(()), |ms| write!(f, ", for {ms} ms"))?;
        lazy.map_or(Ok(()), |ms| write!(f, ", looks again in {ms} ms"))
    }
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn one<T: Clone>(rng: &mut Rng, list: &[T]) -> T {
    list[rng.usize(..list.len())].clone()
}

fn maybe<T>(rng: &mut Rng, percent: u8, some: impl FnOnce(&mut Rng) -> T) -> Option<T> {
    (rng.u8(..100) < percent).then(|| some(rng))
}

impl Plan {
    pub fn new(rng: &mut Rng, extras: &mut Rng, servers: &mut Rng) -> Self {
        let kind = match rng.u8(..100) {
            0..12 => Kind::Healthy,
            12..27 => Kind::Idle,
            27..32 => Kind::Poisoned,
            32..42 => Kind::Cut,
            _ => Kind::Stormy,
        };
        let calm = kind != Kind::Stormy;
        let heals = if calm { rng.u64(3_000..12_000) } else { rng.u64(4_000..12_000) };
        let mut nodes: Vec<_> = (0..rng.usize(1..=4)).map(|_| node(rng, kind)).collect();
        let shortest = nodes.iter().map(|node| node.deadline.as_millis() as u64).min();
        let shortest = shortest.expect("there is a node");
        // To connect and to bring the scripts takes up to seven round trips, and some more to find out that
        // it has to be done.
        let reconnects = matches!(kind, Kind::Idle | Kind::Cut);
        let most = if reconnects { shortest / 40 } else { shortest / 20 };
        let delay = rng.u64(0..=most);
        let jitter = rng.u64(0..=(most - delay).min(delay));
        // Half of those who are impatient leave while the store decides.
        for node in &mut nodes {
            if node.patience.is_some() && rng.bool() {
                node.patience = Some(rng.u64(1..=2 * (delay + jitter) + 1));
            }
        }
        let keys = rng.usize(1..=3);
        // A connection that was idle for less than a second is not checked (S36), so none is closed
        // before a second and a round trip: the outcome of a charge that meets the close is unknown.
        let idle = ms(rng.u64(1_000..4_000) + 2 * (delay + jitter));
        let (closes_idle, forgets_idle) = match (kind, rng.u8(..10)) {
            (Kind::Idle, 0..5) | (Kind::Stormy, 0) => (Some(idle), None),
            (Kind::Idle, _) | (Kind::Stormy, 1) => (None, Some(idle)),
            _ => (None, None),
        };
        // A connection that is made anew at any time has to be made within a deadline.
        let lasts = kind != Kind::Cut && closes_idle.is_none() && forgets_idle.is_none();
        let mut faults = Vec::new();
        if kind == Kind::Stormy {
            for _ in 0..rng.usize(1..=6) {
                let at = rng.u64(500..heals - 500);
                faults.push((ms(at), fault(rng, nodes.len(), heals - at)));
            }
        }
        if kind == Kind::Cut {
            // Connections close one after the other: a request waits for a connection within its deadline.
            let mut at = rng.u64(500..2_000);
            while at < heals {
                let node = maybe(rng, 30, |rng| rng.usize(..nodes.len()));
                faults.push((ms(at), Fault::Close { node, answers: rng.bool() }));
                at += rng.u64(1_100..3_000);
            }
        }
        if kind == Kind::Poisoned {
            faults.push((ms(500), Fault::Poison { key: "poisoned".to_owned() }));
        }
        faults.sort_by_key(|(at, _)| *at);
        let limits = limits(rng);
        if limits.len() > 1 {
            // A request asks for more, so that there are fewer.
            nodes.iter_mut().for_each(|node| node.gap += node.gap / 2);
        }
        let epoch = 1_700_000_000_000_000 + rng.i64(0..1_000_000_000_000);
        let mut plan = Self {
            kind,
            servers: Servers::One,
            limits,
            nodes,
            keys,
            epoch,
            reserves: false,
            delay,
            jitter,
            closes_idle,
            forgets_idle,
            lookup: match rng.u8(..40) {
                0 if !calm && lasts => ms(1_100),
                1..4 if lasts => ms(rng.u64(..100)),
                _ => ms(0),
            },
            lag: ms(one(rng, &[10, 100, 1_000])),
            faults,
            heals: ms(heals),
        };
        plan.extend(extras);
        match servers.u8(..100) {
            0..10 => plan.cluster(servers),
            10..16 => plan.watch(servers),
            _ => {}
        }
        plan
    }

    /// Sentinels name the master, and one of them is well.
    fn watch(&mut self, rng: &mut Rng) {
        let healths = [Health::Well, Health::Well, Health::Silent, Health::Gone];
        let mut all: Vec<_> = (0..rng.usize(0..4)).map(|_| one(rng, &healths)).collect();
        all.insert(rng.usize(..=all.len()), Health::Well);
        self.servers = Servers::Watched(all);
        if self.kind != Kind::Stormy {
            // To ask a Sentinel and to make sure takes five round trips more.
            (self.delay, self.jitter) = (self.delay / 2, self.jitter / 2);
        }
    }

    fn cluster(&mut self, rng: &mut Rng) {
        let masters = rng.usize(2..=3);
        let (victim, gossip) = (rng.usize(..masters), rng.u64(..500));
        self.servers = Servers::Cluster { masters, victim, gossip };
        // As a store of a cluster is.
        self.nodes.iter_mut().for_each(|node| node.one_by_one = true);
        self.lookup = ms(0);
        // To connect takes eleven round trips, and who asks a shard that was lost waits for that.
        let shortest = self.nodes.iter().map(|node| node.deadline.as_millis() as u64).min();
        self.delay = self.delay.min(shortest.expect("there is a node") / 50);
        self.jitter = self.jitter.min(self.delay / 2);
        let heals = self.heals.as_millis() as u64;
        let reshard = |rng: &mut Rng, from: u64, until: u64| {
            let at = rng.u64(from..until);
            let lasts = rng.u64(..1_500).min(until - at);
            let first = rng.usize(..masters * PARTS);
            let last = rng.usize(first..(first + PARTS).min(masters * PARTS));
            let parts = (first..=last).collect();
            (ms(at), Fault::Reshard { parts, to: rng.usize(..masters), lasts })
        };
        match self.kind {
            Kind::Healthy | Kind::Poisoned | Kind::Stormy => {
                for _ in 0..rng.usize(..4) {
                    self.faults.push(reshard(rng, 500, heals - gossip));
                }
            }
            _ => {
                self.kind = Kind::Shard;
                (self.closes_idle, self.forgets_idle) = (None, None);
                self.faults.retain(|(_, fault)| matches!(fault, Fault::Step { .. }));
                for node in &mut self.nodes {
                    (node.gap, node.crowd) = (one(rng, &[20, 50, 100]), one(rng, &[20, 60, 1_000]));
                }
                let fails_over = rng.bool();
                // All hosts and nodes know of slots that have moved before the first one fails.
                let moves = rng.usize(..3) as u64;
                for i in 0..moves {
                    let from = 500 + i * 1_000;
                    let mut moved = reshard(rng, from, from + 1_000);
                    if let Fault::Reshard { lasts, .. } = &mut moved.1 {
                        *lasts = (*lasts).min(300);
                    }
                    self.faults.push(moved);
                }
                let first = (2_000 + 1_500 * moves.min(1)).min(heals - 700);
                for _ in 0..rng.usize(1..=2) {
                    let at = rng.u64(first..heals - 500);
                    self.faults.push((ms(at), shard_fault(rng, fails_over, heals - at)));
                }
            }
        }
        self.faults.sort_by_key(|(at, _)| *at);
    }

    /// Some plans have more, from a generator of its own: a seed's plan stays what it is otherwise.
    fn extend(&mut self, rng: &mut Rng) {
        match rng.u8(..10) {
            0 | 1 => {
                for limit in &mut self.limits {
                    keep_or_reserve(rng, &mut limit.quotas);
                    limit.plan.iter_mut().for_each(|plan| keep_or_reserve(rng, plan));
                }
                let mut all = self.limits.iter().flat_map(|limit| [Some(limit.quotas), limit.plan]);
                self.reserves = all.any(|quotas| quotas.is_some_and(|quotas| reserves(&quotas)));
            }
            2 => {
                let (calendar, boundary) = one(rng, &calendars());
                for limit in &mut self.limits {
                    let quota = calendar.with_limit(limit.quotas.as_ref()[0].limit());
                    limit.quotas = match rng.bool() {
                        true => quota.into(),
                        false => limit.quotas.as_ref()[0].and(quota),
                    };
                }
                // The boundary is crossed in between.
                let heals = self.heals.as_millis() as i64;
                self.epoch = (boundary * 1_000 - rng.i64(1_000..heals)) * 1_000;
            }
            3 => {
                for _ in 0..rng.usize(1..=3) {
                    let at = rng.u64(500..self.heals.as_millis() as u64);
                    let by = one(rng, &STEPS) + rng.i64(-300..300);
                    self.faults.push((ms(at), Fault::Step { by }));
                }
                self.faults.sort_by_key(|(at, _)| *at);
            }
            _ => {}
        }
    }
}

/// By which a clock steps, in milliseconds: within a window, over some of them, and over all.
const STEPS: [i64; 9] = [-400, 700, -1_500, 1_500, -4_000, 4_000, -70_000, 70_000, 3_600_000];

/// Calendars, and an instant at which one of their windows begins, in seconds.
fn calendars() -> [(Quota, i64); 5] {
    [
        (Quota::per_month(1), 1_701_388_800),
        (Quota::per_day(1).in_zone("Europe/Berlin"), 1_700_434_800),
        // The day before has 23 hours.
        (Quota::per_day(1).in_zone("Europe/Berlin"), 1_711_922_400),
        (Quota::per_week(1).in_zone("America/New_York"), 1_700_456_400),
        (Quota::per_year(1).in_zone("Asia/Kolkata"), 1_704_047_400),
    ]
}

/// Returns whether tokens of later windows may be taken under one of the quotas.
fn reserves(quotas: &Quotas) -> bool {
    quotas.into_iter().any(|quota| quota.max_reserved() > 0)
}

fn keep_or_reserve(rng: &mut Rng, quotas: &mut Quotas) {
    let all: &[_] = quotas.as_ref();
    let (first, mut others) = (all[0], all[1..].to_vec());
    let limit = first.limit();
    if others.is_empty() && rng.bool() {
        others.push(Quota::new(limit * 2, first.window() * 3));
    }
    let first = match rng.u8(..3) {
        0 => first.rollover_up_to(limit + rng.u64(1..=2 * limit)),
        1 => first.reserve_up_to(rng.u64(1..=2 * limit)),
        _ => first.rollover_up_to(limit * 2).reserve_up_to(rng.u64(1..=2 * limit)),
    };
    *quotas = others.into_iter().fold(first.into(), |quotas: Quotas, quota| quotas.and(quota));
}

/// Draws one limit, or several.
fn limits(rng: &mut Rng) -> Vec<Limit> {
    let mut limits = vec![Limit { name: SCOPE, quotas: quotas(rng), plan: None }];
    let more = one(rng, &[0, 0, 1, 1, 2]);
    for name in ["tokens", "cents"].into_iter().take(more) {
        let own = quotas(rng);
        let plan = maybe(rng, 30, quotas);
        limits.push(Limit { name, quotas: own, plan });
    }
    limits
}

fn quotas(rng: &mut Rng) -> Quotas {
    let window = one(rng, &[1_000, 2_000, 5_000, 60_000]);
    let limit = match rng.u8(..4) {
        0 => rng.u64(1..5),
        1 => rng.u64(5..30),
        _ => rng.u64(30..300),
    };
    let quota = Quota::new(limit, ms(window));
    let quota = match rng.u8(..6) {
        0 => quota.staggered(),
        1 => quota.from_first_request(),
        2 => quota.starting_at(ms(rng.u64(..window))),
        _ => quota,
    };
    match rng.u8(..8) {
        0 => quota.and(Quota::new(limit * 2, ms(window * 3))),
        _ => quota.into(),
    }
}

fn node(rng: &mut Rng, kind: Kind) -> Node {
    let stormy = kind == Kind::Stormy;
    let door = match rng.u8(..8) {
        0 => Door::Limiter { fallback: false },
        1..3 => Door::Limiter { fallback: true },
        _ => Door::Layer {
            policy: one(
                rng,
                &[
                    OnStoreFailure::Local,
                    OnStoreFailure::Local,
                    OnStoreFailure::Allow,
                    OnStoreFailure::Deny,
                ],
            ),
            refund_dropped: rng.u8(..3) == 0,
        },
    };
    Node {
        deadline: ms(one(rng, &[100, 250, 250, 1_000])),
        one_by_one: rng.u8(..4) == 0,
        door,
        remembers: one(rng, &[Duration::ZERO, ms(1_000), ms(1_000), Duration::MAX]),
        in_order: rng.bool(),
        gap: match kind {
            // Longer than a connection lives, now and then.
            Kind::Idle => rng.u64(500..3_000),
            _ => one(rng, &[20, 50, 100, 100, 300]),
        },
        crowd: match kind {
            Kind::Idle => 1_000,
            // Some are in flight whenever a connection is closed.
            Kind::Cut => one(rng, &[2, 5, 60]),
            _ => one(rng, &[20, 60, 1_000]),
        },
        patience: maybe(rng, if kind == Kind::Idle { 0 } else { 30 }, |rng| rng.u64(0..200).max(1)),
        all_impatient: rng.bool(),
        lazy: maybe(rng, if stormy { 10 } else { 0 }, |rng| rng.u64(1..500)),
        starts: ms(maybe(rng, 60, |rng| rng.u64(..1_500)).unwrap_or(0)),
    }
}

fn fault(rng: &mut Rng, nodes: usize, left: u64) -> Fault {
    let node = maybe(rng, 60, |rng| rng.usize(..nodes));
    let lasts = rng.u64(50..4_000).min(left);
    match rng.u8(..21) {
        0..3 => Fault::Close { node, answers: rng.bool() },
        3..7 => Fault::Silence { node },
        7..10 => Fault::Partition { node, lasts, forgets: rng.bool() },
        10..12 => {
            Fault::Kill { lasts, keeps: rng.bool(), loading: maybe(rng, 30, |_| 300).unwrap_or(0) }
        }
        12 | 13 => Fault::Freeze { lasts },
        14..16 => Fault::Failover {
            leads: maybe(rng, 50, |rng| rng.u64(..2_000).min(left)).unwrap_or(0),
            split: maybe(rng, 30, |rng| rng.u64(..1_000).min(left)).unwrap_or(0),
        },
        16 => Fault::FlushScripts,
        17 => Fault::FlushAll,
        18 | 19 => Fault::Refuse {
            lasts,
            error: one(
                rng,
                &[
                    "LOADING Redis is loading the dataset in memory",
                    "OOM command not allowed when used memory > 'maxmemory'.",
                    "BUSY Redis is busy running a script.",
                    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
                ],
            ),
        },
        _ => Fault::Slow { lasts, delay: rng.u64(20..400) },
    }
}

/// Draws a fault of one master of a cluster.
fn shard_fault(rng: &mut Rng, fails_over: bool, left: u64) -> Fault {
    let lasts = rng.u64(50..4_000).min(left);
    match rng.u8(..6) {
        0..2 => Fault::Kill { lasts, keeps: rng.bool(), loading: 0 },
        2..4 if fails_over => Fault::Failover { leads: lasts.min(1_000), split: 0 },
        2..5 => Fault::Freeze { lasts },
        _ => Fault::Refuse { lasts, error: "LOADING Redis is loading the dataset in memory" },
    }
}

impl Node {
    /// Returns whether several limits are charged one after the other.
    pub fn charges_in_order(&self) -> bool {
        self.in_order || self.one_by_one
    }

    /// Draws a request of this node. `strict`: its caller waits for the answer.
    pub fn ask(&self, rng: &mut Rng, plan: &Plan, id: usize, strict: bool) -> Ask {
        let mut lines = vec![line(rng, plan, id, 0)];
        if plan.limits.len() > 1 && rng.u8(..3) == 0 {
            // Two or three of the limits, in any order; now and then another one alone.
            lines = (0..plan.limits.len()).map(|limit| line(rng, plan, id, limit)).collect();
            rng.shuffle(&mut lines);
            lines.truncate(rng.usize(1..=lines.len()).max(rng.usize(1..=2)));
        }
        let alone = lines.iter().all(|line| line.key.starts_with("once"));
        let several = lines.len() > 1 || lines[0].limit > 0;
        let what = match rng.u8(..20) {
            _ if alone && !several => What::Check { work: 0 },
            0..3 => What::Charge {
                work: one(rng, &[0, 10, 300, 1_500]),
                reserves: plan.reserves && rng.bool(),
            },
            3 if !alone => What::Peek,
            4 if !alone && rng.u8(..4) == 0 => What::Reset,
            _ => What::Check { work: one(rng, &[0, 0, 0, 50, 500]) },
        };
        if what == What::Reset {
            lines.truncate(1);
        }
        if matches!(what, What::Charge { .. }) && rng.u8(..5) > 0 {
            // All are refunded, or some cost something else.
            let refunded = lines.len() > 1 && rng.bool();
            for line in &mut lines {
                let actual = maybe(rng, 80, |rng| rng.u64(..=line.cost + 1));
                line.actual = if refunded { Some(0) } else { actual };
            }
        }
        let all = self.all_impatient;
        let patience = self.patience.filter(|_| !strict && (all || rng.u8(..10) < 8));
        let lazy = self.lazy.filter(|_| !strict && rng.u8(..10) < 5);
        Ask { what, lines, patience, lazy }
    }
}

/// Draws a request's question to one of the limits.
fn line(rng: &mut Rng, plan: &Plan, id: usize, limit: usize) -> Line {
    let key = match rng.u8(..10) {
        // Nobody asks for this one again.
        0..2 => format!("once-{id}"),
        2..8 if plan.kind == Kind::Poisoned => "poisoned".to_owned(),
        _ => format!("key-{}", rng.usize(..plan.keys)),
    };
    let most = plan.limits[limit].quotas(&key).as_ref()[0].limit();
    let cost = match rng.u8(..6) {
        0 => rng.u64(1..=most.min(5)),
        _ => 1,
    };
    Line { limit, key, cost, actual: None }
}
