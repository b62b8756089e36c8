//! A program: random steps, each of which is made by the layers and by the model.

use std::collections::BTreeMap;
use std::fs;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::Body;
use fastrand::Rng;
use futures_util::stream;
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::yield_now;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_fixed_window::{
    Clock, KeptReceipt, Limiter, Limits, Line, MemoryStore, Plan, Quota, Quotas, Receipt,
};

use crate::instant;
use crate::model::{Charged, Counts, Limit, Line as ModelLine, charged};
use crate::reference::Ask as Asks;
use crate::requests::{Flow, Model, PAUSE};
use crate::setup::{Setup, built, key, quotas, with_limits};
use crate::world::{Moment, Service, SteppingClock, What, World, request, response};

const STEPS: u64 = 50;
const START_MS: u64 = 1_700_000_040_000;

pub(crate) struct Program {
    rng: Rng,
    setup: Arc<Setup>,
    model: Model,
    world: World,
    /// `None` while the store is closed.
    open: Option<Open>,
    folder: Option<TempDir>,
    /// The file and the counts when they were saved.
    saved: Option<(Vec<u8>, Counts)>,
    receipts: Vec<(Receipt, usize, Vec<Charged>)>,
    /// The latest time that the clock has shown.
    latest: u64,
    /// Since when requests could have left a queue.
    could_go: BTreeMap<u64, u64>,
    prints: bool,
}

struct Open {
    memory: MemoryStore,
    service: Service,
    limits: Vec<Limits>,
    /// The same limits, which look at the counts where they are.
    near: Vec<Limits>,
    /// The same limits in another store.
    elsewhere: Vec<Limits>,
}

/// A receipt belongs to its store, so the next process reads it from text (S14).
fn deployed(receipt: Receipt) -> Receipt {
    let text = serde_json::to_string(&receipt.keep().expect("it has a name")).expect("text");
    serde_json::from_str::<KeptReceipt>(&text).expect("a receipt").into()
}

impl Program {
    pub(crate) fn new(seed: u64, prints: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let setup = Arc::new(Setup::new(&mut rng));
        if prints {
            println!("{setup:#?}");
        }
        let clock = SteppingClock::at_ms(START_MS + rng.u64(..60_000));
        let mut this = Self {
            rng,
            model: Model::new(Arc::clone(&setup)),
            world: World { clock, log: Arc::default() },
            open: None,
            folder: setup.saved.then(|| tempfile::tempdir().expect("a folder")),
            saved: None,
            receipts: Vec::new(),
            latest: 0,
            could_go: BTreeMap::new(),
            prints,
            setup,
        };
        this.reopen();
        if this.setup.is_full {
            this.fill();
        }
        this
    }

    pub(crate) async fn run(mut self) -> u64 {
        for number in 0..STEPS {
            self.step(number).await;
            self.check().await;
        }
        self.close().await;
        STEPS
    }

    async fn step(&mut self, number: u64) {
        match self.rng.u64(..35) {
            0..14 => self.send(number).await,
            14..19 => self.wait().await,
            19..21 => self.step_clock(),
            21..23 => self.go_on(),
            23..25 => self.drop_one().await,
            25..29 if !self.setup.in_order => self.change(),
            25..30 => self.reset().await,
            30..34 => self.receipt().await,
            _ => self.close_and_open().await,
        }
    }

    fn print(&self, step: impl FnOnce() -> String) {
        if self.prints {
            println!("{} {}", self.world.clock.now_ms(), step());
        }
    }

    fn now(&self) -> Moment {
        self.world.clock.now()
    }

    fn opened(&self) -> &Open {
        self.open.as_ref().expect("it is open")
    }

    /// Opens the store, with the counts of its file if it has one.
    fn reopen(&mut self) {
        let keys = if self.setup.is_full { 1 } else { 1_000 };
        let memory = MemoryStore::with_max_keys(keys).clock(self.world.clock.clone());
        let memory = match &self.folder {
            Some(folder) => {
                memory.saved_to(folder.path().join("counts"), Duration::MAX).expect("it opens")
            }
            None => memory,
        };
        let (service, limits) = self.world.build(&self.setup, &memory);
        let near = match self.setup.far {
            0 => limits.clone(),
            _ => self.setup.layers.iter().map(|of| of.limits(memory.clone())).collect(),
        };
        let other = MemoryStore::with_max_keys(1_000).clock(self.world.clock.clone());
        let elsewhere = self.setup.layers.iter().map(|of| of.limits(other.clone())).collect();
        self.open = Some(Open { memory, service, limits, near, elsewhere });
    }

