//! Several limits in one charge (S37): in one step of the store, or one limit after the other, with
//! tokens that are returned when one refuses, when a request is dropped, and when it fails. Messages
//! may take any time, and may be lost; a node may die at any time.
//!
//! A window may end at any time, each limit's by itself: so what is found holds for windows of any
//! length, for quotas of different lengths, and for any number of windows.

use stateright::{Model, Property};

use crate::look::Breakable;

/// The parameters of a model.
#[derive(Clone, Debug)]
pub struct Groups {
    pub nodes: usize,
    /// Tokens in a window of each limit.
    pub limits: [u8; 2],
    /// The cost of a request under each limit.
    pub costs: [u8; 2],
    /// The sets of limits that requests ask for, in the order of their charges.
    pub asked: &'static [&'static [usize]],
    /// The store can't charge several limits in one step.
    pub in_order: bool,
    /// Clients refund their tokens. Each client keeps one receipt at most.
    pub refunds: bool,
    /// Requests without an answer are counted in memory.
    pub local: bool,
    /// A safety measure that is left out.
    pub fault: Option<Fault>,
}

/// Requests that ask for both limits.
pub const TOGETHER: &[&[usize]] = &[&[0, 1]];
/// Other requests ask for the second limit alone.
pub const AND_ALONE: &[&[usize]] = &[&[0, 1], &[1]];
/// Others that ask for them the other way round.
pub const BOTH_WAYS: &[&[usize]] = &[&[0, 1], &[1, 0]];

/// The smallest one in order in which every promise can be broken.
pub const IN_ORDER: Groups = Groups {
    nodes: 2,
    limits: [2, 1],
    costs: [1, 1],
    asked: TOGETHER,
    in_order: true,
    refunds: false,
    local: false,
    fault: None,
};

/// The same in one step.
pub const IN_ONE_STEP: Groups = Groups { in_order: false, ..IN_ORDER };

/// The faults that can be built in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// A refused charge keeps the tokens of its first limit.
    RefusedKeeps,
    /// Tokens taken by a call whose request was dropped are not returned.
    DroppedKeeps,
    /// Tokens are returned again if the answer to their return was lost.
    ReturnedTwice,
    /// The store accepts returns to a window that is over.
    ReturnedAcross,
    /// A refused charge also returns tokens that the refusing limit has not taken.
    ReturnsUntaken,
    /// Tokens taken in a node's memory are returned to the store.
    ReturnedElsewhere,
    /// A request passes as soon as its first limit passes.
    PassesByTheFirst,
    /// A charge that memory refuses keeps the tokens of its first limit there.
    RefusedKeepsInMemory,
    /// In one step: the first limit is written before the second is read.
    WritesTooEarly,
    /// In one step: other charges run between reading the limits and writing them.
    LooksThenTakes,
    /// In one step: others run between the limits.
    TakesOneByOne,
}

impl Fault {
    pub const ALL: [Self; 11] = [
        Self::RefusedKeeps,
        Self::DroppedKeeps,
        Self::ReturnedTwice,
        Self::ReturnedAcross,
        Self::ReturnsUntaken,
        Self::ReturnedElsewhere,
        Self::PassesByTheFirst,
        Self::RefusedKeepsInMemory,
        Self::WritesTooEarly,
        Self::LooksThenTakes,
        Self::TakesOneByOne,
    ];

    /// The promise that it breaks.
    pub fn breaks(self) -> &'static str {
        match self {
            Self::RefusedKeeps | Self::DroppedKeeps | Self::WritesTooEarly => NOTHING_KEPT,
            Self::ReturnedTwice | Self::ReturnedAcross | Self::ReturnsUntaken => LIMIT,
            Self::ReturnedElsewhere | Self::LooksThenTakes => LIMIT,
            Self::PassesByTheFirst => ALL_COUNTED,
            Self::RefusedKeepsInMemory => NOTHING_KEPT_IN_MEMORY,
            Self::TakesOneByOne => NOT_SEEN,
        }
    }

    /// The smallest model that has it.
    pub fn model(self) -> Groups {
        let base = match self {
            Self::WritesTooEarly | Self::LooksThenTakes => IN_ONE_STEP,
            Self::ReturnedElsewhere => Groups { limits: [1, 1], ..IN_ORDER },
            Self::TakesOneByOne => Groups { limits: [1, 1], asked: AND_ALONE, ..IN_ONE_STEP },
            _ => IN_ORDER,
        };
        let local = matches!(self, Self::ReturnedElsewhere | Self::RefusedKeepsInMemory);
        Groups { fault: Some(self), local, ..base }
    }
}

