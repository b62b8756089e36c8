//! A [`Decision`] as the fields of a response: GitHub's here, the IETF's in `ietf`.
//!
//! Layers of ours may be stacked, and upstream services may send fields of the same names. Which
//! is which is told by the *name* of the limit that stands in the map: one that points into a static
//! of this module was put there by us, in this process. It costs nothing, where a marker in the
//! response's extensions would cost a third of what the whole layer does. The static is an array of
//! bytes, since equal string literals may be merged by the linker.

use std::mem;
use std::sync::Mutex;

use bytes::{Bytes, BytesMut};
use http::Response;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};

use crate::decision::Decision;
use crate::quota::Quota;
use crate::store::Account;

mod ietf;

/// Which rate-limit fields a layer sends: see
/// [`FixedWindowLayer::headers`](crate::FixedWindowLayer::headers).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Headers {
    /// Those of GitHub's REST API: `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` and
    /// `-resource`.
    #[default]
    GitHub,
    /// `RateLimit-Policy` and `RateLimit` as in the tenth draft of the IETF
    /// (draft-ietf-httpapi-ratelimit-headers-10), one item for each quota.
    IetfDraft10,
    /// Both. One popular parser of such fields prefers the IETF's, reads an older draft, and then
    /// misses what GitHub's say: send them where clients ask for them.
    GitHubAndIetfDraft10,
    /// None; a refusal still has `retry-after` and `cache-control`.
    None,
}

impl Headers {
    #[inline]
    fn github(self) -> bool {
        matches!(self, Self::GitHub | Self::GitHubAndIetfDraft10)
    }

    #[inline]
    fn ietf(self) -> bool {
        matches!(self, Self::IetfDraft10 | Self::GitHubAndIetfDraft10)
    }
}

/// The same text twice: at its first place the mark of a request that passed, at its second that of
/// a refusal. Two places of one static are two addresses, whatever a linker folds.
static LIMITS: [u8; 34] = *b"x-ratelimit-limitx-ratelimit-limit";

const fn limit_at(half: usize) -> HeaderName {
    let (first, second) = LIMITS.split_at(17);
    match std::str::from_utf8(if half == 0 { first } else { second }) {
        Ok(text) => HeaderName::from_static(text),
        Err(_) => panic!("ASCII"),
    }
}

// Written as constants, which are put into a map without being cloned first.
const LIMIT: HeaderName = limit_at(0);
const REFUSED_LIMIT: HeaderName = limit_at(1);

const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const USED: HeaderName = HeaderName::from_static("x-ratelimit-used");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RESOURCE: HeaderName = HeaderName::from_static("x-ratelimit-resource");

/// Whether an inner layer of ours refused the request.
pub(crate) fn is_refused_inside<R>(response: &Response<R>) -> bool {
    response.extensions().get::<RefusedInside>().is_some()
        || response.headers().keys().any(|name| at(name) == at(&REFUSED_LIMIT))
}

/// Adds the fields to the response to a request that passed (S18), unless those of an inner layer
/// are tighter (S19). `false`: an inner layer of ours has refused, and nothing was changed.
#[inline]
pub(crate) fn stamp_passed<R>(
    response: &mut Response<R>,
    account: &Account<'_>,
    decision: &Decision,
    fixed: &Fixed,
) -> bool {
    if response.extensions().get::<RefusedInside>().is_some() {
        return false;
    }
    if fixed.style.github() {
        if !stamp_github(response.headers_mut(), decision, fixed) {
            return false;
        }
    } else if is_refused_inside(response) {
        return false;
    }
    if fixed.style.ietf() {
        ietf::append(response.headers_mut(), account, decision);
    }
    true
}

#[inline]
fn stamp_github(headers: &mut HeaderMap, decision: &Decision, fixed: &Fixed) -> bool {
    // Mostly there is none yet, so the cheapest way to look is to write.
    if let Some(theirs) = headers.insert(LIMIT, fixed.limit(decision.limit())) {
        match author(headers) {
            Author::Refusal => {
                headers.insert(LIMIT, theirs);
                return false;
            }
            Author::Pass if !is_tighter(decision, headers) => {
                headers.insert(LIMIT, theirs);
                return true;
            }
            _ => clear(headers),
        }
        headers.insert(LIMIT, fixed.limit(decision.limit()));
    } else if fixed.resource.is_none() && headers.keys().any(|name| *name == RESOURCE) {
        headers.remove(RESOURCE);
    }
    let [remaining, used, reset] = fixed.values(decision);
    headers.insert(REMAINING, remaining);
    headers.insert(USED, used);
    headers.insert(RESET, reset);
    if let Some(resource) = &fixed.resource {
        headers.insert(RESOURCE, resource.clone());
    }
    true
}

