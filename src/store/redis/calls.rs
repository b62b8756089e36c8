//! Calls of the server: each is sent, shared by decisions, and ended in time (S32).

mod call;
mod failure;
mod gather;
mod queue;
mod runtimes;
mod waiting;

pub(super) use call::Call;
pub(super) use failure::ended;
pub(super) use runtimes::Runtimes;
pub(super) use waiting::{Outcome, Waiting};
