//! [`KeyExtractor`], combinations of extractors, and those that read headers, extensions and
//! routes.

use std::any::type_name;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use http::HeaderName;
use http::header::{AUTHORIZATION, PROXY_AUTHORIZATION};
use http::request::Parts;

use super::encoding::Key;
use crate::observe;

/// Extracts the key that a request is counted by.
///
/// An extractor appends the parts that it finds to the key, or returns what is missing. A request
/// without a key is refused; [`or`](Self::or) adds a fallback.
///
/// For most keys, use the functions in [`key`](crate::key), or a closure
/// ([`key_fn`](crate::key::key_fn)). This extractor of an app counts by a number, because a client
/// can write one number in many ways:
///
/// ```
/// use http::request::Parts;
/// use tower_fixed_window::{Key, KeyExtractor, MissingKey};
///
/// /// The number of a tenant, in a header that your gateway sets.
/// struct Tenant;
///
/// impl KeyExtractor for Tenant {
///     fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
///         let mut values = parts.headers.get_all("x-tenant").iter();
///         let tenant = match (values.next(), values.next()) {
///             (None, _) => return Err(MissingKey::client("the x-tenant header")),
///             (Some(one), None) => one.to_str().ok().and_then(|text| text.parse::<u64>().ok()),
///             _ => None,
///         };
///         let tenant = tenant.ok_or(MissingKey::unusable("no single number in x-tenant"))?;
///         key.append(&Key::from(tenant));
///         Ok(())
///     }
/// }
///
/// let key = |request: http::request::Builder| {
///     let (parts, ()) = request.body(()).unwrap().into_parts();
///     let mut key = Key::default();
///     Tenant.or(Key::from("none")).extract(&parts, &mut key).map(|()| key)
/// };
/// let get = || http::Request::get("/");
///
/// assert_eq!(key(get().header("x-tenant", "007")), Ok(Key::from(7_u64)));
/// assert_eq!(key(get()), Ok(Key::from("none")));
/// // What is there and can't be used is not missing: there is no fallback.
/// assert!(key(get().header("x-tenant", "7").header("x-tenant", "8")).is_err());
/// ```
///
/// If a setting chooses the extractor, use a `Box<dyn KeyExtractor>`. If several limits share one,
/// use an `Arc`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` can't extract a key from a request",
    label = "no `KeyExtractor`",
    note = "write `.key_fn(|parts| ...)` for a closure that returns an `Option<Key>`",
    note = "`peer_ip()`, `extension::<User>()`, `header(\"x-api-key\")` and others are in `tower_fixed_window::key`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Appends this request's value to `key`.
    ///
    /// # Errors
    /// Returns what is missing or can't be used, and whether the client or the server caused it.
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey>;

    /// Falls back to another extractor if this one finds no key. There is no fallback for something
    /// that the client sent and that can't be used ([`MissingKey::unusable`]): otherwise a client
    /// could choose what it is counted by.
    fn or(self, other: impl KeyExtractor) -> impl KeyExtractor
    where
        Self: Sized,
    {
        // The number of requests for which this found no key, until it has found one.
        let missed = AtomicU32::new(0);
        Extract(move |parts: &Parts, key: &mut Key| {
            let mut own = Key::default();
            match self.extract(parts, &mut own) {
                Ok(()) => {
                    key.append(&own);
                    if missed.load(Ordering::Relaxed) < MAX_MISSED {
                        missed.store(MAX_MISSED, Ordering::Relaxed);
                    }
                    Ok(())
                }
                Err(unusable) if unusable.is_unusable() => Err(unusable),
                Err(missing) => {
                    note_missing(&missing, &missed);
                    other.extract(parts, key)
                }
            }
        })
    }

    /// Hashes the value that this extractor finds with a secret of your app, so it is not readable
    /// in a store. An address is hashed in the form that counts: an IPv6 /64 has one hash,
    /// [`Key::hmac(secret, Key::from(address).as_bytes())`](Key::hmac).
    fn hashed(self, secret: impl AsRef<[u8]> + Send + Sync + 'static) -> impl KeyExtractor
    where
        Self: Sized,
    {
        Extract(move |parts: &Parts, key: &mut Key| {
            let mut plain = Key::default();
            self.extract(parts, &mut plain)?;
            key.append(&Key::hmac(&secret, plain.as_bytes()));
            Ok(())
        })
    }
}

/// Why a request has no key. `Display` shows what is missing or can't be used, or how to fix it.
///
/// ```
/// use tower_fixed_window::MissingKey;
///
/// let missing = MissingKey::client("the x-api-key header");
/// assert_eq!(missing.to_string(), "the x-api-key header");
/// let unusable = MissingKey::unusable("an x-api-key header without a value");
/// assert_eq!(unusable.to_string(), "an x-api-key header without a value");
/// let fix = MissingKey::server("add the authentication layer");
/// assert_eq!(fix.to_string(), "add the authentication layer");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MissingKey(Missing);

