//! Checks look for what holds in every history.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::time::UNIX_EPOCH;

use tower_fixed_window::{Decision, Key, OnStoreFailure, Quota, Quotas, Usage};

use crate::cluster::{PARTS, part_of};
use crate::history::Event;
use crate::plan::{Ask, Door, Fault, Kind, Line, Plan, Servers, What};
use crate::run::Run;
use crate::server::Fields;

/// A timer ends with the next millisecond, and another one may have to end before.
const TICK: i64 = 3_000;
/// How long after an answer a connection is taken to be open.
const FRESH: i64 = 10_000;
/// How long a store that is asked from its first moment on may take to be connected.
const STARTS_WITHIN: i64 = 1_000_000;

#[derive(Debug)]
pub struct Finding {
    pub check: &'static str,
    /// In microseconds since the beginning.
    pub at: i64,
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} (at {})", self.check, self.what, Time(self.at))
    }
}

/// Milliseconds, of microseconds.
pub struct Time(pub i64);

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1_000, self.0 % 1_000)
    }
}

/// A request, put together.
struct Request<'a> {
    node: usize,
    ask: &'a Ask,
    /// The names of the keys in Redis.
    names: Vec<String>,
    asked: i64,
    decided: Option<(i64, &'a Decision)>,
    called: bool,
    status: Option<u16>,
    failed: Option<&'a str>,
    /// A peek or a reset.
    done: Option<i64>,
    gave_up: bool,
    /// When the first of these was.
    ended: Option<i64>,
    /// The tokens that are returned of each line, and since when.
    returns: Vec<u64>,
    returned: Option<i64>,
}

/// The decision for one line of a request.
struct Part<'a> {
    index: usize,
    line: &'a Line,
    /// The name of the key in Redis.
    name: &'a str,
    decision: Cow<'a, Decision>,
}

impl<'a> Request<'a> {
    /// Returns whether the request asks for several limits in one charge.
    fn is_several(&self) -> bool {
        self.ask.lines.len() > 1 || self.ask.lines[0].limit > 0
    }

    /// Not of lines of which nothing is known: in a refusal, those that were not looked at in time.
    fn parts(&self, plan: &Plan) -> Vec<Part<'_>> {
        let Some((_, decision)) = self.decided else { return Vec::new() };
        let lines = self.ask.lines.iter().enumerate();
        let of = |(index, line): (usize, &'a Line)| {
            let decision = match self.is_several() {
                true => Cow::Owned(decision.of(plan.limits[line.limit].name)?),
                false => Cow::Borrowed(decision),
            };
            Some(Part { index, line, name: &self.names[index], decision })
        };
        lines.filter_map(of).collect()
    }

    /// Returns whether a key of the request holds somebody else's value.
    fn is_poisoned(&self) -> bool {
        self.ask.lines.iter().any(|line| line.limit == 0 && line.key == "poisoned")
    }

    /// Returns the parts of a request that has passed.
    fn passed(&self, plan: &Plan) -> Vec<Part<'_>> {
        let passed = self.decided.is_some_and(|(_, decision)| decision.is_allowed());
        if passed { self.parts(plan) } else { Vec::new() }
    }
}

/// A key as Redis has it.
fn name(plan: &Plan, line: &Line) -> String {
    let scope = plan.limits[line.limit].name;
    format!("tfw1:{{{scope}:{}}}", Key::from(&line.key).readable())
}

/// A window of a count: its field and its start.
type Window = (String, i64);

/// Tokens of a node for a key in a window: those that Redis let pass, those that were to be returned,
/// and when the last one passed.
type Passed = BTreeMap<(usize, String, Window), (i64, i64, i64)>;

/// The windows that a decision says it was counted in, with their lengths.
fn windows(plan: &Plan, line: &Line, decision: &Decision) -> Vec<(String, i64, i64)> {
    let quotas = plan.limits[line.limit].quotas(&line.key).into_iter();
    let of = |(quota, standing): (&Quota, &Usage)| {
        let end = standing.reset_at().duration_since(UNIX_EPOCH).expect("after it");
        let (end, length) = (end.as_millis() as i64, standing.window().as_millis() as i64);
        (quota.counter(), end - length, length)
    };
    quotas.zip(decision.usage()).map(of).collect()
}

pub fn check(run: &Run) -> Vec<Finding> {
    let mut check = Check::new(run);
    check.each_request();
    let passed = check.passed();
    check.limits(&passed);
    check.spans();
    check.steps();
    check.conservation(&passed);
    check.kept(&passed);
    check.causes();
    check.once();
    check.resets();
    check.local();
    check.end();
    check.findings.sort_by_key(|finding| finding.at);
    check.findings
}

struct Check<'a> {
    plan: &'a Plan,
    run: &'a Run,
    requests: BTreeMap<usize, Request<'a>>,
    findings: Vec<Finding>,
    settled: i64,
    over: i64,
    losses: Vec<i64>,
    /// When a node was told which master has which slots.
    told: Vec<(i64, usize)>,
    /// When the servers' clock stepped, and by how many microseconds.
    steps: Vec<(i64, i64)>,
    /// When connections of a node, or of all, were closed.
    cuts: Vec<(i64, Option<usize>)>,
    /// By the key as Redis has it: one of the lines that ask for it.
    keys: BTreeMap<Vec<u8>, &'a Line>,
    /// By the key, too: its quotas, by their fields.
    fields: BTreeMap<Vec<u8>, Vec<(String, Quota)>>,
    /// By how much each node has changed the count of a window.
    changes: BTreeMap<(usize, String, Window), i64>,
    /// The most that a window's count has ever been, and when it was written first.
    peaks: BTreeMap<Vec<u8>, BTreeMap<Window, (i64, i64)>>,
    /// When a key was executed away.
    resets: Vec<(i64, usize, Vec<u8>)>,
}

