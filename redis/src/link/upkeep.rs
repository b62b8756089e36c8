//! A link's connection and its state, and the work on another one: [`Upkeep`].
//!
//! Two kinds of tasks do this, and end when the store is dropped. A *check* asks a server that was
//! silent, or has missed a deadline, whether it is still there. A *renewal* makes connections, one
//! after the other and concurrently, until one is good or no caller asks any more.

use std::future::{Future, poll_fn};
use std::mem::replace;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Weak};
use std::task::Poll;
use std::time::Duration;

use redis::{ErrorKind, RedisError, RedisResult, cmd};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};

use super::super::connect::silence;
use super::health::Health;
use super::origin::{Handle, Origin, needs_replacement};
use crate::observe;
use crate::sync::AtEnd;

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
/// A check is given up this long after it should have ended.
const LATE: Duration = Duration::from_millis(100);
/// Consecutive lost connections until the pause, which doubles with each, is the longest.
const IN_VAIN: u32 = 5;
/// Attempts go on for this long after the last caller has asked.
const WANTED: Duration = Duration::from_secs(1);

pub(super) struct Upkeep {
    pub(super) origin: Arc<Origin>,
    pub(super) status: watch::Sender<Status>,
    /// Of the calls that are not handed to a connection yet.
    pub(super) turns: Arc<Mutex<()>>,
    /// When a caller last found no connection, in milliseconds of the origin's clock.
    pub(super) asked_at: AtomicU64,
    /// The shortest, in microseconds.
    round_trip: AtomicU64,
}

pub(super) struct Status {
    /// The one made last. A lost one stays, as it may only be late.
    pub(super) connection: Option<Box<dyn Handle>>,
    pub(super) health: Arc<Health>,
    pub(super) made: u64,
    pub(super) made_at: Instant,
    pub(super) after_replica: bool,
    /// Consecutive connections that were lost before they answered a call.
    in_vain: u32,
    /// Why the last attempt failed, or why the connection has to be replaced.
    pub(super) error: Option<RedisError>,
    /// Those in flight, if a task makes connections or waits for the current one.
    pub(super) attempts: Option<usize>,
}

impl Status {
    /// No other connection is needed.
    fn is_whole(&self) -> bool {
        self.connection.is_some() && self.health.is_well()
    }
}

impl Upkeep {
    pub(super) fn new(origin: &Arc<Origin>) -> Self {
        let health = Arc::<Health>::default();
        health.mark_lost(origin.now());
        let status = Status {
            connection: None,
            health,
            made: 0,
            made_at: Instant::now(),
            after_replica: false,
            in_vain: 0,
            error: None,
            attempts: None,
        };
        Self {
            origin: Arc::clone(origin),
            status: watch::Sender::new(status),
            turns: Arc::default(),
            asked_at: AtomicU64::new(0),
            round_trip: AtomicU64::new(0),
        }
    }

    /// It is well as far as is known, or being tested.
    pub(super) fn has_connection(&self) -> bool {
        let status = self.status.borrow();
        let is_tested = || self.origin.now() < status.health.check_ends.load(Relaxed);
        status.connection.is_some() && (status.health.is_well() || is_tested())
    }

    fn grace(&self) -> Duration {
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
        if next != known {
            self.round_trip.store(next, Relaxed);
        }
    }

    /// The error of attempts at another connection says nothing about this one.
    fn note_well(&self, health: &Health) {
        let now = self.origin.now();
        health.note_answer(now, true);
        health.clear_loss();
        self.origin.note_answer(now);
        self.status.send_modify(|status| status.error = None);
    }

    /// `None` if a task is at work. The work ends when the guard is dropped.
    fn begin_work(self: &Arc<Self>) -> Option<AtEnd<impl Fn() + Send + use<>>> {
        let begins = self.status.send_if_modified(|status| {
            let begins = status.attempts.is_none();
            status.attempts.get_or_insert(0);
            begins
        });
        let this = Arc::downgrade(self);
        begins.then(|| {
            AtEnd(move || {
                if let Some(this) = this.upgrade() {
                    this.status.send_modify(|status| status.attempts = None);
                }
            })
        })
    }

