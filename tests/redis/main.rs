//! Redis and Valkey as they are really run, and as they really fail. Each test starts its own
//! servers on free ports of this machine and ends them.
//!
//! `REDIS_SERVER=valkey-server` chooses another binary. Where there is none the tests are skipped
//! with a word, or fail if `REQUIRE_REDIS=1`.

mod agreement;
mod all_or_none;
mod attempts;
mod calendars;
mod causes;
mod cluster_and_sentinel;
mod conformance;
mod corrections;
mod cuts;
mod differential;
mod failover;
mod garbage;
mod gathered_calls;
mod idle_connections;
mod latency;
#[path = "../it/log.rs"]
mod log;
mod lost_expiries;
mod observed_outages;
mod outage;
mod proxies;
mod random;
mod resharding;
mod rights;
mod runtimes;
mod secrets;
mod shared_count;
mod silent_hosts;
mod stored_keys;
mod tls;
mod traffic;
