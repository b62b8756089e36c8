//! Keys that requests are counted by: [`Key`], and extractors, which read it from a request and can
//! be combined: [the guide](crate::guide::keys) has a table of them.

#[cfg(feature = "client-ip")]
mod client;
mod encoding;
mod extractor;
#[cfg(feature = "client-ip")]
mod hops;
mod ip;

#[cfg(feature = "client-ip")]
pub use client::{ClientIp, client_ip};
pub use encoding::Key;
#[cfg(feature = "axum")]
pub use extractor::matched_path;
pub(crate) use extractor::route;
pub use extractor::{KeyExtractor, MissingKey, extension, header, key_fn};
pub use ip::{PeerAddr, peer_ip};
pub(crate) use ip::{PeerIp, grpc};
