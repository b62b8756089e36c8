//! [`Key`] and its encoding.

use std::fmt::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The key that requests are counted by. It is an opaque sequence of tagged, length-prefixed parts:
/// `("a", "bc")` differs from `("ab", "c")`, and the name `"127.0.0.1"` differs from that address.
///
/// Create keys from numbers, names, addresses, and tuples of these. Text longer than 64 bytes is
/// hashed. IPv6 addresses count by their /64, or as the IPv4 address inside: [`Key::from_ip`].
///
/// ```
/// use std::net::{IpAddr, Ipv6Addr};
/// use tower_fixed_window::Key;
///
/// assert_ne!(Key::from(("a", "bc")), Key::from(("ab", "c")));
/// assert_ne!(Key::from("127.0.0.1"), Key::from(IpAddr::from([127, 0, 0, 1])));
///
/// let mapped: Ipv6Addr = "::ffff:127.0.0.1".parse()?;
/// assert_eq!(Key::from(IpAddr::from(mapped)), Key::from(IpAddr::from([127, 0, 0, 1])));
///
/// // Hidden from stores.
/// assert_ne!(Key::secret("t0k3n"), Key::from("t0k3n"));
/// assert_ne!(Key::hmac("secret of the app", "192.0.2.1"), Key::secret("192.0.2.1"));
///
/// // One count for a /56.
/// let (one, other) = ("2001:db8::1".parse()?, "2001:db8:0:ff::1".parse()?);
/// assert_eq!(Key::from_ip(one, 56), Key::from_ip(other, 56));
///
/// let mut key = Key::global(); // without parts
/// key.append(&Key::from("a"));
/// key.append(&Key::from("bc"));
/// assert_eq!(key.as_bytes(), Key::from(("a", "bc")).as_bytes());
/// # Ok::<_, std::net::AddrParseError>(())
/// ```
///
/// `Debug` shows no content, so a key does not appear in a log by accident.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Key(Repr);

/// Most keys are an address, a number, a hash, or a number and a route: these need no allocation
/// and are cheap to move. Bytes that fit are inline, so that equal keys are of one form.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Repr {
    /// Unused bytes are 0.
    Inline {
        len: u8,
        bytes: [u8; INLINE],
    },
    Heap(Vec<u8>),
}

const INLINE: usize = 38;

/// Longer text is hashed.
const MAX_TEXT: usize = 64;

/// The prefix by which IPv6 addresses count: a subscriber has at least a /64.
pub(super) const IPV6_PREFIX: u8 = 64;

mod tag {
    pub(super) const TEXT: u8 = b't';
    pub(super) const LONG_TEXT: u8 = b'l';
    pub(super) const SECRET: u8 = b's';
    pub(super) const KEYED_SECRET: u8 = b'k';
    pub(super) const UNSIGNED: u8 = b'u';
    pub(super) const NEGATIVE: u8 = b'n';
    pub(super) const BYTES16: u8 = b'b';
    pub(super) const IPV4: u8 = b'4';
    pub(super) const IPV6: u8 = b'6';
    /// How many parts before this one are one part of a composite.
    pub(super) const GROUP: u8 = b'-';
}

impl Key {
    /// Creates a key without parts. As an extractor, it makes all requests share one count.
    pub fn global() -> Self {
        Self::default()
    }

    /// Creates a key from a credential, such as a token or a session cookie. The key contains its
    /// SHA-256.
    pub fn secret(secret: impl AsRef<[u8]>) -> Self {
        Self::of_part(tag::SECRET, &hmac_sha256::Hash::hash(secret.as_ref()))
    }

    /// Creates a key from a value that can be guessed, such as an e-mail address. The key contains
    /// its HMAC-SHA-256 under a secret of your app, so the value is not readable in a store.
    pub fn hmac(secret: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        Self::of_part(tag::KEYED_SECRET, &hmac_sha256::HMAC::mac(value, secret))
    }

    /// Creates a key from an address. An IPv6 address counts by its first `prefix` bits, at most
    /// 128; `Key::from(address)` uses 64. Link-local and unique local addresses (`fe80::/10`,
    /// `fc00::/7`) count individually, because strangers share their prefixes. If an IPv6 address
    /// contains an IPv4 address (`::ffff:192.0.2.1`, or behind NAT64 `64:ff9b::192.0.2.1`), it
    /// counts as the latter.
    #[inline(always)]
    pub fn from_ip(address: IpAddr, prefix: u8) -> Self {
        match address {
            IpAddr::V4(address) => Self::from_ipv4(address),
            IpAddr::V6(address) => Self::from_ipv6(address, prefix),
        }
    }

    #[inline(always)]
    fn of_part(tag: u8, part: &[u8]) -> Self {
        let mut key = Self::default();
        key.push(tag, part);
        key
    }

