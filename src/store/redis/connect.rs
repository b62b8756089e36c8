//! Opening one connection.

#[cfg(feature = "redis-cluster")]
pub(super) mod cluster;
#[cfg(feature = "redis-sentinel")]
pub(super) mod sentinel;
pub(super) mod settings;
#[cfg(feature = "redis-tls")]
pub(super) mod tls;
