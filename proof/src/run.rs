//! Runs a scenario: processes with clients, a Redis, and what happens to them.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use harness::{Postgres, Proxy, Server, signal, wait_for};
use tempfile::TempDir;
use tower_fixed_window_postgres::SCHEMA;

use crate::check::{Promise, above};
use crate::history::{Answer, Ask, Line, collect, now};
use crate::limiter::{Beside, Contestant, Store};
use crate::line::{idle, overtaken};
use crate::node::{Node, PATIENCE};
use crate::scenarios::{Scenario, Step};
use crate::several::{Returns, torn, unexplained};
use crate::zone;

/// A history, and the times at which the store lost its counts.
pub struct Outcome {
    pub asks: Vec<Ask>,
    pub losses: Vec<(u64, u64)>,
    /// The start of the clients.
    pub from: u64,
    /// The times at which calls may have been lost.
    pub disturbed: Vec<(u64, u64)>,
}

/// A line of the table.
#[derive(Clone, Debug)]
pub struct Row {
    pub asked: usize,
    pub passed: usize,
    pub failed: usize,
    pub gave_up: usize,
    /// The slowest answer, in milliseconds.
    pub slowest: u64,
    /// The longest time in which no client got a decision, in milliseconds.
    pub silence: u64,
    /// By how many tokens more than the limit passed in a window, at least, whatever has happened.
    pub above: u64,
    /// The same, without the excess that the documentation allows.
    pub broken: u64,
    /// Requests for several limits that passed in part, and refusals without a reason.
    pub torn: usize,
    pub unexplained: usize,
    /// Requests that were overtaken in line, and windows that it left unused.
    pub overtaken: usize,
    pub idle: usize,
}

/// The time that processes have to start, in milliseconds.
const STARTS_WITHIN: u64 = 300;

/// Runs a limiter through a scenario.
pub async fn run(scenario: &Scenario, contestant: &Contestant) -> Outcome {
    let redis = contestant.store == Store::Redis;
    let server = redis.then(start_server);
    let is_postgres = contestant.store == Store::Postgres;
    let postgres = is_postgres.then(|| {
        let server = Postgres::start().expect("a server is installed");
        server.run(SCHEMA);
        server
    });
    let replica = (redis && scenario.replica).then(start_server);
    if let (Some(server), Some(replica)) = (&server, &replica) {
        order(replica, &["REPLICAOF", "127.0.0.1", &server.port.to_string()]);
        wait_for("the replica", || replication(replica).contains("master_link_status:up"));
    }
    let port = server.as_ref().map(|server| server.port);
    let port = port.or(postgres.as_ref().map(|server| server.port));
    let proxy = port.filter(|_| scenario.proxied).map(Proxy::to);
    let to = proxy.as_ref().map(|proxy| proxy.port).or(port).unwrap_or_default();
    let url = match contestant.store {
        Store::Postgres => format!("postgres://postgres@127.0.0.1:{to}/postgres"),
        _ => format!("redis://127.0.0.1:{to}/"),
    };
    let from = now() + STARTS_WITHIN * 1_000;
    let first = Node {
        scenario: scenario.clone(),
        limiter: contestant.name.to_owned(),
        url,
        number: 0,
        from,
    };
    let nodes = if port.is_some() { scenario.nodes } else { 1 };
    let zones = (scenario.beside != Beside::Nothing).then(|| {
        let folder = tempfile::tempdir().expect("there is room for files");
        zone::write(folder.path(), scenario.midnight(from));
        folder
    });
    let mut stage = Stage {
        zones,
        server,
        postgres,
        replica,
        proxy,
        next: first,
        nodes: Vec::new(),
        losses: Vec::new(),
        disturbed: Vec::new(),
    };
    stage.nodes.resize_with(nodes as usize, || None);
    let mut readers = Vec::new();
    for node in 0..nodes as usize {
        readers.push(stage.start_node(node));
    }
    for &(at, step) in &scenario.steps {
        tokio::time::sleep(Duration::from_micros((from + at * 1_000).saturating_sub(now()))).await;
        readers.extend(tokio::task::block_in_place(|| stage.step(step)));
    }
    let lines = tokio::task::block_in_place(|| stage.end(readers));
    Outcome { asks: collect(lines), losses: stage.losses, from, disturbed: stage.disturbed }
}