/// Who has written the fields that are there. A value that is replaced leaves its name as it was.
enum Author {
    /// An inner layer of ours, which let the request pass.
    Pass,
    /// An inner layer of ours, which refused it.
    Refusal,
    Other,
}

#[cold]
fn author(headers: &HeaderMap) -> Author {
    match headers.keys().find(|name| **name == LIMIT).map(at) {
        Some(name) if name == at(&LIMIT) => Author::Pass,
        Some(name) if name == at(&REFUSED_LIMIT) => Author::Refusal,
        _ => Author::Other,
    }
}

/// Adds the fields to a refusal by a limit (S18).
pub(crate) fn stamp_refusal<R>(
    response: &mut Response<R>,
    account: &Account<'_>,
    decision: &Decision,
    fixed: &Fixed,
) {
    let headers = response.headers_mut();
    // The ready-made answers begin with the fields: see `refusal`.
    if headers.keys().next().map(at) != Some(at(&REFUSED_LIMIT)) {
        let content_type = headers.remove(CONTENT_TYPE);
        let theirs = mem::replace(headers, refusal(decision, content_type.as_ref(), fixed));
        // What else its author has set stays, unless it is one of ours.
        for (name, value) in &theirs {
            let ours = [LIMIT, REMAINING, USED, RESET, RESOURCE, RETRY_AFTER, CACHE_CONTROL];
            if !ours.contains(name) {
                headers.append(name, value.clone());
            }
        }
    }
    if fixed.style.ietf() {
        ietf::append(headers, account, decision);
    }
    if !fixed.style.github() {
        response.extensions_mut().insert(RefusedInside);
    }
}

/// Adds to a refusal for another reason what keeps it from being cached, and where waiting may help
/// from being repeated at once (S33).
pub(crate) fn stamp_failure<R>(response: &mut Response<R>, may_retry: bool) {
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, NO_STORE);
    if may_retry {
        headers.insert(RETRY_AFTER, number(1));
    }
    response.extensions_mut().insert(RefusedInside);
}

/// The fields of a refusal by a limit. Under an attack they are the same for all refusals of a
/// second, so the last ones are kept.
pub(crate) fn refusal(
    decision: &Decision,
    content_type: Option<&HeaderValue>,
    fixed: &Fixed,
) -> HeaderMap {
    let retry_at = decision.retry_at_ms();
    let told = Told {
        limit: decision.limit(),
        used: decision.used(),
        reset: seconds(decision.reset_at_ms().max(retry_at.unwrap_or(0))),
        retry: retry_at.map(|at| seconds(at.saturating_sub(decision.now_ms())).max(1)),
    };
    fixed.refusal(told, content_type)
}

/// The mark of a refusal that has no rate-limit fields to carry it.
#[derive(Clone, Copy)]
struct RefusedInside;

fn at(name: &HeaderName) -> *const u8 {
    name.as_str().as_ptr()
}

/// What a refusal tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Told {
    limit: u64,
    used: u64,
    reset: u64,
    retry: Option<u64>,
}

fn clear(headers: &mut HeaderMap) {
    for name in [&LIMIT, &REMAINING, &USED, &RESET, &RESOURCE] {
        headers.remove(name);
    }
}

/// Whether fewer tokens remain than an inner layer has written, or as many and later (S19).
fn is_tighter(decision: &Decision, headers: &HeaderMap) -> bool {
    let written = |name| {
        let value: Option<&HeaderValue> = headers.get(name);
        value.and_then(|value| value.to_str().ok()).and_then(|text| text.parse::<u64>().ok())
    };
    let own = (decision.remaining(), seconds(decision.reset_at_ms()));
    match (written(&REMAINING), written(&RESET)) {
        (Some(remaining), Some(reset)) => own.0 < remaining || own.0 == remaining && own.1 > reset,
        _ => true,
    }
}

/// How a quota is called towards clients: `login:5/minute`.
pub(crate) fn policy(name: &str, quota: &Quota) -> String {
    format!("{name}{}{}", if name.is_empty() { "" } else { ":" }, quota.rate())
}

/// Whole seconds, rounded up: a client that waits as long is never too early.
pub(crate) fn seconds(ms: i64) -> u64 {
    (ms.max(0) as u64).div_ceil(1_000)
}

/// The values that a layer's responses share.
#[derive(Debug)]
pub(crate) struct Fixed {
    style: Headers,
    limit: (u64, HeaderValue),
    resource: Option<HeaderValue>,
    last: Mutex<Last>,
    refusal: Mutex<(Told, Option<HeaderValue>, HeaderMap)>,
}