    /// Returns the task, and when it is given up. `sent`: when the call was sent that has failed,
    /// if one has.
    pub(super) fn check(
        self: &Arc<Self>,
        status: &Status,
        sent: Option<u64>,
    ) -> (impl Future<Output = ()> + Send + use<>, u64) {
        let (grace, now) = (self.grace(), self.origin.now());
        let (ends_at, lost_since) = (now + (grace + LATE).as_millis() as u64, sent.unwrap_or(now));
        let connection = status.connection.as_ref().map(|connection| connection.boxed());
        let (this, made) = (Arc::downgrade(self), status.made);
        let health = Arc::clone(&status.health);
        let check = async move {
            let Some(mut connection) = connection else { return };
            let Some(mut changes) = this.upgrade().map(|upkeep| upkeep.status.subscribe()) else {
                return;
            };
            observe::store_checked();
            let start = Instant::now();
            // Any reply, even NOPERM, proves that the connection is alive.
            let mut alive = pin!(async {
                let answer = connection.req_packed_command(&cmd("PING")).await;
                !answer.is_err_and(|error| needs_replacement(&error))
            });
            let mut answer = timeout(grace, alive.as_mut()).await.ok();
            if answer != Some(true) {
                let Some(upkeep) = this.upgrade() else { return };
                health.mark_lost_once(lost_since);
                upkeep.renew();
                // Callers no longer wait for the check, and get the error of the attempts.
                health.check_ends.store(0, Relaxed);
                upkeep.status.send_modify(|_| {});
            }
            if answer.is_none() {
                // The answer may only be late. Wait until the connection is replaced or the store
                // gone.
                let replaced = async {
                    while changes.changed().await.is_ok()
                        && changes.borrow_and_update().made == made
                    {}
                };
                let mut replaced = pin!(replaced);
                let pace = this.upgrade().map(|upkeep| upkeep.pace()).unwrap_or_default();
                let soon = timeout(Duration::from_millis(pace), alive.as_mut());
                answer = match unless_ended(soon, replaced.as_mut()).await {
                    Some(Err(_)) => {
                        // No other connection either: further calls would wait in vain.
                        if let Some(upkeep) = this.upgrade().filter(|_| sent.is_some()) {
                            upkeep.origin.cut_off(lost_since);
                        }
                        let late = unless_ended(timeout(ATTEMPT, alive), replaced).await;
                        late.and_then(Result::ok)
                    }
                    soon => soon.and_then(Result::ok),
                };
            }
            if let Some(upkeep) = this.upgrade()
                && answer == Some(true)
            {
                upkeep.note_round_trip(start.elapsed());
                upkeep.note_well(&health);
            }
        };
        (check, ends_at)
    }

    pub(super) fn renew(self: &Arc<Self>) {
        self.asked_at.store(self.origin.now(), Relaxed);
        if let Some(work) = self.begin_work() {
            self.status.send_modify(|status| status.error = None);
            let (of, changes) = (Arc::downgrade(self), self.status.subscribe());
            let start = self.first_attempt_at();
            tokio::spawn(async move {
                make_connections(of, start, changes).await;
                drop(work);
            });
        }
    }

    /// There are pauses while new connections are no better than the one before: they lead to a
    /// replica, or are closed at once.
    fn first_attempt_at(&self) -> Instant {
        let status = self.status.borrow();
        let in_vain = match status.health.led_to_replica.load(Relaxed) {
            // A replica answers calls that write nothing: answers prove nothing here.
            true => IN_VAIN * u32::from(status.after_replica),
            false if status.made == 0 || status.health.is_proved.load(Relaxed) => 0,
            false => (status.in_vain + 1).min(IN_VAIN),
        };
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
        observe::store_connected();
        let health = Arc::<Health>::default();
        health.note_answer(self.origin.now(), false);
        self.origin.note_connected();
        self.status.send_modify(|status| {
            let (was_proved, made) = (status.health.is_proved.load(Relaxed), status.made);
            // A replica before the connection before counts if that one has answered no call.
            status.after_replica =
                status.health.led_to_replica.load(Relaxed) || status.after_replica && !was_proved;
            status.in_vain = if made > 0 && !was_proved { status.in_vain + 1 } else { 0 };
            (status.connection, status.health) = (Some(connection), health);
            (status.made, status.made_at) = (made + 1, Instant::now());
            status.error = None;
        });
    }
}

async fn make_connections(of: Weak<Upkeep>, start: Instant, mut changes: watch::Receiver<Status>) {
    if unless_ended(sleep_until(start), wait_until_whole(&mut changes)).await.is_none() {
        return;
    }
    let mut attempts = JoinSet::new();
    let (mut failed_once, mut begun) = (false, 0);
    while let Some(due) =
        of.upgrade().and_then(|upkeep| upkeep.begin_attempt(&mut attempts, &mut begun))
    {
        loop {
            let next = async {
                match attempts.join_next().await {
                    Some(attempt) => attempt.unwrap_or_else(|_| {
                        Err((ErrorKind::Client, "connecting has panicked").into())
                    }),
                    None => std::future::pending().await,
                }
            };
            let ended = unless_ended(timeout_at(due, next), wait_until_whole(&mut changes)).await;
            match (ended, of.upgrade()) {
                (None, _) | (_, None) => return,
                (Some(Err(_)), _) => break,
                (Some(Ok(Ok(made))), Some(upkeep)) => return upkeep.install_connection(made),
                // The first may have been closed together with the connection before.
                (Some(Ok(Err(_))), _) if !replace(&mut failed_once, true) => break,
                (Some(Ok(Err(error))), Some(upkeep)) => upkeep.status.send_modify(|status| {
                    status.attempts = Some(attempts.len());
                    status.error = Some(error).filter(|_| !status.is_whole());
                }),
            }
        }
    }
}

async fn wait_until_whole(changes: &mut watch::Receiver<Status>) {
    let _ = changes.wait_for(Status::is_whole).await;
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
