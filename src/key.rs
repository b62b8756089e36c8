//! Who pays: [`Key`], the extractors that read it from a request, and ways to combine them.
//!
//! ```
//! use tower_fixed_window::key::{client_ip, extension, global, header, matched_path, peer_ip};
//! use tower_fixed_window::{FixedWindowLayer, Key, KeyExtractor, Quota};
//!
//! #[derive(Clone)]
//! struct User { id: u64 }
//!
//! impl From<&User> for Key {
//!     fn from(user: &User) -> Key { Key::from(user.id) }
//! }
//!
//! let layer = || FixedWindowLayer::new(Quota::per_minute(60));
//! let _ = layer().key(peer_ip());                                 // the default
//! let _ = layer().key(client_ip().trusting(["10.0.0.0/8"]));      // behind a proxy
//! let _ = layer().key(extension::<User>().or(peer_ip()));         // a user, else an address
//! let _ = layer().key((extension::<User>(), matched_path()));     // each user on each route
//! let _ = layer().key(header("x-api-key"));                       // see the warning there
//! let _ = layer().key(global());                                  // one count for all
//! let _ = layer().key_fn(|parts| parts.extensions.get::<User>().map(Key::from));
//! ```

use std::borrow::Cow;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv6Addr};

use http::HeaderName;
use http::request::Parts;

#[cfg(feature = "client-ip")]
mod client;
#[cfg(feature = "client-ip")]
mod hops;
mod ip;
#[cfg(feature = "client-ip")]
mod networks;

#[cfg(feature = "client-ip")]
#[cfg_attr(docsrs, doc(cfg(feature = "client-ip")))]
pub use client::{ClientIp, client_ip};
pub use ip::{PeerAddr, PeerIp, peer_ip};
#[cfg(feature = "client-ip")]
#[cfg_attr(docsrs, doc(cfg(feature = "client-ip")))]
pub use networks::InvalidNetwork;

/// Who pays, as an opaque sequence of tagged, length-prefixed parts: `("a", "bc")` never meets
/// `("ab", "c")`, and the name `"127.0.0.1"` never meets that address.
///
/// Keys are made from numbers, names and addresses, and from tuples of them. Text longer than
/// 64 bytes is hashed. IPv4-mapped IPv6 addresses are IPv4; other IPv6 addresses count by their
/// /64, see [`Key::from_ip`].
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
/// # Ok::<_, std::net::AddrParseError>(())
/// ```
///
/// Its `Debug` shows no content, so that a key can't end up in a log by accident.
#[derive(Clone)]
pub struct Key(Repr);

/// Most keys are an address, a number, a hash, or a number and a route: those need no allocation, and
/// are small enough that a move of them is a few instructions.
#[derive(Clone)]
enum Repr {
    Inline { len: u8, bytes: [u8; INLINE] },
    Heap(Vec<u8>),
}

const INLINE: usize = 38;

/// Text above this is hashed.
const LONGEST_TEXT: usize = 64;

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
}

impl Key {
    /// A key without parts: all who have it share one count.
    pub fn global() -> Self {
        Self::default()
    }

    /// A credential (a token, a session cookie): only its SHA-256 goes on from here.
    pub fn secret(secret: impl AsRef<[u8]>) -> Self {
        let mut key = Self::default();
        key.push_secret(secret.as_ref());
        key
    }

    /// Something that can be guessed (an e-mail address, an address) and must not be readable in a
    /// store: its HMAC-SHA-256 under a secret of the app's own.
    pub fn hmac(secret: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        let mut key = Self::default();
        key.push(tag::KEYED_SECRET, &hmac_sha256::HMAC::mac(value, secret));
        key
    }

    /// An address; an IPv6 address (that is not an IPv4-mapped one) counts by its first `prefix`
    /// bits, at most 128. `Key::from(address)` takes 64.
    pub fn from_ip(address: IpAddr, prefix: u8) -> Self {
        let mut key = Self::default();
        key.push_ip(address, prefix);
        key
    }

