//! The peer's address as a key. Only this file knows where servers store the address.

use std::net::{IpAddr, SocketAddr};

use http::HeaderValue;
use http::header::CONTENT_TYPE;
use http::request::Parts;

use super::encoding::{IPV6_PREFIX, Key};
use super::extractor::{KeyExtractor, MissingKey};
use super::proxied;

/// The peer's address, for servers other than axum: put it into the extensions of each request.
///
/// ```
/// use std::net::SocketAddr;
/// use tower_fixed_window::key::PeerAddr;
///
/// # let peer: SocketAddr = ([127, 0, 0, 1], 4711).into();
/// let mut request = http::Request::new(());
/// request.extensions_mut().insert(PeerAddr(peer));
/// # assert!(request.extensions().get::<PeerAddr>().is_some());
/// ```
///
/// `examples/hyper.rs` is a complete server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerAddr(pub SocketAddr);

/// Extracts the address of the peer: [`PeerAddr`], or, with the feature `axum`, axum's
/// `ConnectInfo<SocketAddr>` (in tests of an app, `MockConnectInfo`). IPv6 addresses count by their
/// /64, apart from [link-local and unique local ones](Key::from_ip).
///
/// Behind a proxy, this is the proxy's address, and all clients share one count. Use `client_ip()`
/// there (feature `client-ip`). The log warns once if a request has a forwarding header and comes
/// from a loopback or private address, or if it comes from the gateway of a Docker network.
pub fn peer_ip() -> PeerIp {
    PeerIp { ipv6_prefix: IPV6_PREFIX }
}

/// The extractor returned by [`peer_ip`].
#[derive(Clone, Copy, Debug)]
#[must_use = "an extractor does nothing until it is given to a layer"]
pub struct PeerIp {
    ipv6_prefix: u8,
}

impl PeerIp {
    /// IPv6 addresses count by their first `bits`, apart from local ones. The default is 64. A host
    /// has at least a /64, and many customers have a /56 or /48. Fewer bits cover such a customer,
    /// and affect more neighbours.
    ///
    /// # Panics
    /// If `bits` is above 128.
    ///
    /// ```
    /// use std::net::SocketAddr;
    /// use tower_fixed_window::key::{PeerAddr, peer_ip};
    /// use tower_fixed_window::{Key, KeyExtractor};
    ///
    /// let key = |peer: &str| {
    ///     let (mut parts, ()) = http::Request::new(()).into_parts();
    ///     parts.extensions.insert(PeerAddr(peer.parse::<SocketAddr>().unwrap()));
    ///     let mut key = Key::default();
    ///     peer_ip().ipv6_prefix(56).extract(&parts, &mut key).unwrap();
    ///     key
    /// };
    /// assert_eq!(key("[2001:db8:0:1::7]:4711"), key("[2001:db8:0:2::8]:4711"));
    /// assert_ne!(key("[2001:db8:0:1::7]:4711"), key("[2001:db8:0:101::7]:4711"));
    /// ```
    #[track_caller]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.ipv6_prefix = checked_prefix(bits);
        self
    }
}

#[track_caller]
pub(super) fn checked_prefix(bits: u8) -> u8 {
    assert!(bits <= 128, "an IPv6 address has 128 bits, not {bits}: write .ipv6_prefix(56)");
    bits
}

impl KeyExtractor for PeerIp {
    #[inline]
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        notice_proxy(parts);
        key.push_ip(peer(parts)?, self.ipv6_prefix);
        Ok(())
    }
}

/// Logs a hint if a request that counts by its peer has come through a proxy.
#[inline]
pub(super) fn notice_proxy(parts: &Parts) {
    // Reads the peer's address again: keeping it would cost each request time.
    #[cold]
    #[inline(never)]
    fn check_proxy(parts: &Parts) {
        if let Ok(peer) = peer(parts) {
            proxied::log_hint(parts, peer);
        }
    }
    if proxied::is_check_due() {
        check_proxy(parts);
    }
}

/// Returns the peer's address as the server provides it. An address that the app has set takes
/// precedence.
#[inline(always)]
pub(super) fn peer(parts: &Parts) -> Result<IpAddr, MissingKey> {
    if let Some(peer) = parts.extensions.get::<PeerAddr>() {
        return Ok(peer.0.ip());
    }
    #[cfg(feature = "axum")]
    {
        use axum::extract::connect_info::{ConnectInfo, MockConnectInfo};

        if let Some(info) = parts.extensions.get::<ConnectInfo<SocketAddr>>() {
            return Ok(info.0.ip());
        }
        if let Some(info) = parts.extensions.get::<MockConnectInfo<SocketAddr>>() {
            return Ok(info.0.ip());
        }
    }
    Err(MissingKey::server(if is_grpc(parts) { NO_PEER_GRPC } else { NO_PEER }))
}

fn is_grpc(parts: &Parts) -> bool {
    let content_type = parts.headers.get(CONTENT_TYPE).map(HeaderValue::as_bytes);
    content_type.is_some_and(|value| value.starts_with(b"application/grpc"))
}

macro_rules! no_peer {
    ($axum:literal) => {
        concat!(
            "requests carry no peer address. axum: ",
            $axum,
            "serve the app with `axum::serve(listener, \
             app.into_make_service_with_connect_info::<SocketAddr>())`. Other servers, and axum with \
             a `Connected` type of your own: insert `tower_fixed_window::key::PeerAddr` into each \
             request's extensions (salvo: in a handler before the limit, by `.hoop(..)`), or write \
             `.key_fn(..)`; docs/other-stacks.md has a \
             program for each. A Unix socket has no addresses: in axum, write \
             `.layer(axum::Extension(PeerAddr(([127, 0, 0, 1], 0).into())))` after the limit, and for \
             the clients of a proxy `client_ip().trusting([\"127.0.0.1\"])`"
        )
    };
}

#[cfg(feature = "axum")]
const NO_PEER: &str = no_peer!("");

#[cfg(not(feature = "axum"))]
const NO_PEER: &str = no_peer!("enable the feature `axum` of tower-fixed-window, and ");

const NO_PEER_GRPC: &str = "gRPC requests carry no peer address that the rate limit knows. tonic: \
    write `.key_fn(|parts| Some(Key::from(parts.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip())))`, \
    with `get::<TlsConnectInfo<TcpConnectInfo>>()?.get_ref()` under TLS. Other servers: insert \
    `tower_fixed_window::key::PeerAddr` into each request's extensions";
