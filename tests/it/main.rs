//! x
mod client_ip;
mod options;
mod queue;
mod support;