impl<'a> Check<'a> {
    fn new(run: &'a Run) -> Self {
        let mut check = Self {
            plan: &run.plan,
            run,
            requests: BTreeMap::new(),
            findings: Vec::new(),
            settled: i64::MAX,
            over: i64::MAX,
            losses: Vec::new(),
            told: Vec::new(),
            steps: Vec::new(),
            cuts: Vec::new(),
            keys: BTreeMap::new(),
            fields: BTreeMap::new(),
            changes: BTreeMap::new(),
            peaks: BTreeMap::new(),
            resets: Vec::new(),
        };
        for (at, event) in &run.history {
            check.note(*at, event);
        }
        check
    }

    fn note(&mut self, at: i64, event: &'a Event) {
        let of = |id: &usize| *id;
        let (id, note): (_, &dyn Fn(&mut Request<'a>)) = match event {
            Event::Asked { id, node, ask } => {
                let names: Vec<_> = ask.lines.iter().map(|line| name(self.plan, line)).collect();
                for (name, line) in names.iter().zip(&ask.lines) {
                    if self.keys.insert(name.clone().into_bytes(), line).is_none() {
                        let quotas = self.plan.limits[line.limit].quotas(&line.key).into_iter();
                        let fields = quotas.map(|quota| (quota.counter(), *quota));
                        self.fields.insert(name.clone().into_bytes(), fields.collect());
                    }
                }
                let request = Request {
                    node: *node,
                    ask,
                    names,
                    asked: at,
                    decided: None,
                    called: false,
                    status: None,
                    failed: None,
                    done: None,
                    gave_up: false,
                    ended: None,
                    returns: vec![0; ask.lines.len()],
                    returned: None,
                };
                self.requests.insert(*id, request);
                return;
            }
            Event::Decided { id, decision } => {
                (of(id), &|request| request.decided = Some((at, decision)))
            }
            Event::Called { id } => (of(id), &|request| request.called = true),
            Event::Responded { id, status } => (of(id), &|request| request.status = Some(*status)),
            Event::Failed { id, error } => (of(id), &|request| request.failed = Some(error)),
            Event::Done { id } => (of(id), &|request| request.done = Some(at)),
            Event::GaveUp { id } => (of(id), &|request| request.gave_up = true),
            Event::Returns { id, line, tokens } => {
                let request = self.requests.get_mut(id).expect("it was asked");
                request.returns[*line] = *tokens;
                request.returned = Some(at);
                return;
            }
            Event::Executed { node, command, writes, absent, .. } => {
                if command[0] == b"CLUSTER" {
                    self.told.push((at, *node));
                }
                for key in absent {
                    self.resets.push((at, *node, key.clone()));
                }
                // A deletion changes no count, and opens a new one.
                if !matches!(&command[0][..], b"EVAL" | b"EVALSHA") {
                    return;
                }
                for write in writes {
                    self.changed(at, *node, &write.key, &write.before, &write.after);
                    // What is taken and comes back within one command.
                    write.between.iter().for_each(|fields| self.rose(at, &write.key, fields));
                }
                return;
            }
            Event::Lost => return self.losses.push(at),
            Event::Fault(Fault::Close { node, .. }) => return self.cuts.push((at, *node)),
            Event::Fault(Fault::Step { by }) => return self.steps.push((at, by * 1_000)),
            Event::Settled => return self.settled = at,
            Event::Over => return self.over = at,
            _ => return,
        };
        let request = self.requests.get_mut(&id).expect("it was asked");
        note(request);
        request.ended.get_or_insert(at);
    }

    fn rose(&mut self, at: i64, key: &[u8], fields: &Fields) {
        let Some(line) = self.keys.get(key) else { return };
        let shift = stagger(self.plan.limits[line.limit].name, &Key::from(&line.key));
        for (field, value) in fields {
            let field = String::from_utf8_lossy(field).into_owned();
            let Some((start, used)) = count(&field, value, shift) else { continue };
            let peaks = self.peaks.entry(key.to_vec()).or_default();
            let (peak, _) = peaks.entry((field, start)).or_insert((0, at));
            *peak = used.max(*peak);
        }
    }

    fn changed(&mut self, at: i64, node: usize, key: &[u8], before: &Fields, after: &Fields) {
        self.rose(at, key, after);
        let Some(line) = self.keys.get(key) else { return };
        let name = String::from_utf8_lossy(key).into_owned();
        let shift = stagger(self.plan.limits[line.limit].name, &Key::from(&line.key));
        for (field, value) in after {
            let field = String::from_utf8_lossy(field).into_owned();
            let decode = |value: &Vec<u8>| count(&field, value, shift);
            let Some((start, used)) = decode(value) else { continue };
            let was = before.get(field.as_bytes()).and_then(decode);
            let quota = self.quota(&name, &field);
            let limit = quota.limit() as i64;
            let least = limit - quota.capacity() as i64;
            let length = quota.window().as_millis() as i64;
            // The rest of an earlier window, or of one to come that moved along when the clock stepped.
            let carried = was.map_or(least, |(was, before)| match start - was {
                0.. => {
                    (before - limit * ((start - was) / length).max((start > was).into())).max(least)
                }
                _ => before,
            });
            let change = used - carried;
            *self.changes.entry((node, name.clone(), (field, start))).or_default() += change;
        }
    }

    fn find(&mut self, check: &'static str, at: i64, what: String) {
        self.findings.push(Finding { check, at, what });
    }

    /// The servers' clock in microseconds at an instant of the history.
    fn clock(&self, at: i64) -> i64 {
        let stepped = self.steps.iter().filter(|(when, _)| *when <= at).map(|(_, by)| by);
        self.plan.epoch + at + stepped.sum::<i64>()
    }

    /// Returns whether a request was in flight when a connection of its node was closed, or until its node
    /// knew.
    fn was_cut(&self, request: &Request<'_>) -> bool {
        let way = (self.plan.delay + self.plan.jitter) as i64 * 1_000 + TICK + FRESH;
        self.cuts.iter().any(|&(at, node)| {
            node.is_none_or(|node| node == request.node)
                && request.asked <= at + way
                && request.ended.is_none_or(|ended| ended >= at)
        })
    }

    /// Checks each request by itself.
    fn each_request(&mut self) {
        let mut found = Vec::new();
        for (id, request) in &self.requests {
            let mut find = |check, what: String| {
                found.push(Finding {
                    check,
                    at: request.ended.unwrap_or(request.asked),
                    what: format!("#{id} at node {}: {what}", request.node),
                });
            };
            let node = &self.plan.nodes[request.node];
            let (fallback, layer) = match node.door {
                Door::Layer { policy, .. } => (policy, true),
                Door::Limiter { fallback: true } => (OnStoreFailure::Local, false),
                Door::Limiter { fallback: false } => (OnStoreFailure::Deny, false),
            };
            let several = request.is_several();
            let through_layer = layer && matches!(request.ask.what, What::Check { .. }) && !several;
            // A node's limiter has its own policy beside its layer.
            let policy = if through_layer || !layer { fallback } else { OnStoreFailure::Local };
            let local = request.decided.is_some_and(|(_, decision)| decision.is_local());

            // S32: everybody is answered in time, by whomever.
            if request.ask.lazy.is_none() {
                let within = node.deadline.as_micros() as i64 + TICK;
                let late = request.ended.is_none_or(|ended| ended - request.asked > within);
                if late {
                    let ended = request.ended.map(|ended| (ended - request.asked) / 1_000);
                    find("deadline", format!("answered after {ended:?} ms of {:?}", node.deadline));
                }
            }

            // S33: each by its policy.
            let passed = request.decided.is_some_and(|(_, decision)| decision.is_allowed());
            if local && policy != OnStoreFailure::Local {
                find("policy", "decided in memory, which it was not to be".to_owned());
            }
            if through_layer {
                let unknown = request.decided.is_none();
                if request.called && unknown && policy != OnStoreFailure::Allow {
                    find("policy", "reached the service undecided".to_owned());
                }
                if request.called && !unknown && !passed {
                    find("policy", "was refused and reached the service".to_owned());
                }
                if request.status == Some(503) && policy != OnStoreFailure::Deny {
                    find("policy", "503".to_owned());
                }
            }

            // S7, S34: what is said of a window is said while it runs.
            for Part { line, name, decision, .. } in request.parts(self.plan) {
                let Some((decided, _)) = request.decided.filter(|_| !decision.is_local()) else {
                    continue;
                };
                // A node measures what it remembers on its own clock.
                if self.steps.iter().any(|(at, _)| *at <= decided) {
                    continue;
                }
                let (from, to) = (self.clock(request.asked), self.clock(decided));
                let runs = |start: i64, length: i64| {
                    from < (start + length) * 1_000 && to >= start * 1_000
                };
                let all = windows(self.plan, line, &decision);
                let retry_at = decision
                    .retry_at()
                    .map(|at| at.duration_since(UNIX_EPOCH).expect("after it").as_micros() as i64);
                let well = match decision.is_allowed() {
                    true => all.iter().all(|(_, start, length)| runs(*start, *length)),
                    // The rest of a refusal may be as old as a round trip.
                    false => retry_at.is_none_or(|at| from < at),
                };
                if !well {
                    let (key, from, to) = (name, Time(from), Time(to));
                    find("window", format!("{key} in {all:?}, and it is {from} to {to}"));
                }
            }

            // Not looked at in a cluster's storms: a shard that nobody asks for stays lost until then.
            let is_cluster = matches!(self.plan.servers, Servers::Cluster { .. });
            // Where nothing is wrong, or nothing any more, Redis answers.
            let answered = request.ended.is_some() && !request.gave_up;
            let by_redis = !local
                && request.failed.is_none()
                && (request.decided.is_some() || request.done.is_some());
            // In order, the next limit is charged when its caller looks: perhaps after the deadline.
            let slept = several && node.charges_in_order() && request.ask.lazy.is_some();
            if answered && !by_redis && !request.is_poisoned() && !slept {
                let started = request.asked >= node.starts.as_micros() as i64 + STARTS_WITHIN;
                let how = request.failed.unwrap_or("answered without Redis").to_owned();
                match self.plan.kind {
                    Kind::Healthy if started => find("healthy", how),
                    Kind::Idle if started => find("idle", how),
                    Kind::Poisoned if started => find("one key", how),
                    Kind::Cut if started && !self.was_cut(request) => find("cut", how),
                    Kind::Stormy if is_cluster => {}
                    Kind::Stormy if request.asked >= self.settled => find("joined", how),
                    Kind::Shard if request.asked >= self.settled && !self.is_tried(request) => {
                        find("joined", how)
                    }
                    Kind::Shard if started && self.is_elsewhere(request) => find("shard", how),
                    _ => {}
                }
            }
        }
        self.findings.append(&mut found);
    }

    /// Where windows begin with the first request, those before and after a reset or a loss overlap, and
    /// what was taken in one may come back in the other (S14): they are looked at as one.
    fn window(&self, name: &str, field: String, start: i64) -> Window {
        let gone = || {
            !self.losses.is_empty() || self.resets.iter().any(|(_, _, key)| key == name.as_bytes())
        };
        // A reservation comes back in the window that covers it, and so does what has moved along.
        let quota = self.quota(name, &field);
        let length = quota.window().as_micros() as i64;
        // Several steps may lead as far back as one.
        let (mut back, mut last) = (0, 0);
        let moved = self.steps.iter().any(|&(at, by)| {
            back = (back + at - last).min(0) + by;
            last = at;
            back <= -length || by < 0 && gone()
        });
        let broken = field.ends_with('f') && gone() || quota.max_reserved() > 0 || moved;
        (field, if broken { 0 } else { start })
    }

    /// Sums what Redis let pass, and what was to be given back, for each node, key and window.
    fn passed(&self) -> Passed {
        let mut passed = Passed::new();
        for request in self.requests.values() {
            for Part { index, line, name, decision } in request.passed(self.plan) {
                if decision.is_local() {
                    continue;
                }
                for (field, start, _) in windows(self.plan, line, &decision) {
                    let window = self.window(name, field, start);
                    let key = (request.node, name.to_owned(), window);
                    let entry = passed.entry(key).or_default();
                    entry.0 += decision.granted() as i64;
                    entry.1 += request.returns[index] as i64;
                    entry.2 = request.decided.map_or(0, |(at, _)| at);
                }
            }
        }
        passed
    }

    fn first_quota(&self, line: &Line) -> &Quota {
        &self.plan.limits[line.limit].quotas(&line.key).as_ref()[0]
    }

    /// The quota of a count.
    fn quota(&self, name: &str, field: &str) -> &Quota {
        let quota = self.fields[name.as_bytes()].iter().find(|(known, _)| known == field);
        &quota.expect("it is one of them").1
    }

    /// S7: never more than the limit in a window, but for what was lost or reset in it, and for a clock
    /// that stepped back by a window or more.
    fn limits(&mut self, passed: &Passed) {
        let mut windows = BTreeMap::<(String, Window), (i64, i64)>::new();
        for ((_, name, window), (passed, returned, at)) in passed {
            let entry = windows.entry((name.clone(), window.clone())).or_default();
            entry.0 += passed - returned;
            entry.1 = entry.1.max(*at);
        }
        for ((name, (field, start)), (passed, at)) in windows {
            if start == 0 {
                // Nothing to count by: see `window`.
                continue;
            }
            let quota = self.quota(&name, &field);
            let length = quota.window().as_millis() as i64;
            // Under a clock that stepped back, a window may run before its time.
            let stepped = !self.steps.is_empty();
            let inside =
                |at: i64| stepped || (start..start + length).contains(&(self.clock(at) / 1_000));
            let gone =
                |(at, _, key): &&(i64, usize, Vec<u8>)| inside(*at) && *key == name.as_bytes();
            let lost = self.losses.iter().filter(|at| inside(**at)).count();
            // With writes that wait on their way to a master that is none any more.
            let resets = self.resets.iter().filter(gone).count();
            let fresh = 1 + lost + resets;
            let most = quota.capacity() as i64 * fresh as i64;
            if passed > most {
                self.find(
                    "limit",
                    at,
                    format!("{passed} of {most} passed for {name} in {field} from {start}"),
                );
            }
        }
    }

    /// S7, S13: where tokens are kept or taken in advance, no span of windows lets more pass than there was
    /// at its beginning and than it grants, nor does it run more. Not looked at: keys that were reset, lost
    /// counts, and a clock that stepped.
    fn spans(&mut self) {
        if !self.losses.is_empty() || !self.steps.is_empty() {
            return;
        }
        // For each count, by the start of the window: what was let pass and not returned, and what runs there.
        let has_more = |quotas: &Quotas| {
            quotas
                .into_iter()
                .any(|quota| quota.capacity() > quota.limit() || quota.max_reserved() > 0)
        };
        let plan = self.plan.limits.iter();
        if !plan.flat_map(|limit| [Some(limit.quotas), limit.plan]).flatten().any(|q| has_more(&q))
        {
            return;
        }
        let mut counts = BTreeMap::<(&str, String), BTreeMap<i64, (i64, i64)>>::new();
        let mut most = 0;
        for request in self.requests.values() {
            let passed = request.passed(self.plan);
            let Some((_, whole)) = request.decided else { continue };
            let ready = whole.ready_at().filter(|_| !whole.ready_after().is_zero());
            let ready = ready.map(|at| at.duration_since(UNIX_EPOCH).expect("after it"));
            for Part { index, line, decision, .. } in passed {
                if decision.is_local() {
                    continue;
                }
                most = most.max(line.cost as i64);
                let held = decision.granted() as i64 - request.returns[index] as i64;
                for (field, start, length) in windows(self.plan, line, &decision) {
                    let later =
                        ready.map_or(0, |at| (at.as_millis() as i64 - start).div_euclid(length));
                    let of = counts.entry((&request.names[index], field)).or_default();
                    of.entry(start).or_default().0 += held;
                    of.entry(start + later * length).or_default().1 += held;
                }
            }
        }
        let mut found = Vec::new();
        for ((name, field), windows) in counts {
            let quota = self.quota(name, &field);
            let [limit, capacity, reserved] =
                [quota.limit(), quota.capacity(), quota.max_reserved()].map(|n| n as i64);
            let length = quota.window().as_millis() as i64;
            // Tokens that come back later bring what earlier windows have covered of them.
            let covered = if reserved > 0 { most - 1 } else { 0 };
            if self.resets.iter().any(|(_, _, key)| key == name.as_bytes()) {
                continue;
            }
            for &first in windows.keys() {
                let (mut passed, mut runs) = (0, 0);
                for (&last, (held, run)) in windows.range(first..) {
                    let later = (last - first) / length;
                    (passed, runs) = (passed + held, runs + run);
                    let may_pass = capacity + reserved + limit * later + covered;
                    let may_run = (capacity + limit * later).max(limit * (later + 1) + covered);
                    if passed > may_pass || runs > may_run {
                        let at = (last + length) * 1_000 - self.plan.epoch;
                        found.push((at, format!(
                            "{passed} of {may_pass} passed and {runs} of {may_run} run for {name} in {field} from {first} to {last}"
                        )));
                    }
                }
            }
        }
        found.into_iter().for_each(|(at, what)| self.find("spans", at, what));
    }

    /// S4: a step back grants nothing. What runs when the clock steps back runs on, or moves along to the
    /// window of the new time: from the beginning of the first until the end of the second no more than
    /// the limit passes. Not looked at: keys that were reset, lost counts, and two steps within.
    fn steps(&mut self) {
        if self.steps.is_empty() || !self.losses.is_empty() {
            return;
        }
        // For each count with plain windows on a grid: where a window begins, its length and its limit.
        let mut counts = BTreeMap::<(&str, String), (i64, i64, i64)>::new();
        // When a request was sent and answered, and what it holds.
        let mut held = BTreeMap::<(&str, String), Vec<(i64, i64, i64)>>::new();
        for request in self.requests.values() {
            let Some((at, _)) = request.decided else { continue };
            for Part { index, line, decision, .. } in request.passed(self.plan) {
                let name = &request.names[index][..];
                for (field, start, length) in windows(self.plan, line, &decision) {
                    let quota = self.quota(name, &field);
                    let plain = quota.capacity() == quota.limit() && quota.max_reserved() == 0;
                    if decision.is_local() || !plain || field.ends_with('f') {
                        continue;
                    }
                    let tokens = decision.granted() as i64 - request.returns[index] as i64;
                    let of = (name, field);
                    counts.insert(of.clone(), (start, length, quota.limit() as i64));
                    held.entry(of).or_default().push((request.asked, at, tokens));
                }
            }
        }
        let mut found = Vec::new();
        for ((name, field), (start, length, limit)) in counts {
            if self.resets.iter().any(|(_, _, key)| key == name.as_bytes()) {
                continue;
            }
            for (i, &(at, by)) in self.steps.iter().enumerate().filter(|(_, (_, by))| *by < 0) {
                let length = length * 1_000;
                let since = |clock: i64| (clock - start * 1_000).rem_euclid(length);
                let before = since(self.clock(at) - by);
                let from = at - before;
                // Less than a window, and it runs until its own end.
                let until = match -by < length {
                    true => at + length - before - by,
                    false => at + length - since(self.clock(at)),
                };
                let last = i.checked_sub(1).map_or(0, |i| self.steps[i].0);
                let next = self.steps.get(i + 1).map_or(i64::MAX, |(at, _)| *at);
                // A window that nothing was counted in before the step doesn't run on.
                let window = (field.clone(), (self.clock(at) - by - before) / 1_000);
                let written = self.peaks.get(name.as_bytes()).and_then(|peaks| peaks.get(&window));
                let runs_on = written.is_some_and(|(_, since)| (from..at).contains(since));
                if from < last || until > next || !runs_on {
                    continue;
                }
                let inside =
                    |(asked, decided, _): &&(i64, i64, i64)| *asked >= from && *decided < until;
                let held = &held[&(name, field.clone())];
                let passed: i64 = held.iter().filter(inside).map(|(_, _, tokens)| tokens).sum();
                let most = match -by < length {
                    true => limit,
                    // By the new time no window before has ended: its tokens come back to the count that
                    // has moved along.
                    false => limit + self.comes_back(name, from, at),
                };
                if passed > most {
                    let what = format!(
                        "{passed} of {most} passed for {name} in {field} from {} until {}",
                        Time(from),
                        Time(until),
                    );
                    found.push((at, what));
                }
            }
        }
        found.into_iter().for_each(|(at, what)| self.find("stepped", at, what));
    }

    /// How many tokens of a key, asked for before an instant, may come back after another one.
    fn comes_back(&self, name: &str, before: i64, since: i64) -> i64 {
        let mut tokens = 0;
        for request in self.requests.values().filter(|request| request.done.is_none()) {
            if request.asked >= before || self.changes_until(request) < since {
                continue;
            }
            let lines = request.names.iter().zip(&request.ask.lines);
            let of = lines.filter(|(of, _)| *of == name);
            tokens += of.map(|(_, line)| line.cost as i64).sum::<i64>();
            for Part { index, name: of, decision, .. } in request.passed(self.plan) {
                if of == name && !decision.is_local() {
                    tokens -= decision.granted() as i64 - request.returns[index] as i64;
                }
            }
        }
        tokens
    }

    /// S14, S34: what passed was taken from the count before, and comes back once at most, in its
    /// window: a node has taken at least what it let pass, less what was to be given back.
    fn conservation(&mut self, passed: &Passed) {
        let mut changes = BTreeMap::<_, i64>::new();
        for ((node, name, (field, start)), change) in &self.changes {
            let window = self.window(name, field.clone(), *start);
            *changes.entry((*node, name.clone(), window)).or_default() += change;
        }
        for (key, &(passed, returned, at)) in passed {
            let taken = changes.get(key).copied().unwrap_or(0);
            if passed - returned > taken {
                let (node, name, (field, start)) = key;
                self.find(
                    "conservation",
                    at,
                    format!(
                        "node {node} let {passed} pass for {name} in {field} from {start}, \
                         {returned} were to come back, and took {taken}"
                    ),
                );
            }
        }
        // Also where nothing passed: nothing comes back that was not taken.
        let negative: Vec<_> = changes
            .iter()
            .filter(|(_, change)| **change < 0)
            .map(|((node, name, (field, start)), change)| {
                format!("node {node} changed {name} in {field} from {start} by {change}")
            })
            .collect();
        negative.into_iter().for_each(|what| self.find("conservation", self.over, what));
    }

    /// Returns whether the network and the server do no harm to a request.
    fn is_calm(&self, request: &Request<'_>) -> bool {
        let node = &self.plan.nodes[request.node];
        let started = request.asked >= node.starts.as_micros() as i64 + STARTS_WITHIN;
        match self.plan.kind {
            Kind::Healthy | Kind::Idle | Kind::Poisoned => started,
            Kind::Cut => started && !self.was_cut(request),
            Kind::Stormy | Kind::Shard => request.asked >= self.settled,
        }
    }

    /// Returns whether all keys of a request are on masters that are well. Of slots that left the one that
    /// is not, the node has to have been told: nothing is asked while all calls are answered.
    fn is_elsewhere(&self, request: &Request<'_>) -> bool {
        let Servers::Cluster { masters, victim, gossip } = self.plan.servers else { return false };
        request.names.iter().all(|name| {
            let part = part_of(name.as_bytes(), masters * PARTS);
            let mut owner = part / PARTS;
            for (at, fault) in &self.plan.faults {
                let Fault::Reshard { parts, to, lasts } = fault else { continue };
                let until = at.as_micros() as i64 + ((lasts + gossip) * 1_000) as i64;
                let knows = |(at, node): &(i64, usize)| {
                    (until..request.asked).contains(at) && *node == request.node
                };
                if parts.contains(&part) && (*to == victim || self.told.iter().any(knows)) {
                    owner = *to;
                }
            }
            owner != victim
        })
    }

    /// Whether the node's first call to the shard that was lost was under way when this request was
    /// decided. A shard that nobody asks for stays lost until then.
    fn is_tried(&self, request: &Request<'_>) -> bool {
        let decided = request.decided.map_or(request.asked, |(at, _)| at);
        let is_first = |first: &Request<'_>| {
            first.node == request.node
                && (self.settled..=request.asked).contains(&first.asked)
                && first.decided.is_some_and(|(at, of)| at > decided && !of.is_local())
                && !self.is_elsewhere(first)
        };
        !self.is_elsewhere(request) && self.requests.values().any(is_first)
    }