    /// Never inlined, so that [`push_ip`](Self::push_ip) is small enough to be.
    #[inline(never)]
    fn from_ipv6(address: Ipv6Addr, prefix: u8) -> Self {
        if let Some(inside) = ipv4_inside(address) {
            return Self::from_ipv4(inside);
        }
        let is_local = address.is_unicast_link_local() || address.is_unique_local();
        let prefix = if is_local { 128 } else { prefix.min(128) };
        let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
        let mut part = [prefix; 17];
        part[1..].copy_from_slice(&(u128::from(address) & mask).to_be_bytes());
        Self::of_part(tag::IPV6, &part[..1 + usize::from(prefix.div_ceil(8))])
    }

    /// The case of an `Authorization` header's scheme and the number of spaces behind it make no
    /// difference.
    pub(super) fn from_credentials(value: &[u8]) -> Self {
        let Some(space) = value.iter().position(u8::is_ascii_whitespace) else {
            return Self::secret(value);
        };
        let (scheme, rest) = value.split_at(space);
        let mut hash = hmac_sha256::Hash::new();
        scheme.iter().for_each(|byte| hash.update([byte.to_ascii_lowercase()]));
        hash.update(b" ");
        hash.update(rest.trim_ascii_start());
        Self::of_part(tag::SECRET, &hash.finalize())
    }

    /// The most frequent key is written as one word, as the hash reads it: a load of several stores
    /// would wait for these.
    #[inline(always)]
    fn from_ipv4(address: Ipv4Addr) -> Self {
        let part = u64::from(u32::from_le_bytes(address.octets())) << 16;
        let word = part | u64::from(u16::from_le_bytes([tag::IPV4, 4]));
        let mut bytes = [0; INLINE];
        bytes[..8].copy_from_slice(&word.to_le_bytes());
        Self(Repr::Inline { len: 6, bytes })
    }

    /// Returns the encoded parts. The encoding is stable, because stores find existing counters by
    /// it.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len).min(INLINE)],
            Repr::Heap(bytes) => bytes,
        }
    }

    /// The encoding if it fits a word, as that of an IPv4 address or of a small number does. No
    /// other key has this word: no part begins with a 0.
    #[inline(always)]
    pub(crate) fn as_word(&self) -> Option<u64> {
        match self.0 {
            Repr::Inline { len: ..=8, bytes: [a, b, c, d, e, f, g, h, ..] } => {
                Some(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
            }
            _ => None,
        }
    }

    #[cfg(feature = "serde")]
    pub(crate) fn from_encoded(bytes: &[u8]) -> Option<Self> {
        let mut key = Self::default();
        key.extend(bytes);
        let parts = parts(bytes).take_while(|(tag, _)| *tag != 0);
        let whole = parts.map(|(_, part)| 2 + part.len()).sum::<usize>() == bytes.len();
        whole.then_some(key)
    }

    /// Returns the key as readable text, as stores such as Redis show it. Different keys have
    /// different texts. Text is percent-encoded outside of `[A-Za-z0-9_.@-]`, hashes are
    /// hexadecimal, and commas separate parts.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use tower_fixed_window::Key;
    ///
    /// let key = Key::from((7_u64, "a/b", IpAddr::from([127, 0, 0, 1])));
    /// assert_eq!(key.readable(), "u7,ta%2Fb,127.0.0.1");
    /// ```
    pub fn readable(&self) -> String {
        let mut text = String::with_capacity(2 * self.as_bytes().len());
        for (tag, part) in parts(self.as_bytes()) {
            if !text.is_empty() {
                text.push(',');
            }
            write_part(&mut text, tag, part).expect("writing to a string");
        }
        text
    }

    /// Appends the parts of another key.
    pub fn append(&mut self, other: &Key) {
        self.extend(other.as_bytes());
    }

    pub(super) fn len(&self) -> usize {
        self.as_bytes().len()
    }

    /// Ends a part of a composite that begins at `from`. Where nothing was found for it, or several
    /// parts, their number follows, so that it never meets a neighbour: (7, absent) and (absent, 7)
    /// are two keys, and so are ((a, b), c) and (a, (b, c)).
    #[inline]
    pub(super) fn end_part(&mut self, from: usize) {
        let bytes = self.as_bytes().get(from..).unwrap_or_default();
        if bytes.get(1).is_none_or(|&len| bytes.len() != 2 + usize::from(len)) {
            let count = parts(bytes).count() as u32;
            let zeros = count.leading_zeros() as usize / 8;
            self.push(tag::GROUP, &count.to_be_bytes()[zeros..]);
        }
    }

    #[inline]
    fn push(&mut self, tag: u8, part: &[u8]) {
        debug_assert!(part.len() <= MAX_TEXT, "longer parts are hashed");
        self.extend(&[tag, part.len() as u8]);
        self.extend(part);
    }

    #[inline]
    fn extend(&mut self, more: &[u8]) {
        match &mut self.0 {
            Repr::Inline { len, bytes } => {
                let free = bytes.get_mut((*len).into()..usize::from(*len) + more.len());
                if let Some(free) = free {
                    free.copy_from_slice(more);
                    *len += more.len() as u8;
                } else {
                    self.0 = Repr::Heap([self.as_bytes(), more].concat());
                }
            }
            Repr::Heap(bytes) => bytes.extend_from_slice(more),
        }
    }

    #[inline(always)]
    pub(super) fn push_ip(&mut self, address: IpAddr, prefix: u8) {
        match address {
            IpAddr::V4(address) if self.len() == 0 => *self = Self::from_ipv4(address),
            address => self.append(&Self::from_ip(address, prefix)),
        }
    }
}

