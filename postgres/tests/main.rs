//! The store over real servers, which the tests start and kill.

mod clock;
mod conformance;
mod failover;
mod nodes;
mod outage;
mod pooler;
mod queue;
mod runtimes;
mod table;
#[cfg(feature = "tls")]
mod tls;
