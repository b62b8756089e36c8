//! A process of an app: a limiter, and clients that ask it. Writes its history to standard output.

use std::future::poll_fn;
use std::io::Write;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::{Duration, UNIX_EPOCH};

use tokio::time::{sleep, timeout};

use crate::history::{Answer, Ask, Line, Note, now};
use crate::limiter::{Limiter, Setup};
use crate::limiters::make;
use crate::scenarios::{Scenario, scenarios};

/// The arguments of a process: `node SCENARIO LIMITER URL NUMBER FROM`.
#[derive(Clone, Debug)]
pub struct Node {
    pub scenario: Scenario,
    pub limiter: String,
    pub url: String,
    pub number: u32,
    /// The start of the clients, in microseconds since the epoch.
    pub from: u64,
}

impl Node {
    pub fn to_args(&self) -> [String; 5] {
        let Self { scenario, limiter, url, number, from } = self;
        let name = scenario.name.to_owned();
        [name, limiter.clone(), url.clone(), number.to_string(), from.to_string()]
    }

    /// Reads what [`Self::to_args`] wrote.
    pub fn from_args(args: impl Iterator<Item = String>) -> Option<Self> {
        let [name, limiter, url, number, from] = &args.collect::<Vec<_>>()[..] else { return None };
        Some(Self {
            scenario: scenarios().into_iter().find(|scenario| scenario.name == name)?,
            limiter: limiter.clone(),
            url: url.clone(),
            number: number.parse().ok()?,
            from: from.parse().ok()?,
        })
    }

    /// The end of the clients.
    pub fn until(&self) -> u64 {
        self.from + self.scenario.millis * 1_000
    }
}

/// The time that a client waits for an answer, beside its time in line.
pub const PATIENCE: Duration = Duration::from_secs(2);

/// Runs a node until the end of its clients.
pub async fn run(node: Node) {
    let setup = node.scenario.setup(&node.limiter, &node.url, node.from);
    let limiter: Arc<dyn Limiter> = Arc::from(make(&setup).await);
    let ids = Arc::new(AtomicU64::new(0));
    let clients = (0..node.scenario.clients).map(|client| {
        let client = Client {
            random: Random(now() ^ u64::from(node.number) << 48 ^ u64::from(client + 1) << 32),
            limiter: Arc::clone(&limiter),
            ids: Arc::clone(&ids),
            setup: setup.clone(),
            node: node.clone(),
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
    node: Node,
}

impl Client {
    async fn run(mut self) {
        sleep(Duration::from_micros(self.node.from.saturating_sub(now()))).await;
        while now() < self.node.until() {
            let resting =
                self.setup.now() / (self.setup.length * 1_000) % (self.node.scenario.rests + 1);
            if resting > 0 {
                sleep(Duration::from_millis(5)).await;
                continue;
            }
            self.ask().await;
            match self.random.below(self.node.scenario.pause + 1) {
                0 => tokio::task::yield_now().await,
                // Timers end at whole milliseconds.
                pause => sleep(Duration::from_micros(pause)).await,
            }
        }
    }

    async fn ask(&mut self) {
        let Node { scenario: load, number: node, .. } = &self.node;
        let node = *node;
        let id = self.ids.fetch_add(1, Ordering::Relaxed);
        let key = match self.random.below(2) {
            0 => 0,
            _ if load.flood => load.keys + 1_000 + (node << 24 | id as u32 & 0xff_ffff),
            _ => self.random.below(load.keys.into()) as u32,
        };
        let cost = 1 + self.random.below(load.cost);
        let dropped = load.drops > 0 && self.random.below(load.drops) == 0;
        let in_line = load.max_wait();
        let patience = match dropped {
            true => Duration::from_millis(self.random.below(in_line.max(3))),
            false => PATIENCE + Duration::from_millis(in_line),
        };

        let sent = self.setup.now();
        if load.limits > 1 {
            let lines = self.lines(key, cost);
            let answers = timeout(patience, self.limiter.ask_several(lines.clone())).await;
            let received = self.setup.now();
            let answers = answers.unwrap_or_else(|_| vec![Answer::GaveUp; lines.len()]);
            for ((limit, key, cost), answer) in lines.into_iter().zip(answers) {
                let key = key * self.setup.limits as u32 + limit as u32;
                write(&Line::Asked(Ask {
                    node,
                    id,
                    key,
                    cost,
                    sent,
                    received,
                    answer,
                    returned: None,
                    due: None,
                    joined: None,
                }));
            }
            return;
        }
        let mut answer = pin!(timeout(patience, self.limiter.ask(key, cost)));
        let first = poll_fn(|cx| Poll::Ready(answer.as_mut().poll(cx))).await;
        // A request that is pending after its first poll is in line.
        let joined = (in_line > 0 && first.is_pending()).then(|| self.setup.now());
        let answer = match first {
            Poll::Ready(answer) => answer,
            Poll::Pending => answer.await,
        };
        let received = self.setup.now();

        let (answer, receipt) = answer.unwrap_or((Answer::GaveUp, None));
        let ready = receipt.as_ref().map(|receipt| receipt.decision());
        let ready = ready.filter(|decision| !decision.ready_after().is_zero());
        let due = ready.and_then(|decision| {
            Some(decision.ready_at()?.duration_since(UNIX_EPOCH).ok()?.as_micros() as u64)
        });
        let ask = Ask { node, id, key, cost, sent, received, answer, returned: None, due, joined };
        ask.lines().for_each(|line| write(&line));
        if let Some(receipt) = receipt
            && load.refunds > 0
            && self.random.below(load.refunds) == 0
        {
            let (limiter, setup) = (Arc::clone(&self.limiter), self.setup.clone());
            let wait = Duration::from_millis(self.random.below(self.setup.length * 3 / 2));
            tokio::spawn(async move {
                sleep(wait).await;
                let sent = setup.now();
                // The time is noted before the limiter learns of the refund.
                write(&Line::Noted { node, id, note: Note::Returned, at: sent });
                limiter.refund(receipt).await;
            });
        }
    }

    /// Charges a limit for all and a limit for each key, in either order, or one of them alone.
    fn lines(&mut self, key: u32, cost: u64) -> Vec<(usize, u32, u64)> {
        let mut lines = vec![(0, 0, 1), (1, key, cost)];
        match self.random.below(8) {
            0..3 => {}
            3..6 => lines.reverse(),
            6 => lines.truncate(1),
            _ => _ = lines.remove(0),
        }
        lines
    }
}

fn write(line: &Line) {
    // The scenario is over if no process reads the history.
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
