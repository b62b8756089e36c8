//! Makes one call to the server, in a task of its own: [`call_server`].
//!
//! The task keeps the deadline, reports the outcome to the link, answers its callers, and ends
//! whether or not they still wait. The question of a caller that is gone before the call is not
//! sent.

use std::borrow::Cow;
use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::time::{Instant, timeout_at};

use super::super::link::{Connection, Links, is_from_replica};
use super::super::script::{Answer, MANY, MergedCall, ONE, is_script, key_of};
use super::failure::{is_of_forbidden_key, is_of_key, late_error, store_error, unsent_error};
use super::gather::QueuedQuestion;

/// Slots may move on while a call is redirected.
const REDIRECTIONS: usize = 4;
const MISSING_SCRIPT: ErrorKind = ErrorKind::Server(ServerErrorKind::NoScript);

/// A batch was refused with nothing done, so its questions go one by one.
pub(crate) struct Split {
    pub(super) batch: Vec<QueuedQuestion>,
    /// Keys are in several slots, and so may those of the next batch be. Otherwise the server's user
    /// may not touch a key.
    pub(super) by_slots: bool,
}

/// The callers of the batch wait until `until`. Returns how long the call took.
pub(crate) async fn call_server(
    links: &Arc<Links>,
    mut batch: Vec<QueuedQuestion>,
    until: Instant,
) -> Result<Option<Duration>, Split> {
    let mut over = None;
    let result = timeout_at(until, send_and_resend(links, &mut over, &mut batch)).await.ok();
    let Some(over) = over else {
        links.ask_slots();
        let error = match result {
            Some(Err(error)) => store_error(error).unsent(),
            _ => unsent_error(until),
        };
        batch.into_iter().for_each(|waiting| waiting.send_answer(Err(error.clone())));
        return Ok(None);
    };
    let error = match result {
        Some(Ok((answers, took))) => {
            answers.iter().for_each(|answer| over.report_outcome(Some(answer.as_ref())));
            for (waiting, answer) in batch.into_iter().zip(answers) {
                waiting.send_answer(answer.map_err(store_error));
            }
            return Ok(took);
        }
        Some(Err(error)) => {
            over.report_outcome::<()>(Some(Err(&error)));
            let by_slots = is_refused_as_one(&error, &batch);
            if by_slots || batch.len() > 1 && is_of_forbidden_key(&error) {
                return Err(Split { batch, by_slots });
            }
            if !is_of_key(&error) {
                links.ask_slots();
            }
            store_error(error)
        }
        None => {
            over.report_outcome::<()>(None);
            links.ask_slots();
            late_error(until)
        }
    };
    for waiting in batch {
        waiting.send_answer(Err(error.clone()));
    }
    Ok(None)
}

/// The keys are in several slots, or Tair does not take the script, whose keys are no literals.
fn is_refused_as_one(error: &RedisError, batch: &[QueuedQuestion]) -> bool {
    let says = |text| error.detail().is_some_and(|detail| detail.contains(text));
    let refused = error.kind() == ErrorKind::Server(ServerErrorKind::CrossSlot)
        || says("keys must be in same slot")
        || says("bad lua script for redis cluster");
    refused && batch.iter().map(|waiting| waiting.asked.len()).sum::<usize>() > 1
}

