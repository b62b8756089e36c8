//! Detects requests that come through a proxy and count by its address.

use std::cell::Cell;
use std::net::IpAddr;

use http::header::HOST;
use http::request::Parts;
use http::uri::Authority;

use crate::observe;

const HINT: &str = "requests with forwarding headers come from a loopback or private address and \
    count by it: if that is a proxy, all of its clients share one count. Write \
    `.key(client_ip().trusting([\"10.0.0.0/8\"]))` with the addresses of your proxies (feature \
    `client-ip`), or `.key(client_ip().trusting_hops(0))` if there is no proxy";

const DOCKER_HINT: &str = "requests come from the gateway of a Docker network and count by it: \
    Docker's userland proxy hides clients that connect over IPv6, so that all of them share one \
    count. Give the network IPv6 (`enable_ipv6: true` in compose.yaml), or write \
    `.key(client_ip().trusting_hops(0))` if such peers are clients";

#[cfg(feature = "client-ip")]
const OTHER_HEADER_HINT: &str = "requests of a trusted proxy lack the header that `client_ip()` \
    reads, have another forwarding header, and count by the proxy's address: all of its clients \
    share one count. Let the proxy send the header, or write `.from_header(\"x-real-ip\")` with the \
    one that it sends and that clients can't";

/// Headers that proxies set; only a proxy knows which of them. Clients can send them, too, and a
/// peer with a public address may be a client.
const FORWARDING: [&str; 3] = ["x-forwarded-for", "forwarded", "x-real-ip"];

/// Returns whether to check this request. Looking up headers takes time, so each thread checks its
/// first requests and a sample of the later ones.
#[inline]
pub(super) fn is_check_due() -> bool {
    const FIRST: u32 = 64;
    const LATER: u32 = 256;
    thread_local!(static REQUESTS: Cell<u32> = const { Cell::new(0) });

    let request = REQUESTS.get();
    REQUESTS.set(request.wrapping_add(1));
    request < FIRST || request.is_multiple_of(LATER)
}

/// Logs a hint if a request of a trusted proxy, without the header that is read, has another one.
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

/// Logs a hint if a request from this peer has probably come through a proxy.
pub(super) fn log_hint(parts: &Parts, peer: IpAddr) {
    if is_local(peer) && has_forwarding_header(parts) {
        observe::doubt(&HINT);
    } else if is_docker_gateway(peer) && !asks_for_this_host(parts) {
        observe::doubt(&DOCKER_HINT);
    }
}

/// Returns whether this is the address from which Docker's proxy connects to a container of a
/// network that has the usual addresses.
fn is_docker_gateway(peer: IpAddr) -> bool {
    matches!(peer.to_canonical(), IpAddr::V4(v4) if matches!(v4.octets(), [172, 16..32, 0, 1]))
}

/// Returns whether a request is for `localhost`, as those of a developer are, or for no host.
fn asks_for_this_host(parts: &Parts) -> bool {
    let header = parts.headers.get(HOST).and_then(|host| Authority::try_from(host.as_bytes()).ok());
    let Some(host) = parts.uri.host().or(header.as_ref().map(Authority::host)) else { return true };
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// Returns whether the address is of this host, of a private network, or of a provider's network.
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
