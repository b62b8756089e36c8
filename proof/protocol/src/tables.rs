//! Nodes over one table of counters that reads and writes (S42): charges that wait share a call,
//! which reads, decides, and writes what has not changed; a node that has just written a counter
//! does without the read. Messages may take any time, and may be lost; callers leave.
//!
//! There is one counter. A window may end at any time, so what is found holds for windows of any
//! length; a call lasts into the next window at most, and what is known of a counter as well.

use stateright::{Model, Property};

use crate::look::Breakable;

/// The parameters of a model.
#[derive(Clone, Debug)]
pub struct Tables {
    pub nodes: usize,
    /// Tokens in a window.
    pub limit: u8,
    /// Charges in a call, at most.
    pub together: u8,
    /// The table adds to what others have taken, if there is room.
    pub adds: bool,
    /// A safety measure that is left out.
    pub fault: Option<Fault>,
}

/// The smallest model in which every promise but one can be broken.
pub const TABLE: Tables = Tables { nodes: 2, limit: 2, together: 2, adds: true, fault: None };

/// The faults that can be built in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The table writes what has changed.
    WritesOver,
    /// The table adds beyond the limit.
    AddsAbove,
    /// Answers don't say what others have taken before the write.
    ToldByTheRead,
    /// What was written without a read counts, though its window had ended.
    CountsAfterItsEnd,
    /// A call that was lost is repeated.
    Repeats,
    /// A call whose callers have left is written.
    WritesForNobody,
    /// What met a change is taken for written.
    IgnoresConflicts,
}

impl Fault {
    pub const ALL: [Self; 7] = [
        Self::WritesOver,
        Self::AddsAbove,
        Self::ToldByTheRead,
        Self::CountsAfterItsEnd,
        Self::Repeats,
        Self::WritesForNobody,
        Self::IgnoresConflicts,
    ];

    /// The promise that it breaks.
    pub fn breaks(self) -> &'static str {
        match self {
            Self::WritesOver | Self::IgnoresConflicts => COUNTED,
            Self::AddsAbove => LIMIT,
            Self::ToldByTheRead => PLACES,
            Self::CountsAfterItsEnd => RAN,
            Self::Repeats | Self::WritesForNobody => NOTHING_KEPT,
        }
    }

    /// The smallest model that has it.
    pub fn model(self) -> Tables {
        let limit = if self == Self::ToldByTheRead { 3 } else { TABLE.limit };
        Tables { fault: Some(self), limit, ..TABLE }
    }
}

/// A counter as a row or a node has it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Row {
    /// Windows that have begun since its own.
    age: u8,
    used: u8,
}

/// What has passed in a window.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Debug)]
struct Passed {
    tokens: u8,
    /// A bit for each token that an answer has named.
    told: u16,
}

/// Everything there is at an instant.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    row: Option<Row>,
    /// In the window that runs, and in the one before.
    passed: [Passed; 2],
    /// Tokens of calls that were lost after they had been written, in the window that runs.
    excepted: u8,
    /// Two answers have named a token.
    told_twice: bool,
    /// A charge has passed in a window that had ended before it was asked.
    was_late: bool,
    /// A charge has passed that had read nothing.
    was_unread: bool,
    /// The order makes no difference, so it is fixed.
    nodes: Vec<Node>,
}

/// A process.
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Node {
    call: Option<Call>,
    /// What it has written last.
    known: Option<Row>,
}

/// A call in flight.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
struct Call {
    charges: u8,
    /// Windows that have begun since it was asked.
    age: u8,
    /// Its callers still wait; they did not when it was decided.
    wanted: bool,
    for_nobody: bool,
    way: Way,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Way {
    Reads,
    /// What was read, in the window that ran then, of this age.
    HasRead(Option<Row>, u8),
    /// So many charges pass; the row was this, and is to be that.
    Writes {
        passing: u8,
        had: Option<Row>,
        new: Row,
        unread: bool,
    },
    /// The row as it is then, and whether the window of a call that had read nothing ran.
    Wrote {
        passing: u8,
        had: Option<Row>,
        row: Row,
        unread: bool,
        runs: bool,
    },
    Changed,
}

/// A step, mostly of one node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Step {
    /// The window ends, and another one begins.
    End,
    /// The table deletes a row that has ended.
    Delete,
    Ask(usize, u8),
    /// What is known is used.
    AskUnread(usize, u8),
    Execute(usize),
    Answer(usize),
    Lose(usize),
    Leave(usize),
}

impl Row {
    fn end(self) -> Option<Self> {
        (self.age == 0).then_some(Self { age: 1, ..self })
    }
}

