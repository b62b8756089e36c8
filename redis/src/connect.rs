//! Opens connections of the client library, with this crate's settings: [`open`].

use std::iter;
use std::net::SocketAddr;
use std::time::Duration;

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::io::AsyncDNSResolver;
use redis::io::tcp::socket2::TcpKeepalive;
use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ErrorKind, RedisError, RedisFuture, RedisResult,
    Value, cmd,
};
#[cfg(feature = "tls")]
use rustls::crypto::{CryptoProvider, ring};
use tokio::net::{TcpStream, lookup_host};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Stands for a deadline that is too far away to be an instant.
pub(crate) const NEVER: Duration = Duration::from_secs(30 * 365 * 86_400);
/// The system probes a connection that was idle for this long.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Calls in flight on a connection before the next one waits for its turn.
const PIPELINE: usize = 1_024;

/// Stands for an answer that did not come.
pub(crate) const SILENT: &str = "no answer";

/// Redis' answer to one client too many.
pub(crate) const FULL: &str = "max number of clients reached";

/// How long to wait, at least, for a server to say why it closes a connection.
const LISTEN: Duration = Duration::from_millis(10);

pub(crate) fn silence() -> RedisError {
    (ErrorKind::Io, "the server does not answer", SILENT.to_owned()).into()
}

/// `nth`: how many attempts have failed or hang.
pub(crate) async fn open(client: &Client, nth: usize) -> RedisResult<MultiplexedConnection> {
    let start = Instant::now();
    match open_and_ping(client, nth).await {
        Err(error) if error.is_connection_dropped() => {
            let patience = start.elapsed().max(LISTEN);
            let refusal = timeout(patience, read_refusal(client)).await.ok().flatten();
            Err(refusal.unwrap_or(error))
        }
        opened => opened,
    }
}

async fn open_and_ping(client: &Client, nth: usize) -> RedisResult<MultiplexedConnection> {
    if let ConnectionAddr::TcpTls { .. } = client.get_connection_info().addr() {
        install_tls_provider();
    }
    // Without timeouts: the store and the link have deadlines.
    let config = AsyncConnectionConfig::new()
        .set_connection_timeout(None)
        .set_response_timeout(None)
        .set_pipeline_buffer_size(PIPELINE);
    let config = if nth == 0 { config } else { config.set_dns_resolver(Nth(nth)) };
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    ping(&mut connection).await.map(|()| connection)
}

/// The system accepts connections of a server that hangs.
pub(crate) async fn ping(connection: &mut impl ConnectionLike) -> RedisResult<()> {
    let answer = connection.req_packed_command(&cmd("PING")).await;
    match answer.and_then(Value::extract_error) {
        // Decisions show other errors.
        Err(error) if error.code().is_none() || error.detail() == Some(FULL) => Err(error),
        _ => Ok(()),
    }
}

/// Resolves a name to a single address, another one in each attempt. The library takes the first
/// that accepts the connection, and that server may be silent.
struct Nth(usize);

impl AsyncDNSResolver for Nth {
    fn resolve<'a, 'b: 'a>(
        &'a self,
        host: &'b str,
        port: u16,
    ) -> RedisFuture<'a, Box<dyn Iterator<Item = SocketAddr> + Send + 'a>> {
        Box::pin(async move {
            let all: Vec<_> = lookup_host((host, port)).await?.collect();
            let none = (ErrorKind::InvalidClientConfig, "No address found for host");
            Ok(Box::new(iter::once(self.of(&all).ok_or(none)?)) as _)
        })
    }
}

impl Nth {
    fn of(&self, all: &[SocketAddr]) -> Option<SocketAddr> {
        all.get(self.0 % all.len().max(1)).copied()
    }
}

/// Connects once more, for the error that a server sends before any command, as with `maxclients`
/// connections: the library takes it for the answer to its own command.
async fn read_refusal(client: &Client) -> Option<RedisError> {
    let ConnectionAddr::Tcp(host, port) = client.get_connection_info().addr() else { return None };
    let stream = TcpStream::connect((host.as_str(), *port)).await.ok()?;
    stream.readable().await.ok()?;
    let mut said = [0; 256];
    let read = stream.try_read(&mut said).ok()?;
    redis::parse_redis_value(&said[..read]).and_then(|value| value.extract_error()).err()
}

/// For the log: without user and password.
pub(crate) fn server_name(client: &Client) -> Option<String> {
    match client.get_connection_info().addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => {
            Some(host_and_port(host, *port))
        }
        ConnectionAddr::Unix(path) => Some(path.display().to_string()),
        _ => None,
    }
}

pub(crate) fn host_and_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

pub(crate) fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    Some((host.trim_start_matches('[').trim_end_matches(']'), port.parse().ok()?))
}

/// The same client, for another server.
pub(crate) fn at_address(client: &Client, address: &str) -> RedisResult<Client> {
    let invalid = || RedisError::from((ErrorKind::InvalidClientConfig, "no address of a node"));
    let (host, port) = split_address(address).ok_or_else(invalid)?;
    let (host, info) = (host.to_owned(), client.get_connection_info().clone());
    let addr = match info.addr().clone() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            ConnectionAddr::TcpTls { host, port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    Client::open(info.set_addr(addr))
}

/// Connections probe their peer and send at once. They don't say the library's name, unless the app
/// has chosen one: proxies that don't know the command hang up.
pub(crate) fn with_keepalive(client: &Client) -> RedisResult<Client> {
    let mut info = client.get_connection_info().clone();
    if info.redis_settings().lib_name().is_none() {
        let silent = info.redis_settings().clone().set_skip_set_lib_name();
        info = info.set_redis_settings(silent);
    }
    let mut settings = info.tcp_settings().clone().set_nodelay(true);
    if settings.keepalive().is_none() {
        settings = settings.set_keepalive(TcpKeepalive::new().with_time(KEEPALIVE));
    }
    Client::open(info.set_tcp_settings(settings))
}

/// All begin at once, as some may be silent. If none succeeds, returns the last error, or `none` if
/// there are none.
pub(crate) async fn first_success<T: Send + 'static>(
    asked: impl IntoIterator<Item = impl Future<Output = RedisResult<T>> + Send + 'static>,
    none: RedisError,
) -> RedisResult<T> {
    let mut asked: JoinSet<_> = asked.into_iter().collect();
    let mut error = none;
    while let Some(answer) = asked.join_next().await {
        match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(failed)) => error = failed,
            Err(_) => error = (ErrorKind::Client, "connecting has panicked").into(),
        }
    }
    Err(error)
}

/// Unless the app has chosen rustls' cryptography: without a choice, rustls panics if the app's
/// dependencies bring several.
pub(crate) fn install_tls_provider() {
    #[cfg(feature = "tls")]
    if CryptoProvider::get_default().is_none() {
        // Another thread may have been faster.
        let _ = ring::default_provider().install_default();
    }
}

#[cfg(test)]
#[path = "../../tests/unit/connect.rs"]
mod tests;
