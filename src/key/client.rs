//! The client's address behind proxies.

use std::fmt;
use std::net::IpAddr;

use http::HeaderName;
use http::request::Parts;

use super::encoding::{IPV6_PREFIX, Key};
use super::extractor::{KeyExtractor, MissingKey};
use super::hops::Source;
use super::ip;
use super::networks::{InvalidNetwork, Networks};

/// The client's address, also where proxies stand before the server: the peer's, unless that is a
/// proxy you trust, and then what it says in `X-Forwarded-For`, or in another header of your choice.
///
/// Nobody is trusted until you say whom: your proxies by their networks
/// ([`trusting`](ClientIp::trusting)), or, where you don't know these, by their number
/// ([`trusting_hops`](ClientIp::trusting_hops)).
///
/// Anybody can send these headers, and each proxy appends to them. So they are read from the right:
/// the last entry was written by the proxy that we are talking to, the one before it by the proxy
/// before that. The first address that is not trusted is the client's, and what stands left of it is
/// of no interest to anybody. A hop that can't be read (`unknown`, `_hidden`, nonsense) ends the
/// walk at the last trusted address: such requests share that one's count.
///
/// ```
/// use std::net::{IpAddr, SocketAddr};
/// use http::Request;
/// use tower_fixed_window::key::{PeerAddr, client_ip};
///
/// let client = client_ip().trusting(["10.0.0.0/8"]);
/// let address = |peer: [u8; 4], forwarded_for: &str| {
///     let request = Request::get("/").header("x-forwarded-for", forwarded_for).body(()).unwrap();
///     let (mut parts, ()) = request.into_parts();
///     parts.extensions.insert(PeerAddr(SocketAddr::from((peer, 4711))));
///     client.address(&parts).unwrap()
/// };
///
/// // 10.0.0.2 was asked by 10.0.0.1, and that by 192.0.2.7, which has invented the first entry.
/// assert_eq!(address([10, 0, 0, 2], "8.8.8.8, 192.0.2.7, 10.0.0.1"), IpAddr::from([192, 0, 2, 7]));
/// // A peer that is no proxy of ours may claim what it likes.
/// assert_eq!(address([192, 0, 2, 7], "8.8.8.8"), IpAddr::from([192, 0, 2, 7]));
/// ```
///
/// `examples/behind_proxy.rs` answers with the address that it would count, to check a deployment.
pub fn client_ip() -> ClientIp {
    ClientIp { trust: Trust::Nobody, source: Source::XForwardedFor, ipv6_prefix: IPV6_PREFIX }
}

/// Made by [`client_ip`].
#[derive(Clone, Debug)]
#[must_use = "an extractor does nothing until it is given to a layer"]
pub struct ClientIp {
    trust: Trust,
    source: Source,
    ipv6_prefix: u8,
}

#[derive(Clone, Debug)]
enum Trust {
    Nobody,
    Networks(Networks),
    Hops(usize),
}

type IsIn = Box<dyn Fn(&Parts) -> bool + Send + Sync>;

impl Trust {
    /// Whether a hop is trusted that has this number of hops between it and the server.
    #[inline]
    fn includes(&self, address: IpAddr, between: usize) -> bool {
        match self {
            Self::Nobody => false,
            Self::Networks(networks) => networks.contains(address),
            Self::Hops(hops) => between < *hops,
        }
    }
}

impl ClientIp {
    /// Trusts the proxies in these networks, and in those of earlier calls. A single address is a
    /// network, too; bits behind the prefix don't matter.
    ///
    /// Name your proxies, not networks in which clients may be: what a client in a trusted network
    /// writes is believed.
    ///
    /// # Panics
    /// If one of them is no network, or holds every address; and if
    /// [`trusting_hops`](Self::trusting_hops) was called. Networks from a configuration are for
    /// [`try_trusting`](Self::try_trusting).
    #[track_caller]
    pub fn trusting<I>(self, networks: I) -> Self
    where
        I: IntoIterator,
        I::Item: fmt::Display,
    {
        match self.try_trusting(networks) {
            Ok(this) => this,
            Err(error) => panic!("client_ip().trusting(..): {error}"),
        }
    }

