//! [`KeyExtractor`], and combinations of extractors.

use std::any::type_name;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::HeaderName;
use http::request::Parts;

use super::encoding::Key;
use crate::observe;

/// Extracts from a request the key that it is counted by.
///
/// An extractor appends the parts it finds to the key, or returns what is missing. A request
/// without a key is refused; [`or`](Self::or) adds a fallback.
///
/// [`key_fn`](crate::key::key_fn) turns a closure into an extractor. An extractor of your own:
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
///
/// An extractor that a setting chooses is a `Box<dyn KeyExtractor>`. Several limits share one in an
/// `Arc`:
///
/// ```
/// use std::sync::Arc;
/// use tower_fixed_window::key::{header, peer_ip};
/// use tower_fixed_window::{FixedWindowLayer, KeyExtractor, Quota};
///
/// fn by(setting: &str) -> Box<dyn KeyExtractor> {
///     match setting {
///         "token" => Box::new(header("authorization").or(peer_ip())),
///         _ => Box::new(peer_ip()),
///     }
/// }
///
/// let key = Arc::new(by("token"));
/// let layer = FixedWindowLayer::new([
///     Quota::per_minute(60).name("requests").key(key.clone()),
///     Quota::per_day(1_000).name("exports").key(key),
/// ]);
/// # let _ = layer;
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't extract a key from a request",
    label = "no `KeyExtractor`",
    note = "write `.key_fn(|parts| ...)` for a closure that returns an `Option<Key>`",
    note = "`peer_ip()`, `extension::<User>()`, `header(\"x-api-key\")` and others are in `tower_fixed_window::key`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Appends what the request has to `key`.
    ///
    /// # Errors
    /// What is missing, and whether the client or the server caused it.
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey>;

    /// Falls back to another extractor if this one finds no key.
    fn or(self, other: impl KeyExtractor) -> impl KeyExtractor
    where
        Self: Sized,
    {
        OrElse { first: self, other, missed: AtomicU32::new(0) }
    }
}

/// Why a request has no key. `Display` shows what is missing, or how to fix it.
///
/// ```
/// use tower_fixed_window::MissingKey;
///
/// let missing = MissingKey::client("the x-api-key header");
/// assert_eq!(missing.to_string(), "the x-api-key header");
/// let fix = MissingKey::server("add the authentication layer");
/// assert_eq!(fix.to_string(), "add the authentication layer");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingKey(Missing);

/// The missing part of a request. Its text is created only when it is shown, since mostly a
/// fallback finds a key.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Missing {
    Client(Cow<'static, str>),
    Server(Cow<'static, str>),
    Header(HeaderName),
    /// The name of an extension's type.
    Extension(&'static str),
}

impl MissingKey {
    /// The client left something out, such as `"the x-api-key header"`: 400.
    pub fn client(what: impl Into<Cow<'static, str>>) -> Self {
        Self(Missing::Client(what.into()))
    }

    /// The server's configuration leaves requests without a key: 500. The text says how to fix it,
    /// and is logged once.
    pub fn server(fix: impl Into<Cow<'static, str>>) -> Self {
        Self(Missing::Server(fix.into()))
    }

    pub(super) fn header(name: &HeaderName) -> Self {
        Self(Missing::Header(name.clone()))
    }

    pub(super) fn extension<T>() -> Self {
        Self(Missing::Extension(type_name::<T>()))
    }

    /// Returns whether the client caused it, not the server.
    pub(crate) fn is_client(&self) -> bool {
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
                "the rate limit counts by the extension `{name}`, and no outer layer sets it: put the \
                 limit inside of the layer that sets it (in axum: add it before that layer), or \
                 write `.or(peer_ip())` if it is optional"
            ),
        }
    }
}

impl std::error::Error for MissingKey {}

/// Extracts with `first`, or else with `other`.
struct OrElse<A, B> {
    first: A,
    other: B,
    /// The number of requests for which `first` found no key, until it has found one.
    missed: AtomicU32,
}

/// The number of requests without an extension after which the log says that no layer sets it.
const MAX_MISSED: u32 = 1_000;

impl<A, B> OrElse<A, B> {
    /// Counts a request without the extension, and logs once that no layer seems to set it.
    #[cold]
    fn note_missing(&self, missing: &MissingKey) {
        let Missing::Extension(name) = missing.0 else { return };
        if self.missed.load(Ordering::Relaxed) < MAX_MISSED
            && self.missed.fetch_add(1, Ordering::Relaxed) == MAX_MISSED - 1
        {
            observe::doubt(&format_args!(
                "none of {MAX_MISSED} requests had the extension `{name}` that a rate limit counts \
                 by, so all are counted by what `.or(..)` names: if a layer sets it, put the limit \
                 inside of that layer (in axum: add the limit before it)"
            ));
        }
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for OrElse<A, B> {
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let len = key.len();
        match self.first.extract(parts, key) {
            Ok(()) => {
                if self.missed.load(Ordering::Relaxed) < MAX_MISSED {
                    self.missed.store(MAX_MISSED, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(missing) => {
                self.note_missing(&missing);
                key.truncate(len);
                self.other.extract(parts, key)
            }
        }
    }
}

/// The same key for every request.
impl KeyExtractor for Key {
    fn extract(&self, _: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        key.append(self);
        Ok(())
    }
}

macro_rules! pointer {
    ($pointer:ident) => {
        /// Chosen at run time, by a setting for instance.
        impl<E: KeyExtractor + ?Sized> KeyExtractor for $pointer<E> {
            fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
                (**self).extract(parts, key)
            }
        }
    };
}

pointer!(Box);
pointer!(Arc);

macro_rules! tuples {
    ($($t:ident $i:tt),*) => {
        /// All of them; if one finds no key, there is none.
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
