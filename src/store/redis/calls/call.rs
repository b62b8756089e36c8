//! One call of the server, in a task of its own.
//!
//! The task keeps the deadline, reports to the link and the breaker what became of the call,
//! answers its callers, and ends whether or not they still wait. A caller that is gone before the
//! call is sent withdraws what it asked for.

use std::time::Duration;

use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::time::{Instant, timeout, timeout_at};

use super::super::link::is_from_replica;
use super::super::link::{Connection, Link};
use super::super::script::{self, Answer, LOADS, MANY, ONE, rights};
use super::failure::{failed, late, unsent};
use super::queue::{Departing, Question};
use crate::store::error::StoreError;

/// How long to wait for all nodes of a cluster to load a script.
const LOAD: Duration = Duration::from_millis(50);

/// The answers, and how long they took if something was sent.
type Answers = (Vec<RedisResult<Answer>>, Option<Duration>);

/// Sends a batch, whose callers wait until then, and answers them. How long that took; or the batch
/// itself, if it was refused since it is about several slots: nothing was done.
pub(crate) async fn call(
    link: &Link,
    mut batch: Vec<Departing>,
    until: Instant,
) -> Result<Option<Duration>, Vec<Departing>> {
    let domain = link.fault_domain();
    let mut over = None;
    let result = timeout_at(until, send(link, domain, &mut over, &mut batch)).await.ok();
    let Some(over) = over else {
        let error = match result {
            Some(Err(error)) => failed(error).unsent(),
            _ => unsent(),
        };
        batch.into_iter().for_each(|waiting| waiting.answer(Err(error.clone())));
        return Ok(None);
    };
    let error = match result {
        Some(Ok((answers, took))) => {
            answers.iter().for_each(|answer| link.report_outcome(&over, Some(answer.as_ref())));
            for (waiting, answer) in batch.into_iter().zip(answers) {
                tell(link, domain, &over, waiting, answer.map_err(failed));
            }
            return Ok(took);
        }
        Some(Err(error)) => {
            link.report_outcome::<()>(&over, Some(Err(&error)));
            if crosses_slots(&error, &batch) {
                return Err(batch);
            }
            failed(error)
        }
        None => {
            link.report_outcome::<()>(&over, None);
            late()
        }
    };
    for waiting in batch {
        tell(link, domain, &over, waiting, Err(error.clone()));
    }
    Ok(None)
}

fn crosses_slots(error: &RedisError, batch: &[Departing]) -> bool {
    let keys = batch.iter().map(|waiting| waiting.asked.cmds().len());
    error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot) && keys.sum::<usize>() > 1
}

fn tell(
    link: &Link,
    domain: u64,
    over: &Connection,
    waiting: Departing,
    answer: Result<Answer, StoreError>,
) {
    link.breaker().report(domain, Some(over.handed_out_at()), &answer);
    waiting.answer(answer);
}

/// Sends what is still wanted of a batch; again only if it was refused because its script is
/// missing, if the connection had ended before it was sent, or if a replica has refused to write:
/// then it has done nothing.
async fn send(
    link: &Link,
    domain: u64,
    over: &mut Option<Connection>,
    batch: &mut Vec<Departing>,
) -> RedisResult<Answers> {
    let patience = batch.iter().map(|waiting| waiting.patience).max().unwrap_or_default();
    let mut connection = another(link, over, patience).await?;
    let mut loads = 0..LOADS;
    loop {
        let now = Instant::now();
        if !batch.iter().all(|waiting| waiting.is_wanted(now)) {
            let (wanted, late) = batch.drain(..).partition(|waiting| waiting.is_wanted(now));
            *batch = wanted;
            Vec::into_iter(late).for_each(Departing::withdraw);
        }
        let (script, answers) = match &batch[..] {
            [] => return Ok((Vec::new(), None)),
            [Departing { asked: Question::One(cmd), .. }] => {
                let answer = connection.send(cmd).await;
                (&*ONE, answer.and_then(Answer::one).map(|answer| vec![Ok(answer)]))
            }
            all => {
                let asked = all.iter().map(|waiting| waiting.asked.cmds());
                let answer = connection.send(&script::many(asked.clone())).await;
                (&*MANY, answer.and_then(|answer| Answer::many(answer, asked.map(<[_]>::len))))
            }
        };
        let by_replica = match &answers {
            Ok(answers) => answers.iter().any(is_refused),
            Err(error) => is_from_replica(error),
        };
        if connection.can_resend() || by_replica && connection.is_replaceable() {
            if let Ok(answers) = answers {
                // What a replica need not write, it answers.
                let (refused, answered): (Vec<_>, Vec<_>) =
                    batch.drain(..).zip(answers).partition(|(_, answer)| is_refused(answer));
                *batch = refused.into_iter().map(|(waiting, _)| waiting).collect();
                for (waiting, answer) in answered {
                    tell(link, domain, connection, waiting, answer.map_err(failed));
                }
            }
            connection = another(link, over, patience).await?;
            continue;
        }
        match answers {
            Err(error) if script::is_missing(&error) && loads.next().is_some() => {
                // All nodes of a cluster load it, and one of them may be gone. Then the others have
                // it soon.
                let loaded = match link.is_sharded() {
                    true => {
                        let loading = connection.send(script.load());
                        let loaded = timeout(LOAD, loading).await.ok();
                        loaded.filter(|_| loads.is_empty()).map(|loaded| loaded.map(|_| ()))
                    }
                    // It may have lost a command, too, since it was connected.
                    false => Some(rights::load_scripts(&[script], connection.handle()).await),
                };
                match loaded {
                    // The charge was refused, whatever became of the script.
                    Some(Err(error)) if connection.can_resend_after(&error) => {
                        connection = another(link, over, patience).await?;
                        loads = 0..LOADS;
                    }
                    Some(Err(error)) => return Err(error),
                    Some(Ok(())) | None => {}
                }
            }
            answers => {
                return answers.map(|answers| (answers, Some(now.elapsed())));
            }
        }
    }
}

/// The connection to send over, in place of the one before.
async fn another<'a>(
    link: &Link,
    over: &'a mut Option<Connection>,
    patience: Duration,
) -> RedisResult<&'a mut Connection> {
    if let Some(left) = over.take() {
        left.replace();
    }
    Ok(over.insert(link.get_connection(patience).await?))
}

fn is_refused(answer: &RedisResult<Answer>) -> bool {
    answer.as_ref().is_err_and(is_from_replica)
}
