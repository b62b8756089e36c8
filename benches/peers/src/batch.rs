//! What every contestant can do: answer a batch of requests.

use std::net::{IpAddr, Ipv4Addr};

/// Requests pass, or they are refused: all of a case's requests alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    Allowed,
    Refused,
}

impl Verdict {
    pub fn parse(text: &str) -> Self {
        if text == "refused" { Self::Refused } else { Self::Allowed }
    }

    pub fn id(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Refused => "refused",
        }
    }

    /// The limit per day, of every contestant: one that no run can spend, or one that the first
    /// request has spent.
    pub fn limit(self) -> u32 {
        match self {
            Self::Allowed => 1_000_000_000,
            Self::Refused => 1,
        }
    }
}

/// The loop is inside, so that nothing of a contestant is called through a pointer that its users
/// would not need.
pub trait Batch: Send {
    /// One request from each of these clients; returns how many of them were refused.
    fn run(&mut self, clients: &[u32]) -> usize;

    /// The same limiter, for another thread.
    fn fork(&self) -> Box<dyn Batch>;
}

/// A contestant that every client has asked once, and that has proved to do what the case says.
pub fn prepared(mut batch: Box<dyn Batch>, verdict: Verdict, all: &[u32]) -> Box<dyn Batch> {
    let first = batch.run(all);
    let hand_made = first == all.len();
    assert!(first == 0 || hand_made, "{first} of {} first requests were refused", all.len());
    check(verdict, &all[..1], batch.run(&all[..1]));
    batch
}

pub fn check(verdict: Verdict, clients: &[u32], refused: usize) {
    let expected = if verdict == Verdict::Refused { clients.len() } else { 0 };
    assert_eq!(refused, expected, "of {} requests that should be {}", clients.len(), verdict.id());
}

pub fn address(client: u32) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from(client))
}
