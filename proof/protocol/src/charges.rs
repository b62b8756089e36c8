//! The protocol between nodes and a shared store, small enough to look at every state: charges, leases,
//! remembered refusals, refunds, counting in memory while the store is silent, crashes of nodes, and a
//! failover to a replica that lags. Messages may take any time, and may be lost.
//!
//! Nothing is counted from the beginning of time: ticks are relative to now, and windows to the one that
//! runs. So what is found holds for any number of windows.

use stateright::{Model, Property};

use crate::look::Breakable;

/// The parameters of a model.
#[derive(Clone, Debug)]
pub struct Protocol {
    pub nodes: usize,
    /// Tokens in a window.
    pub limit: u8,
    /// Ticks in a window.
    pub length: u8,
    /// The most tokens that a charge takes: one for its request, and a lease of the rest.
    pub lease: u8,
    /// Clients refund tokens. Each client keeps one receipt at most.
    pub refunds: bool,
    /// Requests without an answer are counted in memory.
    pub local: bool,
    pub failover: bool,
    /// A safety measure that is left out.
    pub fault: Option<Fault>,
}

/// The smallest model in which every promise can be broken.
pub const SMALL: Protocol = Protocol {
    nodes: 2,
    limit: 2,
    length: 2,
    lease: 2,
    refunds: true,
    local: false,
    failover: false,
    fault: None,
};

/// The faults that can be built in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A lease ends a window after its answer, and not after its request.
    LeaseOutlives,
    /// A refusal is dated from its answer.
    RefusalOutlives,
    /// The store takes a refund of a window that is over.
    RefundAcross,
    /// A refund whose answer is lost is sent again.
    RefundTwice,
    /// A node returns more tokens of a lease than are left.
    TooMuchBack,
    /// The counts in memory are forgotten when the store answers.
    LocalForgets,
    /// Tokens counted in memory are returned to the store.
    LocalToStore,
}

impl Fault {
    pub const ALL: [Self; 7] = [
        Self::LeaseOutlives,
        Self::RefusalOutlives,
        Self::RefundAcross,
        Self::RefundTwice,
        Self::TooMuchBack,
        Self::LocalForgets,
        Self::LocalToStore,
    ];

    /// The promise that it breaks.
    pub fn breaks(self) -> &'static str {
        match self {
            Self::RefusalOutlives => IN_ITS_WINDOW,
            Self::LocalForgets => LOCAL,
            _ => LIMIT,
        }
    }

    /// The smallest protocol that has it.
    pub fn protocol(self) -> Protocol {
        let local = [Self::LocalForgets, Self::LocalToStore].contains(&self);
        Protocol { fault: Some(self), local, ..SMALL }
    }
}

/// Everything there is at an instant.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    /// Ticks since the window began.
    phase: u8,
    /// The tokens that the store has counted in this window, and the part of them that its replica
    /// knows.
    used: u8,
    replica: u8,
    /// The tokens that passed in this window by the store's count, without refunds.
    held: i8,
    /// Tokens that a failover has lost in this window. A window has one failover at most.
    lost: u8,
    failed_over: bool,
    /// The order makes no difference, so it is fixed.
    nodes: Vec<Node>,
}

/// A process.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Node {
    call: Option<Call>,
    lease: Option<Kept>,
    refusal: Option<Kept>,
    /// A pass that may be given back.
    receipt: Option<Receipt>,
    /// Tokens on their way back, in one message at a time.
    refund: Option<Refund>,
    /// The tokens counted in memory, and those of them that passed and were not refunded.
    local: u8,
    local_passed: i8,
}

/// A pass of an earlier window, this many windows ago.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Receipt {
    windows: u8,
    /// The pass was counted in memory.
    local: bool,
}

/// A charge, or its answer, in flight.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Call {
    /// A request still waits for the answer.
    waited: bool,
    state: Way,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Way {
    /// Ticks since it was sent.
    Asked(u8),
    /// The charge passed if the tokens are not 0. The rest says how long that holds, counted from
    /// the request.
    Answered(Kept),
}

