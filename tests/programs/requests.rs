//! A request's way through the layers, as the log tells it and as the rules have it.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use axum::body::Body;
use http::Response;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tower_fixed_window::CostMeter;

use crate::model::{
    Charged, Counts, Limits, Line, Standing, charged, may_wait, refusal, seconds, tightest,
};
use crate::reference::Ask as Asks;
use crate::setup::{Ask, Ends, Setup};
use crate::world::{Event, Moment, What};

/// How late a timer may be, in milliseconds.
pub(crate) const TICK: u64 = 1;
/// What is in a queue and is not polled is passed after this time.
const PATIENCE: u64 = 100;
/// The time after which the first one in a line has asked again (S13). It may have been refused under
/// other quotas than those in force, so this is of the longest window.
pub(crate) const PAUSE: u64 = 60_000 / 16 + 2 * PATIENCE;

/// A request under way.
pub(crate) struct Flow {
    pub(crate) ask: Arc<Ask>,
    pub(crate) task: JoinHandle<()>,
    /// The upload goes on until this is dropped.
    pub(crate) upload: Option<oneshot::Sender<()>>,
    pub(crate) stage: Stage,
    /// The layers that it has passed, from the outside in.
    passed: Vec<Passed>,
    meter: Option<CostMeter>,
}

struct Passed {
    layer: usize,
    /// The lines that were charged together, and then those in shadow mode beside them.
    lines: Vec<Charged>,
    together: usize,
    /// The costs are known when the body ends.
    metered: bool,
    counts: bool,
}

pub(crate) enum Stage {
    At(Place),
    Inner,
    Called,
    Answers(Expected),
    /// `None`: by what a line knew last.
    Refused {
        expected: Option<Refusal>,
        elapsed: u64,
    },
    /// Its body may go on.
    Done,
}

/// A request that is being decided by a layer, or waits there.
pub(crate) struct Place {
    layer: usize,
    lines: Vec<Line>,
    arrived: Moment,
    waits: bool,
    /// No other waited when it came.
    was_first: bool,
    /// Requests are served in this order.
    order: u64,
}

#[derive(PartialEq, Debug)]
pub(crate) struct Expected {
    status: u16,
    fields: BTreeMap<String, String>,
}

impl Expected {
    fn new(status: u16, standing: Option<Standing>) -> Self {
        let fields = standing.iter().flat_map(|of| {
            let numbers = [
                ("limit", of.limit),
                ("remaining", of.remaining),
                ("used", of.used),
                ("reset", seconds(of.reset)),
            ];
            let numbers = numbers.map(|(name, value)| (name, value.to_string()));
            numbers.into_iter().chain([("resource", of.name.to_owned())])
        });
        let fields = fields.map(|(name, value)| (format!("x-ratelimit-{name}"), value));
        Self { status, fields: fields.collect() }
    }

    fn of(response: &Response<Body>) -> Self {
        let fields = response
            .headers()
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_str().expect("ASCII").to_owned()));
        let is_ours = |(name, _): &(String, String)| {
            name.starts_with("x-ratelimit-") || ["retry-after", "cache-control"].contains(&&**name)
        };
        Self { status: response.status().as_u16(), fields: fields.filter(is_ours).collect() }
    }

    /// Returns whether this is a refusal by what a line knew last.
    fn is_refusal_in_line(&self) -> bool {
        let is = |name: &str, value: &str| self.fields.get(name).is_some_and(|of| of == value);
        self.status == 429
            && is("x-ratelimit-remaining", "0")
            && is("cache-control", "no-store")
            && self.fields.get("retry-after").is_none_or(|wait| wait != "0")
    }
}

/// A refusal, and the wait when it was decided.
pub(crate) struct Refusal {
    status: u16,
    standing: Option<Standing>,
    wait: Option<i128>,
}

impl Refusal {
    /// The response that is handed on this much later (S18).
    fn after(self, late: u64) -> Expected {
        let mut expected = Expected::new(self.status, self.standing);
        let wait = self.wait.map(|wait| seconds(wait - i128::from(late)).max(1).to_string());
        expected.fields.extend(wait.map(|wait| ("retry-after".to_owned(), wait)));
        expected.fields.insert("cache-control".to_owned(), "no-store".to_owned());
        expected
    }
}

/// The model of requests: what is counted, and how far each one has got.
pub(crate) struct Model {
    pub(crate) setup: Arc<Setup>,
    pub(crate) counts: Counts,
    pub(crate) limits: Limits,
    pub(crate) flows: BTreeMap<u64, Flow>,
    /// The last time that tokens came back, a limit changed or the clock stepped.
    pub(crate) disturbed: u64,
    arrivals: u64,
    /// The limits in shadow mode have changed, so that requests have changed their lines.
    pub(crate) has_switched_lines: bool,
}

