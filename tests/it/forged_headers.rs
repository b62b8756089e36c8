//! Clients that try to get around a limit with forged headers: any header, any value, any number of
//! them.

use std::net::IpAddr;

use proptest::prelude::*;
use tower_fixed_window::key::ClientIp;

use crate::client_ip::request;
use crate::prelude::*;

/// How an honest proxy adds an address to what it got.
#[derive(Clone, Copy, Debug)]
enum Adds {
    /// To the end of the last line.
    Appends,
    /// A line of its own.
    NewLine,
    /// All lines become one, and it stands at its end.
    Joins,
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Header {
    XForwardedFor,
    Forwarded,
    /// The first proxy sets it; the others pass it on.
    Single,
}

impl Header {
    fn name(self) -> &'static str {
        match self {
            Self::XForwardedFor => "x-forwarded-for",
            Self::Forwarded => "forwarded",
            Self::Single => "cf-connecting-ip",
        }
    }

    /// An address as some proxy might write it.
    fn entry(self, address: IpAddr, style: u8) -> String {
        let plain = address.to_string();
        let with_port = SocketAddr::new(address, 4711).to_string();
        let text = if style & 1 == 0 { plain } else { with_port };
        match (self, style >> 1 & 3) {
            (Self::Forwarded, 0) => format!("for=\"{text}\""),
            (Self::Forwarded, 1) => format!("For=\"{text}\";proto=https;host=\"a, b;for=c\""),
            (Self::Forwarded, 2) => format!("by=_x;proto=http; for=\"{text}\""),
            (Self::Forwarded, _) => format!("host=\"\\\"\\\\\";for=\"{text}\""),
            _ => text,
        }
    }

    fn pass(self, lines: &mut Vec<Vec<u8>>, entry: &str, adds: Adds) {
        let entry = entry.as_bytes();
        match (self, adds) {
            (Self::Single, _) => *lines = vec![entry.to_vec()],
            (_, Adds::NewLine) => lines.push(entry.to_vec()),
            (_, Adds::Appends | Adds::Joins) => {
                if let Adds::Joins = adds {
                    *lines = vec![lines.join(&b", "[..])];
                }
                match lines.last_mut() {
                    Some(line) => line.extend([b", ", entry].concat()),
                    None => lines.push(entry.to_vec()),
                }
            }
        }
    }

    fn of(self, client: ClientIp) -> ClientIp {
        match self {
            Self::XForwardedFor => client,
            Self::Forwarded => client.from_header("forwarded"),
            Self::Single => client.from_header(self.name()),
        }
    }
}

/// Whatever an attacker may write into a line: made of what the grammars are made of, and bytes.
fn line() -> impl Strategy<Value = Vec<u8>> {
    let fragment = prop_oneof![
        4 => prop::sample::select(vec![
            ",", ", ", ";", "\"", "\\", "\\\"", "=", "for=", "For=\"", "[", "]", ":", "%", " ", "\t",
            "8.8.8.8", "192.0.2.200", "10.0.0.1", "10.0.0.9", "2001:db8::200", "[2001:db8:77::1]:80",
            "::ffff:10.0.0.1", "unknown", "_hidden", "by=", ":4711", "0", "host=\"",
        ]).prop_map(|text| text.as_bytes().to_vec()),
        1 => prop::collection::vec(prop_oneof![0x20..=0x7e_u8, 0x80..=0xff_u8], 0..6),
    ];
    prop::collection::vec(fragment, 0..12).prop_map(|fragments| fragments.concat())
}

fn attacker() -> impl Strategy<Value = IpAddr> {
    prop_oneof![
        any::<u8>().prop_map(|last| IpAddr::from([198, 51, 100, last])),
        any::<u16>().prop_map(|last| IpAddr::from([0x2001, 0xdb8, 0x78, last, 0, 0, 0, last])),
    ]
}

fn header_of_choice() -> impl Strategy<Value = Header> {
    prop::sample::select(vec![Header::XForwardedFor, Header::Forwarded, Header::Single])
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        cases: ProptestConfig::default().cases.max(4_000),
        ..ProptestConfig::default()
    })]

    /// A client whose own address is known neither escapes its count nor spends another client's.
    #[test]
    fn forged_headers_do_not_change_the_key_of_a_client(
        header in header_of_choice(),
        attacker in attacker(),
        mut lines in prop::collection::vec(line(), 0..4),
        elsewhere in prop::collection::vec((header_of_choice(), line()), 0..3),
        proxies in prop::collection::vec(
            (any::<bool>(), 1..=9_u16, any::<u8>(),
             prop::sample::select(vec![Adds::Appends, Adds::NewLine, Adds::Joins])),
            0..4,
        ),
    ) {
        // From the attacker through the proxies, each of which writes down who asked it.
        let mut peer = attacker;
        for (i, (v6, host, style, adds)) in proxies.iter().enumerate() {
            if i == 0 || header != Header::Single {
                header.pass(&mut lines, &header.entry(peer, *style), *adds);
            }
            peer = match v6 {
                true => IpAddr::from([0x2001, 0xdb8, 0x77, 0, 0, 0, 0, *host]),
                false => IpAddr::from([10, 0, 0, *host as u8]),
            };
        }
        let mut all: Vec<_> = lines.iter().map(|line| (header.name(), &line[..])).collect();
        // Headers that nobody was told to read may say anything.
        let elsewhere = elsewhere.iter().filter(|(other, _)| *other != header);
        all.extend(elsewhere.map(|(other, line)| (other.name(), &line[..])));

        let parts = request(&peer.to_string(), &all);
        let ours = client_ip().trusting(["10.0.0.0/8", "2001:db8:77::/48"]);
        prop_assert_eq!(header.of(ours).address(&parts), Ok(attacker));
        let by_number = client_ip().trusting_hops(proxies.len());
        prop_assert_eq!(header.of(by_number).address(&parts), Ok(attacker));
    }

    /// Any request from any peer: no panic, and the address is one that a proxy or peer has named.
    #[test]
    fn any_header_value_is_handled(
        header in header_of_choice(),
        peer in prop::sample::select(vec!["10.0.0.1", "2001:db8:77::1", "192.0.2.7"]),
        lines in prop::collection::vec(line(), 0..5),
    ) {
        let all: Vec<_> = lines.iter().map(|line| (header.name(), &line[..])).collect();
        let parts = request(peer, &all);
        let ours = client_ip().trusting(["10.0.0.0/8", "2001:db8:77::/48"]);
        let found = header.of(ours).address(&parts).expect("a peer");
        if peer == "192.0.2.7" {
            prop_assert_eq!(found.to_string(), peer);
        }
        prop_assert_eq!(found, found.to_canonical());
    }
}