/// Everything there is at an instant.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    counts: [Count; 2],
    /// In order: which is which makes no difference.
    nodes: Vec<Node>,
}

impl State {
    /// The calls of a request that waits, and of one that waits no more.
    fn calls(&self) -> impl Iterator<Item = &Call> {
        let waited = self.nodes.iter().filter_map(|node| Some(&node.request.as_ref()?.call));
        waited.chain(self.nodes.iter().filter_map(|node| node.left.as_ref()))
    }

    fn refused_early(&self) -> bool {
        self.calls().any(|call| call.way == Way::Refused { early: true })
    }
}

/// A limit in the store, in the window that runs.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
struct Count {
    used: u8,
    /// Tokens of requests that passed, without refunds.
    passed: u8,
    /// Tokens that stay counted by an exception of S37: a node crashed, or an answer or a return
    /// was lost.
    excepted: u8,
    /// Tokens on their way back.
    returning: u8,
    /// Tokens on their way back to windows that are over, where that makes a difference.
    outdated: u8,
}

/// A process.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Node {
    request: Option<Request>,
    /// The call of a request that waits for it no more. What it takes is returned.
    left: Option<Call>,
    /// A pass that may be refunded.
    receipt: Option<[Token; 2]>,
    memory: [Memory; 2],
}

/// A limit in the memory of a node.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Memory {
    used: u8,
    passed: u8,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Request {
    asks: &'static [usize],
    /// The tokens taken from each limit so far, until all limits have passed.
    tokens: [Token; 2],
    call: Call,
}

/// The token that a request has from a limit.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Token {
    /// No token, or none of the current window.
    #[default]
    None,
    Taken,
    InMemory,
    /// A token of a window that is over, where that makes a difference.
    Outdated,
}

/// A charge of limits, or its answer, in flight.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Call {
    limits: &'static [usize],
    way: Way,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Way {
    Asked,
    /// The store has begun, and is not done: where one step is several.
    Begun([Token; 2]),
    Passed([Token; 2]),
    Refused {
        /// Only because of tokens that no request has in the end.
        early: bool,
    },
}

/// A step, mostly of one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// Ends a limit's window.
    End(usize),
    Send(usize, &'static [usize]),
    Execute(usize),
    Answer(usize),
    Lose(usize),
    /// The deadline passes: the request is answered from memory.
    GiveUp(usize),
    /// The request is dropped, or ends in an error.
    Drop(usize),
    ExecuteLeft(usize),
    AnswerLeft(usize),
    LoseLeft(usize),
    Refund(usize),
    ReturnArrives(usize),
    ReturnArrivesAndIsSentAgain(usize),
    ReturnIsLost(usize),
    OutdatedReturnArrives(usize),
    Crash(usize),
}

impl Groups {
    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    /// The next call of a request: for the first of these limits, or in one step for all of them.
    fn call(&self, asks: &'static [usize]) -> Call {
        Call { limits: if self.in_order { &asks[..1] } else { asks }, way: Way::Asked }
    }

    fn end(&self, state: &mut State, limit: usize) {
        let outdated = match self.is(Fault::ReturnedAcross) {
            true => state.counts[limit].outdated + state.counts[limit].returning,
            false => 0,
        };
        state.counts[limit] = Count { outdated, ..Count::default() };
        for node in &mut state.nodes {
            node.memory[limit] = Memory::default();
            let calls = node.request.as_mut().map(|request| &mut request.call);
            let ways = calls.into_iter().chain(&mut node.left).map(|call| &mut call.way);
            let answers = ways.filter_map(|way| match way {
                Way::Passed(tokens) | Way::Begun(tokens) => Some(tokens),
                Way::Asked | Way::Refused { .. } => None,
            });
            for tokens in answers.chain(&mut node.receipt) {
                self.outdate(&mut tokens[limit]);
            }
            node.request.iter_mut().for_each(|request| self.outdate(&mut request.tokens[limit]));
            node.receipt.take_if(|tokens| *tokens == [Token::None; 2]);
        }
    }

