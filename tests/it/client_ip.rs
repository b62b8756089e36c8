//! Whose address `client_ip()` finds behind proxies: every form of the headers, honest or not.

use std::net::IpAddr;
use std::panic::{UnwindSafe, catch_unwind};
use std::time::Instant;

use http::{HeaderName, HeaderValue};
use tower_fixed_window::key::ClientIp;

use crate::prelude::*;

/// A request as it arrives from `peer`, with these header lines.
pub(crate) fn request(peer: &str, lines: &[(&str, &[u8])]) -> Parts {
    let (mut parts, ()) = Request::new(()).into_parts();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
        parts.headers.append(name, HeaderValue::from_bytes(value).expect("no control characters"));
    }
    let peer = peer.parse::<IpAddr>().expect("an address");
    parts.extensions.insert(PeerAddr(SocketAddr::new(peer, 4711)));
    parts
}

fn key(extractor: &impl KeyExtractor, parts: &Parts) -> Key {
    let mut key = Key::default();
    extractor.extract(parts, &mut key).expect("there is a peer");
    key
}

/// The proxies are 10.0.0.0/8 and 2001:db8:77::/48.
fn ours() -> ClientIp {
    client_ip().trusting(["10.0.0.0/8", "2001:db8:77::/48"])
}

/// A line of a table: peer, header lines, the address that is counted, why.
type Case = (&'static str, &'static [&'static str], &'static str, &'static str);

fn check(client: &ClientIp, header: &str, cases: &[Case]) {
    for (peer, lines, expected, why) in cases {
        let lines: Vec<_> = lines.iter().map(|line| (header, line.as_bytes())).collect();
        let found = client.address(&request(peer, &lines)).expect("there is a peer");
        assert_eq!(found, expected.parse::<IpAddr>().expect("an address"), "{lines:?}: {why}");
    }
}

#[test]
fn x_forwarded_for() {
    check(&ours(), "x-forwarded-for", X_FORWARDED_FOR);
}

#[rustfmt::skip]
const X_FORWARDED_FOR: &[Case] = &[
    // Trusted and untrusted peers.
    ("192.0.2.7", &[], "192.0.2.7", "nobody stands before the client"),
    ("192.0.2.7", &["8.8.8.8"], "192.0.2.7", "the peer is not trusted"),
    ("192.0.2.7", &["8.8.8.8, 10.0.0.1"], "192.0.2.7", "naming a proxy of ours makes nobody trusted"),
    ("2001:db8:78::1", &["8.8.8.8"], "2001:db8:78::1", "the network beside the trusted one is not trusted"),
    ("11.0.0.0", &["8.8.8.8"], "11.0.0.0", "one past the end of the trusted network"),
    ("10.255.255.255", &["192.0.2.7"], "192.0.2.7", "the last address of the trusted network"),
    ("10.0.0.1", &["192.0.2.7"], "192.0.2.7", "the proxy tells who asked it"),
    ("2001:db8:77::1", &["192.0.2.7"], "192.0.2.7", "the proxy's address is IPv6, the client's IPv4"),
    ("::ffff:10.0.0.1", &["192.0.2.7"], "192.0.2.7", "the proxy on a dual-stack listener is the same proxy"),
    ("::ffff:192.0.2.7", &["8.8.8.8"], "192.0.2.7", "an untrusted one, too, and it is told as IPv4"),
    // Spoofed entries.
    ("10.0.0.1", &["8.8.8.8, 192.0.2.7"], "192.0.2.7", "the first entry is the client's invention"),
    ("10.0.0.1", &["10.0.0.9, 192.0.2.7"], "192.0.2.7", "so is one that looks like a proxy of ours"),
    ("10.0.0.1", &["127.0.0.1"], "127.0.0.1", "which is not trusted unless it is named"),
    ("10.0.0.1", &["1.1.1.1, 8.8.8.8, 192.0.2.7, 10.0.0.2"], "192.0.2.7", "two proxies, two inventions"),
    // Chains.
    ("10.0.0.1", &["192.0.2.7, 10.0.0.3, 10.0.0.2"], "192.0.2.7", "three proxies"),
    ("10.0.0.1", &["192.0.2.7,10.0.0.3,10.0.0.2"], "192.0.2.7", "commas without spaces"),
    ("10.0.0.1", &[" \t192.0.2.7 \t,\t 10.0.0.2 "], "192.0.2.7", "spaces and tabs wherever they are"),
    ("10.0.0.1", &["192.0.2.7, 2001:db8:77::2"], "192.0.2.7", "proxies of both kinds"),
    ("10.0.0.1", &["192.0.2.7, ::ffff:10.0.0.2"], "192.0.2.7", "a proxy in IPv6 clothing"),
    ("10.0.0.1", &["10.0.0.3, 10.0.0.2"], "10.0.0.3", "all are trusted: the client is the first of them"),
    ("10.0.0.1", &["8.8.8.8, 198.51.100.1, 10.0.0.2"], "198.51.100.1", "an unknown proxy is a client like any other"),
    // Several lines.
    ("10.0.0.1", &["8.8.8.8", "192.0.2.7"], "192.0.2.7", "a proxy that adds a line: the last line is the nearest"),
    ("10.0.0.1", &["192.0.2.7", "10.0.0.2"], "192.0.2.7", "the walk goes on in the line above"),
    ("10.0.0.1", &["8.8.8.8, 192.0.2.7", "10.0.0.3, 10.0.0.2"], "192.0.2.7", "lists in lines"),
    ("10.0.0.1", &["", "192.0.2.7"], "192.0.2.7", "the client's empty line stands left"),
    ("10.0.0.1", &["\"", "192.0.2.7"], "192.0.2.7", "a quote can't reach into another line"),
    // Ports, brackets, quotes.
    ("10.0.0.1", &["192.0.2.7:4711"], "192.0.2.7", "with a port"),
    ("10.0.0.1", &["192.0.2.7, 10.0.0.2:443"], "192.0.2.7", "a trusted hop with a port"),
    ("10.0.0.1", &["2001:db8::7"], "2001:db8::7", "IPv6"),
    ("10.0.0.1", &["[2001:db8::7]"], "2001:db8::7", "IPv6 in brackets"),
    ("10.0.0.1", &["[2001:db8::7]:4711"], "2001:db8::7", "IPv6 with a port"),
    ("10.0.0.1", &["[::ffff:192.0.2.7]:4711"], "192.0.2.7", "IPv4 in IPv6 clothing with a port"),
    ("10.0.0.1", &["8.8.8.8, fe80::1%eth0"], "fe80::1", "a zone is the proxy's name of the link"),
    ("10.0.0.1", &["[fe80::1%br-0.7]:4711"], "fe80::1", "in brackets, with a port"),
    ("10.0.0.1", &["\"192.0.2.7\""], "192.0.2.7", "in quotes"),
    ("10.0.0.1", &["\"[2001:db8::7]:4711\""], "2001:db8::7", "quotes, brackets and a port"),
    // An unreadable entry ends the walk at the last trusted address.
    ("10.0.0.1", &[""], "10.0.0.1", "an empty line"),
    ("10.0.0.1", &[" , "], "10.0.0.1", "nothing but a comma"),
    ("10.0.0.1", &["192.0.2.7,"], "10.0.0.1", "the nearest hop is nothing"),
    ("10.0.0.1", &["192.0.2.7", ""], "10.0.0.1", "the same in two lines"),
    ("10.0.0.1", &["192.0.2.7, , 10.0.0.2"], "10.0.0.2", "a hole in the list hides who came before"),
    ("10.0.0.1", &["unknown"], "10.0.0.1", "a proxy that does not say"),
    ("10.0.0.1", &["unknown, 192.0.2.7"], "192.0.2.7", "an unreadable invention is not looked at"),
    ("10.0.0.1", &["192.0.2.7, garbage, 10.0.0.3, 10.0.0.2"], "10.0.0.3", "the last trusted address is the leftmost one read"),
    ("10.0.0.1", &["192.0.2.256"], "10.0.0.1", "no address"),
    ("10.0.0.1", &["192.0.2.07"], "10.0.0.1", "digits that some read as octal"),
    ("10.0.0.1", &["192.0.2.7:"], "10.0.0.1", "a colon without a port"),
    ("10.0.0.1", &["192.0.2.7:123456"], "10.0.0.1", "a port of six digits"),
    ("10.0.0.1", &["192.0.2.7:-1"], "10.0.0.1", "a port that is no number"),
    ("10.0.0.1", &["[192.0.2.7]"], "10.0.0.1", "brackets are for IPv6"),
    ("10.0.0.1", &["[2001:db8::7"], "10.0.0.1", "a bracket that stays open"),
    ("10.0.0.1", &["2001:db8::7]"], "10.0.0.1", "a bracket that was never opened"),
    ("10.0.0.1", &["[2001:db8::7]4711"], "10.0.0.1", "a port without a colon"),
    ("10.0.0.1", &["fe80::1%"], "10.0.0.1", "a zone without a name"),
    ("10.0.0.1", &["fe80::1%eth 0"], "10.0.0.1", "no name of a zone"),
    ("10.0.0.1", &["2001:db8::7%eth0"], "10.0.0.1", "only link-local addresses have zones"),
    ("10.0.0.1", &["192.0.2.7%eth0"], "10.0.0.1", "of IPv6"),
    ("10.0.0.1", &["\"192.0.2.7"], "10.0.0.1", "a quote that stays open"),
    ("10.0.0.1", &["\""], "10.0.0.1", "one quote is no pair"),
    ("10.0.0.1", &["192.0.2.7; 10.0.0.2"], "10.0.0.1", "semicolons separate nothing here"),
    ("10.0.0.1", &["for=192.0.2.7"], "10.0.0.1", "that is the other header's grammar"),
];

#[test]
fn forwarded() {
    check(&ours().from_header("forwarded"), "forwarded", FORWARDED);
}

#[rustfmt::skip]
const FORWARDED: &[Case] = &[
    ("192.0.2.7", &["for=8.8.8.8"], "192.0.2.7", "the peer is not trusted"),
    ("10.0.0.1", &[], "10.0.0.1", "no header"),
    ("10.0.0.1", &["for=192.0.2.7"], "192.0.2.7", "the smallest form"),
    ("10.0.0.1", &["For=192.0.2.7"], "192.0.2.7", "names of parameters have no case"),
    ("10.0.0.1", &["for=\"192.0.2.7\""], "192.0.2.7", "in quotes"),
    ("10.0.0.1", &["for=\"192.0.2.7:4711\""], "192.0.2.7", "with a port"),
    ("10.0.0.1", &["for=192.0.2.7:4711"], "192.0.2.7", "with a port, without the quotes it needs"),
    ("10.0.0.1", &["for=\"192.0.2.7:_obf-port.1\""], "192.0.2.7", "with an obfuscated port"),
    ("10.0.0.1", &["for=\"192.0.2.7:_a/b\""], "10.0.0.1", "what is no port makes it no address"),
    ("10.0.0.1", &["for=\"[2001:db8::7]:4711\""], "2001:db8::7", "IPv6 with a port"),
    ("10.0.0.1", &["for=\"[2001:db8::7]\""], "2001:db8::7", "IPv6"),
    ("10.0.0.1", &["for=\"2001:db8::7\""], "2001:db8::7", "IPv6 without the brackets it needs"),
    ("10.0.0.1", &["for=\"\\[2001:db8::\\7]\""], "2001:db8::7", "characters may be escaped"),
    ("10.0.0.1", &["proto=https;for=192.0.2.7;by=10.0.0.1"], "192.0.2.7", "other parameters around it"),
    ("10.0.0.1", &["proto=https ; for=192.0.2.7 ; by=_x"], "192.0.2.7", "spaces around them"),
    ("10.0.0.1", &["for=192.0.2.7;host=\"a,b;for=8.8.8.8\""], "192.0.2.7", "separators in quotes separate nothing"),
    ("10.0.0.1", &["for=192.0.2.7;host=\"a\\\",for=8.8.8.8\""], "192.0.2.7", "an escaped quote ends no string"),
    ("10.0.0.1", &["for=192.0.2.7;host=\"a\\\\\", for=10.0.0.2"], "192.0.2.7", "an escaped backslash escapes nothing"),
    ("10.0.0.1", &["for=8.8.8.8, for=192.0.2.7, for=10.0.0.2"], "192.0.2.7", "a chain and an invention"),
    ("10.0.0.1", &["for=8.8.8.8", "for=192.0.2.7", "for=10.0.0.2"], "192.0.2.7", "in lines"),
    ("10.0.0.1", &["for=\"8.8.8.8, for=192.0.2.7"], "192.0.2.7", "an open quote of the client's hides nothing"),
    ("10.0.0.1", &["x=\"\\, for=192.0.2.7;by=\"[2001:db8:77::1]\""], "192.0.2.7", "nor before a quoted string of the proxy's"),
    ("10.0.0.1", &["for=\"", "for=192.0.2.7"], "192.0.2.7", "nor in a line of its own"),
    ("10.0.0.1", &["for=unknown"], "10.0.0.1", "a proxy that does not know"),
    ("10.0.0.1", &["for=192.0.2.7, for=unknown, for=10.0.0.2"], "10.0.0.2", "what stands before it may be invented"),
    ("10.0.0.1", &["for=192.0.2.7, by=10.0.0.2"], "10.0.0.1", "an element that does not say for whom"),
    ("10.0.0.1", &["for=8.8.8.8;for=192.0.2.7"], "10.0.0.1", "one that says it twice"),
    ("10.0.0.1", &["for=192.0.2.7;x=\""], "10.0.0.1", "one that can't be read to its end"),
    ("10.0.0.1", &["y\";for=192.0.2.7"], "10.0.0.1", "nor from its beginning"),
    ("10.0.0.1", &["for = 192.0.2.7"], "10.0.0.1", "no spaces around the equals sign"),
    ("10.0.0.1", &["xfor=192.0.2.7"], "10.0.0.1", "another parameter"),
    ("10.0.0.1", &["for="], "10.0.0.1", "nothing"),
    ("10.0.0.1", &["for=\"192.0.2.7\\\""], "10.0.0.1", "a string whose end is escaped"),
    ("10.0.0.1", &[""], "10.0.0.1", "an empty line"),
    ("10.0.0.1", &["for=192.0.2.7, "], "10.0.0.1", "a hole in the list"),
];

#[test]
fn a_header_with_one_address() {
    check(&ours().from_header("CF-Connecting-IP"), "cf-connecting-ip", SINGLE);
}

#[rustfmt::skip]
const SINGLE: &[Case] = &[
    ("192.0.2.7", &["8.8.8.8"], "192.0.2.7", "the peer is not trusted"),
    ("10.0.0.1", &["192.0.2.7"], "192.0.2.7", "the proxy has set it"),
    ("10.0.0.1", &["::ffff:192.0.2.7"], "192.0.2.7", "in IPv6 clothing"),
    ("10.0.0.1", &["10.0.0.2"], "10.0.0.2", "the client may be one of ours: there is nobody before it"),
    ("10.0.0.1", &[], "10.0.0.1", "the proxy asks by itself"),
    ("10.0.0.1", &[""], "10.0.0.1", "empty"),
    ("10.0.0.1", &["8.8.8.8", "192.0.2.7"], "10.0.0.1", "one was the client's, and who can tell which"),
    ("10.0.0.1", &["8.8.8.8, 192.0.2.7"], "10.0.0.1", "the same in one line"),
    ("10.0.0.1", &["unknown"], "10.0.0.1", "no address"),
];

/// Each row of the guide's table names a header, and values of it that stand for the same clients.
#[test]
fn the_guide_s_headers_of_platforms_are_read_as_it_says() {
    let guide = include_str!("../../docs/behind-a-proxy.md");
    let (_, section) = guide.split_once("## Headers of platforms").expect("the section");
    let (section, _) = section.split_once("\n## ").expect("another section");
    let rows = section.lines().filter(|line| line.starts_with("| ")).skip(1);
    let mut headers = Vec::new();
    for row in rows {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let in_code = |cell: &'static str| cell.split('`').skip(1).step_by(2);
        let header = in_code(cells[2]).next().expect("a header");
        for value in in_code(cells[3]) {
            let client = if value.contains("2001") { "2001:db8::7" } else { "192.0.2.7" };
            let parts = request("10.0.0.1", &[(header, value.as_bytes())]);
            let found = ours().from_header(header).address(&parts).expect("a peer");
            assert_eq!(found.to_string(), client, "{header}: {value}");
        }
        headers.push(header);
    }
    for header in
        ["cloudfront-viewer-address", "cf-connecting-ip", "fly-client-ip", "true-client-ip"]
    {
        assert!(headers.contains(&header), "{header}");
    }
    for platform in ["Railway", "Vercel", "Fastly", "Render", "Heroku"] {
        assert!(section.contains(&format!("\n| {platform} | ")), "{platform}");
    }
}

#[test]
fn a_header_that_always_has_a_port() {
    check(&ours().from_header("CloudFront-Viewer-Address"), "cloudfront-viewer-address", WITH_PORT);
}

#[rustfmt::skip]
const WITH_PORT: &[Case] = &[
    ("192.0.2.7", &["8.8.8.8:80"], "192.0.2.7", "the peer is not trusted"),
    ("10.0.0.1", &["192.0.2.7:46532"], "192.0.2.7", "IPv4"),
    ("10.0.0.1", &["2001:db8:1:2:3:4:5:6:46532"], "2001:db8:1:2:3:4:5:6", "nine groups: the last is the port"),
    ("10.0.0.1", &["2001:db8::7:46532"], "2001:db8::7", "a port of more digits than a group has"),
    ("10.0.0.1", &["2001:db8::7:443"], "2001:db8::7", "a port that could be a group"),
    ("10.0.0.1", &["2001:db8:1:2:3:4:5:443"], "10.0.0.1", "eight groups are seven and a port"),
    ("10.0.0.1", &["2001:db8:::443"], "2001:db8::", "an address that ends with zeros"),
    ("10.0.0.1", &["[2001:db8::7]:46532"], "2001:db8::7", "in brackets, should they come one day"),
    ("10.0.0.1", &["::ffff:192.0.2.7:46532"], "192.0.2.7", "IPv4 in IPv6 clothing"),
    ("10.0.0.1", &["2001:db8::7:99999"], "2001:db8::7", "five digits"),
    ("10.0.0.1", &["2001:db8::7:100000"], "10.0.0.1", "six digits are no port"),
    ("10.0.0.1", &["2001:db8::7:beef"], "10.0.0.1", "a group is no port"),
    ("10.0.0.1", &["8.8.8.8:1", "192.0.2.7:2"], "10.0.0.1", "one was the client's"),
];

#[test]
fn hops_by_number() {
    #[rustfmt::skip]
    let cases: &[(usize, Case)] = &[
        (0, ("203.0.113.1", &["8.8.8.8"], "203.0.113.1", "no proxy at all")),
        (1, ("203.0.113.1", &["8.8.8.8, 192.0.2.7"], "192.0.2.7", "the peer is a proxy, wherever it is")),
        (2, ("203.0.113.1", &["8.8.8.8, 192.0.2.7, 203.0.113.2"], "192.0.2.7", "two proxies")),
        (2, ("203.0.113.1", &["8.8.8.8, 192.0.2.7", "203.0.113.2"], "192.0.2.7", "in two lines")),
        (2, ("203.0.113.1", &["192.0.2.7"], "192.0.2.7", "fewer hops than there should be: the last there is")),
        (9, ("203.0.113.1", &[], "203.0.113.1", "none")),
        (3, ("203.0.113.1", &["192.0.2.7, garbage, 203.0.113.2"], "203.0.113.2", "one that can't be read")),
        (usize::MAX, ("203.0.113.1", &["192.0.2.7, 203.0.113.2"], "192.0.2.7", "more than can be")),
    ];
    for (hops, case) in cases {
        check(&client_ip().trusting_hops(*hops), "x-forwarded-for", &[*case]);
    }
}

#[test]
fn a_hop_of_more_than_96_characters_is_no_address() {
    for (length, expected) in [(96, "192.0.2.7"), (97, "10.0.0.1"), (500, "10.0.0.1")] {
        let hop = |length| format!("192.0.2.7:_{}", "a".repeat(length - "192.0.2.7:_".len()));
        // With its quotes.
        for hop in [hop(length), format!("\"{}\"", hop(length - 2))] {
            let parts = request("10.0.0.1", &[("x-forwarded-for", hop.as_bytes())]);
            let found = ours().address(&parts).expect("a peer");
            assert_eq!(found.to_string(), expected, "{length}");
        }
    }
}

#[test]
fn ipv6_counts_by_its_prefix() {
    let at = |address: &str| request("10.0.0.1", &[("x-forwarded-for", address.as_bytes())]);
    let (a, same_64, same_48) =
        (at("2001:db8:1:1::a"), at("2001:db8:1:1:f::b"), at("2001:db8:1:2::c"));
    assert_eq!(key(&ours(), &a), key(&ours(), &same_64));
    assert_ne!(key(&ours(), &a), key(&ours(), &same_48));
    let wide = ours().ipv6_prefix(48);
    assert_eq!(key(&wide, &a), key(&wide, &same_48));
    let exact = ours().ipv6_prefix(128);
    assert_ne!(key(&exact, &a), key(&exact, &same_64));
    // Strangers share the prefixes of link-local and unique local addresses.
    for (one, other) in [("fe80::a", "fe80::b"), ("fd00:1::a", "fd00:1::b"), ("fc00::1", "fc00::2")]
    {
        assert_ne!(key(&ours(), &at(one)), key(&ours(), &at(other)), "{one}");
        assert_ne!(key(&wide, &at(one)), key(&wide, &at(other)), "{one}");
        assert_ne!(key(&peer_ip(), &request(one, &[])), key(&peer_ip(), &request(other, &[])));
    }
    // IPv4 knows no prefix.
    let (b, c) = (at("192.0.2.7"), at("192.0.2.8"));
    assert_ne!(key(&wide.ipv6_prefix(0), &b), key(&ours().ipv6_prefix(0), &c));
}

/// All of IPv4 is in one /64 of each of these prefixes, so one client would use up the count of all.
#[test]
fn an_ipv6_address_with_an_ipv4_address_inside_counts_as_that_one() {
    let of = |address: &str| key(&peer_ip(), &request(address, &[]));
    for prefix in ["64:ff9b::", "::ffff:0:", "::ffff:", "::"] {
        assert_eq!(of(&format!("{prefix}192.0.2.7")), of("192.0.2.7"), "{prefix}");
        assert_ne!(of(&format!("{prefix}192.0.2.7")), of("192.0.2.8"), "{prefix}");
        let behind = request("10.0.0.1", &[("x-forwarded-for", b"64:ff9b::192.0.2.7")]);
        assert_eq!(key(&ours(), &behind), of("192.0.2.7"));
    }
    // The /96 beside each, this host, and no address.
    for other in ["64:ff9b::1:c000:207", "64:ff9b:1::c000:207", "::fffe:0:c000:207", "::1", "::"] {
        let other = other.parse::<IpAddr>().expect("an address");
        assert!(Key::from(other).readable().ends_with("_64"), "{other}");
    }
    // A prefix of another length changes nothing.
    let translated = "64:ff9b::192.0.2.7".parse().expect("an address");
    assert_eq!(Key::from_ip(translated, 128), of("192.0.2.7"));
    // Trust and allow lists take such an address for what it is.
    let nat64 = client_ip().trusting(["64:ff9b::/96"]);
    let from = request("64:ff9b::10.0.0.1", &[("x-forwarded-for", b"192.0.2.7")]);
    assert_eq!(nat64.address(&from), Ok(IpAddr::from([192, 0, 2, 7])));
    assert_eq!(ours().address(&from), Ok("64:ff9b::10.0.0.1".parse().expect("an address")));
}

#[test]
fn a_hashed_address_is_the_hash_of_what_counts_it() {
    const SECRET: &str = "secret of the app";
    let peer = |address: &str| key(&peer_ip().hashed(SECRET), &request(address, &[]));
    let client = |address: &str| {
        let behind = request("10.0.0.1", &[("x-forwarded-for", address.as_bytes())]);
        key(&ours().hashed(SECRET), &behind)
    };
    for of in [&peer as &dyn Fn(&str) -> Key, &client] {
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:ffff:ffff:ffff"), "one /64");
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.7"), of("192.0.2.7"));
        assert_ne!(of("192.0.2.7"), of("192.0.2.8"));
        assert_eq!(of("192.0.2.7").readable().len(), 65, "nothing of it is readable");
    }
    assert_eq!(peer("2001:db8::1"), client("2001:db8::2"));
    let wide = key(&ours().ipv6_prefix(48).hashed(SECRET), &request("2001:db8::1", &[]));
    let as_wide = client_ip().ipv6_prefix(48).hashed(SECRET);
    assert_eq!(wide, key(&as_wide, &request("2001:db8:0:1::", &[])));
    assert_ne!(peer("192.0.2.7"), key(&peer_ip().hashed("another"), &request("192.0.2.7", &[])));
    // In a combination it is one part, and what is missing stays missing.
    let route = (peer_ip().hashed(SECRET), Key::from("/"));
    assert_eq!(key(&route, &request("192.0.2.7", &[])), Key::from((peer("192.0.2.7"), "/")));
    let (no_peer, ()) = Request::new(()).into_parts();
    assert!(peer_ip().hashed(SECRET).extract(&no_peer, &mut Key::default()).is_err());
}

#[test]
fn a_missing_peer_address_is_a_server_error_of_three_short_lines() {
    for content_type in ["text/plain", "application/grpc"] {
        let request = Request::builder().header("content-type", content_type);
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        let error = ours().address(&parts).expect_err("no peer").to_string();
        let lines: Vec<_> = error.lines().collect();
        assert!(lines.len() == 3 && lines.iter().all(|line| line.len() <= 115), "{error}");
        assert!(lines[0].contains("a middleware made a new request and lost its extensions"));
        assert!(error.contains("PeerAddr"), "{error}");
        let fix = ["into_make_service_with_connect_info", "TcpConnectInfo"];
        assert!(lines[1].contains(fix[usize::from(content_type != "text/plain")]), "{error}");
    }
}

#[test]
fn a_hostile_header_of_64_kib_is_read_in_linear_time() {
    let hostile =
        ["\"", "\\", "\\\"", ",", ";", "[", "for=\"", "for=10.0.0.2,", "10.0.0.2,", "\u{fc}"];
    let started = Instant::now();
    for pattern in hostile {
        let line = pattern.repeat((64 << 10) / pattern.len());
        for client in [ours(), ours().from_header("forwarded"), ours().from_header("x-real-ip")] {
            for header in ["x-forwarded-for", "forwarded", "x-real-ip"] {
                // From a trusted peer: this is more than any client can do behind a proxy.
                let parts = request("10.0.0.1", &[(header, line.as_bytes())]);
                let found = client.address(&parts).expect("a peer");
                assert!(["10.0.0.1", "10.0.0.2"].contains(&found.to_string().as_str()), "{found}");
            }
        }
    }
    // 90 lines, a few milliseconds each without optimization; what is quadratic takes minutes.
    assert!(started.elapsed() < Duration::from_secs(20), "{:?}", started.elapsed());
}

#[test]
fn an_allow_list_matches_only_named_addresses_behind_trusted_proxies() {
    let is_in = ours().is_in(["192.0.2.0/24", "2001:db8:5::/48", "10.0.0.0/8"]);
    let says =
        |peer: &str, line: &str| is_in(&request(peer, &[("x-forwarded-for", line.as_bytes())]));
    assert!(says("10.0.0.1", "192.0.2.7"));
    assert!(says("10.0.0.1", "::ffff:192.0.2.7"));
    assert!(says("10.0.0.1", "2001:db8:5:9::1"));
    assert!(says("192.0.2.7", "8.8.8.8"));
    assert!(!says("10.0.0.1", "192.0.3.7"));
    assert!(!says("203.0.113.9", "192.0.2.7"), "an untrusted peer's word");
    assert!(!says("10.0.0.1", "192.0.2.7, 203.0.113.9"), "an invention");
    // A proxy's own health check, though not whoever can't be read behind it.
    assert!(is_in(&request("10.0.0.1", &[])));
    assert!(!says("10.0.0.1", "unknown"));
    assert!(!says("10.0.0.1", "192.0.2.7, unknown, 10.0.0.2"));
    let (no_peer, ()) = Request::new(()).into_parts();
    assert!(!is_in(&no_peer));
}

#[test]
fn networks_are_read_in_every_spelling() {
    for (network, inside, outside) in [
        ("10.0.0.0/8", "10.9.9.9", "11.0.0.0"),
        ("10.1.2.3/8", "10.9.9.9", "11.0.0.0"),
        (" 10.0.0.0/8 ", "10.9.9.9", "11.0.0.0"),
        ("192.0.2.1", "192.0.2.1", "192.0.2.2"),
        ("192.0.2.1/32", "192.0.2.1", "192.0.2.0"),
        ("2001:db8::/32", "2001:db8:ffff::", "2001:db9::"),
        ("2001:db8::1", "2001:db8::1", "2001:db8::2"),
        ("::ffff:10.0.0.0/104", "10.9.9.9", "11.0.0.0"),
        ("::ffff:192.0.2.1", "192.0.2.1", "192.0.2.2"),
    ] {
        let client = client_ip().trusting([network]);
        let lines: &[(&str, &[u8])] = &[("x-forwarded-for", b"8.8.8.8")];
        let found = |peer| client.address(&request(peer, lines)).expect("a peer").to_string();
        assert_eq!(found(inside), "8.8.8.8", "{network}");
        assert_eq!(found(outside), outside, "{network}");
    }
    // From text, addresses, and in several calls.
    let several = client_ip()
        .trusting(vec![String::from("192.0.2.1")])
        .trusting([IpAddr::from([192, 0, 2, 2])]);
    let lines: &[(&str, &[u8])] = &[("x-forwarded-for", b"8.8.8.8, 192.0.2.1")];
    let found = several.address(&request("192.0.2.2", lines)).expect("a peer");
    assert_eq!(found.to_string(), "8.8.8.8");
}

fn panic_of(mistake: impl FnOnce() -> ClientIp + UnwindSafe) -> String {
    let panic = catch_unwind(mistake).expect_err("a mistake");
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => (*panic.downcast::<&str>().expect("a message")).to_owned(),
    }
}

fn panic_of_trusting(network: &'static str) -> String {
    panic_of(|| client_ip().trusting([network]))
}

#[test]
fn the_error_of_a_wrong_network_says_what_to_write() {
    for wrong in [
        "",
        "10.0.0/8",
        "10.0.0.0/33",
        "2001:db8::/129",
        "10.0.0.0/-1",
        "proxy.example",
        "10.0.0.0/8,192.0.2.1",
        "010.0.0.0/8",
        "10.0.0.01",
        "10.0.0.0/08",
        "10.0.0.0/+8",
        "10.0.0.0/8/8",
        "2001:db8::/032",
        "fe80::1%eth0",
    ] {
        let error = panic_of_trusting(wrong);
        let write = format!(
            r#"client_ip().trusting(..): "{wrong}" is not a network: write one such as "10.0.0.0/8""#
        );
        assert!(error.contains(&write), "{error}");
    }
    // What is compared as IPv4 is in no network of IPv6.
    for never in ["::ffff:0:0/95", "::ffff:10.0.0.0/8", "::ffff:10.0.0.0/80", "::fffe:0:0/95"] {
        let error = panic_of_trusting(never);
        assert!(error.contains("would never match"), "{error}");
    }
    for everybody in ["0.0.0.0/0", "::/0", "::ffff:0:0/96", "1.2.3.4/0"] {
        let error = panic_of_trusting(everybody);
        assert!(error.contains(".trusting_hops(1)"), "{error}");
        // As a list of clients it is one like others.
        let _ = client_ip().is_in([everybody]);
    }
}

/// `panics` has the lines that they name.
#[test]
fn panics_say_what_to_write() {
    let both = panic_of(|| client_ip().trusting_hops(1).trusting(["10.0.0.0/8"]));
    assert!(both.contains("write either .trusting([\"10.0.0.0/8\"]) or .trusting_hops(1)"));
    let long = panic_of(|| client_ip().ipv6_prefix(129));
    assert!(long.contains("an IPv6 address has 128 bits, not 129: write .ipv6_prefix(56)"));
    let header = panic_of(|| client_ip().from_header("cf connecting ip"));
    assert!(header.contains("write .from_header(\"cf-connecting-ip\")"));
}