impl Call {
    /// Ages of windows that it has to do with.
    fn ages(&self) -> Vec<u8> {
        let mut ages = vec![self.age];
        match &self.way {
            Way::HasRead(_, age) => ages.push(*age),
            Way::Writes { new, .. } => ages.push(new.age),
            Way::Wrote { row, .. } => ages.push(row.age),
            Way::Reads | Way::Changed => {}
        }
        ages
    }
}

impl Tables {
    fn is(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn end(&self, state: &mut State) {
        let older = |row: Row| Row { age: row.age.saturating_add(1).min(2), ..row };
        state.row = state.row.map(older);
        state.passed = [Passed::default(), state.passed[0]];
        state.excepted = 0;
        for node in &mut state.nodes {
            node.known = node.known.and_then(Row::end);
            let Some(call) = &mut node.call else { continue };
            call.age += 1;
            match &mut call.way {
                Way::HasRead(row, age) => (*row, *age) = (row.map(older), *age + 1),
                Way::Writes { had, new, .. } => (*had, new.age) = (had.map(older), new.age + 1),
                Way::Wrote { had, row, .. } => (*had, row.age) = (had.map(older), row.age + 1),
                Way::Reads | Way::Changed => {}
            }
        }
    }

    /// The table answers.
    fn execute(&self, state: &mut State, call: &mut Call) {
        call.way = match call.way.clone() {
            Way::Reads => Way::HasRead(state.row, 0),
            Way::Writes { passing, had, new, unread } => {
                let row = self.write(state.row, had, new, passing);
                if row.is_none() && !self.is(Fault::IgnoresConflicts) {
                    call.way = Way::Changed;
                    return;
                }
                state.row = row.or(state.row);
                let row = row.unwrap_or(new);
                Way::Wrote { passing, had, row, unread, runs: row.age == 0 }
            }
            way => way,
        };
    }

    /// The row that is written, if it may be.
    fn write(&self, row: Option<Row>, had: Option<Row>, new: Row, passing: u8) -> Option<Row> {
        if row == had || self.is(Fault::WritesOver) {
            return Some(new);
        }
        let (row, had) = (row?, had?);
        let has_room = row.used + passing <= self.limit || self.is(Fault::AddsAbove);
        let adds = self.adds && row.age == had.age && had.age == new.age && row.used >= had.used;
        (adds && has_room).then_some(Row { used: row.used + passing, ..row })
    }

    fn answer(&self, state: &mut State, node: usize) -> Option<()> {
        let mut call = state.nodes[node].call.take()?;
        match call.way {
            // Nobody waits: nothing is written.
            Way::HasRead(..) if !call.wanted && !self.is(Fault::WritesForNobody) => return Some(()),
            Way::HasRead(had, age) => {
                let used = had.filter(|row| row.age == age).map_or(0, |row| row.used);
                let passing = call.charges.min(self.limit.saturating_sub(used));
                if passing == 0 {
                    return Some(());
                }
                let new = Row { age, used: used + passing };
                call.for_nobody = !call.wanted;
                call.way = Way::Writes { passing, had, new, unread: false };
            }
            Way::Wrote { runs: false, unread: true, .. } if !self.is(Fault::CountsAfterItsEnd) => {
                call.way = Way::Reads;
            }
            Way::Wrote { passing, had, row, unread, .. } => {
                state.nodes[node].known = Some(row);
                if call.for_nobody {
                    return Some(());
                }
                state.was_unread |= unread;
                state.was_late |= row.age > call.age;
                let passed = state.passed.get_mut(usize::from(row.age))?;
                passed.tokens += passing;
                let last = match had {
                    Some(had) if self.is(Fault::ToldByTheRead) && had.age == row.age => {
                        had.used + passing
                    }
                    _ => row.used,
                };
                for place in last.saturating_sub(passing)..last {
                    state.told_twice |= passed.told & 1 << place > 0;
                    passed.told |= 1 << place;
                }
                return Some(());
            }
            _ => call.way = Way::Reads,
        }
        state.nodes[node].call = Some(call);
        Some(())
    }
}

impl Model for Tables {
    type State = State;
    type Action = Step;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            row: None,
            passed: Default::default(),
            excepted: 0,
            told_twice: false,
            was_late: false,
            was_unread: false,
            nodes: vec![Node::default(); self.nodes],
        }]
    }

    fn actions(&self, state: &State, steps: &mut Vec<Step>) {
        // A call lasts into one more window at most.
        let calls = || state.nodes.iter().filter_map(|node| node.call.as_ref());
        if calls().all(|call| call.ages().iter().all(|age| *age == 0)) {
            steps.push(Step::End);
        }
        // Longer than a node stands still.
        if state.row.is_some_and(|row| row.age > 0) && calls().next().is_none() {
            steps.push(Step::Delete);
        }
        for (i, node) in state.nodes.iter().enumerate() {
            if i > 0 && state.nodes[i - 1] == *node {
                // An equal node would take the same steps.
                continue;
            }
            let Some(call) = &node.call else {
                for charges in 1..=self.together {
                    steps.push(Step::Ask(i, charges));
                    if node.known.is_some_and(|known| known.used + charges <= self.limit) {
                        steps.push(Step::AskUnread(i, charges));
                    }
                }
                continue;
            };
            let is_asked = matches!(call.way, Way::Reads | Way::Writes { .. });
            steps.push(if is_asked { Step::Execute(i) } else { Step::Answer(i) });
            steps.push(Step::Lose(i));
            if call.wanted {
                steps.push(Step::Leave(i));
            }
        }
    }

    fn next_state(&self, last: &State, step: Step) -> Option<State> {
        let mut state = last.clone();
        match step {
            Step::End => self.end(&mut state),
            Step::Delete => state.row = None,
            Step::Ask(i, charges) => {
                let call =
                    Call { charges, age: 0, wanted: true, for_nobody: false, way: Way::Reads };
                state.nodes[i].call = Some(call);
            }
            Step::AskUnread(i, charges) => {
                // It is forgotten until the call is answered.
                let known = state.nodes[i].known.take()?;
                let new = Row { used: known.used + charges, ..known };
                let way = Way::Writes { passing: charges, had: Some(known), new, unread: true };
                state.nodes[i].call =
                    Some(Call { charges, age: 0, wanted: true, for_nobody: false, way });
            }
            Step::Execute(i) => {
                let mut call = state.nodes[i].call.take()?;
                self.execute(&mut state, &mut call);
                state.nodes[i].call = Some(call);
            }
            Step::Answer(i) => self.answer(&mut state, i)?,
            Step::Lose(i) => {
                let call = state.nodes[i].call.take()?;
                if self.is(Fault::Repeats) {
                    state.nodes[i].call = Some(Call { way: Way::Reads, ..call });
                } else if let Way::Wrote { passing, row, .. } = call.way
                    && row.age == 0
                {
                    state.excepted += passing;
                }
            }
            Step::Leave(i) => state.nodes[i].call.as_mut()?.wanted = false,
        }
        state.nodes.sort_unstable();
        Some(state)
    }

    /// With a fault there is no end to what passes.
    fn within_boundary(&self, state: &State) -> bool {
        let most = 2 * self.limit;
        state.row.is_none_or(|row| row.used <= most)
            && state.passed.iter().all(|passed| passed.tokens <= most)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::<Self>::always(LIMIT, |tables, state| {
                state.passed.iter().all(|passed| passed.tokens <= tables.limit)
            }),
            Property::<Self>::always(COUNTED, |_, state| {
                let used = state.row.filter(|row| row.age == 0).map_or(0, |row| row.used);
                state.passed[0].tokens <= used
            }),
            Property::<Self>::always(NOTHING_KEPT, |_, state| {
                let written = state.nodes.iter().filter_map(|node| match node.call.as_ref()?.way {
                    Way::Wrote { passing, row: Row { age: 0, .. }, .. } => Some(passing),
                    _ => None,
                });
                let known = state.passed[0].tokens + state.excepted + written.sum::<u8>();
                state.row.is_none_or(|row| row.age > 0 || row.used <= known)
            }),
            Property::<Self>::always(PLACES, |_, state| !state.told_twice),
            Property::<Self>::always(RAN, |_, state| !state.was_late),
            // These states are reached, so that the proofs above are not empty.
            Property::<Self>::sometimes("a window is full", |tables, state| {
                state.passed[0].tokens == tables.limit
            }),
            Property::<Self>::sometimes("a charge passes without a read", |_, state| {
                state.was_unread
            }),
            Property::<Self>::sometimes("a node has to read again", |_, state| {
                let mut calls = state.nodes.iter().filter_map(|node| node.call.as_ref());
                calls.any(|call| call.way == Way::Changed)
            }),
        ]
    }
}

impl Breakable for Tables {
    fn breaks(&self) -> Option<&'static str> {
        self.fault.map(Fault::breaks)
    }
}

/// S7: no more than the limit.
pub const LIMIT: &str = "no more than the limit passes in a window";
/// S14, S42.
pub const COUNTED: &str = "what has passed is counted";
/// S42: but for calls whose answer was lost.
pub const NOTHING_KEPT: &str = "nothing is kept of a charge that has not passed";
/// S3: the numbers of answers.
pub const PLACES: &str = "no two answers name a token";
/// S3, S42.
pub const RAN: &str = "a charge passes in a window that ran after it was asked";