    /// Until when a request may change counts.
    fn changes_until(&self, request: &Request<'_>) -> i64 {
        let last = request.ended.max(request.returned).unwrap_or(i64::MAX);
        let deadline = self.plan.nodes[request.node].deadline.as_micros() as i64;
        // An answer that is awaited, and then what is returned.
        last.saturating_add(2 * deadline)
    }

    /// Returns whether some of a request may stay counted in windows that end at an instant, or more than it
    /// has passed with.
    fn may_stay(&self, request: &Request<'_>, end: i64) -> bool {
        // A charge that is dropped is returned only if it is charged in order, which one line never is.
        let node = &self.plan.nodes[request.node];
        let in_order = request.ask.lines.len() > 1 && node.charges_in_order();
        let dropped = request.decided.is_none() && !in_order;
        let abandoned = request.gave_up && (dropped || request.returned.is_some());
        // A cost beyond the charge may be taken from another window.
        let more = |line: &Line| line.actual.is_some_and(|actual| actual > line.cost);
        let late = request.asked < end && self.changes_until(request) >= end;
        let failed = request.failed.is_some() || !self.is_calm(request);
        // Tokens were on their way back when a connection was closed.
        let until = self.changes_until(request);
        let lost = self.cuts.iter().any(|&(at, node)| {
            node.is_none_or(|node| node == request.node) && (request.asked..=until).contains(&at)
        });
        abandoned || late || failed || lost || request.ask.lines.iter().any(more)
    }

