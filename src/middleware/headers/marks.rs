//! Recognizes which layer wrote the rate-limit headers of a response.
//!
//! Layers of this crate may be stacked, and upstream services may send headers of the same names.
//! The *name* of the limit in the map shows which layer wrote it: a name that points into a static
//! of this module was inserted by this crate, in this process. This costs nothing, while a marker
//! in the response's extensions would cost a third of the whole layer. The static is an array of
//! bytes, since the linker may merge equal string literals.

use http::Response;
use http::header::{HeaderMap, HeaderName};

/// The name twice: the first copy marks a request that passed, the second a refusal. Two places in
/// one static have two addresses, whatever a linker merges.
static LIMITS: [u8; 34] = *b"x-ratelimit-limitx-ratelimit-limit";

const fn limit_at(half: usize) -> HeaderName {
    let (first, second) = LIMITS.split_at(17);
    match std::str::from_utf8(if half == 0 { first } else { second }) {
        Ok(text) => HeaderName::from_static(text),
        Err(_) => panic!("ASCII"),
    }
}

// Constants are inserted into a map without a clone.
pub(super) const LIMIT: HeaderName = limit_at(0);
pub(super) const REFUSED_LIMIT: HeaderName = limit_at(1);

/// The mark of a refusal that has no rate-limit headers to carry it.
#[derive(Clone, Copy)]
struct RefusedMark;

/// Marks a refusal that has no [`REFUSED_LIMIT`].
pub(super) fn mark_refused<R>(response: &mut Response<R>) {
    response.extensions_mut().insert(RefusedMark);
}

/// Returns whether a refusal was [marked](mark_refused).
#[inline]
pub(super) fn is_marked_refused<R>(response: &Response<R>) -> bool {
    response.extensions().get::<RefusedMark>().is_some()
}

/// Returns whether an inner layer of this crate refused the request.
#[inline]
pub(crate) fn is_refused_inside<R>(response: &Response<R>) -> bool {
    response.headers().keys().any(|name| address(name) == address(&REFUSED_LIMIT))
        || is_marked_refused(response)
}

pub(super) enum Author {
    /// An inner layer of this crate, which let the request pass.
    Passed,
    /// An inner layer of this crate, which refused it.
    Refused,
    Other,
}

/// Returns the author of the headers after [`LIMIT`] was inserted over them: an insert replaces the
/// value and keeps the author's name.
pub(super) fn author(headers: &HeaderMap) -> Author {
    match headers.keys().find(|name| **name == LIMIT).map(address) {
        Some(name) if name == address(&LIMIT) => Author::Passed,
        Some(name) if name == address(&REFUSED_LIMIT) => Author::Refused,
        _ => Author::Other,
    }
}

#[inline]
fn address(name: &HeaderName) -> *const u8 {
    name.as_str().as_ptr()
}