/// A server that has on disk what it has acknowledged, so that it loses nothing when it is killed.
fn start_server() -> Server {
    let durable = ["--save", "", "--appendonly", "yes", "--appendfsync", "always"];
    let server = Server::with(&[&durable[..], &["--repl-diskless-sync-delay", "0"]].concat());
    server.expect("a server is installed")
}

/// Sends a command that the server answers with `OK`.
fn order(server: &Server, command: &[&str]) {
    let _: String = server.ask(command);
}

fn replication(server: &Server) -> String {
    server.ask(&["INFO", "replication"])
}

/// The table's row for an outcome.
pub fn row(scenario: &Scenario, contestant: &Contestant, outcome: &Outcome) -> Row {
    let asks = &outcome.asks;
    let strict = scenario.promises(contestant.windows, outcome.from);
    let promised = strict.iter().map(|strict| Promise {
        losses: outcome.losses.clone(),
        local: contestant.local,
        ..strict.clone()
    });
    let promised: Vec<_> = promised.collect();
    let worst = |promises: &[Promise]| promises.iter().map(|one| above(asks, one).above).max();
    let in_line = matches!(scenario.beside, Beside::Line { .. });
    // With a reservation, its quotas may also refuse what they would cover in different windows.
    let has_reasons = scenario.limits > 1
        || matches!(
            scenario.beside,
            Beside::Quota { .. } | Beside::Kept { .. } | Beside::Day { .. }
        );
    let count = |answer| asks.iter().filter(|ask| ask.answer == answer).count();
    let decided = |ask: &&Ask| ask.passed() || ask.answer == Answer::Refused;
    let mut times: Vec<_> = asks.iter().filter(decided).map(|ask| ask.received).collect();
    times.push(outcome.from);
    times.push(outcome.from + scenario.millis * 1_000);
    times.sort_unstable();
    let silence = times.windows(2).map(|two| two[1] - two[0]).max();
    Row {
        asked: asks.len(),
        passed: asks.iter().filter(|ask| ask.passed()).count(),
        failed: count(Answer::Failed),
        // Others were dropped on purpose.
        gave_up: asks.iter().filter(|ask| ran_out_of_patience(ask, scenario.max_wait())).count(),
        slowest: asks.iter().map(|ask| ask.received - ask.sent).max().unwrap_or(0) / 1_000,
        // Times on a clock that steps say nothing of that.
        silence: if scenario.steps_clock { 0 } else { silence.unwrap_or(0) / 1_000 },
        above: worst(&strict).unwrap_or(0),
        broken: worst(&promised).unwrap_or(0),
        torn: torn(asks).len(),
        overtaken: if in_line { overtaken(asks, &strict[0]).len() } else { 0 },
        idle: if in_line { idle(asks, &strict[0]).len() } else { 0 },
        unexplained: match contestant.local || !has_reasons {
            // A node that counts in memory may have its own reasons.
            true => 0,
            false => unexplained(asks, &strict, &returns(outcome)).len(),
        },
    }
}

/// How long a refused request may hold tokens: its calls, and what other nodes remember of it.
const HELD: u64 = 1_500_000;
/// Until everything is as before.
const CALM: u64 = 1_500_000;

fn returns(outcome: &Outcome) -> Returns {
    let lost = outcome.asks.iter().filter(|ask| ask.answer == Answer::Failed);
    let lost = lost.map(|ask| (ask.sent, ask.received));
    let spans = outcome.disturbed.iter().copied().chain(lost);
    let mut spans: Vec<_> = spans.map(|(from, to)| (from, to + CALM)).collect();
    spans.sort_unstable();
    spans.dedup_by(|next, last| {
        let overlaps = next.0 <= last.1;
        last.1 = if overlaps { last.1.max(next.1) } else { last.1 };
        overlaps
    });
    Returns { within: HELD, disturbed: spans }
}

fn ran_out_of_patience(ask: &Ask, max_wait: u64) -> bool {
    let patience = PATIENCE.as_micros() as u64 + max_wait * 1_000;
    ask.answer == Answer::GaveUp && ask.received - ask.sent >= patience
}

struct Stage {
    zones: Option<TempDir>,
    server: Option<Server>,
    postgres: Option<Postgres>,
    replica: Option<Server>,
    proxy: Option<Proxy>,
    /// The next process: each has a number of its own.
    next: Node,
    nodes: Vec<Option<Child>>,
    losses: Vec<(u64, u64)>,
    /// Spans in which calls are harmed.
    disturbed: Vec<(u64, u64)>,
}