    /// S37: nothing is kept of what was refused, dropped in order, or returned. Not looked at: keys
    /// that were reset, and windows that were lost or have ended before all that was to come back could.
    fn kept(&mut self, passed: &Passed) {
        if !self.steps.is_empty() {
            return;
        }
        let mut found = Vec::new();
        for ((node, name, (field, start)), taken) in &self.changes {
            let window = self.window(name, field.clone(), *start);
            let key = (*node, name.clone(), window);
            let (passed, returned, _) = passed.get(&key).copied().unwrap_or_default();
            let kept = taken - (passed - returned);
            let lost = self.losses.iter().any(|at| self.clock(*at) >= start * 1_000);
            // A calendar's windows differ in length: when they end is not known here.
            let is_calendar = !field.starts_with(|c: char| c.is_ascii_digit());
            let is_broken = key.2.1 == 0 || is_calendar;
            let is_reset = || self.resets.iter().any(|(_, _, key)| key == name.as_bytes());
            if kept <= 0 || lost || is_broken || is_reset() {
                continue;
            }
            let length = self.quota(name, field).window().as_millis() as i64;
            let end = (start + length) * 1_000 - self.plan.epoch;
            let requests = self.requests.values().filter(|request| request.node == *node);
            let of = requests.filter(|request| self.may_stay(request, end));
            let lines = of.flat_map(|request| request.names.iter().zip(&request.ask.lines));
            // A true cost may be above the cost.
            let tokens = |line: &Line| line.cost.max(line.actual.unwrap_or(0)) as i64;
            let stays: i64 =
                lines.filter(|(of, _)| *of == name).map(|(_, line)| tokens(line)).sum();
            if kept > stays {
                found.push((
                    end,
                    format!(
                        "node {node} let {passed} pass for {name} in {field} from {start}, \
                         {returned} came back, and {taken} stay counted; {stays} may"
                    ),
                ));
            }
        }
        found.into_iter().for_each(|(at, what)| self.find("kept", at, what));
    }

