//! What the layer promises over HTTP: one module for each promise.

mod fields;
mod keys;
mod messages;
mod mounts;
mod options;
mod queue;
mod readiness;
mod sockets;
mod stores;
mod support;
mod types;
mod unharmed;
mod uploads;
