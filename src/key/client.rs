//! The client's address behind proxies.

use std::fmt;
use std::net::IpAddr;

use http::HeaderName;
use http::request::Parts;
use ipnet::{IpNet, Ipv4Net};

use super::encoding::{IPV6_PREFIX, Key};
use super::extractor::{KeyExtractor, MissingKey};
use super::hops::{X_FORWARDED_FOR, visit_hops};
use super::ip;

/// Extracts the client's address, even behind proxies. If the peer is a proxy that you trust, the
/// address comes from `X-Forwarded-For` or another header of your choice; otherwise it is the
/// peer's.
///
/// By default, no proxy is trusted. List the networks of your proxies
/// ([`trusting`](ClientIp::trusting)) or, if you don't know them, give the number of proxies
/// ([`trusting_hops`](ClientIp::trusting_hops)).
///
/// Any client can send these headers, and each proxy appends to them. So they are read from the
/// right, past trusted proxies. Entries to the left of the client's may be forged and are ignored.
/// An entry that can't be read (`unknown`, `_hidden`, garbage) ends the search at the last trusted
/// address, and such requests share its count. [The guide](crate::guide::behind_a_proxy) has an
/// example, and the line to write for your proxy.
///
/// To check a deployment, run `examples/behind_proxy.rs`: it responds with the address that it
/// would count by.
#[doc(alias("x_forwarded_for", "real_ip", "SmartIpKeyExtractor"))]
pub fn client_ip() -> ClientIp {
    ClientIp { networks: Vec::new(), hops: None, header: X_FORWARDED_FOR, ipv6_prefix: IPV6_PREFIX }
}

/// The extractor returned by [`client_ip`].
#[derive(Clone, Debug)]
#[must_use = "an extractor does nothing until it is given to a layer"]
pub struct ClientIp {
    /// Those that are trusted, unless there is a number of hops.
    networks: Vec<IpNet>,
    hops: Option<usize>,
    header: HeaderName,
    ipv6_prefix: u8,
}

impl ClientIp {
    /// Trusts the proxies in these networks, in addition to those of earlier calls. Pass a list,
    /// such as `["10.0.0.0/8"]`; a single address is a network, too. Bits beyond the prefix are
    /// ignored. A client in a trusted network can forge its address; a CDN's networks may contain
    /// other customers' clients.
    ///
    /// # Panics
    /// If an entry is not a network, or contains every address; or after
    /// [`trusting_hops`](Self::trusting_hops). To return an error for an entry of a configuration
    /// file, parse it as `ipnet::IpNet` or `IpAddr` first.
    #[track_caller]
    #[doc(alias = "trusted_proxies")]
    pub fn trusting(mut self, networks: impl IntoNetworks) -> Self {
        let networks = parsed(networks, "trusting");
        if let Some(network) = networks.iter().find(|network| network.prefix_len() == 0) {
            panic!(
                "client_ip().trusting(..): {network} contains every address, so that every client \
                 could forge its own: list the proxies, or if their addresses are unknown, write \
                 .trusting_hops(1)"
            );
        }
        assert!(self.hops.is_none(), "{ONE_WAY}");
        self.networks.extend(networks);
        self
    }

    /// Trusts the last `hops` hops, whatever their addresses: 0 trusts none, 1 trusts the peer, 2
    /// also the last entry of the header. Use this for platforms that don't publish the addresses
    /// of their proxies. A client that reaches the server through fewer hops can forge the missing
    /// ones.
    ///
    /// # Panics
    /// After [`trusting`](Self::trusting).
    #[track_caller]
    pub fn trusting_hops(mut self, hops: usize) -> Self {
        assert!(self.networks.is_empty(), "{ONE_WAY}");
        self.hops = Some(hops);
        self
    }

    /// Reads the address from a header that a proxy *sets* to a single address, such as
    /// `cf-connecting-ip` or `x-real-ip`. If the proxy only forwards the header, clients can forge
    /// it. If a request has the header twice, the proxy appended to what the client sent, and
    /// neither is trusted.
    ///
    /// `forwarded` (RFC 7239) is read as a list of hops, like `x-forwarded-for`, and
    /// `cloudfront-viewer-address` as an address with a port. The guide has [a table of platforms'
    /// headers](crate::guide::behind_a_proxy#headers-of-platforms).
    ///
    /// # Panics
    /// If `name` is not a valid header name.
    ///
    /// ```
    /// use http::Request;
    /// use tower_fixed_window::key::{PeerAddr, client_ip};
    ///
    /// let (parts, ()) = Request::get("/")
    ///     .extension(PeerAddr(([10, 0, 0, 1], 4711).into()))
    ///     .header("cf-connecting-ip", "192.0.2.7")
    ///     .body(())?
    ///     .into_parts();
    /// let client = client_ip().trusting(["10.0.0.1"]).from_header("cf-connecting-ip");
    /// assert_eq!(client.address(&parts), Ok([192, 0, 2, 7].into()));
    /// # Ok::<_, http::Error>(())
    /// ```
    #[track_caller]
    pub fn from_header(mut self, name: impl TryInto<HeaderName>) -> Self {
        let Ok(name) = name.try_into() else {
            panic!("this is not a header name: write .from_header(\"cf-connecting-ip\")")
        };
        self.header = name;
        self
    }

