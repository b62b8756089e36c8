//! The protocol between nodes and a shared store, small enough to look at every state: charges,
//! remembered refusals, refunds, counting in memory while the store is silent, crashes of nodes, and a
//! failover to a replica that lags. Messages may take any time, and may be lost. A tick is a second.
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
    refunds: true,
    local: false,
    failover: false,
    fault: None,
};

/// The faults that can be built in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A refusal is dated from its answer.
    RefusalOutlives,
    /// A refusal outlives its second: it is remembered until its window ends.
    RefusalStays,
    /// The store takes a refund of a window that is over.
    RefundAcross,
    /// A refund whose answer is lost is sent again.
    RefundTwice,
    /// The counts in memory are forgotten when the store answers.
    LocalForgets,
    /// Tokens counted in memory are returned to the store.
    LocalToStore,
}

impl Fault {
    pub const ALL: [Self; 6] = [
        Self::RefusalOutlives,
        Self::RefusalStays,
        Self::RefundAcross,
        Self::RefundTwice,
        Self::LocalForgets,
        Self::LocalToStore,
    ];

    /// The promise that it breaks.
    pub fn breaks(self) -> &'static str {
        match self {
            Self::RefusalOutlives => IN_ITS_WINDOW,
            Self::RefusalStays => A_SECOND,
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
    refusal: Option<Answer>,
    /// A pass that may be given back.
    receipt: Option<Receipt>,
    /// A token on its way back to an earlier window, this many windows ago, in one message at a time.
    refund: Option<u8>,
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
    Answered(Answer),
}

/// The store's decision.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Answer {
    passed: bool,
    /// For how many more ticks a refusal is remembered.
    runs: u8,
    /// The charge was sent a tick ago or earlier, and the refusal is remembered nevertheless.
    old: bool,
    /// The number of windows since the decision.
    windows: u8,
}

/// For how many ticks a refusal is remembered, if its window does not end before.
const SECOND: u8 = 1;

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
    Refund(usize),
    RefundArrives(usize),
    RefundArrivesAndIsSentAgain(usize),
    RefundLost(usize),
    Crash(usize),
    Replicate,
    FailOver,
}

impl State {
    fn refusals(&self) -> impl Iterator<Item = &Answer> {
        self.nodes.iter().filter_map(|node| node.refusal.as_ref())
    }
}

