//! One call of the server, in a task of its own.
//!
//! The task keeps the deadline, reports to the link and the breaker what became of the call, and
//! ends whether or not its callers still wait. A caller that is gone before the call is sent
//! withdraws what it asked for.

use std::time::Duration;

use redis::aio::ConnectionLike;
use redis::{ErrorKind, RedisResult, ServerErrorKind, Value};
use tokio::time::{Instant, timeout, timeout_at};

use super::super::breaker::{Breaker, Listener};
use super::super::error::StoreError;
use super::failure::{failed, late};
use super::handle::is_of_replica;
use super::link::{Connection, Link};
use super::script::{self, Answer, LOADS, MANY, ONE};
use super::waiting::Waiting;

/// How long to wait for all nodes of a cluster to load a script.
const LOAD: Duration = Duration::from_millis(50);
/// How long to listen for a server that has missed a deadline.
const PATIENCE: Duration = Duration::from_secs(2);

pub(super) struct Call {
    link: Link,
    breaker: Breaker,
    batch: Vec<Waiting>,
    /// Until when callers wait for it.
    until: Instant,
}

/// A call that has been answered, has failed or is late.
pub(super) struct Ended {
    link: Link,
    breaker: Breaker,
    domain: u64,
    batch: Vec<Waiting>,
    /// `None`: it was not sent.
    over: Option<Connection>,
    /// `None`: it is late.
    result: Option<RedisResult<Answers>>,
}

struct Answers {
    answers: Vec<RedisResult<Answer>>,
    took: Option<Duration>,
}

impl Call {
    pub(super) fn new(link: Link, breaker: Breaker, batch: Vec<Waiting>, until: Instant) -> Self {
        Self { link, breaker, batch, until }
    }

    pub(super) async fn run(self) {
        if let Some(silent) = self.send().await.answer() {
            silent.listen().await;
        }
    }

    pub(super) async fn send(self) -> Ended {
        let Self { link, breaker, mut batch, until } = self;
        let domain = link.domain(|| {
            let key = batch.first().map(|one| script::key(&one.cmd));
            String::from_utf8_lossy(key.unwrap_or_default()).into_owned()
        });
        let mut over = None;
        let result =
            timeout_at(until, send(&link, &breaker, domain, &mut over, &mut batch)).await.ok();
        if let Some(over) = &over {
            match &result {
                Some(Ok(Answers { answers, .. })) => {
                    answers.iter().for_each(|answer| link.report(over, Some(answer.as_ref())));
                }
                Some(Err(error)) => link.report::<()>(over, Some(Err(error))),
                None => link.report::<()>(over, None),
            }
        }
        Ended { link, breaker, domain, batch, over, result }
    }
}

impl Ended {
    pub(super) fn took(&self) -> Option<Duration> {
        self.result.as_ref()?.as_ref().ok()?.took
    }

    /// Whether it was refused because it is about several keys.
    pub(super) fn crosses_slots(&self) -> bool {
        let crosses = ErrorKind::Server(ServerErrorKind::CrossSlot);
        let refused = matches!(&self.result, Some(Err(error)) if error.kind() == crosses);
        refused && self.batch.len() > 1
    }

    /// Nothing was done: all of it is to be sent in another way.
    pub(super) fn give_back(self) {
        self.batch.into_iter().for_each(Waiting::give_back);
    }

    /// Answers all callers, and reports to the breaker. If the server was silent, it is to be
    /// listened to.
    pub(super) fn answer(self) -> Option<Silent> {
        let Self { link, breaker, domain, batch, over, result } = self;
        let answer = |waiting, answer| tell(&breaker, domain, waiting, answer);
        match (result, over) {
            (Some(Ok(Answers { answers, .. })), _) => {
                for (waiting, outcome) in batch.into_iter().zip(answers) {
                    answer(waiting, outcome.map_err(failed));
                }
            }
            (Some(Err(error)), over) => {
                let error = failed(error);
                let error = if over.is_some() { error } else { error.unsent() };
                batch.into_iter().for_each(|waiting| answer(waiting, Err(error.clone())));
            }
            (None, None) => batch.into_iter().for_each(Waiting::withdraw),
            (None, Some(over)) => {
                let listener = breaker.listener(PATIENCE);
                batch.into_iter().for_each(|waiting| answer(waiting, Err(late())));
                // Other parts of a cluster may answer.
                let listener = listener.filter(|_| domain == 0)?;
                return Some(Silent { link, over, listener });
            }
        }
        None
    }
}

