//! Extractors of what a request has, but for addresses.

use std::any::type_name;
use std::fmt;
use std::marker::PhantomData;

use http::HeaderName;
use http::request::Parts;

use super::encoding::Key;
use super::extractor::{KeyExtractor, MissingKey};

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
#[non_exhaustive]
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
        write!(f, "Extension<{}>", type_name::<T>())
    }
}

impl<T> KeyExtractor for Extension<T>
where
    T: Clone + Send + Sync + 'static,
    for<'a> Key: From<&'a T>,
{
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let Some(value) = parts.extensions.get::<T>() else {
            return Err(MissingKey::extension::<T>());
        };
        key.append(&Key::from(value));
        Ok(())
    }
}

/// The value of a header, hashed.
///
/// **Nobody has verified it.** A client that invents a new value is a new key with a fresh count, so this
/// limits only clients that don't want around it. Let an authentication layer check the header and
/// leave the user in the [`extension`]s, or put a limit per [`peer_ip`](super::peer_ip) in front.
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
            _ => Err(MissingKey::header(&self.0)),
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
#[non_exhaustive]
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
