//! Extractors that read headers, extensions and routes, or call a closure.

use std::marker::PhantomData;

use http::HeaderName;
use http::header::{AUTHORIZATION, PROXY_AUTHORIZATION};
use http::request::Parts;

use super::encoding::Key;
use super::extractor::{KeyExtractor, MissingKey};

/// Extracts the key with a closure, which returns `None` if the client left it out (400), as
/// [`Limit::key_fn`](crate::Limit::key_fn) does; for combinations.
pub fn key_fn<F>(f: F) -> impl KeyExtractor
where
    F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
{
    KeyFn(f)
}

struct KeyFn<F>(F);

impl<F> KeyExtractor for KeyFn<F>
where
    F: Fn(&Parts) -> Option<Key> + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let found = (self.0)(parts).ok_or(MissingKey::client("a key for the rate limit"))?;
        key.append(&found);
        Ok(())
    }
}

/// Extracts a value that an outer layer has put into the request's extensions, such as the user
/// that an authentication layer has verified.
///
/// `T` becomes a key by `impl From<&T> for Key`. A request without the value is refused with 500,
/// since the server's own layers provide it. If it is optional, use a fallback:
/// `extension::<User>().or(peer_ip())`. The limit must be *inside* of the layer that sets the
/// value: in axum, add it before that layer.
///
/// ```
/// use http::Request;
/// use tower_fixed_window::key::extension;
/// use tower_fixed_window::testing::ask;
/// use tower_fixed_window::{FixedWindowLayer, Key, Quota};
///
/// #[derive(Clone)]
/// struct User { id: u64 }
///
/// impl From<&User> for Key {
///     fn from(user: &User) -> Key { Key::from(user.id) }
/// }
///
/// let layer = FixedWindowLayer::new(Quota::per_minute(60).key(extension::<User>()));
///
/// let response = ask(&layer, Request::get("/").extension(User { id: 7 }));
/// assert_eq!(response.headers()["x-ratelimit-used"], "1");
/// assert_eq!(ask(&layer, Request::get("/")).status(), 500);
/// ```
pub fn extension<T>() -> impl KeyExtractor + Clone
where
    T: IntoKey + Clone + Send + Sync + 'static,
{
    Extension::<T>(PhantomData)
}

/// A value with `impl From<&T> for Key`. A trait of this crate, since only its advice is shown by
/// the compiler.
#[diagnostic::on_unimplemented(
    message = "requests can't be counted by a `{Self}`: there is no key for it",
    label = "no `From<&{Self}> for Key`",
    note = "write `impl From<&{Self}> for Key {{ fn from(value: &{Self}) -> Key {{ Key::from(value.id) }} }}`"
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

struct Extension<T>(PhantomData<fn() -> T>);

impl<T> Clone for Extension<T> {
    fn clone(&self) -> Self {
        Self(PhantomData)
    }
}

impl<T> KeyExtractor for Extension<T>
where
    T: IntoKey + Clone + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        let Some(value) = parts.extensions.get::<T>() else {
            return Err(MissingKey::extension::<T>());
        };
        key.append(&value.key());
        Ok(())
    }
}

/// Extracts the value of a header, hashed.
///
/// **The value is unverified.** A client that invents a new value gets a fresh count, so this does
/// not stop clients that want to get around the limit. Let an authentication layer verify the
/// header and put the user into the [`extension`]s, or put a limit per [`peer_ip`](super::peer_ip)
/// in front.
///
/// A request is refused with 400 if the header is missing, empty, or occurs more than once;
/// [`or`](KeyExtractor::or) adds a fallback. Any other value is a key, byte for byte, also if it is
/// long or not text. Only in `authorization` and `proxy-authorization`, the case of the scheme and
/// the number of spaces behind it make no difference: `Bearer t` is `Key::secret("bearer t")`.
///
/// # Panics
/// If `name` is not a valid header name in lower case.
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
#[track_caller]
pub fn header(name: &'static str) -> impl KeyExtractor + Clone {
    match HeaderName::from_lowercase(name.as_bytes()) {
        Ok(name) => Header(name),
        Err(_) => {
            panic!(
                "{name:?} is not a header name in lower case: write one as in header(\"x-api-key\")"
            )
        }
    }
}

#[derive(Clone)]
struct Header(HeaderName);

impl KeyExtractor for Header {
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        // Space around a value is no part of it, and HTTP/2 servers leave it there.
        let values = parts.headers.get_all(&self.0).iter();
        let mut values = values.map(|value| value.as_bytes().trim_ascii());
        match (values.next(), values.next()) {
            (Some(value), None) if !value.is_empty() => {
                match self.0 {
                    AUTHORIZATION | PROXY_AUTHORIZATION => key.push_credentials(value),
                    _ => key.push_secret(value),
                }
                Ok(())
            }
            _ => Err(MissingKey::header(&self.0)),
        }
    }
}

/// Extracts the route that axum matched, such as `/users/{id}`: one count for each route under one
/// layer.
///
/// Requests without a matching route (404s) share one count. A service in a `nest_service` of axum
/// has one count for what is below its path.
/// Without the feature `axum`, requests are refused with 500.
///
/// ```
/// use axum::{Router, routing::get};
/// use http::Request;
/// use tower::ServiceExt;
/// use tower_fixed_window::key::matched_path;
/// use tower_fixed_window::{FixedWindowLayer, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let app: Router = Router::new()
///     .route("/users/{id}", get(async || "a user"))
///     .layer(FixedWindowLayer::new(Quota::per_day(60).key(matched_path())));
///
/// for (path, used) in [("/users/1", "1"), ("/users/2", "2")] {
///     let request = Request::get(path).body(axum::body::Body::empty()).unwrap();
///     let response = app.clone().oneshot(request).await.unwrap();
///     assert_eq!(response.headers()["x-ratelimit-used"], used);
/// }
/// # }
/// ```
pub fn matched_path() -> impl KeyExtractor + Clone {
    MatchedPath
}

#[derive(Clone)]
struct MatchedPath;

impl KeyExtractor for MatchedPath {
    #[cfg(feature = "axum")]
    fn extract(&self, parts: &Parts, key: &mut Key) -> Result<(), MissingKey> {
        match parts.extensions.get::<axum::extract::MatchedPath>() {
            Some(path) => key.push_text(path.as_str()),
            // No route has this name.
            None => key.push_text(&nested_path(parts).map_or_else(String::new, |p| p + "/{*}")),
        }
        Ok(())
    }

    #[cfg(not(feature = "axum"))]
    fn extract(&self, _: &Parts, _: &mut Key) -> Result<(), MissingKey> {
        Err(MissingKey::server(
            "matched_path() reads axum's routes: enable the feature `axum` of tower-fixed-window",
        ))
    }
}

/// Returns the path of a service that [`nest_service`](axum::Router::nest_service) nests, and that
/// the request is on its way to.
///
/// axum sets no `MatchedPath` there, as it does not know the rest. But it does know where a router
/// in that place would be: this asks one.
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
