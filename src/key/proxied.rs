//! Notices requests that come through a proxy and count by its address.

use std::cell::Cell;
use std::net::IpAddr;

use http::request::Parts;

use crate::observe;

const HINT: &str = "requests with forwarding headers come from a loopback or private address and \
    count by it: if that is a proxy, all of its clients share one count. Write \
    `.key(client_ip().trusting([\"10.0.0.0/8\"]))` with the addresses of your proxies (feature \
    `client-ip`), or `.key(client_ip().trusting_hops(0))` if there is no proxy";

/// A client can send these headers, too. A peer with a public address may well be a client, and
/// only a proxy knows which of the headers it sets.
const FORWARDING: [&str; 3] = ["x-forwarded-for", "forwarded", "x-real-ip"];

/// Whether to look at a request: at the first ones of each thread, and at some of the later ones,
/// since it takes time to look up headers.
#[inline]
pub(super) fn is_due() -> bool {
    const FIRST: u32 = 64;
    const LATER: u32 = 256;
    thread_local!(static REQUESTS: Cell<u32> = const { Cell::new(0) });

    let request = REQUESTS.get();
    REQUESTS.set(request.wrapping_add(1));
    request < FIRST || request.is_multiple_of(LATER)
}

/// Whether a request with this peer has probably come through a proxy.
pub(super) fn is_proxied(parts: &Parts, peer: IpAddr) -> bool {
    is_local(peer) && FORWARDING.iter().any(|name| parts.headers.contains_key(*name))
}

pub(super) fn log() {
    observe::doubt(&HINT);
}

/// Whether the address is that of a host or of a network inside of a provider.
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
