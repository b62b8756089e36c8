//! What is set on the library's connections.

use std::time::Duration;

use redis::io::tcp::socket2::TcpKeepalive;
use redis::{AsyncConnectionConfig, Client, RedisResult};

/// What stands for a deadline that is too far away to be an instant.
pub(super) const NEVER: Duration = Duration::from_secs(30 * 365 * 86_400);
/// An idle connection is probed by the system after so long.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Calls that a connection holds before the next one has to wait for its turn.
const PIPELINE: usize = 1_024;

/// Deadlines are the store's own and the link's.
pub(super) fn config() -> AsyncConnectionConfig {
    AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(PIPELINE)
}

/// The same client, over connections that probe their peer and send at once.
pub(super) fn lasting(client: &Client) -> RedisResult<Client> {
    let info = client.get_connection_info();
    let settings = info.tcp_settings().clone().set_nodelay(true);
    let settings = match settings.keepalive() {
        Some(_) => settings,
        None => settings.set_keepalive(TcpKeepalive::new().with_time(KEEPALIVE)),
    };
    Client::open(info.clone().set_tcp_settings(settings))
}
