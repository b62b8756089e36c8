//! Redis and Valkey as they are really run, and as they really fail. Each test starts its own
//! servers on free ports of this machine and ends them.
//!
//! `REDIS_SERVER=valkey-server` chooses another binary. Where there is none the tests are skipped
//! with a word, or fail if `REQUIRE_REDIS=1`.

mod conformance;
mod differential;
mod distance;
mod exact;
mod failover;
mod far;
mod idle;
mod leases;
mod life;
mod outage;
mod proxy;
mod quiet;
mod runtimes;
mod secrets;
mod server;
mod silent;
mod tls;
mod together;
mod topology;
mod unplug;
