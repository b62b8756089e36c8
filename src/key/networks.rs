//! Sets of addresses, written as networks.

use std::error::Error;
use std::fmt;
use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net};

/// A list of networks. IPv4-mapped ones are stored as IPv4, like the addresses that are looked up.
#[derive(Clone, Debug, Default)]
pub(super) struct Networks(Vec<IpNet>);

impl Networks {
    pub(super) fn parse<I>(networks: I) -> Result<Self, InvalidNetwork>
    where
        I: IntoIterator,
        I::Item: fmt::Display,
    {
        networks
            .into_iter()
            .map(|text| parse(&text.to_string()))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    pub(super) fn append(&mut self, mut more: Self) {
        self.0.append(&mut more.0);
    }

    /// Returns these networks as those of proxies: none may contain every address.
    pub(super) fn without_everything(self) -> Result<Self, InvalidNetwork> {
        match self.0.iter().find(|network| network.prefix_len() == 0) {
            Some(network) => Err(InvalidNetwork(NetworkFault::Everything(network.to_string()))),
            None => Ok(self),
        }
    }

    /// Returns whether a network contains `address`, which must be canonical.
    pub(super) fn contains(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

fn parse(text: &str) -> Result<IpNet, InvalidNetwork> {
    let trimmed = text.trim();
    let network = match trimmed.parse::<IpAddr>() {
        Ok(address) => IpNet::from(address),
        Err(_) => {
            trimmed.parse().map_err(|_| InvalidNetwork(NetworkFault::Unreadable(text.into())))?
        }
    };
    Ok(match network {
        IpNet::V6(mapped) if mapped.prefix_len() >= 96 => match mapped.addr().to_ipv4_mapped() {
            Some(address) => Ipv4Net::new(address, mapped.prefix_len() - 96)
                .expect("128 bits less 96 are 32")
                .into(),
            None => network,
        },
        _ => network,
    })
}

/// A text that is not a network, or a network that can't be trusted. `Display` shows what to write:
/// see [`ClientIp::try_trusting`](super::ClientIp::try_trusting).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InvalidNetwork(NetworkFault);

#[derive(Clone, PartialEq, Eq, Debug)]
enum NetworkFault {
    Unreadable(String),
    Everything(String),
}

impl fmt::Display for InvalidNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            NetworkFault::Unreadable(text) => write!(
                f,
                "{text:?} is not a network: write one such as \"10.0.0.0/8\" or \"2001:db8::/32\", or \
                 a single address such as \"192.0.2.1\""
            ),
            NetworkFault::Everything(network) => write!(
                f,
                "{network} contains every address, so that every client could forge its own: list the \
                 proxies, or if their addresses are unknown, write .trusting_hops(1)"
            ),
        }
    }
}

impl Error for InvalidNetwork {}
