//! A history lists events in order. Checks read it, and a seed prints it.

use std::fmt;
use std::sync::{Arc, Mutex};

use tokio::time::Instant;
use tower_fixed_window::Decision;

use crate::plan::{Ask, Fault};
use crate::server::{Reply, Write};

#[derive(Debug)]
pub enum Event {
    Asked {
        id: usize,
        node: usize,
        ask: Ask,
    },
    /// A charge was decided.
    Decided {
        id: usize,
        decision: Decision,
    },
    /// The service behind the layer was called.
    Called {
        id: usize,
    },
    Responded {
        id: usize,
        status: u16,
    },
    /// A call without a decision is done: a peek, a reset.
    Done {
        id: usize,
    },
    Failed {
        id: usize,
        error: String,
    },
    /// The caller has dropped the call.
    GaveUp {
        id: usize,
    },
    /// The caller gives tokens of its charge back, or drops a request whose charge goes back.
    Returns {
        id: usize,
        line: usize,
        tokens: u64,
    },

    Connected {
        node: usize,
        connection: usize,
        host: usize,
    },
    Refused {
        node: usize,
    },
    Dropped {
        node: usize,
        connection: usize,
    },
    Executed {
        node: usize,
        connection: usize,
        host: usize,
        command: Vec<Vec<u8>>,
        reply: Reply,
        writes: Vec<Write>,
        /// Keys that were named and are not there afterwards.
        absent: Vec<Vec<u8>>,
    },

    Fault(Fault),
    /// Writes were lost.
    Lost,
    Healed,
    /// From here on everything has to be answered by Redis.
    Settled,
    /// All stores are dropped.
    Over,
    /// Sockets and tasks were still there some time later.
    Left {
        sockets: usize,
        tasks: usize,
    },
    Panicked(String),
}

/// An event, and when it happened in microseconds since the beginning.
pub type Entry = (i64, Event);

#[derive(Clone)]
pub struct History {
    began: Instant,
    entries: Arc<Mutex<Vec<Entry>>>,
}

impl History {
    pub fn began_now() -> Self {
        Self { began: Instant::now(), entries: Arc::default() }
    }

    pub fn add(&self, event: Event) {
        let now = self.began.elapsed().as_micros() as i64;
        self.entries.lock().expect("nobody panics under it").push((now, event));
    }

    pub fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut self.entries.lock().expect("nobody panics under it"))
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asked { id, node, ask } => write!(f, "#{id} node {node} asks: {ask}"),
            Self::Decided { id, decision } => {
                let by = if decision.is_local() { "in memory" } else { "by Redis" };
                let passes = if decision.is_allowed() { "passes" } else { "is refused" };
                write!(f, "#{id} {passes} {by}: {:?}", decision.usage())?;
                for (name, of) in decision.limits() {
                    let passes = if of.is_allowed() { "passes" } else { "is refused" };
                    write!(f, "; {name} {passes}: {:?}", of.usage())?;
                }
                Ok(())
            }
            Self::Called { id } => write!(f, "#{id} reaches the service"),
            Self::Responded { id, status } => write!(f, "#{id} has its response, {status}"),
            Self::Done { id } => write!(f, "#{id} is done"),
            Self::Failed { id, error } => write!(f, "#{id} fails: {error}"),
            Self::GaveUp { id } => write!(f, "#{id} is dropped"),
            Self::Returns { id, line: 0, tokens } => write!(f, "#{id} gives back {tokens}"),
            Self::Returns { id, line, tokens } => {
                write!(f, "#{id} gives back {tokens} of line {line}")
            }
            Self::Connected { node, connection, host, .. } => {
                write!(f, "node {node} connects to host {host}: connection {connection}")
            }
            Self::Refused { node } => write!(f, "node {node} can't connect"),
            Self::Dropped { node, connection } => {
                write!(f, "node {node} drops connection {connection}")
            }
            Self::Executed { node, connection, host, command, reply, writes, .. } => {
                write!(f, "host {host} executes for node {node} over {connection}:")?;
                for arg in command {
                    // Scripts and their hashes say nothing here.
                    match arg.len() {
                        ..=39 => write!(f, " {}", String::from_utf8_lossy(arg))?,
                        _ => f.write_str(" ..")?,
                    }
                }
                match reply {
                    Reply::Bulk(bytes) => match bytes.as_chunks::<8>() {
                        ([used, _], []) => write!(f, " -> {}", i64::from_be_bytes(*used))?,
                        _ => write!(f, " -> {}", String::from_utf8_lossy(bytes))?,
                    },
                    reply => write!(f, " -> {reply:?}")?,
                }
                for write in writes {
                    let text = |fields: &crate::server::Fields| {
                        let field = |(name, value): (&Vec<u8>, &Vec<u8>)| {
                            let text = String::from_utf8_lossy;
                            format!("{}: {}", text(name), text(value))
                        };
                        fields.iter().map(field).collect::<Vec<_>>().join(", ")
                    };
                    let key = String::from_utf8_lossy(&write.key);
                    write!(f, "; {key} [{}] -> [{}]", text(&write.before), text(&write.after))?;
                }
                Ok(())
            }
            Self::Fault(fault) => write!(f, "** {fault:?}"),
            Self::Lost => write!(f, "** writes are lost"),
            Self::Healed => write!(f, "** healed"),
            Self::Settled => write!(f, "** from here on Redis has to answer"),
            Self::Over => write!(f, "** all stores are dropped"),
            Self::Left { sockets, tasks } => write!(f, "** left: {sockets} sockets, {tasks} tasks"),
            Self::Panicked(message) => write!(f, "** panic: {message}"),
        }
    }
}