    /// The encoded parts. The encoding is stable: it is what deployed counters are found by.
    #[inline]
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Repr::Inline { len, bytes } => &bytes[..usize::from(*len).min(INLINE)],
            Repr::Heap(bytes) => bytes,
        }
    }

    /// The key as text that can be read, and no two keys alike: how it is written in a store that
    /// operators look into. Text is percent-encoded outside `[A-Za-z0-9_.@-]`, hashes are
    /// hexadecimal, parts are separated by commas.
    ///
    /// ```
    /// use std::net::IpAddr;
    /// use tower_fixed_window::Key;
    ///
    /// let key = Key::from((7_u64, "a/b", IpAddr::from([127, 0, 0, 1])));
    /// assert_eq!(key.readable().to_string(), "u7,ta%2Fb,127.0.0.1");
    /// ```
    pub fn readable(&self) -> impl fmt::Display + '_ {
        Readable(self)
    }

    /// Adds the parts of another key.
    pub fn append(&mut self, other: &Key) {
        self.extend(other.as_bytes());
    }

    fn len(&self) -> usize {
        self.as_bytes().len()
    }

    fn truncate(&mut self, to: usize) {
        match &mut self.0 {
            Repr::Inline { len, .. } => *len = to.min((*len).into()) as u8,
            Repr::Heap(bytes) => bytes.truncate(to),
        }
    }

    #[inline]
    fn push(&mut self, tag: u8, part: &[u8]) {
        debug_assert!(part.len() <= LONGEST_TEXT, "longer parts are hashed");
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

    fn push_text(&mut self, text: &str) {
        if text.len() <= LONGEST_TEXT {
            self.push(tag::TEXT, text.as_bytes());
        } else {
            self.push(tag::LONG_TEXT, &hmac_sha256::Hash::hash(text.as_bytes()));
        }
    }

    fn push_secret(&mut self, secret: &[u8]) {
        self.push(tag::SECRET, &hmac_sha256::Hash::hash(secret));
    }

    #[inline]
    fn push_ip(&mut self, address: IpAddr, prefix: u8) {
        match address.to_canonical() {
            IpAddr::V4(address) => self.push(tag::IPV4, &address.octets()),
            IpAddr::V6(address) => self.push_ipv6(address, prefix),
        }
    }

    /// Apart, so that the rest is small enough to be inlined.
    #[inline(never)]
    fn push_ipv6(&mut self, address: Ipv6Addr, prefix: u8) {
        let prefix = prefix.min(128);
        let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
        let mut part = [prefix; 17];
        part[1..].copy_from_slice(&(u128::from(address) & mask).to_be_bytes());
        self.push(tag::IPV6, &part[..1 + usize::from(prefix.div_ceil(8))]);
    }

    /// Tags and contents of the parts.
    fn parts(&self) -> impl Iterator<Item = (u8, &[u8])> {
        let mut rest = self.as_bytes();
        std::iter::from_fn(move || {
            let (&[tag, len], tail) = rest.split_first_chunk()?;
            let (part, tail) = tail.split_at_checked(len.into())?;
            rest = tail;
            Some((tag, part))
        })
    }
}

impl Default for Key {
    #[inline]
    fn default() -> Self {
        Self(Repr::Inline { len: 0, bytes: [0; INLINE] })
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_bytes().hash(state);
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

struct Readable<'a>(&'a Key);

impl fmt::Display for Readable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (tag, part)) in self.0.parts().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            match (tag, part.len()) {
                (tag::TEXT, _) => {
                    f.write_str("t")?;
                    percent(f, part)?;
                }
                (tag::UNSIGNED | tag::NEGATIVE, 8) => {
                    let number = u64::from_be_bytes(part.try_into().expect("eight bytes"));
                    write!(f, "{}{number}", char::from(tag))?;
                }
                (tag::IPV4, 4) => write!(f, "{}.{}.{}.{}", part[0], part[1], part[2], part[3])?,
                (tag::IPV6, 1..=17) => {
                    let mut octets = [0; 16];
                    octets[..part.len() - 1].copy_from_slice(&part[1..]);
                    // An address has colons, which no other part has.
                    write!(f, "{}_{}", std::net::Ipv6Addr::from(octets), part[0])?;
                }
                _ => {
                    write!(f, "{}", char::from(tag))?;
                    part.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
                }
            }
        }
        Ok(())
    }
}

fn percent(f: &mut fmt::Formatter<'_>, text: &[u8]) -> fmt::Result {
    text.iter().try_for_each(|&byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'@' | b'-' => {
            write!(f, "{}", char::from(byte))
        }
        _ => write!(f, "%{byte:02X}"),
    })
}

impl From<&Key> for Key {
    fn from(key: &Key) -> Self {
        key.clone()
    }
}

