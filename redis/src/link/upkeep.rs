//! A link's connection and its state, and the work on another one: of [`Link`].
//!
//! A single task does this, and ends when the store is dropped. It asks a connection that was
//! silent, or has missed a deadline, whether it is still there. Without an answer soon, it makes
//! others, one after the other and concurrently, until one is good or no caller asks any more.

use std::future::{Future, pending, poll_fn};
use std::mem::replace;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use redis::{ErrorKind, RedisError, RedisResult, cmd};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::super::connect::silence;
use super::health::Health;
use super::origin::{Handle, Origin, needs_replacement};
use crate::observe;

/// How long an idle connection has to answer before another one is made beside it: two round trips,
/// within these bounds. A freeze makes the measured round trip long.
const LEAST_GRACE: Duration = Duration::from_millis(20);
const MOST_GRACE: Duration = Duration::from_secs(1);
/// How long an attempt to connect may take, at most. Others begin meanwhile.
const ATTEMPT: Duration = Duration::from_secs(5);
/// Between the beginnings of two attempts. While attempts hang, it grows with each.
pub(super) const PAUSE: Duration = Duration::from_millis(250);
/// Attempts in flight at a time: each holds a socket.
const ATTEMPTS: u32 = 3;
/// Without an answer for this long, or for four round trips, a connection is checked, whatever the
/// patience of callers.
const PACE: Duration = Duration::from_millis(200);
/// Consecutive lost connections until the pause, which doubles with each, is the longest.
const IN_VAIN: u32 = 5;
/// Attempts go on for this long after the last caller has asked.
const WANTED: Duration = Duration::from_secs(1);

pub(super) struct Link {
    pub(super) origin: Arc<Origin>,
    pub(super) status: watch::Sender<Status>,
    /// The order of the calls that are not handed to a connection yet.
    pub(super) turns: Arc<Mutex<()>>,
    /// No connection can be had.
    pub(super) is_cut_off: AtomicBool,
    /// When a caller last found no connection, in milliseconds of the origin's clock.
    pub(super) asked_at: AtomicU64,
    /// The shortest, in microseconds.
    round_trip: AtomicU64,
}

pub(super) struct Status {
    /// The one made last. A lost one stays, as it may only be late.
    pub(super) connection: Option<Box<dyn Handle>>,
    pub(super) health: Arc<Health>,
    pub(super) made_at: Instant,
    /// Consecutive connections before this one that were of no use: lost before they answered a call,
    /// or to a replica.
    pub(super) in_vain: u32,
    /// Why the last attempt failed, or why the connection has to be replaced.
    pub(super) error: Option<RedisError>,
    /// Those in flight, if a task makes connections or waits for the current one.
    pub(super) attempts: Option<usize>,
}

impl Status {
    /// The number for the next connection.
    fn in_vain_next(&self) -> u32 {
        // A replica answers calls that write nothing: answers prove nothing there.
        let is_of_use = self.health.is_proved.load(Relaxed) && !self.health.refuses.load(Relaxed);
        if self.connection.is_none() || is_of_use { 0 } else { self.in_vain + 1 }
    }
}

impl Link {
    /// Begins to connect, in the current runtime.
    pub(super) fn connecting(origin: &Arc<Origin>) -> Arc<Self> {
        observe::store_connections(0, 0);
        let health = Arc::<Health>::default();
        health.mark_lost_once(origin.now());
        let status = Status {
            connection: None,
            health,
            made_at: Instant::now(),
            in_vain: 0,
            error: None,
            attempts: None,
        };
        let this = Arc::new(Self {
            origin: Arc::clone(origin),
            status: watch::Sender::new(status),
            turns: Arc::default(),
            is_cut_off: AtomicBool::new(false),
            asked_at: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
        });
        this.renew();
        this
    }

    pub(super) fn grace(&self) -> Duration {
        let round_trip = Duration::from_micros(self.round_trip.load(Relaxed));
        (2 * round_trip).clamp(LEAST_GRACE, MOST_GRACE)
    }

    /// In milliseconds.
    pub(super) fn pace(&self) -> u64 {
        let round_trip = Duration::from_micros(self.round_trip.load(Relaxed));
        PACE.max(4 * round_trip).as_millis() as u64
    }

    pub(super) fn note_round_trip(&self, time: Duration) {
        let time = (time.as_micros() as u64).max(1);
        let known = self.round_trip.load(Relaxed);
        // A shorter round trip counts at once, longer ones only if there are many of them.
        let next = if known == 0 || time < known { time } else { known + (time - known) / 256 };
        self.round_trip.store(next, Relaxed);
    }

    /// The error of attempts at another connection says nothing about this one.
    fn note_well(&self, health: &Health) {
        let now = self.origin.now();
        health.note_answer(now, true);
        health.lost_since.store(0, Relaxed);
        self.is_cut_off.store(false, Relaxed);
        self.status.send_modify(|status| status.error = None);
    }

    /// Checks the connection, and makes another one if it does not answer soon, or is lost. One task
    /// is at work, as long as the store is there.
    pub(super) fn renew(self: &Arc<Self>) {
        let now = self.origin.now();
        self.asked_at.store(now, Relaxed);
        let begins = self.status.send_if_modified(|status| {
            status.attempts.is_none() && {
                (status.attempts, status.error) = (Some(0), None);
                true
            }
        });
        if begins {
            let (of, mut changes) = (Arc::downgrade(self), self.status.subscribe());
            tokio::spawn(async move {
                let gone = async { while changes.changed().await.is_ok() {} };
                unless_ended(find_connection(&of, now), gone).await;
                if let Some(link) = of.upgrade() {
                    link.status.send_modify(|status| status.attempts = None);
                }
            });
        }
    }

