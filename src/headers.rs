//! A [`Decision`] as the fields of a response: GitHub's here, the IETF's in `ietf`.
//!
//! Layers of ours may be stacked, and upstream services may send fields of the same names. Which
//! is which is told by the *name* of the limit that stands in the map: one that points into a static
//! of this module was put there by us, in this process. It costs nothing, where a marker in the
//! response's extensions would cost a third of what the whole layer does. The static is an array of
//! bytes, since equal string literals may be merged by the linker.

use std::mem;
use std::sync::Mutex;

use http::Response;
use http::header::{
    CACHE_CONTROL, CONTENT_TYPE, Entry, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
};

use crate::decision::Decision;
use crate::rejection::{Reason, Rejection};
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

static LIMIT: HeaderName = limit_at(0);
static REFUSED_LIMIT: HeaderName = limit_at(1);

static REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
static USED: HeaderName = HeaderName::from_static("x-ratelimit-used");
static RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
static RESOURCE: HeaderName = HeaderName::from_static("x-ratelimit-resource");

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
    match headers.entry(&LIMIT) {
        Entry::Vacant(entry) => {
            entry.insert(fixed.limit(decision.limit()));
            if fixed.resource.is_none() {
                headers.remove(&RESOURCE);
            }
        }
        Entry::Occupied(entry) => {
            let author = at(entry.key());
            if author == at(&REFUSED_LIMIT) {
                return false;
            }
            if author == at(&LIMIT) && !is_tighter(decision, headers) {
                return true;
            }
            clear(headers);
            headers.insert(&LIMIT, fixed.limit(decision.limit()));
        }
    }
    headers.insert(&REMAINING, number(decision.remaining()));
    headers.insert(&USED, number(decision.used()));
    headers.insert(&RESET, fixed.reset(seconds(decision.reset_at_ms())));
    if let Some(resource) = &fixed.resource {
        headers.insert(&RESOURCE, resource.clone());
    }
    true
}

/// Adds the fields to a refusal: all of them where the limit is spent (S18), else only those that
/// keep it from being cached and repeated at once (S33).
pub(crate) fn stamp_refusal<R>(
    response: &mut Response<R>,
    account: &Account<'_>,
    why: &Rejection<'_>,
    fixed: &Fixed,
) {
    let headers = response.headers_mut();
    if let Reason::RateLimited(decision) = why.reason() {
        refuse(headers, decision, fixed);
        if fixed.style.ietf() {
            ietf::append(headers, account, decision);
        }
        if fixed.style.github() {
            return;
        }
    } else {
        headers.insert(CACHE_CONTROL, NO_STORE);
        if !matches!(why.reason(), Reason::MissingKey(_)) {
            headers.insert(RETRY_AFTER, number(1));
        }
    }
    response.extensions_mut().insert(RefusedInside);
}

/// The mark of a refusal that has no rate-limit fields to carry it.
#[derive(Clone, Copy)]
struct RefusedInside;

fn at(name: &HeaderName) -> *const u8 {
    name.as_str().as_ptr()
}

/// The fields of a refusal by a limit. Under an attack they are the same for all refusals of a
/// second, so the last ones are kept.
fn refuse(headers: &mut HeaderMap, decision: &Decision, fixed: &Fixed) {
    let reset = seconds(decision.reset_at_ms().max(decision.retry_at_ms().unwrap_or(0)));
    let retry = decision.retry_at_ms().map(|at| at.saturating_sub(decision.now_ms()));
    let told = Told {
        limit: decision.limit(),
        used: decision.used(),
        reset,
        retry: retry.map(|ms| seconds(ms).max(1)),
        content_type: headers.remove(CONTENT_TYPE),
    };
    let own = mem::replace(headers, fixed.refusal(told));
    // What else the rejection's author has set stays, unless it is one of these.
    for (name, value) in &own {
        let ours = [&LIMIT, &REMAINING, &USED, &RESET, &RESOURCE, &RETRY_AFTER, &CACHE_CONTROL];
        if !ours.contains(&name) {
            headers.append(name, value.clone());
        }
    }
}

/// What a refusal tells.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Told {
    limit: u64,
    used: u64,
    reset: u64,
    retry: Option<u64>,
    content_type: Option<HeaderValue>,
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
    /// The end of the window that was told last: the same for most, and too large for the table.
    reset: Mutex<(u64, HeaderValue)>,
    refusal: Mutex<(Told, HeaderMap)>,
}

impl Fixed {
    pub(crate) fn new(style: Headers, name: &str, limit: u64) -> Self {
        let resource = HeaderValue::from_str(name).ok().filter(|name| !name.is_empty());
        Self {
            style,
            limit: (limit, number(limit)),
            resource,
            reset: Mutex::new((0, number(0))),
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

    fn reset(&self, reset: u64) -> HeaderValue {
        // Whoever finds it locked makes a value of its own: nobody waits.
        let Ok(mut last) = self.reset.try_lock() else { return number(reset) };
        if last.0 != reset {
            *last = (reset, number(reset));
        }
        last.1.clone()
    }

    fn refusal(&self, told: Told) -> HeaderMap {
        let Ok(mut last) = self.refusal.try_lock() else { return self.make_refusal(&told) };
        if last.0 != told || last.1.is_empty() {
            last.1 = self.make_refusal(&told);
            last.0 = told;
        }
        last.1.clone()
    }

    #[cold]
    fn make_refusal(&self, told: &Told) -> HeaderMap {
        // Room for these, a content-type, and what a server adds.
        let mut headers = HeaderMap::with_capacity(12);
        headers.extend(told.content_type.clone().map(|value| (CONTENT_TYPE, value)));
        if self.style.github() {
            headers.insert(&REFUSED_LIMIT, self.limit(told.limit));
            headers.insert(&REMAINING, number(0));
            headers.insert(&USED, number(told.used));
            headers.insert(&RESET, self.reset(told.reset));
            headers.extend(self.resource.clone().map(|resource| (RESOURCE.clone(), resource)));
        }
        headers.extend(told.retry.map(|retry| (RETRY_AFTER, number(retry))));
        headers.insert(CACHE_CONTROL, NO_STORE);
        headers
    }
}

const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

/// An integer as a value. Small ones, which most are, come from a table without an allocation.
fn number(n: u64) -> HeaderValue {
    if n >= SMALL as u64 {
        return HeaderValue::from(n);
    }
    let n = n as usize;
    let digits = 1 + usize::from(n >= 10) + usize::from(n >= 100) + usize::from(n >= 1_000);
    HeaderValue::from_static(&TABLE[n * 4 + 4 - digits..n * 4 + 4])
}

/// Below this, integers are in the table.
const SMALL: usize = 10_000;

/// Four digits each.
static TABLE: &str = {
    static DIGITS: [u8; 4 * SMALL] = {
        let mut digits = [b'0'; 4 * SMALL];
        let mut i = 0;
        while i < 4 * SMALL {
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
