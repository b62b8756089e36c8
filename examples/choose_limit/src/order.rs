//! Requests in the order of time: each log is sorted within a bound, and then logs are merged.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use crate::client::Clients;
use crate::input::{Input, Line, MAX_LINE};
use crate::line::{Format, Unread};
use crate::table::grouped;

/// Lines that are sorted at a time, over all logs and in each log.
const SORTED: usize = 1 << 20;
const SORTED_IN_A_LOG: usize = 65_536;

/// Reads lines, and counts those that can't be used.
pub(crate) struct Reader {
    pub(crate) format: Format,
    pub(crate) clients: Clients,
    pub(crate) broken: u64,
    pub(crate) too_long: u64,
    pub(crate) without_client: u64,
    pub(crate) late: u64,
    /// Requests of clients beyond the maximum.
    pub(crate) left_out: u64,
    pub(crate) first_broken: Option<String>,
    pub(crate) failed: Vec<String>,
    line: Vec<u8>,
}

impl Reader {
    pub(crate) fn new(format: Format, clients: Clients) -> Self {
        Self {
            format,
            clients,
            broken: 0,
            too_long: 0,
            without_client: 0,
            late: 0,
            left_out: 0,
            first_broken: None,
            failed: Vec::new(),
            line: Vec::new(),
        }
    }

    pub(crate) fn skipped(&self) -> u64 {
        self.broken + self.too_long + self.without_client + self.late + self.left_out
    }

    /// Notes on the accuracy of the numbers.
    pub(crate) fn notes(&self, sorted_within: usize) -> Vec<String> {
        let most = self.clients.most();
        let counted = [
            ("lines that could not be read".to_owned(), self.broken),
            (format!("lines of more than {MAX_LINE} bytes"), self.too_long),
            ("lines that don't say who the client is".to_owned(), self.without_client),
            (format!("lines out of order by more than {sorted_within} lines"), self.late),
            (
                format!("requests left out, because there were more than {most} clients"),
                self.left_out,
            ),
        ];
        let counted = counted.into_iter().filter(|(_, count)| *count > 0);
        let counted = counted.map(|(what, count)| format!("{what}: {}", grouped(count)));
        let first = self
            .first_broken
            .iter()
            .map(|line| format!("the first line that could not be read: {line}"));
        counted.chain(first).chain(self.failed.iter().cloned()).collect()
    }

    /// The time and the client of a log's next request.
    fn next(&mut self, log: &mut Log) -> Option<(i64, u32)> {
        loop {
            match log.input.line(&mut self.line) {
                Ok(Line::Whole) => log.lines += 1,
                Ok(Line::TooLong) => {
                    log.lines += 1;
                    self.too_long += 1;
                    continue;
                }
                Ok(Line::End) => return None,
                Err(error) => {
                    let line = log.lines + 1;
                    self.failed.push(format!("{} ends at line {line}: {error}", log.input.name));
                    return None;
                }
            }
            let line = self.line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            match self.format.read(line) {
                Ok((time, client)) => match self.clients.number(client) {
                    Some(client) => return Some((time, client)),
                    None => self.left_out += 1,
                },
                Err(Unread::NoClient) => self.without_client += 1,
                Err(Unread::Broken) => {
                    self.broken += 1;
                    let line = || format!("{}:{}", log.input.name, log.lines);
                    self.first_broken.get_or_insert_with(line);
                }
            }
        }
    }
}

struct Log {
    input: Input,
    lines: u64,
    ended: bool,
    /// Requests that were read and not returned yet, by time.
    held: BTreeMap<i64, Vec<u32>>,
    count: usize,
    /// The clients of one time, in the order of the log.
    due: std::vec::IntoIter<u32>,
    now: i64,
}

impl Log {
    fn next(&mut self, reader: &mut Reader, bound: usize) -> Option<(i64, u32)> {
        while !self.ended && self.count < bound {
            match reader.next(self) {
                None => self.ended = true,
                Some((time, _)) if time < self.now => reader.late += 1,
                Some((time, client)) => {
                    self.held.entry(time).or_default().push(client);
                    self.count += 1;
                }
            }
        }
        if self.due.len() == 0 {
            let (time, clients) = self.held.pop_first()?;
            (self.now, self.due) = (time, clients.into_iter());
        }
        self.count -= 1;
        self.due.next().map(|client| (self.now, client))
    }
}

/// All logs as one.
pub(crate) struct Merged {
    logs: Vec<Log>,
    next: BinaryHeap<Reverse<(i64, usize, u32)>>,
    pub(crate) sorted_within: usize,
}

impl Merged {
    pub(crate) fn new(inputs: Vec<Input>, reader: &mut Reader) -> Self {
        let sorted_within = SORTED_IN_A_LOG.min(SORTED / inputs.len().max(1)).max(1);
        let log = |input| Log {
            input,
            lines: 0,
            ended: false,
            held: BTreeMap::new(),
            count: 0,
            due: Vec::new().into_iter(),
            now: 0,
        };
        let logs = inputs.into_iter().map(log).collect();
        let mut merged = Self { logs, next: BinaryHeap::new(), sorted_within };
        for log in 0..merged.logs.len() {
            merged.refill(log, reader);
        }
        merged
    }

    pub(crate) fn next(&mut self, reader: &mut Reader) -> Option<(i64, u32)> {
        let Reverse((time, log, client)) = self.next.pop()?;
        self.refill(log, reader);
        Some((time, client))
    }

    fn refill(&mut self, log: usize, reader: &mut Reader) {
        let next = self.logs[log].next(reader, self.sorted_within);
        self.next.extend(next.map(|(time, client)| Reverse((time, log, client))));
    }
}