    /// Other keys take all entries. By a quota that is over when the program begins, each key is
    /// asked for what those have charged that share its entry: the first of them its number.
    fn fill(&mut self) {
        let Self { world: World { clock, .. }, model, setup, .. } = self;
        let memory = &self.open.as_ref().expect("it is open").memory;
        let start = clock.now_ms();
        clock.step_to(start - 1_000);
        let flood = Quota::per_week(1).name("flood").store(memory.clone());
        for other in 0..1_000_u64 {
            let _ = flood.check(other).into_now().expect("memory").expect("memory");
        }
        let limit = &setup.layers[0].limits[0];
        let asked = Quota::new(1_000, Duration::from_millis(1)).name(limit.name);
        let asked = asked.store(memory.clone());
        for (number, of) in (1..).zip(limit.keys()) {
            let found = asked.peek(key(of)).into_now().expect("memory").expect("memory").used();
            if found == 0 {
                let charged = asked.charge(key(of), number).into_now().expect("memory");
                charged.expect("memory").expect("it passes");
            }
            model.counts.shares.insert(of, if found == 0 { number } else { found });
        }
        let others = memory.live_entries() as u64;
        assert!(memory.overflowed() > 1_000 - others, "no key has an entry of its own");
        clock.step_to(start);
    }

    /// Ends the process, with all requests.
    async fn close(&mut self) {
        for flow in self.model.flows.values() {
            flow.task.abort();
        }
        let numbers: Vec<_> = self.model.flows.keys().copied().collect();
        // All tasks are dropped at once, and bodies end after that.
        let (bodies, tasks): (Vec<_>, Vec<_>) =
            numbers.into_iter().partition(|number| self.model.has_body(*number));
        for number in tasks {
            let flow = self.model.flows.get_mut(&number).expect("it is under way");
            let _ = (&mut flow.task).await;
            let now = self.now();
            self.model.dropped(number, now);
        }
        for number in bodies {
            let now = self.now();
            self.model.end_body(number, now, false);
        }
        self.check().await;
        self.open = None;
    }

    async fn send(&mut self, number: u64) {
        let ask = Arc::new(self.setup.ask(&mut self.rng, number));
        self.print(|| format!("{ask:?}"));
        let (upload, ends) = oneshot::channel::<()>();
        let body = match ask.uploads {
            true => Body::from_stream(stream::once(async move {
                let _ = ends.await;
                Ok::<_, std::convert::Infallible>("the end")
            })),
            false => Body::empty(),
        };
        let request = request(&ask, body);
        let (service, world) = (self.opened().service.clone(), self.world.clone());
        let task = tokio::spawn(async move {
            let response = service.oneshot(request).await.unwrap_or_else(|_| response(500));
            world.clock.panics.store(false, Ordering::SeqCst);
            world.note(number, What::Done(response));
        });
        let upload = ask.uploads.then_some(upload);
        self.model.flows.insert(number, Flow::new(ask, task, upload));
        let now = self.now();
        self.model.arrive(number, 0, now);
        if self.setup.far == 0 {
            self.rest().await;
            self.model.check_newcomer(number, now);
        }
        // Some clients are gone while the store decides.
        if self.setup.far > 0 && self.rng.u64(..4) == 0 {
            let gone = self.rng.u64(1..8 * self.setup.far);
            sleep(Duration::from_millis(gone)).await;
            self.read_log();
            if self.model.flows.get(&number).is_some_and(|flow| !flow.task.is_finished()) {
                self.drop_request(number).await;
            }
        }
    }

    fn read_log(&mut self) {
        let events = std::mem::take(&mut *self.world.log.lock().expect("no panic"));
        for event in events {
            if self.prints {
                println!("    {event:?}");
            }
            self.model.note(event);
        }
    }