impl Fixed {
    pub(crate) fn new(style: Headers, name: &str, limit: u64) -> Self {
        let resource = HeaderValue::from_str(name).ok().filter(|name| !name.is_empty());
        Self {
            style,
            limit: (limit, number(limit)),
            resource,
            last: Mutex::default(),
            refusal: Mutex::default(),
        }
    }

    /// The limit that speaks: mostly the one that was expected.
    fn limit(&self, limit: u64) -> HeaderValue {
        match &self.limit {
            (known, value) if *known == limit => value.clone(),
            _ => number(limit),
        }
    }

    /// What remains, what is used, and when the window ends.
    fn values(&self, decision: &Decision) -> [HeaderValue; 3] {
        let (remaining, used) = (decision.remaining(), decision.used());
        let reset = seconds(decision.reset_at_ms());
        // Whoever finds it locked makes values of its own: nobody waits.
        let Ok(mut last) = self.last.try_lock() else {
            return [remaining, used, reset].map(number);
        };
        if last.reset.0 != reset {
            last.reset = (reset, number(reset));
        }
        let chunk = &mut last.chunk;
        [number_in(remaining, chunk), number_in(used, chunk), last.reset.1.clone()]
    }

    fn refusal(&self, told: Told, content_type: Option<&HeaderValue>) -> HeaderMap {
        let Ok(mut last) = self.refusal.try_lock() else {
            return self.make_refusal(told, content_type);
        };
        let (known, typ, headers) = &mut *last;
        if *known != told || typ.as_ref() != content_type || headers.is_empty() {
            *headers = self.make_refusal(told, content_type);
            *known = told;
            *typ = content_type.cloned();
        }
        headers.clone()
    }

    #[cold]
    fn make_refusal(&self, told: Told, content_type: Option<&HeaderValue>) -> HeaderMap {
        // Room for these, a content-type, and what a server adds.
        let mut headers = HeaderMap::with_capacity(12);
        if self.style.github() {
            headers.insert(REFUSED_LIMIT, self.limit(told.limit));
            headers.insert(REMAINING, number(0));
            headers.insert(USED, number(told.used));
            headers.insert(RESET, number(told.reset));
            headers.extend(self.resource.clone().map(|resource| (RESOURCE.clone(), resource)));
        }
        headers.extend(told.retry.map(|retry| (RETRY_AFTER, number(retry))));
        headers.insert(CACHE_CONTROL, NO_STORE);
        headers.extend(content_type.map(|value| (CONTENT_TYPE, value.clone())));
        headers
    }
}

const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// What was told last.
#[derive(Debug)]
struct Last {
    /// The end of the window: the same for most, and too large for the table.
    reset: (u64, HeaderValue),
    /// Where the next large integers are written. It lives as long as the last response with one.
    chunk: BytesMut,
}

impl Default for Last {
    fn default() -> Self {
        Self { reset: (0, number(0)), chunk: BytesMut::with_capacity(1_024) }
    }
}

/// An integer as a value. Small ones, which most are, come from a table without an allocation.
fn number(n: u64) -> HeaderValue {
    small(n)
        .unwrap_or_else(|| large(Bytes::copy_from_slice(itoa::Buffer::new().format(n).as_bytes())))
}

/// The same, written behind others into a chunk, of which the value is a slice: an allocation of its
/// own would cost as much as all of the rest.
#[inline]
fn number_in(n: u64, chunk: &mut BytesMut) -> HeaderValue {
    small(n).unwrap_or_else(|| {
        chunk.extend_from_slice(itoa::Buffer::new().format(n).as_bytes());
        large(chunk.split().freeze())
    })
}

#[inline]
fn small(n: u64) -> Option<HeaderValue> {
    (n < SMALL).then(|| HeaderValue::from_static(digits(n)))
}

fn large(digits: Bytes) -> HeaderValue {
    HeaderValue::from_maybe_shared(digits).expect("digits")
}

fn digits(n: u64) -> &'static str {
    let digits = 1 + usize::from(n >= 10) + usize::from(n >= 100) + usize::from(n >= 1_000);
    let end = n as usize * 4 + 4;
    &TABLE[end - digits..end]
}

/// Below this, integers are in the table.
const SMALL: u64 = 10_000;

/// Four digits each.
static TABLE: &str = {
    static DIGITS: [u8; 4 * SMALL as usize] = {
        let mut digits = [b'0'; 4 * SMALL as usize];
        let mut i = 0;
        while i < digits.len() {
            let power = [1_000, 100, 10, 1][i % 4];
            digits[i] += (i / 4 / power % 10) as u8;
            i += 1;
        }
        digits
    };
    match std::str::from_utf8(&DIGITS) {
        Ok(text) => text,
        Err(_) => panic!("digits"),
    }
};
