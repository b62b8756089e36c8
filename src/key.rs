//! Keys that requests are counted by: [`Key`], extractors that read it from a request, and ways to
//! combine them.
//!
//! ```
//! use tower_fixed_window::key::{client_ip, extension, header, matched_path, peer_ip};
//! use tower_fixed_window::{FixedWindowLayer, Key, KeyExtractor, Limit, Quota};
//!
//! #[derive(Clone)]
//! struct User { id: u64 }
//!
//! impl From<&User> for Key {
//!     fn from(user: &User) -> Key { Key::from(user.id) }
//! }
//!
//! const QUOTA: Quota = Quota::per_minute(60);
//! let _ = QUOTA.key(peer_ip());                               // the default
//! let _ = QUOTA.key(client_ip().trusting(["10.0.0.0/8"]));    // behind a proxy
//! let _ = QUOTA.key(extension::<User>().or(peer_ip()));       // a user, else an address
//! let _ = QUOTA.key((extension::<User>(), matched_path()));   // each user on each route
//! let _ = QUOTA.key(header("x-api-key"));                     // see the warning there
//! let _ = QUOTA.key(Key::global());                           // one count for all
//! let by_user = Limit::new(QUOTA)
//!     .key_fn(|parts| parts.extensions.get::<User>().map(Key::from));
//! let layer = FixedWindowLayer::new(by_user);
//! # let _ = layer;
//! ```

#[cfg(feature = "client-ip")]
mod client;
mod encoding;
mod extractor;
#[cfg(feature = "client-ip")]
mod hops;
mod ip;

#[cfg(feature = "client-ip")]
#[cfg_attr(docsrs, doc(cfg(feature = "client-ip")))]
pub use client::{ClientIp, InvalidNetwork, client_ip};
pub use encoding::Key;
pub(crate) use extractor::route;
pub use extractor::{KeyExtractor, MissingKey, extension, header, key_fn, matched_path};
pub use ip::{PeerAddr, PeerIp, peer_ip};