    /// The same, for networks that come from a configuration.
    ///
    /// # Errors
    /// If one of them is no network, or holds every address.
    ///
    /// # Panics
    /// If [`trusting_hops`](Self::trusting_hops) was called.
    ///
    /// ```
    /// use tower_fixed_window::key::client_ip;
    ///
    /// let from_environment = "10.0.0.0/8,2001:db8:77::/48,192.0.2.1";
    /// assert!(client_ip().try_trusting(from_environment.split(',')).is_ok());
    ///
    /// let error = client_ip().try_trusting(["10.0.0/8"]).unwrap_err();
    /// assert!(error.to_string().starts_with(r#""10.0.0/8" is no network: write"#));
    /// ```
    #[track_caller]
    pub fn try_trusting<I>(mut self, networks: I) -> Result<Self, InvalidNetwork>
    where
        I: IntoIterator,
        I::Item: fmt::Display,
    {
        let networks = Networks::parse(networks)?.trusted()?;
        match &mut self.trust {
            Trust::Nobody => self.trust = Trust::Networks(networks),
            Trust::Networks(trusted) => trusted.append(networks),
            Trust::Hops(_) => panic!("{ONE_WAY}"),
        }
        Ok(self)
    }

    /// Trusts the last so many hops, whatever their addresses: with 1 the peer, with 2 also the
    /// proxy before it. For platforms that don't tell where their proxies are.
    ///
    /// Only where nobody reaches the server by fewer hops: a client that does can invent the missing ones.
    ///
    /// # Panics
    /// If [`trusting`](Self::trusting) was called.
    ///
    /// ```
    /// # use std::net::{IpAddr, SocketAddr};
    /// # use http::Request;
    /// # use tower_fixed_window::key::{PeerAddr, client_ip};
    /// # let request = Request::get("/").header("x-forwarded-for", "8.8.8.8, 192.0.2.7, 203.0.113.1");
    /// # let (mut parts, ()) = request.body(()).unwrap().into_parts();
    /// # parts.extensions.insert(PeerAddr(SocketAddr::from(([203, 0, 113, 2], 4711))));
    /// // x-forwarded-for: 8.8.8.8, 192.0.2.7, 203.0.113.1
    /// let hops = |n| client_ip().trusting_hops(n).address(&parts).unwrap();
    /// assert_eq!(hops(1), IpAddr::from([203, 0, 113, 1]));
    /// assert_eq!(hops(2), IpAddr::from([192, 0, 2, 7]));
    /// ```
    #[track_caller]
    pub fn trusting_hops(mut self, hops: usize) -> Self {
        assert!(!matches!(self.trust, Trust::Networks(_)), "{ONE_WAY}");
        self.trust = Trust::Hops(hops);
        self
    }

    /// Reads `Forwarded` (RFC 7239) instead of `X-Forwarded-For`.
    ///
    /// ```
    /// # use std::net::{IpAddr, SocketAddr};
    /// # use http::Request;
    /// # use tower_fixed_window::key::{PeerAddr, client_ip};
    /// let request = Request::get("/").header("forwarded", r#"for="[2001:db8::7]:4711";proto=https"#);
    /// # let (mut parts, ()) = request.body(()).unwrap().into_parts();
    /// # parts.extensions.insert(PeerAddr(SocketAddr::from(([10, 0, 0, 1], 4711))));
    /// let client = client_ip().trusting(["10.0.0.1"]).forwarded();
    /// assert_eq!(client.address(&parts).unwrap(), "2001:db8::7".parse::<IpAddr>().unwrap());
    /// ```
    pub fn forwarded(mut self) -> Self {
        self.source = Source::Forwarded;
        self
    }