impl Flow {
    pub(crate) fn new(
        ask: Arc<Ask>,
        task: JoinHandle<()>,
        upload: Option<oneshot::Sender<()>>,
    ) -> Self {
        Self { ask, task, upload, stage: Stage::Inner, passed: Vec::new(), meter: None }
    }
}

impl Model {
    pub(crate) fn new(setup: Arc<Setup>) -> Self {
        Self {
            counts: Counts::default(),
            limits: Limits::new(&setup),
            flows: BTreeMap::new(),
            disturbed: 0,
            arrivals: 0,
            has_switched_lines: false,
            setup,
        }
    }

    fn flow(&mut self, number: u64) -> &mut Flow {
        self.flows.get_mut(&number).expect("it is under way")
    }

    fn refuse(&mut self, number: u64, expected: Option<Refusal>, now: Moment) {
        self.flow(number).stage = Stage::Refused { expected, elapsed: now.elapsed };
    }

    /// Goes on to the first layer from this one on that has a line for the request.
    pub(crate) fn arrive(&mut self, number: u64, layer: usize, arrived: Moment) {
        let setup = Arc::clone(&self.setup);
        let ask = Arc::clone(&self.flow(number).ask);
        for (layer, of) in setup.layers.iter().enumerate().skip(layer) {
            let Some(lines) = self.limits.lines(layer, of, &ask, arrived.at) else {
                let refusal = Refusal { status: 400, standing: None, wait: None };
                return self.refuse(number, Some(refusal), arrived);
            };
            if !lines.is_empty() {
                let waits = of.queue.is_some() && may_wait(&lines);
                self.arrivals += 1;
                let order = self.arrivals;
                let mut place = Place { layer, lines, arrived, waits, was_first: false, order };
                let (main, _) = split(&place.lines);
                place.was_first = self.before(&place, &main).is_empty();
                if waits && place.was_first && !main[0].shadow {
                    // If it is refused, it waits.
                    self.counts.could_pass(&main, arrived.at + setup.far);
                }
                self.flow(number).stage = Stage::At(place);
                return;
            }
        }
        self.flow(number).stage = Stage::Inner;
    }

    pub(crate) fn note(&mut self, Event { number, what, now }: Event) {
        let flow = self.flow(number);
        match what {
            What::Decided { layer, name, allowed } => {
                self.decided(number, layer, &name, allowed, now);
            }
            What::Called => {
                let before = mem::replace(&mut flow.stage, Stage::Called);
                assert!(matches!(before, Stage::Inner), "{number} is called");
            }
            What::Panics => self.dropped(number, now),
            What::Answers(meter) => self.answers(number, meter, now),
            What::Done(response) => self.done(number, &response, now),
        }
    }

    /// A layer has decided, and tells it now, by the limit of this name.
    fn decided(&mut self, number: u64, layer: usize, name: &str, allowed: bool, now: Moment) {
        let far = self.setup.far;
        let Stage::At(mut place) = mem::replace(&mut self.flow(number).stage, Stage::Inner) else {
            panic!("{number} is decided by layer {layer}")
        };
        assert_eq!(layer, place.layer, "{number} is decided by another layer");
        if place.waits {
            let could_refuse = |line: &Line| line.name == name && !line.shadow;
            assert!(place.lines.iter().any(could_refuse), "{number} has waited for {name}");
            self.limits.end_changes(layer, now.at);
            place.lines = self.limits.renewed(&place.lines);
            // Of several that are in shadow mode by now, the layer has noticed one last.
            if place.lines.iter().all(|line| line.shadow) {
                place.lines.sort_by_key(|line| line.name != name);
            }
        } else {
            let decided = place.arrived.elapsed + 2 * far;
            assert_eq!(now.elapsed, decided, "{number} waits without a queue");
        }
        let (main, asides) = split(&place.lines);
        let (is_shadow, at) = (main[0].shadow, now.at - far);
        let before = self.counts.clone();
        let together = self.counts.charge(&main, at, Asks::Charge);
        if place.waits && !is_shadow && !allowed {
            // One behind others has not been charged, or would have written what has moved (S4).
            if together.allowed || !self.before(&place, &main).is_empty() {
                self.counts = before;
            }
            let expected = self.check_refusal(number, &place, &main, now);
            return self.refuse(number, expected, now);
        }
        assert_eq!(allowed, together.allowed, "{number} by layer {layer} at {at}: {main:?}");
        if place.waits && !is_shadow {
            let is_first = self.before(&place, &main).is_empty();
            assert!(is_first || self.has_switched_lines, "{number} has overtaken others");
        }
        if !allowed && !is_shadow {
            let (standing, retry_at) = refusal(&main, &together);
            let wait = retry_at.map(|retry_at| retry_at - i128::from(at));
            let refusal = Refusal { status: 429, standing: Some(standing), wait };
            return self.refuse(number, Some(refusal), now);
        }
        let mut lines = charged(main, together, 0);
        let together = lines.len();
        for line in asides {
            let line = vec![line];
            let decided = self.counts.charge(&line, now.at + far, Asks::Charge);
            lines.extend(charged(line, decided, now.elapsed + 2 * far));
        }
        self.flow(number).passed.push(Passed {
            layer,
            lines,
            together,
            metered: false,
            counts: true,
        });
        self.arrive(number, layer + 1, now);
    }