/// The text is created only when it is shown, since mostly a fallback finds a key.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Missing {
    Client(Cow<'static, str>),
    Unusable(Cow<'static, str>),
    Server(Cow<'static, str>),
    Header(HeaderName),
    Extension(&'static str),
}

impl MissingKey {
    /// Creates the error for a client that left something out, such as `"the x-api-key header"`:
    /// 400, unless there is a fallback. The response says "The request lacks", followed by this
    /// text.
    pub fn client(what: impl Into<Cow<'static, str>>) -> Self {
        Self(Missing::Client(what.into()))
    }

    /// Creates the error for a client that sent something that can't be used, such as a header
    /// twice: 400, and [`or`](KeyExtractor::or) does not fall back. The response says "The request
    /// has", followed by this text.
    pub fn unusable(what: impl Into<Cow<'static, str>>) -> Self {
        Self(Missing::Unusable(what.into()))
    }

    /// Creates the error for a server whose configuration leaves requests without a key: 500. The
    /// text says how to fix it, and is logged once.
    pub fn server(fix: impl Into<Cow<'static, str>>) -> Self {
        Self(Missing::Server(fix.into()))
    }

    pub(crate) fn is_client(&self) -> bool {
        matches!(self.0, Missing::Client(_) | Missing::Header(_)) || self.is_unusable()
    }

    pub(crate) fn is_unusable(&self) -> bool {
        matches!(self.0, Missing::Unusable(_))
    }

    /// A mistake of the server. Each arm is a kind of its own: the texts that an app makes up as it
    /// runs, or the types of many extensions, silence no other.
    #[cold]
    pub(crate) fn log_mistake(&self) {
        match &self.0 {
            Missing::Client(_) | Missing::Header(_) | Missing::Unusable(_) => {}
            Missing::Server(Cow::Owned(_)) => observe::mistake(self),
            Missing::Server(Cow::Borrowed(_)) => observe::mistake(self),
            Missing::Extension(_) => observe::mistake(self),
        }
    }
}

impl fmt::Display for MissingKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Missing::Client(text) | Missing::Unusable(text) | Missing::Server(text) => {
                f.write_str(text)
            }
            Missing::Header(name) => write!(f, "the {name} header"),
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

const MAX_MISSED: u32 = 1_000;

#[cold]
fn note_missing(missing: &MissingKey, missed: &AtomicU32) {
    let Missing::Extension(name) = missing.0 else { return };
    if missed.load(Ordering::Relaxed) < MAX_MISSED
        && missed.fetch_add(1, Ordering::Relaxed) == MAX_MISSED - 1
    {
        observe::doubt(&format_args!(
            "none of {MAX_MISSED} requests had the extension `{name}` that a rate limit counts by, \
             so all are counted by what `.or(..)` names: if a layer sets it, put the limit inside \
             of that layer (in axum: add the limit before it)"
        ));
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
        /// All of them. If one finds no key, the request has none. For an optional part, fall back
        /// to [`Key::global()`](Key::global), an absent part: it differs from every value.
        impl<$($t: KeyExtractor),*> KeyExtractor for ($($t,)*) {
            fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
                $(
                    let from = key.len();
                    self.$i.extract(parts, key)?;
                    key.end_part(from);
                )*
                Ok(())
            }
        }
    };
}

tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);

#[derive(Clone)]
struct Extract<F>(F);

impl<F> KeyExtractor for Extract<F>
where
    F: Fn(&Parts, &mut Key) -> Result<(), MissingKey> + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        (self.0)(parts, key)
    }
}

/// Extracts the key with a closure, as [`Limit::key_fn`](crate::Limit::key_fn) does. Use this to
/// combine the closure with other extractors. `None` means that the client left the key out (400).
pub fn key_fn<F>(f: F) -> impl KeyExtractor
where
    F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
{
    Extract(move |parts: &Parts, key: &mut Key| {
        key.append(&f(parts).ok_or(MissingKey::client("a key for the rate limit"))?);
        Ok(())
    })
}

/// Extracts a value of type `T` that an outer layer has put into the request's extensions, such as
/// a verified user, as in [the guide](crate::guide::keys#a-verified-user). It needs an
/// `impl From<&T> for Key`; in a generic function, the bound is `for<'a> Key: From<&'a T>`.
///
/// A request without the value is refused with 500, because your own layers should provide it. If
/// it is optional, write `extension::<User>().or(peer_ip())`. Put the limit *inside* of the layer
/// that sets the value: in axum, add it before that layer.
pub fn extension<T>() -> impl KeyExtractor + Clone
where
    T: IntoKey + Clone + Send + Sync + 'static,
{
    Extract(|parts: &Parts, key: &mut Key| {
        let missing = MissingKey(Missing::Extension(type_name::<T>()));
        key.append(&parts.extensions.get::<T>().ok_or(missing)?.key());
        Ok(())
    })
}

/// Has `impl From<&T> for Key`. A trait of this crate, since only its advice is shown by the
/// compiler.
#[diagnostic::on_unimplemented(
    message = "requests can't be counted by a `{Self}`: there is no key for it",
    label = "no `From<&{Self}> for Key`",
    note = "for a type of your crate, write `impl From<&{Self}> for Key {{ fn from(value: &{Self}) -> Key {{ Key::from(value.id) }} }}`",
    note = "for a number or text, put a type of yours that has it into the extensions: `struct UserId(u64)`"
)]
pub trait IntoKey {
    #[doc(hidden)]
    fn key(&self) -> Key;
}