/// The store's decision, and for how many more ticks it holds.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Kept {
    tokens: u8,
    runs: u8,
    /// The number of windows since the decision.
    windows: u8,
}

/// Tokens on their way back to an earlier window, this many windows ago.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Refund {
    tokens: u8,
    windows: u8,
}

/// How many windows ago makes no difference any more.
const LONG_AGO: u8 = 2;

/// A step, mostly of one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    Tick,
    Send(usize),
    Execute(usize),
    Answer(usize),
    Lose(usize),
    /// The request that waits is answered from memory.
    GiveUp(usize),
    Spend(usize),
    GiveBack(usize),
    Refund(usize),
    RefundArrives(usize),
    RefundArrivesAndIsSentAgain(usize),
    RefundLost(usize),
    Crash(usize),
    Replicate,
    FailOver,
}

impl Protocol {
    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn tick(&self, state: &mut State) {
        state.phase += 1;
        for node in &mut state.nodes {
            match node.call.as_mut().map(|call| &mut call.state) {
                Some(Way::Asked(age)) => *age = (*age + 1).min(self.length),
                Some(Way::Answered(kept)) => self.age_on_its_way(kept),
                None => {}
            }
            for kept in [&mut node.lease, &mut node.refusal] {
                kept.iter_mut().for_each(|kept| kept.runs -= 1);
                kept.take_if(|kept| kept.runs == 0);
            }
        }
        if state.phase < self.length {
            return;
        }
        (state.phase, state.used, state.replica) = (0, 0, 0);
        (state.held, state.lost, state.failed_over) = (0, 0, false);
        for node in &mut state.nodes {
            let older = |windows: &mut u8| *windows = (*windows + 1).min(LONG_AGO);
            if let Some(Call { state: Way::Answered(kept), .. }) = &mut node.call {
                older(&mut kept.windows);
            }
            let kept = [&mut node.lease, &mut node.refusal];
            kept.into_iter().flatten().for_each(|kept| older(&mut kept.windows));
            node.receipt.iter_mut().for_each(|receipt| older(&mut receipt.windows));
            node.receipt.take_if(|receipt| receipt.windows == LONG_AGO);
            node.refund.iter_mut().for_each(|refund| older(&mut refund.windows));
            node.refund.take_if(|refund| refund.windows == LONG_AGO);
            (node.local, node.local_passed) = (0, 0);
        }
    }

    /// Ages an answer in flight, too.
    fn age_on_its_way(&self, kept: &mut Kept) {
        let lease = kept.tokens > 0;
        if !self.is(if lease { Fault::LeaseOutlives } else { Fault::RefusalOutlives }) {
            kept.runs = kept.runs.saturating_sub(1);
        }
        if kept.runs == 0 {
            // None of the lease will be used.
            kept.tokens = kept.tokens.min(1);
        }
    }

    /// The store decides.
    fn execute(&self, state: &mut State, node: usize) {
        let Some(Call { state: way @ Way::Asked(_), .. }) = &mut state.nodes[node].call else {
            return;
        };
        let Way::Asked(age) = *way else { return };
        let tokens = self.lease.min(self.limit.saturating_sub(state.used));
        state.used += tokens;
        // The request passes if its answer arrives.
        state.held += i8::from(tokens > 0);
        let mut kept = Kept { tokens, runs: self.length - state.phase, windows: 0 };
        (0..age).for_each(|_| self.age_on_its_way(&mut kept));
        *way = Way::Answered(kept);
    }

    fn answer(&self, node: &mut Node) {
        let Some(Call { waited, state: Way::Answered(kept) }) = node.call.take() else { return };
        if self.is(Fault::LocalForgets) {
            node.local = 0;
        }
        if kept.tokens > 0 && waited {
            self.passed(node, kept.windows, false);
        }
        if kept.runs == 0 {
            return;
        }
        match kept.tokens {
            0 => node.refusal = Some(kept),
            1 => {}
            // The first token is for the request itself.
            _ => node.lease = Some(Kept { tokens: kept.tokens - 1, ..kept }),
        }
    }