    /// S6, S37: what is refused by Redis would not have fit at some time of its window; and all limits
    /// of a charge pass, or none.
    fn causes(&mut self) {
        let mut found = Vec::new();
        for (id, request) in &self.requests {
            let Some((at, decision)) = request.decided else { continue };
            let parts = request.parts(self.plan);
            let granted = parts.iter().map(|part| (part.decision.granted(), part.line.cost));
            if decision.is_allowed() {
                let all = parts.len() == request.ask.lines.len();
                if !all || granted.clone().any(|(granted, cost)| granted != cost) {
                    let granted: Vec<_> = granted.collect();
                    found.push((at, format!("#{id} passes with {granted:?}")));
                }
                continue;
            }
            if granted.clone().any(|(granted, _)| granted > 0) {
                found
                    .push((at, format!("#{id} is refused with {:?}", granted.collect::<Vec<_>>())));
            }
            let refused = |part: &&Part<'_>| !part.decision.is_allowed();
            if !parts.iter().any(|part| refused(&part)) {
                found.push((at, format!("#{id} is refused by none of its limits")));
            }
            for Part { line, name, decision, .. } in parts.iter().filter(refused) {
                let quotas = self.plan.limits[line.limit].quotas(&line.key).into_iter();
                let windows = quotas.zip(windows(self.plan, line, decision));
                let is_full = |(quota, (field, start, length)): (&Quota, (String, i64, i64))| {
                    let limit = quota.limit() as i64;
                    // True costs may have taken more than a limit (S15), and more than one window's.
                    let left = |((_, from), (used, _)): (&Window, &(i64, i64))| {
                        used - (start - from).max(0) / length * limit
                    };
                    // A count that moves along is of a window to come.
                    let last = if self.steps.is_empty() { start } else { i64::MAX };
                    let peaks = self.peaks.get(name.as_bytes()).into_iter();
                    let peaks = peaks.flat_map(|peaks| {
                        peaks.range((field.clone(), 0)..=(field.clone(), last)).rev()
                    });
                    line.cost as i64 > limit
                        || peaks.map(left).any(|used| used + line.cost as i64 > limit)
                };
                // Its quotas may also cover it in windows that don't agree (S13).
                let reserves = matches!(request.ask.what, What::Charge { reserves: true, .. });
                let full = windows.into_iter().any(is_full) || reserves;
                if !full && !decision.is_local() {
                    found.push((at, format!("#{id} is refused for {name}, which had room")));
                }
            }
        }
        found.into_iter().for_each(|(at, what)| self.find("together", at, what));
    }

