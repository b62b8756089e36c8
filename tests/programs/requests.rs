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
    Charged, Counts, Limits, Line, Standing, Told, charged, may_wait, refusal, seconds, tightest,
};
use crate::reference::Ask as Asks;
use crate::setup::{Ask, BASE, Inside, Setup};
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
    /// Those whose response has passed, and which wait for its meter.
    settling: Vec<Passed>,
    meter: Option<CostMeter>,
    /// Inside of these layers, it was asked once more.
    retried: Vec<usize>,
}

struct Passed {
    layer: usize,
    /// The lines that were charged together, and then those in shadow mode beside them.
    lines: Vec<Charged>,
    together: usize,
}

pub(crate) enum Stage {
    At(Place),
    /// Inside of this layer, it goes on at this time.
    Slow(usize, u64),
    Inner,
    Called,
    /// It is asked once more inside of this layer.
    Retries(usize),
    Answers(Answer),
    /// By this layer. `None`: by what a line knew last.
    Refused {
        layer: usize,
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

/// A response on its way out.
pub(crate) struct Answer {
    /// `None`: an error.
    status: Option<u16>,
    fields: Fields,
    /// The true costs that it reports, but for those of its meter.
    told: Told,
}

enum Fields {
    /// Of a layer that the request has passed.
    Passed(Option<Standing>),
    /// Of a refusal, which no layer outside changes.
    Kept(BTreeMap<String, String>),
    /// Of a refusal in a line.
    Unknown,
}

impl Answer {
    fn of(status: impl Into<Option<u16>>) -> Self {
        Self { status: status.into(), fields: Fields::Passed(None), told: Vec::new() }
    }

    fn refusal(expected: Option<Expected>) -> Self {
        let fields = expected.map(|expected| (expected.status, Fields::Kept(expected.fields)));
        let (status, fields) = fields.unwrap_or((429, Fields::Unknown));
        Self { fields, ..Self::of(status) }
    }
}

#[derive(PartialEq, Debug)]
pub(crate) struct Expected {
    pub(crate) status: u16,
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

    pub(crate) fn of(response: &Response<Body>) -> Self {
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
        let (passed, settling, retried, meter) = Default::default();
        Self { ask, task, upload, stage: Stage::Inner, passed, settling, meter, retried }
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

    fn refuse(&mut self, number: u64, layer: usize, expected: Option<Refusal>, now: Moment) {
        self.flow(number).stage = Stage::Refused { layer, expected, elapsed: now.elapsed };
    }

    /// Goes on to the first layer from this one on that has a line for the request, or takes time.
    pub(crate) fn arrive(&mut self, number: u64, layer: usize, arrived: Moment) {
        let setup = Arc::clone(&self.setup);
        let ask = Arc::clone(&self.flow(number).ask);
        for (layer, of) in setup.layers.iter().enumerate().skip(layer) {
            let Some(lines) = self.limits.lines(layer, of, &ask, arrived.at) else {
                let refusal = Refusal { status: 400, standing: None, wait: None };
                return self.refuse(number, layer, Some(refusal), arrived);
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
            if self.is_slowed(number, layer, arrived) {
                return;
            }
        }
        self.flow(number).stage = Stage::Inner;
    }

    fn is_slowed(&mut self, number: u64, layer: usize, now: Moment) -> bool {
        let Inside::Slow(ms) = self.setup.layers[layer].inside else { return false };
        self.flow(number).stage = Stage::Slow(layer, now.elapsed + ms);
        true
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
            What::Passes(layer) => self.passes(number, layer, now),
            What::GoesOn(layer) => {
                let is_due = |at: u64| at <= now.elapsed && now.elapsed <= at + TICK;
                let goes_on =
                    matches!(flow.stage, Stage::Slow(of, at) if of == layer && is_due(at));
                assert!(goes_on, "{number} goes on inside of {layer}");
                self.arrive(number, layer + 1, now);
            }
            What::Again(layer) => {
                self.refused(number, now);
                let flow = self.flow(number);
                let is_asked = matches!(flow.stage, Stage::Retries(of) if of == layer);
                assert!(is_asked, "{number} is asked once more inside of {layer}");
                flow.retried.retain(|of| *of < layer);
                flow.retried.push(layer);
                // The second request has no body.
                flow.upload = None;
                self.arrive(number, layer + 1, now);
            }
            What::TimesOut(layer) => {
                self.give_up(number, layer + 1, now);
                self.outward(number, Answer::of(504), layer + 1, now);
            }
            What::Panics => self.dropped(number, now),
            What::Fails => {
                assert!(matches!(flow.stage, Stage::Called), "{number} fails");
                self.outward(number, Answer::of(None), self.setup.layers.len(), now);
            }
            What::Answers(meter, expected) => self.answers(number, meter, expected, now),
            What::Done(response) => self.done(number, &response, now),
        }
    }

    /// No layer tells a decision of a request whose limits were all lifted while it waited.
    fn passes(&mut self, number: u64, layer: usize, now: Moment) {
        self.limits.end_changes(layer, now.at);
        let Stage::At(place) = &self.flows[&number].stage else { return };
        if place.layer != layer {
            return;
        }
        assert!(place.waits, "{number} passes {layer} without a decision");
        let lines = self.limits.renewed(&place.lines);
        assert!(lines.is_empty(), "{number} passes {layer} without a decision: {lines:?}");
        if !self.is_slowed(number, layer, now) {
            self.arrive(number, layer + 1, now);
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
            let could_refuse = place.lines.iter().any(|line| line.name == name && !line.shadow);
            self.limits.end_changes(layer, now.at);
            place.lines = self.limits.renewed(&place.lines);
            // What it waited for may have been lifted since, so that only shadows are left.
            let is_shadow = place.lines.iter().all(|line| line.shadow);
            assert!(could_refuse || is_shadow, "{number} has waited for {name}");
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
            return self.refuse(number, layer, expected, now);
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
            return self.refuse(number, layer, Some(refusal), now);
        }
        let mut lines = charged(main, together, 0);
        let together = lines.len();
        for line in asides {
            let line = vec![line];
            let decided = self.counts.charge(&line, now.at + far, Asks::Charge);
            lines.extend(charged(line, decided, now.elapsed + 2 * far));
        }
        self.flow(number).passed.push(Passed { layer, lines, together });
        if !self.is_slowed(number, layer, now) {
            self.arrive(number, layer + 1, now);
        }
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
        let before = before.filter(|(_, lines)| !lines.is_empty() && keys(lines) == keys(main));
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

    fn answers(&mut self, number: u64, meter: Option<CostMeter>, expected: Expected, now: Moment) {
        let below = self.setup.layers.len();
        let flow = self.flow(number);
        assert!(matches!(flow.stage, Stage::Called), "{number} is answered");
        let [costs, by_meter] = &flow.ask.costs;
        let told = match meter {
            Some(_) => costs.clone(),
            None if costs.is_empty() => Vec::new(),
            None => [&[BASE], &costs[..], by_meter].concat(),
        };
        flow.meter = meter;
        let status = expected.status;
        let is_theirs = !expected.fields.is_empty();
        let mut answer =
            if is_theirs { Answer::refusal(Some(expected)) } else { Answer::of(status) };
        answer.told = told;
        self.outward(number, answer, below, now);
    }

    /// The refusal is handed on: it may have waited for the rest of an upload.
    fn refused(&mut self, number: u64, now: Moment) {
        let flow = self.flow(number);
        match mem::replace(&mut flow.stage, Stage::Done) {
            Stage::Refused { layer, expected, elapsed } => {
                let is_silent = now.elapsed >= elapsed + 1_000;
                assert!(flow.upload.is_none() || is_silent, "{number} is answered while it sends");
                let expected = expected.map(|refusal| refusal.after(now.elapsed - elapsed));
                self.outward(number, Answer::refusal(expected), layer, now);
            }
            stage => flow.stage = stage,
        }
    }

    /// A response, or an error, goes out through the layers below this one.
    fn outward(&mut self, number: u64, mut answer: Answer, below: usize, now: Moment) {
        let setup = Arc::clone(&self.setup);
        for layer in (0..below).rev() {
            let of = &setup.layers[layer];
            let flow = self.flow(number);
            match of.inside {
                Inside::Replaces(status) if answer.status != Some(200) => {
                    answer = Answer::of(status);
                }
                Inside::Retries if answer.status != Some(200) && !flow.retried.contains(&layer) => {
                    flow.stage = Stage::Retries(layer);
                    return;
                }
                _ => {}
            }
            let is_metered = flow.meter.is_some();
            let clock_panics = is_metered && flow.ask.clock_panics;
            let Some(mut passed) = flow.passed.pop_if(|passed| passed.layer == layer) else {
                continue;
            };
            let Some(status) = answer.status else {
                // As if it was dropped.
                if of.refunds_dropped {
                    passed.lines.iter_mut().for_each(|charged| self.correct(charged, 0, now));
                }
                continue;
            };
            let counts = status != 418 || of.counts_teapots;
            let settles = of.limits.iter().any(|limit| limit.settled);
            let waits = is_metered && (counts || settles);
            for charged in passed.lines.iter_mut().filter(|_| !waits) {
                let cost = setup.true_cost(&answer.told, charged, counts);
                self.correct(charged, cost, now);
            }
            let together = &passed.lines[..passed.together];
            if let Fields::Passed(fields) = &mut answer.fields
                && !together[0].line.shadow
            {
                let own = tightest(together);
                let is_tighter = fields.as_ref().is_none_or(|inner| own.is_tighter(inner));
                if clock_panics && fields.is_some() && is_tighter {
                    self.flow(number).passed.push(passed);
                    self.give_up(number, 0, now);
                    return;
                }
                if is_tighter && (fields.is_none() || own.reset > now.at.into()) {
                    *fields = Some(own);
                }
            }
            if waits {
                self.flow(number).settling.push(passed);
            }
        }
        answer.status.get_or_insert(500);
        self.flow(number).stage = Stage::Answers(answer);
    }

    /// The response is there.
    fn done(&mut self, number: u64, response: &Response<Body>, now: Moment) {
        self.refused(number, now);
        let (found, flow) = (Expected::of(response), self.flow(number));
        let Stage::Answers(answer) = mem::replace(&mut flow.stage, Stage::Done) else {
            panic!("{number} is answered: {found:?}")
        };
        let status = answer.status.expect("an error is answered");
        let expected = match answer.fields {
            Fields::Passed(standing) => Some(Expected::new(status, standing)),
            Fields::Kept(fields) => Some(Expected { status, fields }),
            Fields::Unknown => None,
        };
        match expected {
            Some(expected) => assert_eq!(found, expected, "the answer to {number}"),
            None => assert!(found.is_refusal_in_line(), "{number}: {found:?}"),
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

    /// The request is dropped inside of the layers before this one. Those promise nothing yet; of
    /// the others, some return what they have charged, from the inside out.
    fn give_up(&mut self, number: u64, from: usize, now: Moment) {
        let setup = Arc::clone(&self.setup);
        let refunds = |layer: usize| setup.layers[layer].refunds_dropped;
        let stage = mem::replace(&mut self.flow(number).stage, Stage::Done);
        if let Stage::At(Place { layer, lines, arrived, waits: false, .. }) = stage {
            // It was sent: it is counted, and comes back where that is promised (S14).
            let (main, _) = split(&lines);
            let together = self.counts.charge(&main, arrived.at + setup.far, Asks::Charge);
            let known = arrived.elapsed + 2 * setup.far;
            let lines = if together.allowed { charged(main, together, known) } else { Vec::new() };
            for mut charged in lines.into_iter().filter(|_| refunds(layer)) {
                self.correct(&mut charged, 0, arrived);
            }
        }
        while let Some(of) = self.flow(number).passed.pop_if(|of| of.layer >= from) {
            for mut charged in of.lines.into_iter().filter(|_| refunds(of.layer)) {
                self.correct(&mut charged, 0, now);
            }
        }
    }

    /// The request was dropped, or its service has panicked.
    pub(crate) fn dropped(&mut self, number: u64, now: Moment) {
        let flow = self.flow(number);
        flow.meter = None;
        if !matches!(flow.stage, Stage::Done) {
            self.give_up(number, 0, now);
        }
        self.forget_if_done(number);
    }

    /// The body has ended, with its costs if these are told.
    pub(crate) fn end_body(&mut self, number: u64, now: Moment, is_told: bool) {
        let setup = Arc::clone(&self.setup);
        let flow = self.flows.remove(&number).expect("it is under way");
        let mut meter = flow.meter.expect("its body goes on");
        let [mut told, by_meter] = flow.ask.costs.clone();
        if is_told {
            by_meter.iter().for_each(|&(name, cost)| meter.set(name, cost));
            told.extend(by_meter);
        }
        drop(meter);
        for mut charged in flow.settling.into_iter().flat_map(|of| of.lines) {
            let cost = setup.true_cost(&told, &charged, true);
            self.correct(&mut charged, cost, now);
        }
    }

    pub(crate) fn waits(&self) -> bool {
        self.flows.values().any(|flow| matches!(flow.stage, Stage::At(_)))
    }

    /// Returns whether requests go on soon: refused ones are still being read, or slowed down.
    pub(crate) fn goes_on(&self) -> bool {
        let goes_on = |of: &Stage| matches!(of, Stage::Refused { .. } | Stage::Slow(..));
        self.flows.values().any(|flow| goes_on(&flow.stage))
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
                Stage::Slow(_, at) => assert!(elapsed <= at + TICK, "{number} is slow"),
                Stage::Inner => panic!("{number} is not called"),
                Stage::Called => {
                    let works = flow.upload.is_some() || flow.ask.held.is_some();
                    assert!(works, "{number} stands still");
                }
                Stage::Answers(_) | Stage::Retries(_) => panic!("{number} has no response"),
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
            if lines.is_empty() {
                all.push(*number);
                continue;
            }
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