    /// Returns the connection's answer to come, if it may give one, and how long it has before
    /// another one is made.
    fn check(&self, status: &Status) -> (JoinSet<bool>, Duration) {
        let mut check = JoinSet::new();
        if let Some(connection) = &status.connection
            && !status.health.refuses.load(Relaxed)
        {
            observe::store_connections(0, 1);
            let mut connection = connection.boxed();
            check.spawn(async move {
                // Any reply, even NOPERM, proves that the connection is alive.
                let answer = connection.req_packed_command(&cmd("PING")).await;
                !answer.is_err_and(|error| needs_replacement(&error))
            });
        }
        (check, if status.health.is_well() { self.grace() } else { Duration::ZERO })
    }

    /// There are pauses while new connections are no better than the one before: they lead to a
    /// replica, or are closed at once.
    fn first_attempt_at(&self) -> Instant {
        let status = self.status.borrow();
        let in_vain = status.in_vain_next().min(IN_VAIN);
        match in_vain {
            0 => Instant::now(),
            many => status.made_at + PAUSE / (1 << (IN_VAIN - many)),
        }
    }

    /// If callers still ask. Returns when the next attempt is due, or `None` if no caller asks and
    /// no attempt is in flight.
    fn begin_attempt(
        self: Arc<Self>,
        attempts: &mut JoinSet<RedisResult<Box<dyn Handle>>>,
        begun: &mut u32,
    ) -> Option<Instant> {
        let asked_at = self.origin.instant(self.asked_at.load(Relaxed));
        // How many have begun, the last one included, since one was in flight alone.
        *begun = if attempts.is_empty() { 1 } else { *begun + 1 };
        let pause = |nth: u32| (PAUSE * nth).min(ATTEMPT / ATTEMPTS);
        if asked_at.elapsed() < WANTED {
            let origin = Arc::clone(&self.origin);
            // Until there would be one too many.
            let lasts = (*begun..*begun + ATTEMPTS).map(pause).sum();
            attempts.spawn(async move {
                timeout(lasts, origin.connect()).await.unwrap_or_else(|_| Err(silence()))
            });
        } else if attempts.is_empty() {
            return None;
        }
        self.status.send_if_modified(|status| {
            status.attempts = Some(attempts.len());
            false
        });
        Some(Instant::now() + pause(*begun))
    }

    fn install_connection(&self, connection: Box<dyn Handle>) {
        observe::store_connections(1, 0);
        let health = Arc::<Health>::default();
        health.note_answer(self.origin.now(), false);
        self.is_cut_off.store(false, Relaxed);
        self.status.send_modify(|status| {
            status.in_vain = status.in_vain_next();
            (status.connection, status.health) = (Some(connection), health);
            (status.made_at, status.error) = (Instant::now(), None);
        });
    }
}

/// Until there is a connection, or no caller asks any more.
async fn find_connection(of: &Weak<Link>, now: u64) -> Option<()> {
    let link = of.upgrade()?;
    let start = link.first_attempt_at();
    let health = Arc::clone(&link.status.borrow().health);
    let (mut check, grace) = link.check(&link.status.borrow());
    drop(link);
    let answer = timeout(grace, check.join_next()).await;
    let link = of.upgrade()?;
    if let Ok(Some(Ok(true))) = answer {
        link.note_well(&health);
        return Some(());
    }
    health.mark_lost_once(now);
    // Callers wait no longer than their patience.
    link.status.send_modify(|_| {});
    drop(link);
    // The answer may only be late.
    let mut is_well = pin!(async {
        if !matches!(timeout(ATTEMPT, check.join_next()).await, Ok(Some(Ok(true)))) {
            pending::<()>().await;
        }
    });
    let mut attempts = JoinSet::new();
    let (mut due, mut failed_once, mut begun) = (start, false, 0);
    loop {
        let next = async {
            match attempts.join_next().await {
                Some(attempt) => attempt
                    .unwrap_or_else(|_| Err((ErrorKind::Client, "connecting has panicked").into())),
                None => pending().await,
            }
        };
        let ended = unless_ended(timeout_at(due, next), is_well.as_mut()).await;
        let link = of.upgrade()?;
        match ended {
            None => break link.note_well(&health),
            Some(Ok(Ok(made))) => break link.install_connection(made),
            // The first may have been closed together with the connection before.
            Some(Ok(Err(error))) if replace(&mut failed_once, true) => {
                link.status.send_modify(|status| {
                    (status.attempts, status.error) = (Some(attempts.len()), Some(error));
                });
            }
            _ => {
                if begun > 0 && link.origin.now() >= health.lost_since.load(Relaxed) + link.pace() {
                    // Further calls would wait in vain.
                    link.is_cut_off.store(true, Relaxed);
                }
                due = link.begin_attempt(&mut attempts, &mut begun)?;
            }
        }
    }
    Some(())
}

pub(super) async fn unless_ended<T>(
    future: impl Future<Output = T>,
    end: impl Future<Output = ()>,
) -> Option<T> {
    let (mut future, mut end) = (pin!(future), pin!(end));
    poll_fn(|cx| {
        if let Poll::Ready(value) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(value));
        }
        end.as_mut().poll(cx).map(|()| None)
    })
    .await
}
