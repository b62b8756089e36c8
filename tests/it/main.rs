//! What the layer promises over HTTP: one module for each promise.

mod client_ip;
mod fields;
mod forgery;
mod header_keys;
mod keys;
mod memory;
mod messages;
mod mounts;
mod options;
mod queue;
mod readiness;
mod secrets;
mod sockets;
mod stores;
mod support;
mod types;
mod unharmed;
mod uploads;