/// A server that has missed a deadline.
pub(super) struct Silent {
    link: Link,
    over: Connection,
    listener: Listener,
}

impl Silent {
    /// Answers come in order, so the one to a harmless command, sent now, shows that it is back.
    pub(super) async fn listen(mut self) {
        let ping = redis::cmd("PING");
        let answer = timeout(PATIENCE, self.over.req_packed_command(&ping)).await;
        let Ok(answer) = answer.map(|answer| answer.and_then(Value::extract_error)) else { return };
        self.link.report(&self.over, Some(answer.as_ref()));
        // Without the right to ask for this, it is an answer all the same.
        let is_back = match answer {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::Server(ServerErrorKind::NoPerm),
        };
        if is_back {
            self.listener.heard();
        }
    }
}

fn tell(breaker: &Breaker, domain: u64, waiting: Waiting, answer: Result<Answer, StoreError>) {
    breaker.report(domain, &answer);
    waiting.answer(answer);
}

/// Sends what is still wanted of a batch; again only if it was refused because its script is
/// missing, if the connection had ended before it was sent, or if a replica has refused to write:
/// then it has done nothing.
async fn send(
    link: &Link,
    breaker: &Breaker,
    domain: u64,
    over: &mut Option<Connection>,
    batch: &mut Vec<Waiting>,
) -> RedisResult<Answers> {
    let patience = batch.iter().map(|waiting| waiting.patience).max().unwrap_or_default();
    let mut connection = over.insert(link.get(patience).await?);
    let mut loads = 0..LOADS;
    loop {
        let now = Instant::now();
        if !batch.iter().all(|waiting| waiting.is_wanted(now)) {
            let (wanted, late) = batch.drain(..).partition(|waiting| waiting.is_wanted(now));
            *batch = wanted;
            Vec::into_iter(late).for_each(Waiting::withdraw);
        }
        let (script, answers) = match &batch[..] {
            [] => return Ok(Answers { answers: Vec::new(), took: None }),
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
        let by_replica = match &answers {
            Ok(answers) => answers.iter().any(is_refused),
            Err(error) => is_of_replica(error),
        };
        if connection.had_ended() || by_replica && connection.is_replaceable() {
            if let Ok(answers) = answers {
                // What a replica need not write, it answers.
                let (refused, answered): (Vec<_>, Vec<_>) =
                    batch.drain(..).zip(answers).partition(|(_, answer)| is_refused(answer));
                *batch = refused.into_iter().map(|(waiting, _)| waiting).collect();
                for (waiting, answer) in answered {
                    tell(breaker, domain, waiting, answer.map_err(failed));
                }
            }
            if let Some(left) = over.take() {
                left.leave();
            }
            connection = over.insert(link.get(patience).await?);
            continue;
        }
        match answers {
            Err(error) if script::is_missing(&error) && loads.next().is_some() => {
                // All nodes of a cluster load it, and one of them may be gone. Then the others have
                // it soon.
                let loading = script.load_async(connection);
                let loaded = match link.is_sharded() {
                    true => timeout(LOAD, loading).await.ok().filter(|_| loads.is_empty()),
                    false => Some(loading.await),
                };
                if !connection.had_ended()
                    && let Some(Err(error)) = loaded
                {
                    return Err(error);
                }
            }
            answers => {
                return answers.map(|answers| Answers { answers, took: Some(now.elapsed()) });
            }
        }
    }
}

fn is_refused(answer: &RedisResult<Answer>) -> bool {
    answer.as_ref().is_err_and(is_of_replica)
}