    /// The lines of requests that wait by the same keys and have come before, in their order. Those
    /// that change their lines join the others again, behind all that are there.
    fn before(&self, place: &Place, main: &[Line]) -> Vec<Vec<Line>> {
        let keys = |lines: &[Line]| -> Vec<_> {
            lines.iter().filter(|line| !line.shadow).map(|line| (line.limit, line.key)).collect()
        };
        let places = self.flows.values().filter_map(|flow| match &flow.stage {
            Stage::At(other) if other.waits && other.layer == place.layer => Some(other),
            _ => None,
        });
        let is_before = |of: &&Place| match self.has_switched_lines {
            true => of.order != place.order,
            false => of.order < place.order,
        };
        let before = places.filter(is_before).map(|of| (of.order, self.limits.renewed(&of.lines)));
        let before = before.filter(|(_, lines)| keys(lines) == keys(main));
        let before = before.map(|(order, lines)| (order, split(&lines).0));
        BTreeMap::from_iter(before).into_values().collect()
    }

    /// Checks that a request in a queue may be refused now. Returns the refusal if it is known.
    fn check_refusal(
        &self,
        number: u64,
        place: &Place,
        main: &[Line],
        now: Moment,
    ) -> Option<Refusal> {
        let (most, max_wait) = self.setup.layers[place.layer].queue.expect("it waits");
        let mut queue = self.before(place, main);
        let (is_alone, is_full) = (queue.is_empty(), queue.len() as u64 >= most);
        let waited = now.elapsed - place.arrived.elapsed;
        let together = self.counts.clone().charge(main, now.at, Asks::Charge);
        let is_for_good = !together.allowed && together.retry_at.is_none();
        if is_for_good || self.has_switched_lines {
            return None;
        }
        // All tokens asked for before it count, also those of other plans (S13).
        for (line, own) in queue.iter_mut().flat_map(|lines| lines.iter_mut().zip(main)) {
            line.terms.clone_from(&own.terms);
        }
        let mut queue: Vec<_> = queue.into_iter().flat_map(in_parts).collect();
        queue.push(main.to_vec());
        let due = self.counts.due(&queue, now.at);
        let is_late = due - now.at > max_wait;
        if waited > 0 {
            // If those before it were due when it came, the next answer may have refused it, also
            // where tokens in that answer have come back since, at this instant.
            let has_room_since = self.disturbed == now.elapsed;
            let is_judged_later = !place.was_first && (is_full || is_late || has_room_since);
            let has_waited = waited + TICK >= max_wait;
            assert!(has_waited || is_judged_later, "{number} is refused after {waited} ms");
            return None;
        }
        let is_known = is_alone || now.elapsed > self.disturbed + PAUSE;
        assert!(is_full || is_late || !is_known, "{number} is refused, and due at {due}: {main:?}");
        is_alone.then(|| {
            let (standing, retry_at) = refusal(main, &together);
            let wait = retry_at.map(|retry_at| retry_at - i128::from(now.at));
            Refusal { status: 429, standing: Some(standing), wait }
        })
    }

    /// Corrects a charge to another cost, as soon as its decision is known.
    pub(crate) fn correct(&mut self, charged: &mut Charged, cost: u64, now: Moment) {
        let Some(taken) = charged.taken.as_mut().filter(|_| cost != charged.cost) else { return };
        let known = now.at + charged.known.saturating_sub(now.elapsed);
        taken.cost = charged.cost.into();
        let terms = self.limits.corrected_by(&charged.line, known);
        self.counts.settle(&charged.line, &terms, taken.clone(), known + self.setup.far, cost);
        if cost < charged.cost {
            self.disturbed = now.elapsed;
        }
        charged.cost = cost;
    }