impl Answer {
    /// A tick, by which a refusal has less time.
    fn age(&mut self, by: u8) {
        self.runs = self.runs.saturating_sub(by);
        self.old = self.runs > 0;
    }
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
                Some(Way::Answered(answer)) => self.age_on_its_way(answer),
                None => {}
            }
            node.refusal.iter_mut().for_each(|refusal| refusal.age(1));
            node.refusal.take_if(|refusal| refusal.runs == 0);
        }
        if state.phase < self.length {
            return;
        }
        (state.phase, state.used, state.replica) = (0, 0, 0);
        (state.held, state.lost, state.failed_over) = (0, 0, false);
        for node in &mut state.nodes {
            let older = |windows: &mut u8| *windows = (*windows + 1).min(LONG_AGO);
            if let Some(Call { state: Way::Answered(answer), .. }) = &mut node.call {
                older(&mut answer.windows);
            }
            node.refusal.iter_mut().for_each(|refusal| older(&mut refusal.windows));
            node.receipt.iter_mut().for_each(|receipt| older(&mut receipt.windows));
            node.receipt.take_if(|receipt| receipt.windows == LONG_AGO);
            node.refund.iter_mut().for_each(older);
            node.refund.take_if(|windows| *windows == LONG_AGO);
            (node.local, node.local_passed) = (0, 0);
        }
    }

    /// Ages an answer in flight, too.
    fn age_on_its_way(&self, answer: &mut Answer) {
        answer.age(u8::from(!self.is(Fault::RefusalOutlives)));
    }

    /// The store decides.
    fn execute(&self, state: &mut State, node: usize) {
        let Some(Call { state: way @ Way::Asked(_), .. }) = &mut state.nodes[node].call else {
            return;
        };
        let Way::Asked(age) = *way else { return };
        let passed = state.used < self.limit;
        state.used += u8::from(passed);
        // The request passes if its answer arrives.
        state.held += i8::from(passed);
        let left = self.length - state.phase;
        let runs = match passed {
            true => 0,
            false if self.is(Fault::RefusalStays) => left,
            false => left.min(SECOND),
        };
        let mut answer = Answer { passed, runs, old: false, windows: 0 };
        (0..age).for_each(|_| self.age_on_its_way(&mut answer));
        *way = Way::Answered(answer);
    }

    fn answer(&self, node: &mut Node) {
        let Some(Call { waited, state: Way::Answered(answer) }) = node.call.take() else { return };
        if self.is(Fault::LocalForgets) {
            node.local = 0;
        }
        if answer.passed && waited {
            self.passed(node, answer.windows, false);
        }
        if answer.runs > 0 {
            node.refusal = Some(answer);
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
                None if node.refusal.is_none() => steps.push(Step::Send(i)),
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
            if node.refund.is_some() {
                steps.push(Step::RefundArrives(i));
                steps.push(Step::RefundLost(i));
                if self.is(Fault::RefundTwice) {
                    steps.push(Step::RefundArrivesAndIsSentAgain(i));
                }
            } else if node.receipt.is_some() {
                steps.push(Step::Refund(i));
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
                    node.refund = Some(windows);
                }
            }
            Step::RefundArrives(i) | Step::RefundArrivesAndIsSentAgain(i) => {
                let windows = state.nodes[i].refund?;
                if step == Step::RefundArrives(i) {
                    state.nodes[i].refund = None;
                }
                if windows == 0 || self.is(Fault::RefundAcross) {
                    state.used = state.used.saturating_sub(1);
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
                state.refusals().all(|refusal| refusal.windows == 0)
            }),
            Property::<Self>::always(A_SECOND, |_, state| {
                state.refusals().all(|refusal| !refusal.old)
            }),
            Property::<Self>::always(LOCAL, |protocol, state| {
                state.nodes.iter().all(|node| node.local_passed <= protocol.limit as i8)
            }),
            // These states are reached, so that the proofs above are not empty.
            Property::<Self>::sometimes("the limit passes", |protocol, state| {
                state.held == protocol.limit as i8
            }),
            Property::<Self>::sometimes("a refusal is remembered", |_, state| {
                state.refusals().next().is_some()
            }),
        ];
        if self.local {
            properties.push(Property::<Self>::sometimes("memory counts", |protocol, state| {
                state.nodes.iter().all(|node| node.local_passed == protocol.limit as i8)
            }));
        }
        if self.refunds {
            properties.push(Property::<Self>::sometimes("a refund is late", |_, state| {
                state.nodes.iter().filter(|node| node.refund == Some(1)).count() > 1
            }));
        }
        if self.local && self.refunds {
            properties.push(Property::<Self>::sometimes("memory takes back", |_, state| {
                let gave = |node: &Node| node.receipt.as_ref().is_some_and(|r| r.local);
                state.nodes.iter().all(gave)
            }));
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
/// S14: nothing that passed is missing in the store.
pub const COUNTED: &str = "what has passed is counted";
/// S34: a refusal ends with its window,
pub const IN_ITS_WINDOW: &str = "what a node remembers is of this window";
/// and after a second, so that a refund by another node is seen.
pub const A_SECOND: &str = "what a node remembers was asked for within a second";
/// S33: one further limit for each node.
pub const LOCAL: &str = "no more than one limit passes in the memory of a node";

impl Breakable for Protocol {
    fn breaks(&self) -> Option<&'static str> {
        self.fault.map(Fault::breaks)
    }
}