    /// Reads a header that a proxy *sets* to the one address it has seen, such as
    /// `cf-connecting-ip` or `x-real-ip`. Two of them are one too many: then it was added to what
    /// the client had sent, and neither is believed.
    ///
    /// `x-forwarded-for` and `forwarded` are read as the lists they are.
    ///
    /// Make sure that the proxy does set it. One that only passes it on lets clients write it.
    ///
    /// # Panics
    /// If that can't be a header's name.
    ///
    /// ```
    /// # use std::net::{IpAddr, SocketAddr};
    /// # use http::Request;
    /// # use tower_fixed_window::key::{PeerAddr, client_ip};
    /// let request = Request::get("/").header("cf-connecting-ip", "192.0.2.7");
    /// # let (mut parts, ()) = request.body(()).unwrap().into_parts();
    /// # parts.extensions.insert(PeerAddr(SocketAddr::from(([10, 0, 0, 1], 4711))));
    /// let client = client_ip().trusting(["10.0.0.1"]).from_header("cf-connecting-ip");
    /// assert_eq!(client.address(&parts).unwrap(), IpAddr::from([192, 0, 2, 7]));
    /// ```
    #[track_caller]
    pub fn from_header(mut self, name: impl TryInto<HeaderName>) -> Self {
        let Ok(name) = name.try_into() else {
            panic!("that is no header's name: write .from_header(\"cf-connecting-ip\")")
        };
        self.source = name.into();
        self
    }

    /// IPv6 addresses count by their first `bits`; 64 unless set. See
    /// [`PeerIp::ipv6_prefix`](super::PeerIp::ipv6_prefix).
    ///
    /// # Panics
    /// If there are more than 128.
    #[track_caller]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.ipv6_prefix = ip::checked_prefix(bits);
        self
    }

    /// The client's address. IPv4-mapped ones are returned as IPv4.
    ///
    /// # Errors
    /// If the server has not said who its peer is.
    pub fn address(&self, parts: &Parts) -> Result<IpAddr, MissingKey> {
        self.find(parts).map(|(address, _)| address)
    }

    /// Whether a client's address is in one of these networks: an allow list for
    /// [`FixedWindowLayer::skip`](crate::FixedWindowLayer::skip). A client whose address can't be
    /// found is not.
    ///
    /// # Panics
    /// If one of them is no network. Networks from a configuration are for
    /// [`try_is_in`](Self::try_is_in).
    ///
    /// ```
    /// use tower_fixed_window::key::client_ip;
    /// use tower_fixed_window::{FixedWindowLayer, Quota};
    ///
    /// let client = client_ip().trusting(["10.0.0.0/8"]);
    /// let layer = FixedWindowLayer::new(Quota::per_minute(60))
    ///     .key(client.clone())
    ///     .skip(client.is_in(["192.0.2.0/24", "2001:db8:5::/48"]));
    /// # let _ = layer;
    /// ```
    #[track_caller]
    pub fn is_in<I>(self, networks: I) -> IsIn
    where
        I: IntoIterator,
        I::Item: fmt::Display,
    {
        match self.try_is_in(networks) {
            Ok(is_in) => is_in,
            Err(error) => panic!("client_ip().is_in(..): {error}"),
        }
    }

    /// The same, for networks that come from a configuration.
    ///
    /// # Errors
    /// If one of them is no network.
    pub fn try_is_in<I>(self, networks: I) -> Result<IsIn, InvalidNetwork>
    where
        I: IntoIterator,
        I::Item: fmt::Display,
    {
        let networks = Networks::parse(networks)?;
        // Where a hop can't be read, the address is that of a proxy, which may well be in the list.
        Ok(Box::new(move |parts| {
            self.find(parts).is_ok_and(|(address, whole)| whole && networks.contains(address))
        }))
    }

    /// The client's address, and whether every hop on the way to it could be read.
    #[inline]
    fn find(&self, parts: &Parts) -> Result<(IpAddr, bool), MissingKey> {
        let mut address = ip::peer(parts)?.to_canonical();
        let mut whole = true;
        if self.trust.includes(address, 0) {
            let mut between = 0;
            self.source.walk(&parts.headers, |hop| {
                let Some(hop) = hop else {
                    whole = false;
                    return false;
                };
                address = hop.to_canonical();
                between += 1;
                self.trust.includes(address, between)
            });
        }
        Ok((address, whole))
    }
}

const ONE_WAY: &str = "client_ip() trusts by networks or by a number of hops: write either \
    .trusting([\"10.0.0.0/8\"]) or .trusting_hops(1)";

impl KeyExtractor for ClientIp {
    #[inline]
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let (address, _) = self.find(parts)?;
        key.push_ip(address, self.ipv6_prefix);
        Ok(())
    }
}
