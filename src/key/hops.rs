//! The addresses in forwarding headers, nearest hop first.
//!
//! Clients can write anything into these headers, and each proxy appends. So nothing on the left
//! may change how an entry to the right of it is read: all code here goes from right to left, in
//! one pass over the bytes.

use std::iter;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use http::header::FORWARDED;
use http::{HeaderMap, HeaderName, HeaderValue};

/// The longest hop that is read. An IPv6 address in brackets and quotes, with a port, takes 56
/// bytes.
const MAX_HOP: usize = 96;

pub(super) const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const CLOUDFRONT: HeaderName = HeaderName::from_static("cloudfront-viewer-address");

/// Nearest first, as long as `see` returns `true`; `None` is a hop that can't be read.
pub(super) fn visit_hops(
    name: &HeaderName,
    headers: &HeaderMap,
    mut see: impl FnMut(Option<IpAddr>) -> bool,
) {
    let mut lines = headers.get_all(name).iter().rev().map(HeaderValue::as_bytes);
    if *name == X_FORWARDED_FOR {
        let hops = lines.flat_map(|line| line.rsplit(|&b| b == b','));
        let _ended = hops.map(hop_address).all(see);
    } else if *name == FORWARDED {
        let elements = lines.flat_map(|line| unquoted_parts(line, b','));
        let _ended = elements.map(|element| element.and_then(forwarded_for)).all(see);
    } else {
        let address = if *name == CLOUDFRONT { address_before_port } else { hop_address };
        // A proxy that sets this header leaves only one. If there are two, the client may have sent
        // either.
        match (lines.next(), lines.next()) {
            (Some(value), None) => see(address(value)),
            (Some(_), Some(_)) => see(None),
            (None, _) => true,
        };
    }
}

/// The `for` of an element, if it has exactly one, and that is an address.
fn forwarded_for(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    for pair in unquoted_parts(element, b';') {
        let pair = pair?.trim_ascii();
        if pair.get(..4).is_some_and(|name| name.eq_ignore_ascii_case(b"for=")) {
            if found.is_some() {
                return None;
            }
            found = Some(&pair[4..]);
        }
    }
    hop_address(found?)
}

/// From right to left, the parts between separators outside of quoted strings. A quoted string
/// without a beginning ends them with `None`.
fn unquoted_parts(text: &[u8], separator: u8) -> impl Iterator<Item = Option<&[u8]>> {
    let mut left = Some(text);
    iter::from_fn(move || {
        let rest = left.take()?;
        let mut quoted = false;
        let mut at = rest.len();
        while at > 0 {
            at -= 1;
            if rest[at] == b'"' {
                let escapes = rest[..at].iter().rev().take_while(|&&b| b == b'\\').count();
                if escapes.is_multiple_of(2) {
                    quoted = !quoted;
                }
                // The backslashes before a quote are skipped: no later step looks at them.
                at -= escapes;
            } else if rest[at] == separator && !quoted {
                left = Some(&rest[..at]);
                return Some(Some(&rest[at + 1..]));
            }
        }
        Some((!quoted).then_some(rest))
    })
}

fn hop_address(text: &[u8]) -> Option<IpAddr> {
    let text = text.trim_ascii();
    if text.len() > MAX_HOP {
        return None;
    }
    let Some(quoted) = text.strip_prefix(b"\"") else { return parse_address(text) };
    // RFC 9110 lets a backslash stand before any character of a quoted string.
    let mut plain = [0; MAX_HOP];
    let mut len = 0;
    let mut bytes = quoted.strip_suffix(b"\"")?.iter();
    while let Some(&byte) = bytes.next() {
        plain[len] = match byte {
            b'"' => return None,
            b'\\' => *bytes.next()?,
            _ => byte,
        };
        len += 1;
    }
    parse_address(&plain[..len])
}

/// There always is a port, also behind an IPv6 address without brackets: there, `2001:db8::7:443`
/// would be an address by itself.
fn address_before_port(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text.trim_ascii()).ok()?;
    match text.rsplit_once(':') {
        Some((address, port)) if !text.starts_with('[') && is_port(port) => address.parse().ok(),
        _ => {
            parse_address(text.as_bytes()).filter(|_| text.starts_with('[') || !text.contains(':'))
        }
    }
}

/// Other names are no address: `unknown`, `_hidden`, `unix:`, host names.
fn parse_address(text: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(text).ok()?;
    if let Some(bracketed) = text.strip_prefix('[') {
        let (address, port) = bracketed.split_once(']')?;
        let address = ipv6_address(address)?;
        let is_port = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        return is_port.then_some(address.into());
    }
    if let Some(address) = ipv6_address(text) {
        return Some(address.into());
    }
    let Some((address, port)) = text.split_once(':') else {
        return Some(text.parse::<Ipv4Addr>().ok()?.into());
    };
    let address = address.parse::<Ipv4Addr>().ok()?;
    is_port(port).then_some(address.into())
}

/// A zone, as in `fe80::1%eth0`, names an interface of the proxy, and a link-local address is
/// unique there without it.
fn ipv6_address(text: &str) -> Option<Ipv6Addr> {
    let Some((address, zone)) = text.split_once('%') else { return text.parse().ok() };
    let address = address.parse::<Ipv6Addr>().ok().filter(Ipv6Addr::is_unicast_link_local)?;
    is_plain(zone).then_some(address)
}

/// A number, or an obfuscated port of RFC 7239.
fn is_port(text: &str) -> bool {
    match text.strip_prefix('_') {
        Some(name) => is_plain(name),
        None => (1..=5).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit()),
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
}
