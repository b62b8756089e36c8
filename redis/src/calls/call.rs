//! Makes one call to the server, in a task of its own: [`call_server`].
//!
//! The task keeps the deadline, reports the outcome to the link, answers its callers, and ends
//! whether or not they still wait. The question of a caller that is gone before the call is not
//! sent.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use redis::{ErrorKind, RedisError, RedisResult, ServerErrorKind};
use tokio::time::{Instant, timeout_at};

use super::super::link::{Connection, Links, is_from_replica};
use super::super::script::{Answered, MergedCall};
use super::failure::{is_of_key, late_error, store_error, unsent_error};
use super::gather::QueuedQuestion;

/// Slots may move on while a call is redirected.
const REDIRECTIONS: usize = 4;
const MISSING_SCRIPT: ErrorKind = ErrorKind::Server(ServerErrorKind::NoScript);

/// A batch was refused with nothing done, so its questions go one by one. `true`: keys are in several
/// slots, and so may those of the next batch be. Otherwise the server's user may not touch a key.
pub(super) type Split = (Vec<QueuedQuestion>, bool);

/// Returns how long the call took. The callers of the batch, which is not empty, are answered.
pub(super) async fn call_server(
    links: &Arc<Links>,
    mut batch: Vec<QueuedQuestion>,
) -> Result<Option<Duration>, Split> {
    let mut over = None;
    let until = batch.iter().map(|waiting| waiting.until).max().unwrap_or_else(Instant::now);
    let sent = send_and_resend(links, &mut over, &mut batch, until - Instant::now());
    let result = timeout_at(until, sent).await.ok();
    if let Some(over) = &over {
        match &result {
            Some(Ok((answers, _))) => {
                answers.iter().for_each(|answer| over.report_outcome(Some(answer.as_ref())));
            }
            Some(Err(error)) => over.report_outcome::<()>(Some(Err(error))),
            None => over.report_outcome::<()>(None),
        }
    }
    let error = match result {
        Some(Ok((answers, took))) => {
            for (waiting, answer) in batch.into_iter().zip(answers) {
                waiting.send_answer(answer.map_err(store_error));
            }
            return Ok(took);
        }
        Some(Err(error)) => {
            let by_slots = is_refused_as_one(&error, &batch);
            let of_key = is_of_key(&error);
            if over.is_some() && (by_slots || batch.len() > 1 && of_key) {
                return Err((batch, by_slots));
            } else if !of_key {
                links.ask_slots();
            }
            if over.is_some() { store_error(error) } else { store_error(error).unsent() }
        }
        None => {
            links.ask_slots();
            if over.is_some() { late_error(until) } else { unsent_error(until) }
        }
    };
    batch.into_iter().for_each(|waiting| waiting.send_answer(Err(error.clone())));
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
    patience: Duration,
) -> RedisResult<(Vec<Answered>, Option<Duration>)> {
    let key = batch.first().map(|waiting| waiting.asked[0].key.clone()).unwrap_or_default();
    let (mut brings_script, mut redirections) = (false, 0);
    loop {
        let next = match over.take() {
            Some(connection) => connection,
            None => links.get_connection(key.as_bytes(), patience).await?,
        };
        let connection = over.insert(next);
        // Before the look at the time: a caller whose deadline passes meanwhile is late.
        batch.iter().for_each(|waiting| waiting.note_sent(true));
        let now = Instant::now();
        for late in batch.extract_if(.., |of| now >= of.until || of.reply.is_closed()) {
            let error = unsent_error(late.until);
            late.send_answer(Err(error));
        }
        if batch.is_empty() {
            return Ok((Vec::new(), None));
        }
        let call = MergedCall::new(batch.iter().map(|waiting| &waiting.asked[..]));
        let health = Arc::clone(&connection.health);
        let lacks_script = &health.lacks_script[usize::from(call.is_one())];
        brings_script |= lacks_script.load(Relaxed);
        let answer = connection.send(&call.to_cmd(brings_script)).await;
        let answers = answer.and_then(|answer| call.parse(answer));
        let is_missing = answers.as_ref().is_err_and(|error| error.kind() == MISSING_SCRIPT);
        lacks_script.store(is_missing && !brings_script, Relaxed);
        let by_replica = match &answers {
            // A replica answers questions that write nothing.
            Ok(answers) => answers.iter().any(|of| of.as_ref().is_err_and(is_from_replica)),
            Err(error) => is_from_replica(error),
        };
        if connection.unsent || by_replica && connection.is_replaceable {
            over.take().into_iter().for_each(Connection::replace);
            batch.iter().for_each(|waiting| waiting.note_sent(false));
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
            *over = Some(elsewhere.await?);
            continue;
        }
        match answers {
            // Behind a proxy, another server may have it, so the charge is sent with the script.
            Err(_) if is_missing && !brings_script => brings_script = true,
            answers => return answers.map(|answers| (answers, Some(now.elapsed()))),
        }
    }
}
