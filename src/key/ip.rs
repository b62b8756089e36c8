//! Addresses as keys. The only file that knows how a server tells its peer's address.

use std::net::{IpAddr, SocketAddr};

use http::request::Parts;

use super::{Key, KeyExtractor, MissingKey};

/// IPv6 addresses count by this prefix: what one subscriber has.
pub(super) const IPV6_PREFIX: u8 = 64;

/// The peer's address, for servers that are not axum's: put it into each request's extensions.
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
/// `examples/hyper.rs` is a whole server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerAddr(pub SocketAddr);

/// The address of the connection's other end: [`PeerAddr`], or with the `axum` feature axum's
/// `ConnectInfo<SocketAddr>` (in an app's tests, its `MockConnectInfo`). IPv6 addresses count by their /64.
///
/// Behind a proxy that is the proxy's address, and all clients share one count.
pub fn peer_ip() -> PeerIp {
    PeerIp
}

/// Made by [`peer_ip`].
#[derive(Clone, Copy, Debug)]
pub struct PeerIp;

impl KeyExtractor for PeerIp {
    #[inline]
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        key.push_ip(peer(parts)?, IPV6_PREFIX);
        Ok(())
    }
}

/// The peer's address, from whoever left it in the request. What the app itself has set goes first.
fn peer(parts: &Parts) -> Result<IpAddr, MissingKey> {
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
    Err(MissingKey::server(NO_PEER))
}

#[cfg(feature = "axum")]
const NO_PEER: &str = "requests carry no peer address: serve the app with \
    `axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())`; \
    servers other than axum's insert `tower_fixed_window::key::PeerAddr` into each request's extensions";

#[cfg(not(feature = "axum"))]
const NO_PEER: &str = "requests carry no peer address: with axum, enable the feature `axum` of \
    tower-fixed-window and serve the app with \
    `axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>())`; \
    other servers insert `tower_fixed_window::key::PeerAddr` into each request's extensions";