    fn outdate(&self, token: &mut Token) {
        *token = match *token {
            Token::Taken | Token::Outdated if self.is(Fault::ReturnedAcross) => Token::Outdated,
            _ => Token::None,
        };
    }

    fn has_room(&self, state: &State, limit: usize) -> bool {
        state.counts[limit].used + self.costs[limit] <= self.limits[limit]
    }

    /// The tokens that requests will have from a limit, and those that stay counted without a
    /// request.
    fn in_the_end(&self, state: &State, limit: usize) -> u8 {
        let passed =
            |call: &&Call| matches!(call.way, Way::Passed(tokens) if tokens[limit] == Token::Taken);
        let on_their_way = state.calls().filter(passed).count() as u8 * self.costs[limit];
        let Count { passed, excepted, returning, .. } = state.counts[limit];
        passed + excepted + returning + on_their_way
    }

    /// The tokens of requests that have not passed all of their limits yet.
    fn held(&self, state: &State, limit: usize) -> u8 {
        let requests = state.nodes.iter().filter_map(|node| node.request.as_ref());
        let held = requests.filter(|request| request.tokens[limit] == Token::Taken);
        let begun =
            |call: &&Call| matches!(call.way, Way::Begun(tokens) if tokens[limit] == Token::Taken);
        (held.count() + state.calls().filter(begun).count()) as u8 * self.costs[limit]
    }

    /// The store decides.
    fn execute(&self, state: &mut State, call: &mut Call) {
        let refused = |state: &State| Way::Refused {
            early: call.limits.iter().all(|&limit| {
                self.in_the_end(state, limit) + self.costs[limit] <= self.limits[limit]
            }),
        };
        let has_room = call.limits.iter().all(|&limit| self.has_room(state, limit));
        let mut tokens = [Token::None; 2];
        let take = |state: &mut State, tokens: &mut [Token; 2], limit: usize| {
            state.counts[limit].used += self.costs[limit];
            tokens[limit] = Token::Taken;
        };
        call.way = match (call.way.clone(), self.fault) {
            (Way::Asked, Some(Fault::LooksThenTakes)) if has_room => Way::Begun(tokens),
            (Way::Asked, Some(Fault::TakesOneByOne)) if call.limits.len() > 1 => {
                let first = call.limits[0];
                if self.has_room(state, first) {
                    take(state, &mut tokens, first);
                    Way::Begun(tokens)
                } else {
                    refused(state)
                }
            }
            (Way::Begun(begun), Some(Fault::TakesOneByOne)) => {
                tokens = begun;
                if self.has_room(state, call.limits[1]) {
                    take(state, &mut tokens, call.limits[1]);
                    Way::Passed(tokens)
                } else {
                    let first = call.limits[0];
                    if tokens[first] == Token::Taken {
                        state.counts[first].used -= self.costs[first];
                    }
                    refused(state)
                }
            }
            (way, _) if has_room || matches!(way, Way::Begun(_)) => {
                call.limits.iter().for_each(|&limit| take(state, &mut tokens, limit));
                Way::Passed(tokens)
            }
            _ => {
                let way = refused(state);
                let first = call.limits[0];
                if self.is(Fault::WritesTooEarly) && self.has_room(state, first) {
                    state.counts[first].used += self.costs[first];
                }
                way
            }
        };
    }

    /// A request has the answer to its call.
    fn answer(&self, state: &mut State, node: usize) {
        let Some(mut request) = state.nodes[node].request.take() else { return };
        match request.call.way {
            Way::Passed(taken) => {
                for &limit in request.call.limits {
                    request.tokens[limit] = taken[limit];
                }
                self.continue_request(state, node, request);
            }
            Way::Refused { .. } => {
                if self.is(Fault::ReturnsUntaken) {
                    request.call.limits.iter().for_each(|&l| request.tokens[l] = Token::Taken);
                }
                if !self.is(Fault::RefusedKeeps) {
                    self.return_tokens(state, node, request.tokens);
                }
            }
            Way::Asked | Way::Begun(_) => unreachable!("there is no answer"),
        }
    }