    fn answers(&mut self, number: u64, meter: Option<CostMeter>, now: Moment) {
        let (setup, flow) = (Arc::clone(&self.setup), self.flow(number));
        let (ask, mut passed) = (Arc::clone(&flow.ask), mem::take(&mut flow.passed));
        assert!(matches!(flow.stage, Stage::Called), "{number} is answered");
        let mut fields: Option<Standing> = None;
        for of in passed.iter_mut().rev() {
            let layer = &setup.layers[of.layer];
            of.counts = ask.ends != Ends::Teapot || layer.counts_teapots;
            let settles = layer.limits.iter().any(|limit| limit.settled);
            of.metered = meter.is_some() && (of.counts || settles);
            for charged in of.lines.iter_mut().filter(|_| !of.metered) {
                let cost = setup.true_cost(&ask, charged, of.counts, true);
                self.correct(charged, cost, now);
            }
            let together = &of.lines[..of.together];
            if !together[0].line.shadow {
                let own = tightest(together);
                fields = Some(fields.filter(|inner| !own.replaces(inner, now.at)).unwrap_or(own));
            }
        }
        let status = if ask.ends == Ends::Teapot { 418 } else { 200 };
        let flow = self.flow(number);
        (flow.passed, flow.meter) = (passed, meter);
        flow.stage = Stage::Answers(Expected::new(status, fields));
    }

    /// The response is there.
    fn done(&mut self, number: u64, response: &Response<Body>, now: Moment) {
        let (found, flow) = (Expected::of(response), self.flow(number));
        match mem::replace(&mut flow.stage, Stage::Done) {
            Stage::Answers(expected) => assert_eq!(found, expected, "the answer to {number}"),
            Stage::Refused { expected, elapsed: refused } => {
                let is_silent = now.elapsed >= refused + 1_000;
                assert!(flow.upload.is_none() || is_silent, "{number} is answered while it sends");
                match expected {
                    Some(refusal) => {
                        let expected = refusal.after(now.elapsed - refused);
                        assert_eq!(found, expected, "{number} is refused");
                    }
                    None => assert!(found.is_refusal_in_line(), "{number}: {found:?}"),
                }
            }
            _ => panic!("{number} is answered: {found:?}"),
        }
        self.forget_if_done(number);
    }

    fn forget_if_done(&mut self, number: u64) {
        let flow = self.flow(number);
        let is_done = matches!(flow.stage, Stage::Done);
        if is_done && flow.meter.is_none() {
            self.flows.remove(&number);
        }
    }

    /// Returns what those of the passed layers have charged, from the inside out.
    fn give_back(&mut self, number: u64, now: Moment, returns: impl Fn(usize) -> bool) {
        let passed = mem::take(&mut self.flow(number).passed);
        for of in passed.into_iter().rev().filter(|of| returns(of.layer)) {
            of.lines.into_iter().for_each(|mut charged| self.correct(&mut charged, 0, now));
        }
    }

    /// The request was dropped, or its service has panicked.
    pub(crate) fn dropped(&mut self, number: u64, now: Moment) {
        let (setup, flow) = (Arc::clone(&self.setup), self.flow(number));
        flow.meter = None;
        match mem::replace(&mut flow.stage, Stage::Done) {
            Stage::Done => {}
            stage => {
                let refunds = |layer: usize| setup.layers[layer].refunds_dropped;
                if let Stage::At(Place { layer, lines, arrived, waits: false, .. }) = stage {
                    // It was sent: it is counted, and comes back where that is promised (S14).
                    let (main, _) = split(&lines);
                    let together = self.counts.charge(&main, arrived.at + setup.far, Asks::Charge);
                    let known = arrived.elapsed + 2 * setup.far;
                    let lines =
                        if together.allowed { charged(main, together, known) } else { Vec::new() };
                    for mut charged in lines.into_iter().filter(|_| refunds(layer)) {
                        self.correct(&mut charged, 0, arrived);
                    }
                }
                self.give_back(number, now, refunds);
            }
        }
        self.forget_if_done(number);
    }

    /// The body has ended, with its costs if these are told.
    pub(crate) fn end_body(&mut self, number: u64, now: Moment, is_told: bool) {
        let setup = Arc::clone(&self.setup);
        let Flow { ask, passed, meter, .. } = self.flows.remove(&number).expect("it is under way");
        let mut meter = meter.expect("its body goes on");
        if is_told {
            ask.costs.iter().for_each(|&(name, cost)| meter.set(name, cost));
        }
        drop(meter);
        for of in passed.into_iter().filter(|of| of.metered) {
            for mut charged in of.lines {
                let cost = setup.true_cost(&ask, &charged, of.counts, is_told);
                self.correct(&mut charged, cost, now);
            }
        }
    }

