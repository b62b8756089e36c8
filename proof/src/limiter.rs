//! The interface of all limiters, ours and others: how they are made and asked.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tower_fixed_window::{Clock, Quota, Quotas, Receipt};

use crate::check::Windows;
use crate::history::{Answer, now};
use crate::zone;

/// A decision that is ready later.
pub type Later<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A rate limiter under test.
pub trait Limiter: Send + Sync + 'static {
    /// Asks for tokens. A receipt, where there is one, refunds them.
    fn ask(&self, key: u32, cost: u64) -> Later<'_, (Answer, Option<Receipt>)>;

    /// Asks several limits for tokens at once, each for its cost by a key.
    fn ask_several(&self, lines: Vec<(usize, u32, u64)>) -> Later<'_, Vec<Answer>> {
        unimplemented!("{lines:?} are asked of limiters that know several limits")
    }

    /// Refunds tokens.
    fn refund(&self, _: Receipt) -> Later<'_, ()> {
        Box::pin(async {})
    }
}

/// A limiter, and how it is set up.
#[derive(Clone, Copy, Debug)]
pub struct Contestant {
    /// The crate and, for ours, the options that are on.
    pub name: &'static str,
    /// The tested version.
    pub version: &'static str,
    /// The place of the counts.
    pub store: Store,
    /// The grid of the windows.
    pub windows: Windows,
    /// Each node may count by itself while the store is away.
    pub local: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Store {
    Memory,
    Redis,
    Postgres,
}

/// Further rules of a limit, beside tokens in a window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Beside {
    Nothing,
    /// Another quota, with its milliseconds.
    Quota {
        limit: u64,
        length: u64,
    },
    /// Unspent tokens are kept, up to this capacity.
    Kept {
        capacity: u64,
    },
    /// Up to `most` tokens of later windows may be taken; and another quota.
    Reserved {
        most: u64,
        limit: u64,
        length: u64,
    },
    /// A quota for each day of a zone, in which it is midnight while the scenario runs.
    Day {
        limit: u64,
    },
    /// Requests wait in line, in a number of places and for some milliseconds at most.
    Line {
        places: u64,
        max_wait: u64,
    },
}

/// The set-up of a limiter.
#[derive(Clone, Debug)]
pub struct Setup {
    pub name: String,
    /// The address of the proxy or of the server.
    pub url: String,
    /// Tokens.
    pub limit: u64,
    /// Milliseconds; whole seconds, since some know no others.
    pub length: u64,
    /// Keys that ours keeps in memory.
    pub max_keys: usize,
    /// Limits that are charged together; one: each by itself.
    pub limits: usize,
    pub beside: Beside,
    /// Passes come with receipts.
    pub receipts: bool,
    /// The time from which the limiter's clock steps, in microseconds since the epoch.
    pub clock_steps_from: Option<u64>,
}

/// The time between two steps of the clock, in microseconds.
const STEPS_EVERY: u64 = 430_000;
/// The size of a step, in microseconds: less than a window.
const STEPS: [i64; 6] = [0, -400_000, 300_000, -150_000, 500_000, 20_000];

impl Setup {
    /// All quotas of a key.
    pub fn quotas(&self) -> Quotas {
        let quota = Quota::new(self.limit, Duration::from_millis(self.length));
        let other = |limit, length| Quota::new(limit, Duration::from_millis(length));
        match self.beside {
            Beside::Nothing | Beside::Line { .. } => quota.into(),
            Beside::Quota { limit, length } => quota.and(other(limit, length)),
            Beside::Kept { capacity } => quota.rollover_up_to(capacity).into(),
            Beside::Reserved { most, limit, length } => {
                quota.reserve_up_to(most).and(other(limit, length))
            }
            Beside::Day { limit } => quota.and(Quota::per_day(limit).in_zone(zone::NAME)),
        }
    }

    /// The time that the limiter's clock shows at an instant.
    fn clock(&self, at: u64) -> u64 {
        let Some(from) = self.clock_steps_from else { return at };
        let step = at.saturating_sub(from) / STEPS_EVERY;
        at.saturating_add_signed(STEPS[step as usize % STEPS.len()])
    }

    /// The latest that the limiter's clock has shown: a clock that steps back by less than a window opens
    /// no other window (S4).
    pub fn now(&self) -> u64 {
        let now = now();
        let Some(from) = self.clock_steps_from else { return now };
        let ends = (from..now).step_by(STEPS_EVERY as usize).skip(1);
        ends.map(|end| self.clock(end - 1)).fold(self.clock(now), u64::max)
    }
}

impl Clock for Setup {
    fn now_ms(&self) -> u64 {
        self.clock(now()) / 1_000
    }
}