    /// The limits of its last call have passed.
    fn continue_request(&self, state: &mut State, node: usize, mut request: Request) {
        let asked = request.call.limits.last().expect("there is one");
        let next = request.asks.iter().position(|limit| limit == asked).expect("it is one") + 1;
        let rest = &request.asks[next..];
        if self.is(Fault::PassesByTheFirst) {
            rest.iter().for_each(|&limit| request.tokens[limit] = Token::Taken);
        } else if !rest.is_empty() {
            request.call = self.call(rest);
            state.nodes[node].request = Some(request);
            return;
        }
        for (limit, token) in request.tokens.iter().enumerate() {
            match token {
                Token::Taken => state.counts[limit].passed += self.costs[limit],
                Token::InMemory => state.nodes[node].memory[limit].passed += self.costs[limit],
                Token::None | Token::Outdated => {}
            }
        }
        if self.refunds && request.tokens != [Token::None; 2] {
            state.nodes[node].receipt = Some(request.tokens);
        }
    }

    /// Memory decides on these limits, in one step, as the store did not.
    fn stand_in(&self, state: &mut State, node: usize, limits: &'static [usize]) {
        let Some(mut request) = state.nodes[node].request.take() else { return };
        let memory = &mut state.nodes[node].memory;
        let has_room =
            |memory: &Memory, limit: usize| memory.used + self.costs[limit] <= self.limits[limit];
        if self.local && limits.iter().all(|&limit| has_room(&memory[limit], limit)) {
            for &limit in limits {
                memory[limit].used += self.costs[limit];
                request.tokens[limit] = Token::InMemory;
            }
            request.call = Call { limits, way: Way::Passed(request.tokens) };
            self.continue_request(state, node, request);
            return;
        }
        let first = limits[0];
        if self.is(Fault::RefusedKeepsInMemory) && has_room(&memory[first], first) {
            memory[first].used += self.costs[first];
        }
        self.return_tokens(state, node, request.tokens);
    }

    /// Each limit's by a message of its own; in memory at once.
    fn return_tokens(&self, state: &mut State, node: usize, tokens: [Token; 2]) {
        for (limit, token) in tokens.into_iter().enumerate() {
            let count = &mut state.counts[limit];
            match token {
                Token::None => {}
                Token::Taken => count.returning += self.costs[limit],
                Token::Outdated => count.outdated += self.costs[limit],
                Token::InMemory if self.is(Fault::ReturnedElsewhere) => {
                    count.returning += self.costs[limit];
                }
                Token::InMemory => state.nodes[node].memory[limit].used -= self.costs[limit],
            }
        }
    }

    /// Tokens of a call whose answer is lost stay counted.
    fn forget(&self, state: &mut State, call: &Call) {
        if let Way::Passed(tokens) | Way::Begun(tokens) = call.way {
            self.except(state, tokens);
        }
    }

    fn except(&self, state: &mut State, tokens: [Token; 2]) {
        for (limit, token) in tokens.into_iter().enumerate() {
            if token == Token::Taken {
                state.counts[limit].excepted += self.costs[limit];
            }
        }
    }

    /// The rest of what a request asks for, from the call in flight on.
    fn rest(request: &Request) -> &'static [usize] {
        let first = request.call.limits[0];
        let at = request.asks.iter().position(|limit| *limit == first).expect("it is one");
        &request.asks[at..]
    }
}

