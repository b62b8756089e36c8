//! One call of the server, in a task of its own.
//!
//! The task keeps the deadline, tells the link and the breakers what became of the call, and ends
//! whether or not its callers still wait. A caller that is gone before the call is sent withdraws
//! what it asked for.

use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value};
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

use super::gather::Place;
use super::link::{Lease, Link};
use super::script::{self, Answer, LOADS, MANY, ONE};
use super::{failed, late, unsent};
use crate::store::{StoreError, Watch};

/// How long to listen for a server that has missed a deadline.
const PATIENCE: Duration = Duration::from_secs(2);

/// A command, and who waits for its answer.
pub(super) struct Waiting {
    pub(super) cmd: Cmd,
    pub(super) until: Instant,
    /// Where the answer is awaited.
    pub(super) runtime: Handle,
    watch: Option<Watch>,
    reply: oneshot::Sender<Fate>,
}

/// What became of a command.
pub(super) enum Fate {
    Known(Result<Answer, StoreError>),
    /// It was not sent in this way, and is to be sent in another.
    Returned(Cmd),
}

impl Waiting {
    pub(super) fn new(
        cmd: Cmd,
        until: Instant,
        runtime: Handle,
        watch: Option<Watch>,
    ) -> (Self, oneshot::Receiver<Fate>) {
        let (reply, fate) = oneshot::channel();
        (Self { cmd, until, runtime, watch, reply }, fate)
    }

    /// What is late or was dropped is not sent.
    pub(super) fn is_wanted(&self, now: Instant) -> bool {
        now < self.until && !self.reply.is_closed()
    }

    /// It is not sent any more. Who is gone needs no answer, here and below.
    pub(super) fn withdraw(self) {
        let _ = self.reply.send(Fate::Known(Err(unsent())));
    }

    pub(super) fn give_back(self) {
        let _ = self.reply.send(Fate::Returned(self.cmd));
    }

    /// The breaker of `domain` learns what a call says of the store; of one that was not sent, nothing.
    fn tell(self, answer: Result<Answer, StoreError>, domain: u64) {
        if let Some(watch) = &self.watch {
            match &answer {
                Err(error) if error.is_unsent() => {}
                answer => {
                    watch.note(domain, answer.as_ref().err().is_none_or(StoreError::is_of_key))
                }
            }
        }
        let _ = self.reply.send(Fate::Known(answer));
    }
}

pub(super) struct Call {
    link: Link,
    batch: Vec<Waiting>,
    /// Until when anybody in it waits.
    until: Instant,
    /// Among the calls under way, where these are counted.
    place: Option<Place>,
}

impl Call {
    pub(super) fn alone(link: Link, waiting: Waiting) -> Self {
        Self { link, until: waiting.until, batch: vec![waiting], place: None }
    }

    pub(super) fn of(link: Link, batch: Vec<Waiting>, until: Instant, place: Place) -> Self {
        Self { link, batch, until, place: Some(place) }
    }

    pub(super) async fn run(self) {
        let Self { link, mut batch, until, place } = self;
        let domain = link.domain(|| {
            let key = batch.first().map(|one| script::key(&one.cmd));
            String::from_utf8_lossy(key.unwrap_or_default()).into_owned()
        });
        let mut used = None;
        let sent = timeout_at(until, send(&link, &mut used, &mut batch)).await.ok();
        match sent {
            Some(Ok((answers, took))) => {
                if let (Some(place), Some(took)) = (&place, took) {
                    place.answered(took);
                }
                for (waiting, answer) in batch.into_iter().zip(answers) {
                    if let Some(lease) = &used {
                        link.report(lease, Some(answer.as_ref()));
                    }
                    waiting.tell(answer.map_err(failed), domain);
                }
            }
            Some(Err(error)) => {
                if let Some(lease) = &used {
                    link.report::<()>(lease, Some(Err(&error)));
                }
                if let Some(place) = &place
                    && error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot)
                    && batch.len() > 1
                {
                    place.come_apart();
                    batch.into_iter().for_each(Waiting::give_back);
                    return;
                }
                let error = failed(error);
                let error = if used.is_some() { error } else { error.unsent() };
                batch.into_iter().for_each(|one| one.tell(Err(error.clone()), domain));
            }
            None => {
                // The next one has waited for this.
                drop(place);
                let Some(lease) = used else {
                    return batch.into_iter().for_each(Waiting::withdraw);
                };
                link.report::<()>(&lease, None);
                let watches = batch.iter().filter_map(|one| one.watch.as_ref());
                let listeners: Vec<_> = watches.filter_map(Watch::listener).collect();
                batch.into_iter().for_each(|one| one.tell(Err(late()), domain));
                if domain == 0 && !listeners.is_empty() && is_back(&link, lease).await {
                    listeners.iter().for_each(|listener| listener.heard(domain));
                }
            }
        }
    }
}

/// Sends what is still wanted of a batch; again only if it was refused because its script is missing.
/// The answers, and how long they took.
async fn send(
    link: &Link,
    used: &mut Option<Lease>,
    batch: &mut Vec<Waiting>,
) -> RedisResult<(Vec<RedisResult<Answer>>, Option<Duration>)> {
    let Lease { connection } = used.insert(link.get().await?);
    let mut loads = 0..LOADS;
    loop {
        let now = Instant::now();
        if !batch.iter().all(|waiting| waiting.is_wanted(now)) {
            let (wanted, late) = batch.drain(..).partition(|waiting| waiting.is_wanted(now));
            *batch = wanted;
            Vec::into_iter(late).for_each(Waiting::withdraw);
        }
        let (script, answers) = match &batch[..] {
            [] => return Ok((Vec::new(), None)),
            [one] => {
                let answer = connection.req_packed_command(&one.cmd).await;
                (&ONE, answer.and_then(Answer::one).map(|answer| vec![Ok(answer)]))
            }
            all => {
                let cmd = script::many(all.iter().map(|waiting| &waiting.cmd));
                let answer = connection.req_packed_command(&cmd).await;
                (&MANY, answer.and_then(|answer| Answer::many(answer, all.len())))
            }
        };
        match answers {
            Err(error) if script::is_missing(&error) && loads.next().is_some() => {
                script.load_async(connection).await?;
            }
            answers => return answers.map(|answers| (answers, Some(now.elapsed()))),
        }
    }
}

/// The server missed a deadline. Answers come in order, so the one to a question that harms nobody,
/// sent now, tells that it is back.
async fn is_back(link: &Link, mut lease: Lease) -> bool {
    let ping = redis::cmd("PING");
    let answer = timeout(PATIENCE, lease.connection.req_packed_command(&ping)).await;
    let Ok(answer) = answer.map(|answer| answer.and_then(Value::extract_error)) else {
        return false;
    };
    link.report(&lease, Some(answer.as_ref()));
    // Without the right to ask for this, it is an answer all the same.
    match answer {
        Ok(_) => true,
        Err(error) => error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm),
    }
}
