//! Clients, by address or text, and a bounded table of them.

use std::collections::hash_map::Entry;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hmac_sha256::{HMAC, Hash};

/// Longer texts are shortened, so that the names of a million clients are bounded.
const MAX_TEXT: usize = 64;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Client {
    V4(Ipv4Addr),
    /// The address's /64, since a subscriber usually has one.
    V6(u64),
    Text(Box<str>),
}

impl Client {
    /// Parses a client. `None` for an empty text, and for the dash that logs write instead.
    pub(crate) fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        if matches!(text, "" | "-") {
            return None;
        }
        let last = text.rsplit(',').next().unwrap_or(text);
        let address = address(text).or_else(|| address(last.trim()));
        Some(address.map_or_else(|| Self::text(text), Self::address))
    }

    fn address(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::V4(address),
            IpAddr::V6(address) => Self::V6((u128::from(address) >> 64) as u64),
        }
    }

    fn text(text: &str) -> Self {
        if text.len() <= MAX_TEXT {
            return Self::Text(text.into());
        }
        let begin: String = text.chars().take(16).collect();
        Self::Text(format!("{begin}..{}", hex(&Hash::hash(text.as_bytes())[..8])).into())
    }

    pub(crate) fn is_address(&self) -> bool {
        !matches!(self, Self::Text(_))
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(address) => address.fmt(f),
            Self::V6(network) => {
                write!(f, "{}/64", Ipv6Addr::from(u128::from(*network) << 64))
            }
            Self::Text(text) => text.chars().try_for_each(|char| match char {
                // Control and bidirectional characters could rewrite a terminal's screen.
                char if char.is_control() => write!(f, "{}", char.escape_unicode()),
                '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                    write!(f, "{}", char.escape_unicode())
                }
                char => write!(f, "{char}"),
            }),
        }
    }
}

/// An address as logs write it: with a port, in brackets, with the interface.
fn address(text: &str) -> Option<IpAddr> {
    if let Ok(address) = text.parse() {
        return Some(address);
    }
    let host = match text.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?.0,
        None => match text.split_once(':') {
            Some((host, port)) if !port.contains(':') => host,
            _ => text,
        },
    };
    host.split('%').next()?.parse().ok()
}

/// Numbers for clients, in the order in which they appear.
pub(crate) struct Clients {
    numbers: foldhash::HashMap<Client, u32>,
    most: usize,
}

impl Clients {
    pub(crate) fn up_to(most: usize) -> Self {
        Self { numbers: foldhash::HashMap::default(), most }
    }

    /// Returns the client's number. `None` if it is new and there are too many already.
    pub(crate) fn number(&mut self, client: Client) -> Option<u32> {
        let next = self.numbers.len();
        match self.numbers.entry(client) {
            Entry::Occupied(known) => Some(*known.get()),
            Entry::Vacant(new) => (next < self.most).then(|| *new.insert(next as u32)),
        }
    }

    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// The names of clients for a report, hashed on request.
    pub(crate) fn names(&self, hash: bool) -> Names<'_> {
        let mut clients: Vec<_> = self.numbers.iter().collect();
        clients.sort_unstable_by_key(|(_, number)| **number);
        let clients = clients.into_iter().map(|(client, _)| client).collect();
        Names { clients, secret: hash.then(secret) }
    }
}

pub(crate) struct Names<'a> {
    clients: Vec<&'a Client>,
    secret: Option<[u8; 32]>,
}

impl Names<'_> {
    pub(crate) fn name(&self, number: u32) -> String {
        let name = self.clients[number as usize].to_string();
        match &self.secret {
            Some(secret) => hex(&HMAC::mac(name.as_bytes(), secret)[..8]),
            None => name,
        }
    }
}

/// A plain hash hides no address: there are few enough to hash them all. The secret comes from the
/// keys of the standard library's hash tables, which are random numbers of the system.
fn secret() -> [u8; 32] {
    let random: [u64; 4] = std::array::from_fn(|i| RandomState::new().hash_one(i));
    Hash::hash(random.map(u64::to_le_bytes).as_flattened())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