#[diagnostic::do_not_recommend]
impl<T> IntoKey for T
where
    for<'a> Key: From<&'a T>,
{
    fn key(&self) -> Key {
        Key::from(self)
    }
}

/// Extracts the value of a header, such as an API key, and hashes it.
///
/// **The value is unverified.** A client that invents a new value gets a fresh count. Count by [a
/// verified user](crate::guide::keys#a-verified-user), or add a limit per
/// [`peer_ip`](super::peer_ip). If your check accepts several spellings of one key, count by the
/// user that it finds.
///
/// A request without the header is refused with 400, unless [`or`](KeyExtractor::or) adds a
/// fallback. If the header is empty or occurs more than once, the request is refused even then,
/// because your app might read another of the values. Any other value is a key, byte for byte, even
/// if it is long or not text. Only in `authorization` and `proxy-authorization`, the scheme's case
/// and the number of spaces after it are ignored: `Bearer t` is `Key::secret("bearer t")`. HTTP/2
/// clients may send `cookie` in several lines: read a session's cookie in a closure ([`key_fn`]).
///
/// # Panics
/// If `name` is not a valid header name in lower case.
#[track_caller]
pub fn header(name: &'static str) -> impl KeyExtractor + Clone {
    let Ok(name) = HeaderName::from_lowercase(name.as_bytes()) else {
        panic!("{name:?} is not a header name in lower case: write one as in header(\"x-api-key\")")
    };
    Extract(move |parts: &Parts, key: &mut Key| {
        // Space around a value is no part of it, and HTTP/2 servers leave it there.
        let values = parts.headers.get_all(&name).iter();
        let mut values = values.map(|value| value.as_bytes().trim_ascii());
        match (values.next(), values.next()) {
            (None, _) => return Err(MissingKey(Missing::Header(name.clone()))),
            (_, Some(_)) => {
                return Err(MissingKey::unusable(format!("more than one {name} header")));
            }
            (Some(b""), _) => return Err(MissingKey::unusable(format!("an empty {name} header"))),
            (Some(value), _) => key.append(&match name {
                AUTHORIZATION | PROXY_AUTHORIZATION => Key::from_credentials(value),
                _ => Key::secret(value),
            }),
        }
        Ok(())
    })
}

/// Extracts the route that axum matched, such as `/users/{id}`, without a slash at its end.
/// Requests without a matching route (404s) share one count. A service in axum's `nest_service`
/// counts by the path that it is nested at. Usually, this is part of a
/// [combination](crate::guide::keys): `(peer_ip(), matched_path())`.
#[cfg(feature = "axum")]
pub fn matched_path() -> impl KeyExtractor + Clone {
    Extract(|parts: &Parts, key: &mut Key| {
        key.append(&match parts.extensions.get::<axum::extract::MatchedPath>() {
            // Each nested service has three routes: its path, the same with a slash, and the rest.
            Some(path) => match path.as_str().trim_end_matches('/') {
                "" => "/".into(),
                path => path.into(),
            },
            // No route has an empty name.
            None => nested_path(parts).unwrap_or_default().into(),
        });
        Ok(())
    })
}

/// Clients choose the first segment, and it is kept, so it has at most 64 characters.
pub(crate) fn route(parts: &Parts) -> &str {
    #[cfg(feature = "axum")]
    if let Some(path) = parts.extensions.get::<axum::extract::MatchedPath>() {
        return path.as_str();
    }
    let segment = parts.uri.path().split('/').nth(1).unwrap_or_default();
    segment.char_indices().nth(64).map_or(segment, |(end, _)| &segment[..end])
}

/// The path of a service that [`nest_service`](axum::Router::nest_service) nests. axum sets no
/// `MatchedPath` there, as it does not know the rest. But it does know where a router in that place
/// would be: this asks one.
#[cfg(feature = "axum")]
#[cold]
fn nested_path(parts: &Parts) -> Option<String> {
    use std::pin::pin;
    use std::sync::LazyLock;
    use std::task::{Context, Poll, Waker};

    use axum::extract::MatchedPath;
    use axum::routing::any;
    use axum::{Extension, Router, body::Body};
    use tower_service::Service;

    static IN_ITS_PLACE: LazyLock<Router> =
        LazyLock::new(|| Router::new().route("/", any(async |path: MatchedPath| Extension(path))));

    let mut request = http::Request::new(Body::empty());
    *request.extensions_mut() = parts.extensions.clone();
    // Nothing in it waits.
    let response = pin!(IN_ITS_PLACE.clone().call(request));
    let response = response.poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Ok(response)) = response else { return None };
    // Requests without a route are at `/`.
    let path = response.extensions().get::<MatchedPath>()?.as_str();
    path.strip_suffix('/').filter(|path| !path.is_empty()).map(str::to_owned)
}
