//! The store over real servers, which the tests start and kill.

mod conformance;
mod nodes;
mod outage;
mod table;