    pub(crate) fn waits(&self) -> bool {
        self.flows.values().any(|flow| matches!(flow.stage, Stage::At(_)))
    }

    /// Returns whether refused requests are still being read.
    pub(crate) fn reads_refused(&self) -> bool {
        self.flows.values().any(|flow| matches!(flow.stage, Stage::Refused { .. }))
    }

    pub(crate) fn has_body(&self, number: u64) -> bool {
        let flow = &self.flows[&number];
        matches!(flow.stage, Stage::Done) && flow.meter.is_some()
    }

    /// Asserts that the requests have got as far as they can, at rest.
    pub(crate) fn check_progress(&self, elapsed: u64) {
        for (number, flow) in &self.flows {
            match &flow.stage {
                Stage::At(place) => assert!(place.waits, "{number} is not decided"),
                Stage::Inner => panic!("{number} is not called"),
                Stage::Called => {
                    let works = flow.upload.is_some() || flow.ask.held.is_some();
                    assert!(works, "{number} stands still");
                }
                Stage::Answers(_) => panic!("{number} has no response"),
                Stage::Refused { elapsed: refused, .. } => {
                    let is_silent = elapsed > refused + 1_000 + TICK;
                    assert!(flow.upload.is_some() && !is_silent, "{number} has no refusal");
                }
                Stage::Done => assert!(flow.meter.is_some()),
            }
        }
    }

    /// Asserts that a request that has just come may wait, if it does and no other waits.
    pub(crate) fn check_newcomer(&self, number: u64, now: Moment) {
        let stage = self.flows.get(&number).map(|flow| &flow.stage);
        let Some(Stage::At(place)) = stage.filter(|_| !self.has_switched_lines) else { return };
        let (most, max_wait) = self.setup.layers[place.layer].queue.expect("it waits");
        let (main, _) = split(&place.lines);
        if place.was_first {
            let due = self.counts.due(&[main], now.at);
            let is_in_time = most > 0 && due > now.at && due - now.at <= max_wait + TICK;
            assert!(is_in_time, "{number} waits, and is due at {due}, not {}", now.at);
        }
    }

    /// The requests that are first in a line and could pass, and those that wait behind too many.
    pub(crate) fn could_go(&mut self, now: Moment) -> Vec<u64> {
        let mut all = Vec::new();
        (0..self.setup.layers.len()).for_each(|layer| self.limits.end_changes(layer, now.at));
        for (number, flow) in &self.flows {
            let Stage::At(place) = &flow.stage else { continue };
            let (most, max_wait) = self.setup.layers[place.layer].queue.expect("it waits");
            let waited = now.elapsed - place.arrived.elapsed;
            assert!(waited <= max_wait + PATIENCE + TICK, "{number} waits for {waited} ms");
            let lines = self.limits.renewed(&place.lines);
            let (main, _) = split(&lines);
            if main[0].shadow {
                all.push(*number);
                continue;
            }
            let queue = self.before(place, &main);
            if !queue.is_empty() {
                if queue.len() as u64 >= most && !self.has_switched_lines {
                    all.push(*number);
                }
                continue;
            }
            if self.counts.could_pass(&main, now.at) {
                all.push(*number);
            }
        }
        all
    }
}

/// A request by another plan may ask for more than these lines can grant at once.
fn in_parts(mut lines: Vec<Line>) -> Vec<Vec<Line>> {
    let mut parts = Vec::new();
    loop {
        let part: Vec<_> = lines
            .iter_mut()
            .map(|line| {
                let most = line.terms.iter().map(|of| of.limit as u64).min().expect("a quota");
                let cost = line.cost.min(most);
                line.cost -= cost;
                Line { cost, ..line.clone() }
            })
            .collect();
        if part.iter().all(|line| line.cost == 0) {
            return parts;
        }
        parts.push(part);
    }
}

/// The lines that are charged together, and those in shadow mode beside them (S37).
fn split(lines: &[Line]) -> (Vec<Line>, Vec<Line>) {
    let (mut shadow, mut main): (Vec<_>, Vec<_>) =
        lines.iter().cloned().partition(|line| line.shadow);
    if main.is_empty() {
        main.push(shadow.remove(0));
    }
    (main, shadow)
}