    /// S32: a charge is applied once at most. Seen best where nobody else asks for the key.
    fn once(&mut self) {
        let mut found = Vec::new();
        let mut unreturned = Vec::new();
        let mut taken = BTreeMap::<&str, i64>::new();
        for ((_, name, (field, _)), change) in &self.changes {
            if *field == self.first_quota(self.keys[name.as_bytes()]).counter() {
                *taken.entry(name).or_default() += change;
            }
        }
        for (id, request) in &self.requests {
            for (name, line) in request.names.iter().zip(&request.ask.lines) {
                let taken = taken.get(&name[..]).copied().unwrap_or(0);
                let cost = line.cost.max(line.actual.unwrap_or(0));
                if line.key.starts_with("once") && taken > cost as i64 {
                    let at = request.ended.unwrap_or(request.asked);
                    found.push((at, format!("#{id} cost {cost}, and {taken} were taken")));
                }
            }
            let (line, name) = (&request.ask.lines[0], &request.names[0]);
            if request.is_several() || !line.key.starts_with("once") {
                continue;
            }
            let taken = taken.get(&name[..]).copied().unwrap_or(0);
            // S14: also while the store decides. With some time to come back in.
            let node = &self.plan.nodes[request.node];
            let refunds = matches!(node.door, Door::Layer { refund_dropped: true, .. });
            let Some(ended) = request.ended.filter(|_| refunds && request.gave_up) else {
                continue;
            };
            let quota = self.first_quota(line);
            let (first, length) = (quota.counter(), quota.window().as_millis() as i64);
            // A clock that steps forward meanwhile may end the window.
            let while_returned = |at: i64| at > ended && at <= ended + 1_000_000;
            let ahead = self.steps.iter().filter(|(at, by)| *by > 0 && while_returned(*at));
            let ahead: i64 = ahead.map(|(_, by)| by).sum();
            let open = self.changes.iter().any(|((_, other, (field, start)), _)| {
                other == name
                    && *field == first
                    && start + length > (self.clock(ended) + ahead) / 1_000 + 1_000
            });
            if taken > 0 && open && self.plan.kind == Kind::Healthy {
                unreturned.push((ended, format!("#{id} was dropped, and {taken} stay counted")));
            }
        }
        found.into_iter().for_each(|(at, what)| self.find("once", at, what));
        unreturned.into_iter().for_each(|(at, what)| self.find("dropped", at, what));
    }

