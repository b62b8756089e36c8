//! The real `RedisStore` of several nodes over a simulated network, clock and server, from a seed.
//!
//! Parts that are real: the store with its link, gather, guard and front, the layer and the limiter,
//! the client library's connection, and the Lua scripts. What is simulated: sockets, the server's
//! commands, and time.

pub mod check;
pub mod cluster;
pub mod history;
pub mod net;
pub mod plan;
pub mod run;
pub mod sentinel;
pub mod server;
pub mod wire;