    /// Lets everything happen that can happen by now.
    async fn rest(&mut self) {
        loop {
            match self.setup.far {
                0 => {
                    for _ in 0..30 {
                        yield_now().await;
                    }
                }
                far => sleep(Duration::from_millis(20 * far)).await,
            }
            let has_rested = self.world.log.lock().expect("no panic").is_empty();
            self.read_log();
            // What takes time ends before others begin: so the log has the order of the store.
            if self.setup.far == 0 || has_rested && !self.model.goes_on() {
                break;
            }
        }
        self.latest = self.latest.max(self.world.clock.now_ms());
        let now = self.now();
        self.model.check_progress(now.elapsed);
        let could_go = self.model.could_go(now);
        let mut since = std::mem::take(&mut self.could_go);
        for number in could_go {
            let since = since.remove(&number).unwrap_or(now.elapsed);
            assert!(now.elapsed <= since + PAUSE, "{number} could go since {since}");
            self.could_go.insert(number, since);
        }
    }

    /// Asserts that all is as the model says.
    async fn check(&mut self) {
        self.rest().await;
        let now = self.now();
        let Open { limits, near, .. } = self.open.as_ref().expect("it is open");
        for (limit, live) in &mut self.model.limits.0 {
            let of = &self.setup.layers[limit.0].limits[limit.1];
            live.end(now.at);
            let limiter = limits[limit.0].limiter(of.name);
            if of.plans.len() == 1 {
                assert_eq!(
                    limiter.quotas(),
                    Some(match live.is_lifted() {
                        true => Plan::UNLIMITED,
                        false => built(live.quotas()).into(),
                    }),
                    "{} has these",
                    of.name
                );
            }
            assert_eq!(limiter.key_quotas().len(), live.keys.len(), "{} has these", of.name);
            let plans = of.plans.iter().flatten();
            let mut all: Vec<_> = plans.chain([&live.quotas().to_vec()]).cloned().collect();
            all.extend(live.keys.values().map(|(terms, _)| terms.clone()));
            all.dedup();
            for (number, terms) in of.keys().flat_map(|key| all.iter().map(move |of| (key, of))) {
                let quotas = built(terms);
                let line = Line::new(of.name, key(number), 0).with_quotas(&quotas);
                let standing = near[limit.0].peek([line]).await.expect("memory answers");
                let usage = standing.usage().iter();
                let found: Vec<_> =
                    usage.map(|of| (i128::from(of.used()), of.reset_at())).collect();
                let expected = self.model.counts.standing(*limit, number, terms, now.at);
                assert_eq!(found, expected, "{number} by {}, at {}: {terms:?}", of.name, now.at);
            }
        }
    }

    fn some_time(&mut self) -> u64 {
        let now = self.world.clock.now_ms();
        let window = [1_000, 2_000, 10_000, 60_000][self.rng.usize(..4)];
        match self.rng.u64(..4) {
            0 => self.rng.u64(1..100),
            1 => self.rng.u64(1..2 * window),
            // To the end of a window, or a little before or after it.
            _ => (window - now % window + self.rng.u64(..3)).saturating_sub(1).max(1),
        }
    }

    async fn wait(&mut self) {
        let mut left = self.some_time();
        self.print(|| format!("waits for {left} ms"));
        while left > 0 {
            let in_parts = self.model.waits() || self.model.goes_on();
            let part = if in_parts { left.min(250) } else { left };
            sleep(Duration::from_millis(part)).await;
            self.rest().await;
            left -= part;
        }
    }

    fn step_clock(&mut self) {
        let now = self.world.clock.now_ms();
        let by = self.some_time();
        let to = if self.rng.bool() { now + by } else { now - by };
        // What waits in a queue asks at some time, and writes what a step back has moved.
        let may_step_back =
            || !self.model.waits() && self.model.counts.may_step_back(to, self.latest.max(now));
        if to < now && (self.setup.in_order || self.setup.is_full || !may_step_back()) {
            return;
        }
        self.print(|| format!("the clock steps to {to}"));
        self.latest = self.latest.max(now);
        self.world.clock.step_to(to);
        self.disturb();
    }

    fn disturb(&mut self) {
        self.model.disturbed = self.world.clock.elapsed();
    }

    /// A service or an upload ends.
    fn go_on(&mut self) {
        let Some(number) = self.some_request() else { return };
        let (ends, now) = (self.rng.bool(), self.now());
        self.print(|| format!("{number} goes on"));
        if self.model.has_body(number) {
            self.model.end_body(number, now, ends);
            return;
        }
        let flow = self.model.flows.get_mut(&number).expect("it is under way");
        if flow.upload.take().is_none()
            && let Some(held) = &flow.ask.held
        {
            held.notify_one();
        }
    }

