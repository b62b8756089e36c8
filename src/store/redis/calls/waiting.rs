//! A command that waits to be sent, and for its answer.

use std::time::Duration;

use redis::Cmd;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::script::Answer;
use super::failure::unsent;
use crate::store::error::StoreError;

pub(crate) struct Waiting {
    pub(crate) cmd: Cmd,
    pub(crate) until: Instant,
    /// How long it may wait for a connection.
    pub(crate) patience: Duration,
    reply: oneshot::Sender<Outcome>,
}

/// What became of a command.
pub(crate) enum Outcome {
    Answered(Result<Answer, StoreError>),
    /// It was not sent in this way, and is to be sent in another.
    Returned(Cmd),
}

impl Waiting {
    pub(crate) fn new(cmd: Cmd, until: Instant) -> (Self, oneshot::Receiver<Outcome>) {
        let (reply, outcome) = oneshot::channel();
        let patience = until - Instant::now();
        (Self { cmd, until, patience, reply }, outcome)
    }

    /// What is late or was dropped is not sent.
    pub(crate) fn is_wanted(&self, now: Instant) -> bool {
        now < self.until && !self.reply.is_closed()
    }

    /// It is not sent any more.
    pub(crate) fn withdraw(self) {
        self.answer(Err(unsent()));
    }

    pub(crate) fn give_back(self) {
        // Who is gone needs no answer, here and below.
        let _ = self.reply.send(Outcome::Returned(self.cmd));
    }

    pub(crate) fn answer(self, answer: Result<Answer, StoreError>) {
        let _ = self.reply.send(Outcome::Answered(answer));
    }
}