    /// S12: a reset that is said to be done was done.
    fn resets(&mut self) {
        let mut found = Vec::new();
        for (id, request) in &self.requests {
            let (What::Reset, Some(done)) = (request.ask.what, request.done) else { continue };
            let name = &request.names[0];
            let reset = self.resets.iter().any(|(at, node, key)| {
                (request.asked..=done).contains(at)
                    && *node == request.node
                    && *key == name.as_bytes()
            });
            if !reset {
                found.push((done, format!("#{id} was told that {name} is reset")));
            }
        }
        found.into_iter().for_each(|(at, what)| self.find("reset", at, what));
    }

    /// S33: without Redis at most one further limit passes on each node, by its clock.
    fn local(&mut self) {
        let mut passed = BTreeMap::<(usize, String, Window), (i64, i64)>::new();
        let mut resets = BTreeMap::<(usize, String), i64>::new();
        for request in self.requests.values() {
            if request.ask.what == What::Reset {
                let name = request.names[0].clone();
                *resets.entry((request.node, name)).or_default() += 1;
            }
            for Part { index, line, name, decision } in request.passed(self.plan) {
                let Some((at, _)) = request.decided.filter(|_| decision.is_local()) else {
                    continue;
                };
                for (field, start, _) in windows(self.plan, line, &decision) {
                    let window = (request.node, name.to_owned(), (field, start));
                    let entry = passed.entry(window).or_default();
                    entry.0 += decision.granted() as i64 - request.returns[index] as i64;
                    entry.1 = at;
                }
            }
        }
        let mut found = Vec::new();
        for ((node, key, (field, start)), (passed, at)) in passed {
            let quota = self.quota(&key, &field);
            let limit = (quota.capacity() + quota.max_reserved()) as i64;
            let most = limit * (1 + resets.get(&(node, key.clone())).copied().unwrap_or(0));
            if passed > most {
                let what = format!(
                    "{passed} of {most} passed in memory at node {node} for {key} in {field} from {start}"
                );
                found.push((at, what));
            }
        }
        found.into_iter().for_each(|(at, what)| self.find("local", at, what));
    }

