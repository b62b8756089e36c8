//! What the layer promises over HTTP: one module for each promise.

mod attack;
mod breaker;
mod client_ip;
mod clients;
mod dropped;
mod endpoint;
mod fields;
mod forgery;
/// The example, so that its very policy is tested, with a clock that can be moved.
#[path = "../../examples/github.rs"]
#[allow(dead_code, reason = "its main function")]
mod github;
mod header_keys;
mod keys;
mod late;
mod layout;
mod memory;
mod messages;
mod million;
mod mounts;
mod operations;
mod options;
mod order;
mod outbound;
mod pictures;
mod queue;
mod readiness;
mod resets;
mod secrets;
mod shutdown;
mod sockets;
mod speech;
mod stores;
mod support;
mod types;
mod unharmed;
mod uploads;
mod watching;
mod words;