    fn some_request(&mut self) -> Option<u64> {
        let numbers: Vec<_> = self.model.flows.keys().copied().collect();
        (!numbers.is_empty()).then(|| numbers[self.rng.usize(..numbers.len())])
    }

    async fn drop_one(&mut self) {
        let Some(number) = self.some_request() else { return };
        if !self.model.has_body(number) {
            self.drop_request(number).await;
        }
    }

    async fn drop_request(&mut self, number: u64) {
        self.print(|| format!("{number} is dropped"));
        let flow = self.model.flows.get_mut(&number).expect("it is under way");
        flow.task.abort();
        assert!((&mut flow.task).await.expect_err("it was dropped").is_cancelled());
        let now = self.now();
        self.model.dropped(number, now);
    }

    fn some_limit(&mut self) -> (Limit, Limiter) {
        let limits: Vec<_> = self.model.limits.0.keys().copied().collect();
        let limit = limits[self.rng.usize(..limits.len())];
        let name = self.setup.layers[limit.0].limits[limit.1].name;
        (limit, self.opened().limits[limit.0].limiter(name).clone())
    }

    fn change(&mut self) {
        let (limit, limiter) = self.some_limit();
        let of = &self.setup.layers[limit.0].limits[limit.1];
        let until = self.world.clock.now_ms() + self.rng.u64(1..30_000);
        let number = of.some_key(&mut self.rng);
        let waits = self.model.waits();
        let (lifts, now) = (self.rng.u64(..3) == 0, self.world.clock.now_ms());
        let live = self.model.limits.0.get_mut(&limit).expect("it is there");
        live.end(now);
        let new = match self.rng.u64(..4) {
            0 => quotas(&mut self.rng, self.setup.windows()),
            _ => with_limits(&mut self.rng, &live.quotas),
        };
        let (quotas, shadow, kind) = (built(&new), self.rng.bool(), self.rng.u64(..8));
        if self.prints {
            println!("changes {limit:?}: {kind} {quotas} {shadow} {number} {until}");
        }
        match kind {
            0..=3 if of.plans.len() > 1 => return,
            // When a request that waits notices is its own to say: it has to last.
            0..=3 if waits && live.is_lifted() => return,
            0 if lifts => {
                limiter.set_quotas(Plan::UNLIMITED);
                (live.lifted, live.quotas_for_now) = (true, None);
                self.model.has_switched_lines = true;
            }
            0..=1 => {
                limiter.set_quotas(quotas);
                (live.quotas, live.quotas_for_now, live.lifted) = (new, None, false);
            }
            2..=3 => {
                limiter.set_quotas_until(quotas, instant(until));
                live.quotas_for_now = Some((new, until));
            }
            4..=5 => {
                limiter.set_key_quotas_until(key(number), quotas, instant(until));
                live.keys.insert(number, (new, until));
            }
            6 => {
                limiter.clear_key_quotas(key(number));
                live.keys.remove(&number);
            }
            _ if waits && live.is_shadow() => return,
            _ => {
                if waits || self.rng.bool() {
                    limiter.set_shadow(shadow || waits);
                    (live.shadow, live.shadow_for_now) = (shadow || waits, None);
                } else {
                    limiter.set_shadow_until(shadow, instant(until));
                    live.shadow_for_now = Some((shadow, until));
                }
                self.model.has_switched_lines = true;
            }
        }
        self.disturb();
    }

    async fn reset(&mut self) {
        let (limit, limiter) = self.some_limit();
        let number = self.setup.layers[limit.0].limits[limit.1].some_key(&mut self.rng);
        self.print(|| format!("resets {number} of {}", limiter.name()));
        let reset = limiter.reset(key(number)).await;
        let at = self.world.clock.now_ms();
        assert_eq!(reset.is_ok(), self.model.counts.reset(limit, number, at), "{reset:?}");
        self.disturb();
    }