    /// Sets how many bits of an IPv6 address count, as in the example of [`Key`]. The default is
    /// 64. Link-local and unique local addresses always count individually. A host has at least a
    /// /64, and many customers have a /56 or /48. Fewer bits cover such a customer, but affect more
    /// neighbours.
    ///
    /// # Panics
    /// If `bits` is above 128.
    #[track_caller]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        assert!(bits <= 128, "an IPv6 address has 128 bits, not {bits}: write .ipv6_prefix(56)");
        self.ipv6_prefix = bits;
        self
    }

    /// Returns the client's address, as in the example of [`from_header`](Self::from_header). An
    /// IPv4-mapped address is returned as IPv4.
    ///
    /// # Errors
    /// If the server did not provide the address of its peer.
    pub fn address(&self, parts: &Parts) -> Result<IpAddr, MissingKey> {
        self.find_address(parts).map(|(address, _)| address)
    }

    /// Returns a closure that checks whether the client's address is in one of these networks: an
    /// allow list, as in the example of [`FixedWindowLayer::skip`](crate::FixedWindowLayer::skip).
    /// The closure returns `false` if the address can't be determined.
    ///
    /// A trusted peer that sends no header counts as the client itself, as in its health checks.
    /// With some proxies, a client can remove the header (`connection: x-forwarded-for`). So leave
    /// the networks of your proxies out of this list.
    ///
    /// # Panics
    /// If an entry is not a network.
    #[track_caller]
    pub fn is_in(self, networks: impl IntoNetworks) -> Box<dyn Fn(&Parts) -> bool + Send + Sync> {
        let networks = parsed(networks, "is_in");
        // If a hop can't be read, the address found is that of a proxy, which may be in the list.
        Box::new(move |parts| {
            self.find_address(parts)
                .is_ok_and(|(address, whole)| whole && contains(&networks, address))
        })
    }

    fn trusts(&self, hop: IpAddr, between: usize) -> bool {
        self.hops.map_or_else(|| contains(&self.networks, hop), |hops| between < hops)
    }

    /// Returns also whether every hop on the way to the address could be read.
    fn find_address(&self, parts: &Parts) -> Result<(IpAddr, bool), MissingKey> {
        let mut address = ip::peer(parts)?.to_canonical();
        let mut whole = true;
        if self.trusts(address, 0) {
            let mut between = 0;
            visit_hops(&self.header, &parts.headers, |hop| {
                let Some(hop) = hop else {
                    whole = false;
                    return false;
                };
                address = hop.to_canonical();
                between += 1;
                self.trusts(address, between)
            });
            if between == 0 && whole {
                ip::log_other_header(parts);
            }
        }
        Ok((address, whole))
    }
}

const ONE_WAY: &str = "client_ip() trusts by networks or by a number of hops: write either \
    .trusting([\"10.0.0.0/8\"]) or .trusting_hops(1)";

impl KeyExtractor for ClientIp {
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let (address, _) = self.find_address(parts)?;
        if self.networks.is_empty() && self.hops.is_none() {
            ip::notice_proxy(parts);
        }
        key.push_ip(address, self.ipv6_prefix);
        Ok(())
    }
}

/// A list of networks. A trait of this crate, since only its advice is shown by the compiler.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a list of networks",
    label = "write a list here, also of one network",
    note = "one network is `[\"10.0.0.0/8\"]`; a text with several becomes a list by `.split(',')`"
)]
pub trait IntoNetworks {
    #[doc(hidden)]
    fn parse(self) -> Result<Vec<IpNet>, String>;
}

#[diagnostic::do_not_recommend]
impl<I> IntoNetworks for I
where
    I: IntoIterator,
    I::Item: fmt::Display,
{
    fn parse(self) -> Result<Vec<IpNet>, String> {
        self.into_iter().map(|text| parse(&text.to_string())).collect()
    }
}

#[track_caller]
fn parsed(networks: impl IntoNetworks, by: &str) -> Vec<IpNet> {
    match networks.parse() {
        Ok(networks) => networks,
        Err(error) => panic!("client_ip().{by}(..): {error}"),
    }
}

/// `address` must be canonical: IPv4-mapped networks are stored as IPv4.
fn contains(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address))
}

fn parse(text: &str) -> Result<IpNet, String> {
    let network = parse_strictly(text.trim()).ok_or_else(|| {
        format!(
            "{text:?} is not a network: write one such as \"10.0.0.0/8\" or \"2001:db8::/32\", or a \
             single address such as \"192.0.2.1\""
        )
    })?;
    let IpNet::V6(v6) = network else { return Ok(network) };
    let mapped = [v6.addr(), v6.broadcast()].into_iter().find_map(|end| end.to_ipv4_mapped());
    match (mapped, v6.prefix_len().checked_sub(96)) {
        (None, _) => Ok(network),
        (Some(address), Some(len)) => Ok(Ipv4Net::new_assert(address, len).into()),
        (Some(_), None) => Err(format!(
            "{text:?} would never match, since IPv4-mapped addresses are compared as IPv4: write the \
             network of IPv4, such as \"10.0.0.0/8\""
        )),
    }
}

/// Numbers with leading zeros, which some programs read as octal, are no numbers.
fn parse_strictly(text: &str) -> Option<IpNet> {
    let Some((address, prefix)) = text.split_once('/') else {
        return Some(text.parse::<IpAddr>().ok()?.into());
    };
    let len = prefix.parse::<u8>().ok().filter(|len| len.to_string() == prefix)?;
    IpNet::new(address.parse().ok()?, len).ok()
}
