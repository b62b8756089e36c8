//! x
mod client_ip;
mod forgery;
mod keys;
mod options;
mod queue;
mod support;