impl From<&str> for Key {
    fn from(text: &str) -> Self {
        let mut key = Self::default();
        key.push_text(text);
        key
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
    fn from(address: IpAddr) -> Self {
        Self::from_ip(address, ip::IPV6_PREFIX)
    }
}

/// Sixteen bytes, such as a UUID's.
impl From<[u8; 16]> for Key {
    fn from(id: [u8; 16]) -> Self {
        let mut key = Self::default();
        key.push(tag::BYTES16, &id);
        key
    }
}

macro_rules! from_numbers {
    ($($t:ty),*) => {$(
        /// Numbers are the same key whatever their type: `7_u32` is `7_i64`.
        impl From<$t> for Key {
            #[allow(unused_comparisons, reason = "some of the types are unsigned")]
            fn from(number: $t) -> Self {
                let mut key = Self::default();
                if number < 0 {
                    key.push(tag::NEGATIVE, &(number as i64).unsigned_abs().to_be_bytes());
                } else {
                    key.push(tag::UNSIGNED, &(number as u64).to_be_bytes());
                }
                key
            }
        }
    )*};
}

from_numbers!(u16, u32, u64, usize, i16, i32, i64);

macro_rules! tuples {
    ($($t:ident $i:tt),*) => {
        /// The parts one after the other.
        impl<$($t: Into<Key>),*> From<($($t,)*)> for Key {
            fn from(parts: ($($t,)*)) -> Self {
                let mut key = Self::default();
                $(key.append(&parts.$i.into());)*
                key
            }
        }

        /// All of them; it has no key where one of them has none.
        impl<$($t: KeyExtractor),*> KeyExtractor for ($($t,)*) {
            fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
                $(self.$i.extract(parts, key)?;)*
                Ok(())
            }
        }
    };
}

tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);

/// Reads from a request who pays for it.
///
/// An extractor adds the parts it finds to the key, or says what is missing. A request without a
/// key is refused, never let through: give it a fallback with [`or`](Self::or).
///
/// Closures are extractors by [`key_fn`]; a type of your own:
///
/// ```
/// use http::request::Parts;
/// use tower_fixed_window::{Key, KeyExtractor, MissingKey};
///
/// struct Tenant;
///
/// impl KeyExtractor for Tenant {
///     fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
///         let host = parts.uri.host().ok_or(MissingKey::client("a host"))?;
///         key.append(&Key::from(host));
///         Ok(())
///     }
/// }
///
/// let (parts, ()) = http::Request::get("http://acme.example/").body(())?.into_parts();
/// let mut key = Key::default();
/// assert_eq!(Tenant.extract(&parts, &mut key), Ok(()));
/// assert_eq!(key, Key::from("acme.example"));
/// # Ok::<_, http::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` doesn't say who pays for a request",
    label = "no `KeyExtractor`",
    note = "write `.key_fn(|parts| ...)` for a closure that returns an `Option<Key>`",
    note = "`peer_ip()`, `extension::<User>()`, `header(\"x-api-key\")` and others are in `tower_fixed_window::key`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Adds to `key` what the request has.
    ///
    /// # Errors
    /// What is missing, and whose fault that is.
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey>;

    /// The key of another extractor where this one finds none.
    fn or<E: KeyExtractor>(self, other: E) -> Or<Self, E>
    where
        Self: Sized,
    {
        Or(self, other)
    }
}

/// Why a request has no key: its `Display` says what is missing, or how to mend it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingKey(Missing);

/// Text is made when it is shown: most are never, since a fallback finds a key.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Missing {
    Client(Cow<'static, str>),
    Server(Cow<'static, str>),
    Header(HeaderName),
    /// By the name of its type.
    Extension(&'static str),
}

impl MissingKey {
    /// The client left out what it should have sent, such as `"the x-api-key header"`: 400.
    pub fn client(what: impl Into<Cow<'static, str>>) -> Self {
        Self(Missing::Client(what.into()))
    }

    /// The server is set up in a way that leaves requests without a key: 500. The text says how to
    /// mend it, and is told to the operator, once.
    pub fn server(fix: impl Into<Cow<'static, str>>) -> Self {
        Self(Missing::Server(fix.into()))
    }

    /// Whether it is for the client to mend.
    pub fn is_client(&self) -> bool {
        matches!(self.0, Missing::Client(_) | Missing::Header(_))
    }
}

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Missing::Client(text) | Missing::Server(text) => f.write_str(text),
            Missing::Header(name) => write!(f, "exactly one {name} header"),
            Missing::Extension(name) => write!(
                f,
                "the rate limit counts by the extension `{name}`, which no layer outside of it has \
                 set: put the limiter inside the layer that sets it (in axum: add it before that \
                 one), or write `.or(peer_ip())` where it is optional"
            ),
        }
    }
}

impl std::error::Error for MissingKey {}

/// Made by [`KeyExtractor::or`].
#[derive(Clone, Copy, Debug)]
pub struct Or<A, B>(A, B);

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Or<A, B> {
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let len = key.len();
        self.0.extract(parts, key).or_else(|_| {
            key.truncate(len);
            self.1.extract(parts, key)
        })
    }
}

/// A closure that returns the key, or `None` where the client left it out (400).
pub fn key_fn<F>(f: F) -> KeyFn<F>
where
    F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
{
    KeyFn(f)
}