    /// Nothing is left behind, and nothing has panicked.
    fn end(&mut self) {
        let run = self.run;
        for (at, event) in &run.history {
            match event {
                Event::Left { sockets, tasks } if sockets + tasks > 0 => {
                    self.find("left behind", *at, format!("{sockets} sockets and {tasks} tasks"));
                }
                Event::Panicked(message) => self.find("panic", *at, message.clone()),
                _ => {}
            }
        }
        // The run has not seen the end of these.
        let unseen = self.requests.values().filter(|request| request.ended.is_none()).count();
        if unseen > 0 {
            self.find("deadline", self.over, format!("{unseen} requests have no end"));
        }
    }
}

/// The start of a window in milliseconds and what is used in it, as a field's value says.
fn count(field: &str, value: &[u8], shift: u64) -> Option<(i64, i64)> {
    let value = str::from_utf8(value).ok()?;
    if let Some((used, rest)) = value.split_once('@') {
        let end = rest.char_indices().skip(1).find(|(_, c)| !c.is_ascii_digit());
        let start = &rest[..end.map_or(rest.len(), |(end, _)| end)];
        return Some((start.parse().ok()?, used.parse().ok()?));
    }
    let digits = field.find(|c: char| !c.is_ascii_digit())?;
    let length: i64 = field[..digits].parse().ok()?;
    let grid = match &field[digits..] {
        "s" => (shift % length as u64) as i64,
        "f" => return None,
        offset => offset.parse().ok()?,
    };
    let value: i64 = value.parse().ok()?;
    let at = value.div_euclid(1_000);
    let start = at - (at - grid).rem_euclid(length);
    Some((start, value - start * 1_000))
}

/// The shift of a staggered grid: FNV-1a, finished by MurmurHash3's fmix64 (S2).
fn stagger(scope: &str, key: &Key) -> u64 {
    let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    let mut hash = scope.as_bytes().iter().chain(key.as_bytes()).fold(0xcbf2_9ce4_8422_2325, mix);
    for factor in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        hash = (hash ^ (hash >> 33)).wrapping_mul(factor);
    }
    hash ^ (hash >> 33)
}