/// Sends the questions whose callers still wait; again only if nothing was done: the connection had
/// ended before, or the server has said that the script is missing, that it is a replica, or which
/// node has the slot. Returns the answers, and how long they took if something was sent.
async fn send_and_resend(
    links: &Arc<Links>,
    over: &mut Option<Connection>,
    batch: &mut Vec<QueuedQuestion>,
) -> RedisResult<(Vec<RedisResult<Answer>>, Option<Duration>)> {
    let patience = batch.iter().map(|waiting| waiting.patience).max().unwrap_or_default();
    let key = batch.first().map(|waiting| key_of(&waiting.asked[0]).to_owned()).unwrap_or_default();
    let mut connection = next_connection(links, over, &key, patience).await?;
    let (mut missing, mut redirections) = (None, 0);
    loop {
        // Before the look at the time: a caller whose deadline passes meanwhile is late.
        batch.iter().for_each(|waiting| waiting.note_sent(true));
        let now = Instant::now();
        let late = batch.extract_if(.., |waiting| !waiting.is_wanted(now));
        late.for_each(QueuedQuestion::fail_unsent);
        if batch.is_empty() {
            // Or callers who never wait for two round trips would never load the script.
            if let Some(loads) = missing {
                let _ = connection.send(&loads).await;
            }
            return Ok((Vec::new(), None));
        }
        let (answers, loads) = ask(connection, batch, missing.is_some()).await;
        let by_replica = match &answers {
            Ok(answers) => answers.iter().any(is_refused_by_replica),
            Err(error) => is_from_replica(error),
        };
        if connection.is_unsent() || by_replica && connection.is_replaceable() {
            if let Ok(answers) = answers {
                // A replica answers questions that write nothing.
                for (waiting, answer) in take(batch).into_iter().zip(answers) {
                    match is_refused_by_replica(&answer) {
                        true => batch.push(waiting),
                        false => waiting.send_answer(answer.map_err(store_error)),
                    }
                }
            }
            batch.iter().for_each(|waiting| waiting.note_sent(false));
            connection = next_connection(links, over, &key, patience).await?;
            continue;
        }
        if let Err(error) = &answers
            && redirections < REDIRECTIONS
            && let Some(elsewhere) = links.redirected(connection, error, patience)
        {
            redirections += 1;
            connection.report_outcome::<()>(Some(Err(error)));
            *over = None;
            batch.iter().for_each(|waiting| waiting.note_sent(false));
            connection = over.insert(elsewhere.await?);
            continue;
        }
        match answers {
            // Behind a proxy, another server may have it, so the charge is sent with the script.
            Err(_) if loads.is_some() && missing.is_none() => missing = loads,
            answers => return answers.map(|answers| (answers, Some(now.elapsed()))),
        }
    }
}

/// Also returns what loads the script, if it is missing.
async fn ask(
    connection: &mut Connection,
    batch: &[QueuedQuestion],
    brings_script: bool,
) -> (RedisResult<Vec<RedisResult<Answer>>>, Option<Cmd>) {
    let merged = match batch {
        [one] if one.asked.len() == 1 => None,
        all => Some(MergedCall::new(all.iter().map(|waiting| &waiting.asked[..]))),
    };
    let (script, call) = match &merged {
        None => (&*ONE, Cow::Borrowed(&batch[0].asked[0])),
        Some(merged) => (&*MANY, Cow::Owned(merged.to_cmd())),
    };
    let brings_script = is_script(&call) && (brings_script || !connection.keeps_scripts());
    let answer = match brings_script {
        true => connection.send(&script.eval(&call)).await,
        false => connection.send(&call).await,
    };
    let answers = match &merged {
        None => {
            answer.and_then(|answer| Answer::from_one(&call, answer)).map(|answer| vec![Ok(answer)])
        }
        Some(merged) => answer.and_then(|answer| merged.parse(answer)),
    };
    let is_missing = answers.as_ref().is_err_and(|error| error.kind() == MISSING_SCRIPT);
    if brings_script || is_missing || answers.is_ok() {
        connection.note_script((!brings_script).then_some(is_missing));
    }
    let loads = is_missing.then(|| script.load(&call));
    (answers, loads)
}

async fn next_connection<'a>(
    links: &Links,
    over: &'a mut Option<Connection>,
    key: &[u8],
    patience: Duration,
) -> RedisResult<&'a mut Connection> {
    if let Some(left) = over.take() {
        left.replace();
    }
    Ok(over.insert(links.get_connection(key, patience).await?))
}

fn is_refused_by_replica(answer: &RedisResult<Answer>) -> bool {
    answer.as_ref().is_err_and(is_from_replica)
}
