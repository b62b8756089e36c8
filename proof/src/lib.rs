//! Checks what a rate limiter has let pass against what it promises: from outside, by the times at which
//! requests were sent and answered, with real stores, processes and signals. See PROOF.md.

pub mod check;
pub mod history;
pub mod limiters;
pub mod node;
#[cfg(feature = "peers")]
mod peers;
pub mod proxy;
pub mod redis_server;
pub mod run;
pub mod scenarios;
