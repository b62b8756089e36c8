//! Detects requests that come through a proxy and count by its address.

use std::cell::Cell;
use std::net::IpAddr;

use http::request::Parts;

use crate::observe;

const HINT: &str = "requests with forwarding headers come from a loopback or private address and \
    count by it: if that is a proxy, all of its clients share one count. Write \
    `.key(client_ip().trusting([\"10.0.0.0/8\"]))` with the addresses of your proxies (feature \
    `client-ip`), or `.key(client_ip().trusting_hops(0))` if there is no proxy";

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

/// Returns whether a request from this peer has probably come through a proxy.
pub(super) fn is_proxied(parts: &Parts, peer: IpAddr) -> bool {
    is_local(peer) && FORWARDING.iter().any(|name| parts.headers.contains_key(*name))
}

pub(super) fn log_hint() {
    observe::doubt(&HINT);
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