/// Made by [`key_fn`].
#[derive(Clone, Copy)]
pub struct KeyFn<F>(F);

impl<F> fmt::Debug for KeyFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyFn(..)")
    }
}

impl<F> KeyExtractor for KeyFn<F>
where
    F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let found =
            (self.0)(parts).ok_or(MissingKey::client("what the rate limit is counted by"))?;
        key.append(&found);
        Ok(())
    }
}

/// One key for all requests: a limit for the whole service.
pub fn global() -> Global {
    Global
}

/// Made by [`global`].
#[derive(Clone, Copy, Debug)]
pub struct Global;

impl KeyExtractor for Global {
    fn extract(&self, _: &Parts, _: &mut Key) -> Result<(), MissingKey> {
        Ok(())
    }
}

/// What a layer further out left in the request's extensions: the user that an authentication
/// layer has verified.
///
/// `T` becomes a key by `impl From<&T> for Key`. A request without it is refused with 500, since
/// it is the server's own layers that put it there; where it is optional, fall back:
/// `extension::<User>().or(peer_ip())`. The limiter must be *inside* the layer that sets it: in
/// axum, added before it.
pub fn extension<T>() -> Extension<T>
where
    T: Clone + Send + Sync + 'static,
    for<'a> Key: From<&'a T>,
{
    Extension(PhantomData)
}

/// Made by [`extension`].
pub struct Extension<T>(PhantomData<fn() -> T>);

impl<T> fmt::Debug for Extension<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>", std::any::type_name::<T>())
    }
}

impl<T> KeyExtractor for Extension<T>
where
    T: Clone + Send + Sync + 'static,
    for<'a> Key: From<&'a T>,
{
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let Some(value) = parts.extensions.get::<T>() else {
            return Err(MissingKey(Missing::Extension(std::any::type_name::<T>())));
        };
        key.append(&Key::from(value));
        Ok(())
    }
}

/// The value of a header, hashed.
///
/// **Nobody has verified it.** Whoever invents a new value is a new key with a fresh count, so this
/// limits only clients that don't want around it. Let an authentication layer check the header and
/// leave the user in the [`extension`]s, or put a limit per [`peer_ip`] in front.
///
/// A request that has the header not at all, empty, or more than once is refused with 400, or
/// takes the fallback of [`or`](KeyExtractor::or). Any other value is a key, byte for byte: it may
/// be long, and need not be text.
///
/// # Panics
/// If `name` is not a header's name in lower case.
///
/// ```
/// use tower_fixed_window::key::header;
/// use tower_fixed_window::{Key, KeyExtractor, MissingKey};
///
/// let key = |request: http::request::Builder| -> Result<Key, MissingKey> {
///     let (parts, ()) = request.body(()).unwrap().into_parts();
///     let mut key = Key::default();
///     header("x-api-key").extract(&parts, &mut key).map(|()| key)
/// };
/// let get = || http::Request::get("/");
///
/// assert_eq!(key(get().header("x-api-key", "alpha")), Ok(Key::secret("alpha")));
/// let twice = key(get().header("x-api-key", "alpha").header("x-api-key", "beta"));
/// assert_eq!(twice.unwrap_err().to_string(), "exactly one x-api-key header");
/// ```
pub fn header(name: &'static str) -> Header {
    Header(HeaderName::from_static(name))
}

/// Made by [`header`].
#[derive(Clone, Debug)]
pub struct Header(HeaderName);

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let mut values = parts.headers.get_all(&self.0).iter();
        match (values.next(), values.next()) {
            (Some(value), None) if !value.is_empty() => {
                key.push_secret(value.as_bytes());
                Ok(())
            }
            _ => Err(MissingKey(Missing::Header(self.0.clone()))),
        }
    }
}

/// The route that axum matched, such as `/users/{id}`: a count for each route under one layer.
///
/// Requests that no route matches (404s) share one count. Without the `axum` feature a request is
/// refused with 500.
pub fn matched_path() -> MatchedPath {
    MatchedPath
}

/// Made by [`matched_path`].
#[derive(Clone, Copy, Debug)]
pub struct MatchedPath;

impl KeyExtractor for MatchedPath {
    #[cfg(feature = "axum")]
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let path = parts.extensions.get::<axum::extract::MatchedPath>();
        key.push_text(path.map_or("", |path| path.as_str()));
        Ok(())
    }

    #[cfg(not(feature = "axum"))]
    fn extract(&self, _: &Parts, _: &mut Key) -> Result<(), MissingKey> {
        Err(MissingKey::server(
            "matched_path() reads axum's routes: enable the feature `axum` of tower-fixed-window",
        ))
    }
}
