//! A process of an app: a limiter, and clients that ask it. Writes its history to standard output.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::{sleep, timeout};

use crate::history::{Answer, Ask, Line, now};
use crate::limiters::{Limiter, Setup, make};

/// What the clients of a node do.
#[derive(Clone, Debug)]
pub struct Load {
    pub node: u32,
    /// Clients that ask one request after the other.
    pub clients: u32,
    /// Keys that they share; the first of them gets every second request.
    pub keys: u32,
    /// Whether the other requests have a key each that nobody had before.
    pub flood: bool,
    /// Between two requests of a client, in microseconds, at most.
    pub pause: u64,
    /// The largest cost.
    pub cost: u64,
    /// One in so many requests is dropped before its answer. 0: none.
    pub drops: u64,
    /// One in so many passes is given back, some of them when their window is over. 0: none.
    pub refunds: u64,
    /// When to begin and to end, in microseconds since the epoch.
    pub from: u64,
    pub until: u64,
}

/// As a process is told.
pub fn to_args(setup: &Setup, load: &Load) -> Vec<String> {
    let Setup { name, url, limit, length, max_keys, receipts, clock_steps_from } = setup;
    let Load { node, clients, keys, flood, pause, cost, drops, refunds, from, until } = load;
    let numbers = [
        *limit,
        *length,
        *max_keys as u64,
        u64::from(*receipts),
        clock_steps_from.unwrap_or(0),
        u64::from(*node),
        u64::from(*clients),
        u64::from(*keys),
        u64::from(*flood),
        *pause,
        *cost,
        *drops,
        *refunds,
        *from,
        *until,
    ];
    [name.clone(), url.clone()]
        .into_iter()
        .chain(numbers.map(|number| number.to_string()))
        .collect()
}

/// As [`to_args`] wrote it.
pub fn from_args(mut args: impl Iterator<Item = String>) -> (Setup, Load) {
    let (name, url) = args.next().zip(args.next()).expect("a name and an address");
    let numbers: Vec<u64> = args.map(|arg| arg.parse().expect("a number")).collect();
    let [
        limit,
        length,
        max_keys,
        receipts,
        steps,
        node,
        clients,
        keys,
        flood,
        pause,
        cost,
        drops,
        refunds,
        from,
        until,
    ] = numbers[..]
    else {
        panic!("15 numbers")
    };
    let setup = Setup {
        name,
        url,
        limit,
        length,
        max_keys: max_keys as usize,
        receipts: receipts > 0,
        clock_steps_from: (steps > 0).then_some(steps),
    };
    let load = Load {
        node: node as u32,
        clients: clients as u32,
        keys: keys as u32,
        flood: flood > 0,
        pause,
        cost,
        drops,
        refunds,
        from,
        until,
    };
    (setup, load)
}

/// How long a client waits for an answer.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Runs a node until its time is over.
pub async fn node(setup: Setup, load: Load) {
    let limiter: Arc<dyn Limiter> = Arc::from(make(&setup).await);
    let ids = Arc::new(AtomicU64::new(0));
    let clients = (0..load.clients).map(|client| {
        let client = Client {
            random: Random(now() ^ u64::from(load.node) << 48 ^ u64::from(client + 1) << 32),
            limiter: Arc::clone(&limiter),
            ids: Arc::clone(&ids),
            setup: setup.clone(),
            load: load.clone(),
        };
        tokio::spawn(client.run())
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.expect("no client panics");
    }
}

struct Client {
    random: Random,
    limiter: Arc<dyn Limiter>,
    ids: Arc<AtomicU64>,
    setup: Setup,
    load: Load,
}

impl Client {
    async fn run(mut self) {
        sleep(Duration::from_micros(self.load.from.saturating_sub(now()))).await;
        while now() < self.load.until {
            self.ask().await;
            match self.random.below(self.load.pause + 1) {
                0 => tokio::task::yield_now().await,
                // A timer ends with a millisecond.
                pause => sleep(Duration::from_micros(pause)).await,
            }
        }
    }

    async fn ask(&mut self) {
        let load = &self.load;
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let key = match self.random.below(2) {
            0 => 0,
            _ if load.flood => load.keys + 1_000 + (load.node << 24 | id as u32 & 0xff_ffff),
            _ => self.random.below(load.keys.into()) as u32,
        };
        let cost = 1 + self.random.below(load.cost);
        let dropped = load.drops > 0 && self.random.below(load.drops) == 0;
        let patience = if dropped { Duration::from_millis(self.random.below(3)) } else { PATIENCE };

        let sent = self.setup.now();
        let answer = timeout(patience, self.limiter.ask(key, cost)).await;
        let received = self.setup.now();

        let (answer, receipt) = answer.unwrap_or((Answer::GaveUp, None));
        let ask = Ask { node: load.node, id, key, cost, sent, received, answer, returned: None };
        write(&Line::Asked(ask));
        if let Some(receipt) = receipt
            && load.refunds > 0
            && self.random.below(load.refunds) == 0
        {
            let (limiter, setup, node) = (Arc::clone(&self.limiter), self.setup.clone(), load.node);
            let wait = Duration::from_millis(self.random.below(self.setup.length * 3 / 2));
            tokio::spawn(async move {
                sleep(wait).await;
                let sent = setup.now();
                // Before the limiter may know.
                write(&Line::Returned { node, id, sent });
                limiter.refund(receipt).await;
            });
        }
    }
}

fn write(line: &Line) {
    // Nobody reads any more: the scenario is over.
    if writeln!(std::io::stdout(), "{line}").is_err() {
        std::process::exit(0);
    }
}

/// xorshift64*.
struct Random(u64);

impl Random {
    /// A number below `bound`, which is not 0.
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % bound
    }
}