    /// Charges some limits of a layer without HTTP, or corrects such a charge.
    async fn receipt(&mut self) {
        if !self.receipts.is_empty() && self.rng.bool() {
            return self.settle().await;
        }
        let layer = self.rng.usize(..self.setup.layers.len());
        let mut lines = Vec::new();
        let now = self.now();
        self.model.limits.end_changes(layer, now.at);
        for (i, of) in self.setup.layers[layer].limits.iter().enumerate() {
            let (key, cost) = (of.some_key(&mut self.rng), self.rng.u64(..4));
            let live = &self.model.limits.0[&(layer, i)];
            let own = live.keys.get(&key);
            // By name, or those in force.
            let plan = of.plans.last().expect("a plan").as_ref().filter(|_| of.plans.len() > 1);
            let terms = match (plan, own) {
                (Some(plan), _) => plan,
                (None, Some((own, _))) => own,
                (None, None) if of.plans.len() == 1 && !live.is_lifted() => live.quotas(),
                (None, None) => continue,
            };
            let (limit, name, terms, shadow) = ((layer, i), of.name, terms.to_vec(), false);
            let own = plan.is_some() || own.is_some();
            lines.push((ModelLine { limit, name, key, terms, own, cost, shadow }, plan.is_some()));
        }
        if lines.is_empty() {
            return;
        }
        self.print(|| format!("charges {lines:?}"));
        let plans: Vec<Quotas> = lines.iter().map(|(line, _)| built(&line.terms)).collect();
        let each = lines.iter().zip(&plans).map(|((line, names), plan)| {
            let of = Line::new(line.name, key(line.key), line.cost);
            if *names { of.with_quotas(plan) } else { of }
        });
        let each: Vec<_> = each.collect();
        let answer = self.opened().limits[layer].charge(&each).await.expect("it answers");
        let lines: Vec<_> = lines.into_iter().map(|(line, _)| line).collect();
        let together = self.model.counts.charge(&lines, now.at + self.setup.far, Asks::Charge);
        assert_eq!(answer.is_ok(), together.allowed, "without HTTP: {lines:?}");
        // The receipts of another store are good for nothing here (S14).
        let Open { limits, elsewhere, .. } = self.opened();
        if let Ok(Ok(receipt)) = elsewhere[layer].charge(&each).await {
            limits[layer].refund(receipt).await.expect_err("it is another store's");
        }
        if let Ok(receipt) = answer {
            self.receipts.push((receipt, layer, charged(lines, together, 0)));
        }
    }

    async fn settle(&mut self) {
        let i = self.rng.usize(..self.receipts.len());
        let (receipt, layer, mut lines) = self.receipts.swap_remove(i);
        let limits = self.opened().limits[layer].clone();
        let now = self.now();
        let refunds = self.rng.bool();
        let mut costs = Vec::new();
        for line in &mut lines {
            if refunds || self.rng.bool() {
                let cost = if refunds { 0 } else { self.rng.u64(..20) };
                costs.push((line.line.name, cost));
                self.model.correct(line, cost, now);
            }
        }
        self.print(|| format!("settles {costs:?}"));
        let corrected = match refunds {
            true => limits.refund(receipt).await,
            false => limits.settle(receipt, costs).await,
        };
        corrected.expect("it is possible");
        self.disturb();
    }

    /// Saves the counts, or ends the process, in order or not.
    async fn close_and_open(&mut self) {
        let Some(path) = self.folder.as_ref().map(|folder| folder.path().join("counts")) else {
            return;
        };
        if self.rng.bool() {
            self.print(|| "saves".to_owned());
            self.opened().memory.save().expect("it saves");
            self.saved = Some((fs::read(path).expect("a file"), self.model.counts.clone()));
            return;
        }
        let crashes = self.rng.bool();
        self.print(|| format!("ends; crashes: {crashes}"));
        self.close().await;
        let receipts = mem::take(&mut self.receipts).into_iter();
        self.receipts = receipts.map(|(of, layer, lines)| (deployed(of), layer, lines)).collect();
        let now = self.now();
        let may_crash = |counts: &Counts| crashes && counts.may_step_back(now.at, self.latest);
        if let Some((bytes, counts)) = self.saved.clone().filter(|(_, of)| may_crash(of)) {
            fs::write(path, bytes).expect("written");
            self.model.counts = counts;
        }
        self.model.limits = crate::model::Limits::new(&self.setup);
        self.model.has_switched_lines = false;
        self.could_go.clear();
        self.reopen();
    }
}