impl Model for Groups {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        let nodes = vec![Node::default(); self.nodes];
        vec![State { counts: [Count::default(); 2], nodes }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        let executed = |call: &Call| matches!(call.way, Way::Passed(_) | Way::Refused { .. });
        for (limit, count) in state.counts.iter().enumerate() {
            steps.push(Step::End(limit));
            if count.returning > 0 {
                steps.extend([Step::ReturnArrives(limit), Step::ReturnIsLost(limit)]);
                if self.is(Fault::ReturnedTwice) {
                    steps.push(Step::ReturnArrivesAndIsSentAgain(limit));
                }
            }
            if count.outdated > 0 {
                steps.push(Step::OutdatedReturnArrives(limit));
            }
        }
        for (i, node) in state.nodes.iter().enumerate() {
            if i > 0 && state.nodes[i - 1] == *node {
                // An equal node would take the same steps.
                continue;
            }
            match &node.request {
                None => steps.extend(self.asked.iter().map(|asks| Step::Send(i, asks))),
                Some(request) => {
                    let executed = executed(&request.call);
                    steps.push(if executed { Step::Answer(i) } else { Step::Execute(i) });
                    steps.push(Step::Lose(i));
                    if node.left.is_none() {
                        steps.push(Step::Drop(i));
                        if self.local {
                            steps.push(Step::GiveUp(i));
                        }
                    }
                }
            }
            if let Some(left) = &node.left {
                let executed = executed(left);
                steps.push(if executed { Step::AnswerLeft(i) } else { Step::ExecuteLeft(i) });
                steps.push(Step::LoseLeft(i));
            }
            if node.receipt.is_some() {
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
            Step::End(limit) => self.end(&mut state, limit),
            Step::Send(i, asks) => {
                let tokens = [Token::None; 2];
                state.nodes[i].request = Some(Request { asks, tokens, call: self.call(asks) });
            }
            Step::Execute(i) => {
                let mut call = state.nodes[i].request.as_ref()?.call.clone();
                self.execute(&mut state, &mut call);
                state.nodes[i].request.as_mut()?.call = call;
            }
            Step::Answer(i) => self.answer(&mut state, i),
            Step::Lose(i) => {
                let call = state.nodes[i].request.as_ref()?.call.clone();
                self.forget(&mut state, &call);
                self.stand_in(&mut state, i, call.limits);
            }
            Step::GiveUp(i) => {
                let request = state.nodes[i].request.as_ref()?;
                let (call, rest) = (request.call.clone(), Self::rest(request));
                state.nodes[i].left = Some(call);
                self.stand_in(&mut state, i, rest);
            }
            Step::Drop(i) => {
                let request = state.nodes[i].request.take()?;
                state.nodes[i].left = Some(request.call);
                self.return_tokens(&mut state, i, request.tokens);
            }
            Step::ExecuteLeft(i) => {
                let mut call = state.nodes[i].left.clone()?;
                self.execute(&mut state, &mut call);
                state.nodes[i].left = Some(call);
            }
            Step::AnswerLeft(i) => {
                let call = state.nodes[i].left.take()?;
                if let Way::Passed(tokens) = call.way
                    && !self.is(Fault::DroppedKeeps)
                {
                    self.return_tokens(&mut state, i, tokens);
                }
            }
            Step::LoseLeft(i) => {
                let call = state.nodes[i].left.take()?;
                self.forget(&mut state, &call);
            }
            Step::Refund(i) => {
                let tokens = state.nodes[i].receipt.take()?;
                for (limit, token) in tokens.iter().enumerate() {
                    match token {
                        Token::Taken => state.counts[limit].passed -= self.costs[limit],
                        Token::InMemory => {
                            state.nodes[i].memory[limit].passed -= self.costs[limit];
                        }
                        Token::None | Token::Outdated => {}
                    }
                }
                self.return_tokens(&mut state, i, tokens);
            }
            Step::ReturnArrives(limit) | Step::ReturnArrivesAndIsSentAgain(limit) => {
                let (count, cost) = (&mut state.counts[limit], self.costs[limit]);
                if step == Step::ReturnArrives(limit) {
                    count.returning -= cost;
                }
                count.used = count.used.saturating_sub(cost);
            }
            Step::ReturnIsLost(limit) => {
                let (count, cost) = (&mut state.counts[limit], self.costs[limit]);
                count.returning -= cost;
                count.excepted += cost;
            }
            Step::OutdatedReturnArrives(limit) => {
                let (count, cost) = (&mut state.counts[limit], self.costs[limit]);
                count.outdated -= cost;
                count.used = count.used.saturating_sub(cost);
            }
            // Returns that a node has sent may still arrive after its crash.
            Step::Crash(i) => {
                let node = std::mem::take(&mut state.nodes[i]);
                if let Some(request) = node.request {
                    self.except(&mut state, request.tokens);
                    self.forget(&mut state, &request.call);
                }
                if let Some(call) = node.left {
                    self.forget(&mut state, &call);
                }
            }
        }
        state.nodes.sort_unstable();
        Some(state)
    }

    /// With a fault there is no end to what passes, and to what is on its way.
    fn within_boundary(&self, state: &State) -> bool {
        self.fault.is_none()
            || state.counts.iter().zip(self.limits).all(|(count, limit)| {
                let Count { used, passed, excepted, returning, outdated } = *count;
                [used, passed, excepted, returning, outdated].iter().all(|n| *n <= 3 * limit)
            })
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::<Self>::always(LIMIT, |groups, state| {
                let counts = state.counts.iter().zip(groups.limits);
                counts.into_iter().all(|(count, limit)| count.passed <= limit)
            }),
            Property::<Self>::always(ALL_COUNTED, |_, state| {
                state.counts.iter().all(|count| count.passed <= count.used)
            }),
            Property::<Self>::always(NOTHING_KEPT, |groups, state| {
                (0..2).all(|limit| {
                    let known = groups.in_the_end(state, limit) + groups.held(state, limit);
                    state.counts[limit].used <= known
                })
            }),
            Property::<Self>::always(MEMORY, |groups, state| {
                let memory = state.nodes.iter().flat_map(|node| node.memory.iter());
                memory.zip(groups.limits.iter().cycle()).all(|(memory, &l)| memory.passed <= l)
            }),
            Property::<Self>::always(NOTHING_KEPT_IN_MEMORY, |groups, state| {
                state.nodes.iter().all(|node| {
                    let tokens = node.request.as_ref().map_or(Default::default(), |r| r.tokens);
                    (0..2).all(|limit| {
                        let holds = u8::from(tokens[limit] == Token::InMemory);
                        let Memory { used, passed } = node.memory[limit];
                        used == passed + holds * groups.costs[limit]
                    })
                })
            }),
            // These states are reached, so that the proofs above are not empty.
            Property::<Self>::sometimes("both limits pass in full", |groups, state| {
                let counts = state.counts.iter().zip(groups.limits).zip(groups.costs);
                counts.into_iter().all(|((count, limit), cost)| count.passed > limit - cost)
                    || groups.asked == TOGETHER
                        && state.counts.iter().zip(groups.limits).any(|(c, l)| c.passed == l)
            }),
            Property::<Self>::sometimes("tokens of both are on their way back", |_, state| {
                state.counts.iter().all(|count| count.returning > 0)
            }),
            Property::<Self>::sometimes("tokens of both stay counted", |_, state| {
                state.counts.iter().all(|count| count.excepted > 0)
            }),
        ];
        properties.push(match self.in_order {
            // An exception of S37.
            true => Property::<Self>::sometimes("a request is refused early", |_, state| {
                state.refused_early()
            }),
            false => Property::<Self>::always(NOT_SEEN, |_, state| !state.refused_early()),
        });
        if self.local {
            properties.push(Property::<Self>::sometimes(
                "memory passes in full",
                |groups, state| {
                    let limits = groups.limits;
                    state
                        .nodes
                        .iter()
                        .all(|node| (0..2).any(|l| node.memory[l].passed == limits[l]))
                },
            ));
        }
        properties
    }
}

impl Breakable for Groups {
    fn breaks(&self) -> Option<&'static str> {
        self.fault.map(Fault::breaks)
    }
}

/// S7: no more than the limit.
pub const LIMIT: &str = "no more than the limit passes in a window";
/// S14, S37: what passed was taken from each of its limits.
pub const ALL_COUNTED: &str = "what has passed is counted in each limit";
/// S37: but for tokens of nodes that died, and for answers and returns that were lost.
pub const NOTHING_KEPT: &str = "nothing is kept of a charge that was refused or dropped";
/// S37, for limits in one step.
pub const NOT_SEEN: &str = "no request is refused by tokens of one that is refused";
/// S33: one further limit for each node.
pub const MEMORY: &str = "no more than one limit passes in the memory of a node";
/// S37, in memory.
pub const NOTHING_KEPT_IN_MEMORY: &str = "memory keeps nothing of a charge that was refused";
