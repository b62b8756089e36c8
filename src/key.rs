//! What requests are counted by: [`Key`], extractors that read it from a request, and ways to
//! combine them.
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

#[cfg(feature = "client-ip")]
mod client;
mod encoding;
mod extractor;
mod from_request;
#[cfg(feature = "client-ip")]
mod hops;
mod ip;
#[cfg(feature = "client-ip")]
mod networks;
mod proxied;

#[cfg(feature = "client-ip")]
#[cfg_attr(docsrs, doc(cfg(feature = "client-ip")))]
pub use client::{ClientIp, client_ip};
pub use encoding::Key;
pub use extractor::{KeyExtractor, MissingKey, Or};
pub use from_request::{
    Extension, Global, Header, KeyFn, MatchedPath, extension, global, header, key_fn, matched_path,
};
pub use ip::{PeerAddr, PeerIp, peer_ip};
#[cfg(feature = "client-ip")]
#[cfg_attr(docsrs, doc(cfg(feature = "client-ip")))]
pub use networks::InvalidNetwork;
