//! When the client library of a cluster held calls. While it looks for moved slots, it sends nothing, and it
//! connects to all nodes meanwhile, also to silent ones.

use std::collections::BTreeMap;

use crate::history::Event;
use crate::server::Reply;

/// The connections here are the library's, each of which has one socket or more to each node.
#[derive(Default)]
pub struct Holds {
    /// The connection of each socket.
    sockets: BTreeMap<usize, usize>,
    /// Sockets that have had no answer, and since when.
    connecting: BTreeMap<usize, i64>,
    /// From when until when a connection may have held calls.
    held: Vec<(usize, i64, i64)>,
    /// Since when each node's charges go over which connection.
    used: BTreeMap<usize, Vec<(i64, usize)>>,
}

impl Holds {
    /// Notes an event. `replaced`: until when the store replaces a connection that looks for moved slots
    /// over the socket of a silent node, if one is silent.
    pub fn note(&mut self, at: i64, event: &Event, replaced: Option<i64>) {
        match event {
            Event::Connected { connection, part_of: Some(of), .. } => {
                self.sockets.insert(*connection, *of);
                self.connecting.insert(*connection, at);
            }
            Event::Dropped { connection, .. } => self.end(at, *connection),
            Event::Executed { node, connection, command, reply, .. } => {
                self.end(at, *connection);
                let Some(&of) = self.sockets.get(connection) else { return };
                let used = self.used.entry(*node).or_default();
                let script = matches!(&command[0][..], b"EVAL" | b"EVALSHA");
                // Once it goes on, a frozen server executes what it got over an earlier connection.
                if script && used.last().is_none_or(|(_, last)| *last < of) {
                    used.push((at, of));
                }
                let moved = matches!(reply, Reply::Error(error) if error.starts_with("MOVED"));
                self.held.extend(replaced.filter(|_| moved).map(|until| (of, at, until)));
            }
            _ => {}
        }
    }

    /// A node has answered over a socket, or never will.
    fn end(&mut self, at: i64, socket: usize) {
        if let Some(since) = self.connecting.remove(&socket) {
            self.held.push((self.sockets[&socket], since, at));
        }
    }

    /// Returns whether a node's calls may have been held at some time between these.
    pub fn any(&self, node: usize, from: i64, until: i64) -> bool {
        let Some(used) = self.used.get(&node) else { return false };
        let first = used.partition_point(|(at, _)| *at <= from).saturating_sub(1);
        // Of the next connection, nothing may have been executed yet.
        let last = used.partition_point(|(at, _)| *at <= until).min(used.len() - 1);
        let connections = &used[first..=last];
        self.held.iter().any(|(of, since, to)| {
            *since <= until && *to >= from && connections.iter().any(|(_, used)| used == of)
        })
    }
}