    fn passed(&self, node: &mut Node, windows: u8, local: bool) {
        if self.refunds && windows < LONG_AGO {
            node.receipt = Some(Receipt { windows, local });
        }
    }

    /// A request gets no answer from the store.
    fn count_locally(&self, node: &mut Node) {
        if self.local && node.local < self.limit {
            node.local += 1;
            node.local_passed += 1;
            self.passed(node, 0, true);
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            phase: 0,
            used: 0,
            replica: 0,
            held: 0,
            lost: 0,
            failed_over: false,
            nodes: vec![Node::default(); self.nodes],
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        steps.push(Step::Tick);
        if self.failover {
            if state.replica != state.used {
                steps.push(Step::Replicate);
            }
            if !state.failed_over {
                steps.push(Step::FailOver);
            }
        }
        for (i, node) in state.nodes.iter().enumerate() {
            if i > 0 && state.nodes[i - 1] == *node {
                // An equal node would take the same steps.
                continue;
            }
            match &node.call {
                None if node.lease.is_none() && node.refusal.is_none() => steps.push(Step::Send(i)),
                None => {}
                Some(call) => {
                    let asked = matches!(call.state, Way::Asked(_));
                    steps.push(if asked { Step::Execute(i) } else { Step::Answer(i) });
                    steps.push(Step::Lose(i));
                    if call.waited && self.local {
                        steps.push(Step::GiveUp(i));
                    }
                }
            }
            if node.lease.is_some() {
                steps.push(Step::Spend(i));
            }
            if node.refund.is_some() {
                steps.push(Step::RefundArrives(i));
                steps.push(Step::RefundLost(i));
                if self.is(Fault::RefundTwice) {
                    steps.push(Step::RefundArrivesAndIsSentAgain(i));
                }
            } else {
                if node.lease.is_some() {
                    steps.push(Step::GiveBack(i));
                }
                if node.receipt.is_some() {
                    steps.push(Step::Refund(i));
                }
            }
            if *node != Node::default() {
                steps.push(Step::Crash(i));
            }
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::Tick => self.tick(&mut state),
            Step::Send(i) => {
                state.nodes[i].call = Some(Call { waited: true, state: Way::Asked(0) });
            }
            Step::Execute(i) => self.execute(&mut state, i),
            Step::Answer(i) => self.answer(&mut state.nodes[i]),
            Step::Lose(i) => {
                if state.nodes[i].call.take().is_some_and(|call| call.waited) {
                    self.count_locally(&mut state.nodes[i]);
                }
            }
            Step::GiveUp(i) => {
                state.nodes[i].call.iter_mut().for_each(|call| call.waited = false);
                self.count_locally(&mut state.nodes[i]);
            }
            Step::Spend(i) => {
                let node = &mut state.nodes[i];
                let lease = node.lease.as_mut()?;
                lease.tokens -= 1;
                let windows = lease.windows;
                node.lease.take_if(|lease| lease.tokens == 0);
                self.passed(node, windows, false);
                state.held += 1;
            }
            Step::GiveBack(i) => {
                let node = &mut state.nodes[i];
                let Kept { tokens, windows, .. } = node.lease.take()?;
                let tokens = tokens + u8::from(self.is(Fault::TooMuchBack));
                node.refund = (windows < LONG_AGO).then_some(Refund { tokens, windows });
            }
            Step::Refund(i) => {
                let node = &mut state.nodes[i];
                let Receipt { windows, local } = node.receipt.take()?;
                let this_window = windows == 0;
                if local {
                    node.local_passed -= i8::from(this_window);
                    node.local = node.local.saturating_sub(u8::from(this_window));
                } else {
                    state.held -= i8::from(this_window);
                }
                if !local || self.is(Fault::LocalToStore) {
                    node.refund = Some(Refund { tokens: 1, windows });
                }
            }
            Step::RefundArrives(i) | Step::RefundArrivesAndIsSentAgain(i) => {
                let Refund { tokens, windows } = state.nodes[i].refund.clone()?;
                if step == Step::RefundArrives(i) {
                    state.nodes[i].refund = None;
                }
                if windows == 0 || self.is(Fault::RefundAcross) {
                    state.used = state.used.saturating_sub(tokens);
                }
            }
            Step::RefundLost(i) => state.nodes[i].refund = None,
            // Messages that a node has sent may still arrive after its crash.
            Step::Crash(i) => {
                let refund = state.nodes[i].refund.take();
                state.nodes[i] = Node { refund, ..Node::default() };
            }
            Step::Replicate => state.replica = state.used,
            Step::FailOver => {
                state.lost = state.used.saturating_sub(state.replica);
                (state.used, state.failed_over) = (state.replica, true);
            }
        }
        state.nodes.sort_unstable();
        Some(state)
    }

    /// With a fault there is no end to what passes.
    fn within_boundary(&self, state: &State) -> bool {
        state.held <= 3 * self.limit as i8
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::<Self>::always(LIMIT, |protocol, state| {
                state.held <= (protocol.limit + state.lost) as i8
            }),
            Property::<Self>::always(COUNTED, |_, state| {
                state.held <= (state.used + state.lost) as i8
            }),
            Property::<Self>::always(IN_ITS_WINDOW, |_, state| {
                let kept = |node: &Node| [node.lease.clone(), node.refusal.clone()];
                state.nodes.iter().flat_map(kept).flatten().all(|kept| kept.windows == 0)
            }),
            Property::<Self>::always(LOCAL, |protocol, state| {
                state.nodes.iter().all(|node| node.local_passed <= protocol.limit as i8)
            }),
            // These states are reached, so that the proofs above are not empty.
            Property::<Self>::sometimes("the limit passes", |protocol, state| {
                state.held == protocol.limit as i8
            }),
            Property::<Self>::sometimes("a refusal is remembered", |_, state| {
                state.nodes.iter().any(|node| node.refusal.is_some())
            }),
        ];
        if self.local {
            properties.push(Property::<Self>::sometimes("memory counts", |protocol, state| {
                state.nodes.iter().all(|node| node.local_passed == protocol.limit as i8)
            }));
        }
        if self.refunds {
            properties.push(Property::<Self>::sometimes("a refund is late", |_, state| {
                let refunds = state.nodes.iter().filter_map(|node| node.refund.as_ref());
                refunds.filter(|refund| refund.windows == 1).count() > 1
            }));
        }
        if self.local && self.refunds {
            properties.push(Property::<Self>::sometimes("memory takes back", |_, state| {
                let gave = |node: &Node| node.receipt.as_ref().is_some_and(|r| r.local);
                state.nodes.iter().all(gave)
            }));
        }
        if self.lease > 1 {
            properties.push(Property::<Self>::sometimes(
                "all nodes have a lease",
                |protocol, state| {
                    let leases = state.nodes.iter().filter(|node| node.lease.is_some()).count();
                    leases == protocol.nodes.min(usize::from(protocol.limit / 2))
                },
            ));
        }
        if self.failover {
            properties.push(Property::<Self>::sometimes(
                "what was lost passes again",
                |protocol, state| state.held > protocol.limit as i8,
            ));
        }
        properties
    }
}

/// S7: no more than the limit, and what a failover has lost.
pub const LIMIT: &str = "no more than the limit passes in a window";
/// S14, S34: nothing that passed is missing in the store.
pub const COUNTED: &str = "what has passed is counted";
/// S34: leases and refusals die with their window.
pub const IN_ITS_WINDOW: &str = "what a node remembers is of this window";
/// S33: one further limit for each node.
pub const LOCAL: &str = "no more than one limit passes in the memory of a node";

impl Breakable for Protocol {
    fn breaks(&self) -> Option<&'static str> {
        self.fault.map(Fault::breaks)
    }
}
