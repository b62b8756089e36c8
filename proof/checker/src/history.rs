//! Requests and answers as the clients saw them: as values, and as lines of text, so that a limiter
//! in any language can write a history.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::time::{SystemTime, UNIX_EPOCH};

/// A request and its answer. Times are microseconds since the Unix epoch, on the clock of the
/// machine that runs clients and store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ask {
    /// The process that was asked.
    pub node: u32,
    /// Different for each request of a node. A request for several limits is an [`Ask`] for each,
    /// with one id.
    pub id: u64,
    /// The client.
    pub key: u32,
    /// The tokens that were asked for.
    pub cost: u64,
    /// Before the limiter was called.
    pub sent: u64,
    /// After it had answered.
    pub received: u64,
    /// The limiter's answer.
    pub answer: Answer,
    /// When the refund of its tokens was sent.
    pub returned: Option<u64>,
    /// From when on it may run, if it has taken tokens of later windows.
    pub due: Option<u64>,
    /// When it was in a line already.
    pub joined: Option<u64>,
}

/// The outcome of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Answer {
    /// Passed by the count that all nodes share.
    Passed,
    /// Passed by its node's own count, in place of a store that failed.
    PassedLocally,
    /// Refused by the limit.
    Refused,
    /// Another limit has refused the same request: this one keeps nothing of it.
    Undone,
    /// The limiter failed: an error is neither.
    Failed,
    /// The client gave up: nobody knows what was decided.
    GaveUp,
}

impl Ask {
    /// Returns `true` for both kinds of passes.
    pub fn passed(&self) -> bool {
        matches!(self.answer, Answer::Passed | Answer::PassedLocally)
    }
}

/// The wall clock, in microseconds.
pub fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// A line of a history.
pub enum Line {
    /// `NODE ID KEY COST SENT RECEIVED ANSWER`.
    Asked(Ask),
    /// `NODE ID NOTE AT`, where `NOTE` is `returned`, `due` or `joined`.
    Noted { node: u32, id: u64, note: Note, at: u64 },
}

/// A fact about a request beside its answer: see the fields of [`Ask`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Note {
    Returned,
    Due,
    Joined,
}

impl Ask {
    /// The lines that it is written as.
    pub fn lines(&self) -> impl Iterator<Item = Line> {
        let Self { node, id, returned, due, joined, .. } = *self;
        let notes = [(Note::Returned, returned), (Note::Due, due), (Note::Joined, joined)];
        let noted =
            move |(note, at): (Note, Option<u64>)| Some(Line::Noted { node, id, note, at: at? });
        [Line::Asked(self.clone())].into_iter().chain(notes.into_iter().filter_map(noted))
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked(Ask { node, id, key, cost, sent, received, answer, .. }) => {
                let answer = match answer {
                    Answer::Passed => "passed",
                    Answer::PassedLocally => "passed-locally",
                    Answer::Refused => "refused",
                    Answer::Undone => "undone",
                    Answer::Failed => "failed",
                    Answer::GaveUp => "gave-up",
                };
                write!(f, "{node} {id} {key} {cost} {sent} {received} {answer}")
            }
            Self::Noted { node, id, note, at } => {
                let note = match note {
                    Note::Returned => "returned",
                    Note::Due => "due",
                    Note::Joined => "joined",
                };
                write!(f, "{node} {id} {note} {at}")
            }
        }
    }
}

impl FromStr for Line {
    type Err = String;

    fn from_str(line: &str) -> Result<Self, String> {
        let bad = || format!("not a line of a history: {line:?}");
        let number = |text: &str| text.parse::<u64>().map_err(|_| bad());
        let small = |text: &str| text.parse::<u32>().map_err(|_| bad());
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            [node, id, note, at] => {
                let note = match note {
                    "returned" => Note::Returned,
                    "due" => Note::Due,
                    "joined" => Note::Joined,
                    _ => return Err(bad()),
                };
                Ok(Self::Noted { node: small(node)?, id: number(id)?, note, at: number(at)? })
            }
            [node, id, key, cost, sent, received, answer] => {
                let answer = match answer {
                    "passed" => Answer::Passed,
                    "passed-locally" => Answer::PassedLocally,
                    "refused" => Answer::Refused,
                    "undone" => Answer::Undone,
                    "failed" => Answer::Failed,
                    "gave-up" => Answer::GaveUp,
                    _ => return Err(bad()),
                };
                Ok(Self::Asked(Ask {
                    node: small(node)?,
                    id: number(id)?,
                    key: small(key)?,
                    cost: number(cost)?,
                    sent: number(sent)?,
                    received: number(received)?,
                    answer,
                    returned: None,
                    due: None,
                    joined: None,
                }))
            }
            _ => Err(bad()),
        }
    }
}

/// Puts lines together: notes with the requests that they belong to.
pub fn collect(lines: impl IntoIterator<Item = Line>) -> Vec<Ask> {
    let (mut asks, mut notes) = (Vec::new(), HashMap::new());
    for line in lines {
        match line {
            Line::Asked(ask) => asks.push(ask),
            Line::Noted { node, id, note, at } => {
                notes.insert((node, id, note), at);
            }
        }
    }
    for ask in &mut asks {
        let noted = |note| notes.get(&(ask.node, ask.id, note)).copied();
        (ask.returned, ask.due) = (noted(Note::Returned), noted(Note::Due));
        ask.joined = noted(Note::Joined);
    }
    asks
}
