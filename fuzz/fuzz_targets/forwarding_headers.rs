//! Whatever a client writes into forwarding headers, behind honest proxies it is found by its own
//! address; and without them there is an answer, and no panic.
#![no_main]

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use arbitrary::Arbitrary;
use http::{HeaderName, HeaderValue, Request};
use libfuzzer_sys::fuzz_target;
use tower_fixed_window::key::{PeerAddr, client_ip};

const NAMES: [&str; 3] = ["x-forwarded-for", "forwarded", "x-real-ip"];
const CLIENT: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 7));

#[derive(Arbitrary, Debug)]
struct Input<'a> {
    source: u8,
    lines: Vec<&'a [u8]>,
    elsewhere: Vec<(u8, &'a [u8])>,
    /// How each proxy adds its entry; an empty list is a trusted peer that adds nothing.
    proxies: Vec<(bool, u8)>,
}

fuzz_target!(|input: Input<'_>| {
    let source = usize::from(input.source) % NAMES.len();
    // A server would refuse to read other bytes.
    let valid = |line: &&[u8]| HeaderValue::from_bytes(line).is_ok();
    let mut lines: Vec<Vec<u8>> =
        input.lines.iter().copied().filter(valid).map(<[u8]>::to_vec).collect();
    let mut peer = CLIENT;
    for (i, (own_line, style)) in input.proxies.iter().take(8).enumerate() {
        let entry = match (source, style % 4) {
            (1, 0) => format!("for={peer}"),
            (1, 1) => format!("for=\"{}\";proto=https", SocketAddr::new(peer, 80)),
            (1, 2) => format!("host=\"a,b;\\\"for=c\";For=\"{peer}\""),
            (1, _) => format!("by=_x; for=\"{peer}\" ;host=d"),
            (_, 0 | 1) => peer.to_string(),
            _ => SocketAddr::new(peer, 80).to_string(),
        };
        if source == 2 {
            if i == 0 {
                lines = vec![entry.into_bytes()];
            }
        } else if *own_line || lines.is_empty() {
            lines.push(entry.into_bytes());
        } else {
            let last = lines.last_mut().expect("not empty");
            last.extend_from_slice(b", ");
            last.extend_from_slice(entry.as_bytes());
        }
        peer = IpAddr::from([10, 0, 0, i as u8 + 1]);
    }

    let (mut parts, ()) = Request::new(()).into_parts();
    let mut add = |name: usize, line: &[u8]| {
        let name = HeaderName::from_static(NAMES[name % NAMES.len()]);
        let value = HeaderValue::from_bytes(line).expect("checked");
        parts.headers.append(name, value);
    };
    for line in &lines {
        add(source, line);
    }
    for (name, line) in &input.elsewhere {
        let name = usize::from(*name) % NAMES.len();
        if name != source && valid(line) {
            add(name, line);
        }
    }

    let honest = !input.proxies.is_empty();
    let peer = if honest { peer } else { IpAddr::from([10, 0, 0, 1]) };
    parts.extensions.insert(PeerAddr(SocketAddr::new(peer, 4711)));
    let by_network = client_ip().trusting(["10.0.0.0/8"]).from_header(NAMES[source]);
    let by_number =
        client_ip().trusting_hops(input.proxies.len().min(8)).from_header(NAMES[source]);
    let found = by_network.address(&parts).expect("there is a peer");
    assert_eq!(found, found.to_canonical());
    if honest {
        assert_eq!(found, CLIENT);
        assert_eq!(by_number.address(&parts), Ok(CLIENT));
    }
});