type Reader = JoinHandle<Vec<Line>>;

impl Stage {
    fn start_node(&mut self, node: usize) -> Reader {
        let mut command = Command::new(std::env::current_exe().expect("it is a file"));
        if let Some(zones) = &self.zones {
            command.env(zone::FOLDER, zones.path());
        }
        let mut child = command
            .arg("node")
            .args(self.next.to_args())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        self.next.number += 1;
        let lines = BufReader::new(child.stdout.take().expect("it is a pipe"));
        self.nodes[node] = Some(child);
        // The last line of a process that is killed may be half of one.
        thread::spawn(move || lines.lines().map_while(|line| line.ok()?.parse().ok()).collect())
    }

    fn step(&mut self, step: Step) -> Option<Reader> {
        let before = now();
        match step {
            Step::KillStore => self.each(Server::kill, Postgres::kill),
            Step::StartStore => self.each(Server::restart, Postgres::restart),
            Step::FreezeStore => self.each(|of| of.freeze(), |of| of.freeze()),
            Step::ThawStore => self.each(|of| of.thaw(), |of| of.thaw()),
            Step::EmptyStore => {
                order(self.server(), &["FLUSHALL"]);
                self.losses.push((before, now()));
            }
            Step::FlushScripts => order(self.server(), &["SCRIPT", "FLUSH"]),
            Step::CloseIdle => order(self.server(), &["CONFIG", "SET", "timeout", "1"]),
            Step::HandOver => {
                let port = self.replica().port;
                let to = ["FAILOVER", "TO", "127.0.0.1", &port.to_string(), "TIMEOUT", "2000"];
                order(self.server(), &to);
                let replica = self.replica();
                wait_for("the failover", || replication(replica).contains("role:master"));
                self.network().set_target(port);
            }
            Step::FailOver => {
                let port = self.replica().port;
                self.server().kill();
                order(self.replica(), &["REPLICAOF", "NO", "ONE"]);
                self.losses.push((before, now()));
                self.network().set_target(port);
            }
            Step::Silent(silent) => self.network().set_silent(silent),
            Step::Delay(millis) => {
                self.network().set_delay(move || Duration::from_millis(millis));
            }
            Step::Cut => self.network().cut(),
            Step::KillNode(node) => self.nodes[node].iter_mut().for_each(|child| {
                let _ = child.kill();
                let _ = child.wait();
            }),
            Step::StartNode(node) => return Some(self.start_node(node)),
            Step::PauseNode(node) => {
                self.nodes[node].iter().for_each(|child| signal(child, "-STOP"));
            }
            Step::ResumeNode(node) => {
                self.nodes[node].iter().for_each(|child| signal(child, "-CONT"));
            }
        }
        let lasts = matches!(step, Step::KillStore | Step::FreezeStore | Step::Silent(true));
        // Until a step that ends it.
        let to = if lasts { u64::MAX - CALM } else { now() };
        self.disturbed.iter_mut().for_each(|span| span.1 = span.1.min(now()));
        self.disturbed.push((before, to));
        None
    }

    /// Harms the server, whichever it is.
    fn each(&mut self, redis: impl FnOnce(&mut Server), postgres: impl FnOnce(&mut Postgres)) {
        self.server.as_mut().map(redis);
        self.postgres.as_mut().map(postgres);
    }

    fn server(&mut self) -> &mut Server {
        self.server.as_mut().expect("the scenario is for those in Redis")
    }

    fn replica(&mut self) -> &mut Server {
        self.replica.as_mut().expect("the scenario has one")
    }

    fn network(&self) -> &Proxy {
        self.proxy.as_ref().expect("the scenario has a network")
    }

    /// Waits for the nodes. Those that do not end by themselves stopped long ago.
    fn end(&mut self, readers: Vec<Reader>) -> Vec<Line> {
        let in_line = self.next.scenario.max_wait() * 1_000;
        let patience = PATIENCE.as_micros() as u64 + in_line + 500_000;
        for child in self.nodes.iter_mut().flatten() {
            while now() < self.next.until() + patience && matches!(child.try_wait(), Ok(None)) {
                thread::sleep(Duration::from_millis(10));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
        readers.into_iter().flat_map(|reader| reader.join().expect("it only reads")).collect()
    }
}
