//! Shared by tests, benches and proofs: servers that they start and kill, a network that can be
//! made bad, a clock, and stores to put in place of Redis.

mod clock;
mod counts;
mod forward;
mod gateway;
mod postgres;
mod proxy;
mod server;

pub use clock::TokioClock;
pub use counts::Counts;
pub use forward::Operation;
pub use gateway::{Command, Fate, contains, gateway};
pub use postgres::{Pooler, Postgres, give};
pub use proxy::Proxy;
pub use server::{ALONE, Server, ask, free_port, installed, shifted_clock, signal, wait_for};
