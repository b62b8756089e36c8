//! The peer's address as a key, and requests that come through a proxy and count by its address.
//! Only this file knows where servers store the address.

use std::cell::Cell;
use std::net::{IpAddr, SocketAddr};

use http::HeaderValue;
use http::header::CONTENT_TYPE;
use http::request::Parts;

use super::encoding::{IPV6_PREFIX, Key};
use super::extractor::{KeyExtractor, MissingKey};
use crate::observe;

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

/// Extracts the address of the peer: [`PeerAddr`] or, with the feature `axum`, axum's
/// `ConnectInfo<SocketAddr>` (in tests of an app, `MockConnectInfo`). IPv6 addresses count by their
/// /64, except [link-local and unique local ones](Key::from_ip);
/// `client_ip().ipv6_prefix(56)` sets another prefix.
///
/// Behind a proxy, the peer is the proxy, so all clients share one count: use `client_ip()` there
/// (feature `client-ip`). The log warns once if a request has a forwarding header and comes from a
/// loopback or private address.
pub fn peer_ip() -> impl KeyExtractor + Copy {
    PeerIp
}

#[derive(Clone, Copy)]
pub(crate) struct PeerIp;

impl KeyExtractor for PeerIp {
    #[inline]
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        notice_proxy(parts);
        key.push_ip(peer(parts)?, IPV6_PREFIX);
        Ok(())
    }
}

/// Reads the peer's address again: keeping it would cost each request time.
#[inline]
pub(super) fn notice_proxy(parts: &Parts) {
    if is_check_due() && peer(parts).is_ok_and(is_local) && has_forwarding_header(parts) {
        observe::doubt(&HINT);
    }
}

/// An address that the app has set takes precedence.
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
    Err(MissingKey::server(if grpc(parts).is_some() { NO_PEER_GRPC } else { NO_PEER }))
}

/// The content type of a gRPC call, and whether it is one of gRPC-web.
pub(crate) fn grpc(parts: &Parts) -> Option<(&HeaderValue, bool)> {
    const GRPC: &[u8] = b"application/grpc";
    const WEB: &[u8] = b"-web";

    let value = parts.headers.get(CONTENT_TYPE)?;
    let (kind, rest) = value.as_bytes().split_at_checked(GRPC.len())?;
    let is_web = rest.get(..WEB.len()).is_some_and(|rest| rest.eq_ignore_ascii_case(WEB));
    let is_grpc = is_web || matches!(rest.first(), None | Some(b'+' | b';' | b' '));
    (kind.eq_ignore_ascii_case(GRPC) && is_grpc).then_some((value, is_web))
}

macro_rules! no_peer {
    ($($fix:literal),*) => {
        concat!(
            "requests carry no peer address: the server sets none, or a middleware made a new \
             request and lost its extensions",
            $("\n  ", $fix),*
        )
    };
}

const NO_PEER: &str = no_peer!(
    "axum (feature `axum`): serve `app.into_make_service_with_connect_info::<SocketAddr>()`",
    "other servers, Unix sockets: set `tower_fixed_window::key::PeerAddr`, as docs/other-stacks.md does"
);

const NO_PEER_GRPC: &str = no_peer!(
    "tonic: `.key_fn(|parts| Some(Key::from(parts.extensions.get::<TcpConnectInfo>()?.remote_addr()?.ip())))`",
    "TLS: `get::<TlsConnectInfo<TcpConnectInfo>>()?.get_ref()`; others: `tower_fixed_window::key::PeerAddr`"
);

const HINT: &str = "requests with forwarding headers come from a loopback or private address and \
    count by it: if that is a proxy, all of its clients share one count. Write \
    `.key(client_ip().trusting([\"10.0.0.0/8\"]))` with the addresses of your proxies (feature \
    `client-ip`), or `.key(client_ip().trusting_hops(0))` if there is no proxy";

#[cfg(feature = "client-ip")]
const OTHER_HEADER_HINT: &str = "requests of a trusted proxy lack the header that `client_ip()` \
    reads, have another forwarding header, and count by the proxy's address: all of its clients \
    share one count. Let the proxy send the header, or write `.from_header(\"x-real-ip\")` with the \
    one that it sends and that clients can't";

/// Only a proxy knows which of these headers it sets. Clients can send them, too, and a peer with a
/// public address may be a client.
const FORWARDING: [&str; 3] = ["x-forwarded-for", "forwarded", "x-real-ip"];

/// Looking up headers takes time, so each thread checks its first requests and a sample of the
/// later ones.
#[inline]
fn is_check_due() -> bool {
    const FIRST: u32 = 64;
    const LATER: u32 = 256;
    thread_local!(static REQUESTS: Cell<u32> = const { Cell::new(0) });

    let request = REQUESTS.get();
    REQUESTS.set(request.wrapping_add(1));
    request < FIRST || request.is_multiple_of(LATER)
}

#[cfg(feature = "client-ip")]
#[cold]
pub(super) fn log_other_header(parts: &Parts) {
    if is_check_due() && has_forwarding_header(parts) {
        observe::doubt(&OTHER_HEADER_HINT);
    }
}

fn has_forwarding_header(parts: &Parts) -> bool {
    FORWARDING.iter().any(|name| parts.headers.contains_key(*name))
}

/// This host's, a private network's, or a provider's network's.
fn is_local(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => {
            let [a, b, ..] = v4.octets();
            let is_shared = a == 100 && b & 0xc0 == 64;
            v4.is_loopback() || v4.is_private() || v4.is_link_local() || is_shared
        }
        IpAddr::V6(v6) => v6.is_loopback() || v6.is_unique_local() || v6.is_unicast_link_local(),
    }
}
