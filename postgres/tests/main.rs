//! The store over real servers, which the tests start and kill.

mod clock;
mod conformance;
mod failover;
mod nodes;
mod outage;
mod runtimes;
mod table;
