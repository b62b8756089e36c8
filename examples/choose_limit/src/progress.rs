//! Progress, on a terminal.

use std::cell::Cell;
use std::io::{self, IsTerminal};
use std::rc::Rc;
use std::time::{Duration, Instant};

use crate::table::grouped;

/// Requests between two readings of the clock.
const REQUESTS: u64 = 16_384;
const PAUSE: Duration = Duration::from_millis(500);

pub(crate) struct Progress {
    /// Bytes of all logs, as they are on disk.
    pub(crate) read: Rc<Cell<u64>>,
    pub(crate) total: u64,
    told: Instant,
    on_terminal: bool,
    shown: bool,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            read: Rc::default(),
            total: 0,
            told: Instant::now(),
            on_terminal: io::stderr().is_terminal(),
            shown: false,
        }
    }
}

impl Progress {
    pub(crate) fn tell(&mut self, requests: u64) {
        if !self.on_terminal || !requests.is_multiple_of(REQUESTS) || self.told.elapsed() < PAUSE {
            return;
        }
        (self.told, self.shown) = (Instant::now(), true);
        let (read, total) = (self.read.get() >> 20, self.total >> 20);
        let requests = grouped(requests);
        // The size of standard input is not known.
        match total >= read && total > 0 {
            true => eprint!("\r{:3}% of {total} MiB, {requests} requests ", read * 100 / total),
            false => eprint!("\r{read} MiB, {requests} requests "),
        }
    }

    pub(crate) fn clear(&mut self) {
        if self.shown {
            eprint!("\r{:60}\r", "");
        }
    }
}