/// The IPv4 address in one of the well-known prefixes, which are for all of IPv4 and within one
/// /64: that of NAT64, and those of translated, mapped and compatible addresses. `::1` has none.
fn ipv4_inside(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let [prefix @ .., a, b, c, d] = address.octets();
    let is_known = match prefix {
        [0, 0x64, 0xff, 0x9b, 0, 0, 0, 0, 0, 0, 0, 0] => true,
        [0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0] => true,
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] => true,
        _ => prefix == [0; 12] && a != 0,
    };
    is_known.then_some(Ipv4Addr::new(a, b, c, d))
}

fn parts(encoded: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut rest = encoded;
    std::iter::from_fn(move || {
        let (&[tag, len], tail) = rest.split_first_chunk()?;
        let (part, tail) = tail.split_at_checked(len.into())?;
        rest = tail;
        Some((tag, part))
    })
}

impl Default for Key {
    #[inline]
    fn default() -> Self {
        Self(Repr::Inline { len: 0, bytes: [0; INLINE] })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

fn write_part(text: &mut String, tag: u8, part: &[u8]) -> fmt::Result {
    match (tag, part.len()) {
        (tag::TEXT, _) => {
            text.push('t');
            part.iter().try_for_each(|&byte| match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'@' | b'-' => {
                    text.write_char(byte.into())
                }
                _ => write!(text, "%{byte:02X}"),
            })
        }
        (tag::UNSIGNED | tag::NEGATIVE, 8) => {
            let number = u64::from_be_bytes(part.try_into().expect("eight bytes"));
            write!(text, "{}{number}", char::from(tag))
        }
        (tag::IPV4, 4) => write!(text, "{}.{}.{}.{}", part[0], part[1], part[2], part[3]),
        (tag::IPV6, 1..=17) => {
            let mut octets = [0; 16];
            octets[..part.len() - 1].copy_from_slice(&part[1..]);
            // No other part has colons, so an IPv6 address needs no tag.
            write!(text, "{}_{}", Ipv6Addr::from(octets), part[0])
        }
        _ => {
            text.push(tag.into());
            part.iter().try_for_each(|byte| write!(text, "{byte:02x}"))
        }
    }
}

impl From<&Key> for Key {
    fn from(key: &Key) -> Self {
        key.clone()
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        if text.len() <= MAX_TEXT {
            Self::of_part(tag::TEXT, text.as_bytes())
        } else {
            Self::of_part(tag::LONG_TEXT, &hmac_sha256::Hash::hash(text.as_bytes()))
        }
    }
}

impl From<&String> for Key {
    fn from(text: &String) -> Self {
        text.as_str().into()
    }
}

impl From<String> for Key {
    fn from(text: String) -> Self {
        text.as_str().into()
    }
}

impl From<IpAddr> for Key {
    #[inline]
    fn from(address: IpAddr) -> Self {
        Self::from_ip(address, IPV6_PREFIX)
    }
}

/// Sixteen bytes, such as a UUID's.
impl From<[u8; 16]> for Key {
    fn from(id: [u8; 16]) -> Self {
        Self::of_part(tag::BYTES16, &id)
    }
}

macro_rules! from_numbers {
    ($($t:ty),*) => {$(
        /// Equal numbers are one key, whatever their type: `7_u32` is `7_i64`.
        impl From<$t> for Key {
            #[allow(unused_comparisons, reason = "some of the types are unsigned")]
            fn from(number: $t) -> Self {
                let tag = if number < 0 { tag::NEGATIVE } else { tag::UNSIGNED };
                let size = (number as i128).unsigned_abs() as u64;
                Self::of_part(tag, &size.to_be_bytes())
            }
        }
    )*};
}

from_numbers!(u16, u32, u64, usize, i16, i32, i64);

macro_rules! from_tuples {
    ($($t:ident $i:tt),*) => {
        /// The parts one after the other. [`Key::global()`](Key::global) is an absent part, and a
        /// tuple in a tuple is one part.
        impl<$($t: Into<Key>),*> From<($($t,)*)> for Key {
            fn from(parts: ($($t,)*)) -> Self {
                let mut key = Self::default();
                $(
                    let from = key.len();
                    key.append(&parts.$i.into());
                    key.end_part(from);
                )*
                key
            }
        }
    };
}

from_tuples!(A 0, B 1);
from_tuples!(A 0, B 1, C 2);
from_tuples!(A 0, B 1, C 2, D 3);
