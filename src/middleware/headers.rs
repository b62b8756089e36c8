//! Writes a [`Decision`] as headers: GitHub's, and those of the IETF's draft, which are structured
//! fields (RFC 9651): lists with one quoted item for each quota (S20).
//!
//! Layers of this crate may be stacked, and upstream services may send headers of the same names.
//! The *name* of the limit in the map shows which layer wrote it: a name that points into
//! [`LIMITS`] is this crate's, in this process. This costs nothing, while a marker in the
//! response's extensions would cost a third of the whole layer. `LIMITS` is an array of bytes,
//! since the linker may merge equal string literals.

use std::cell::RefCell;
use std::fmt::Write;
use std::iter;
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http::header::{CACHE_CONTROL, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};

use crate::decision::{Decision, Usage, Verdict};
use crate::sync::{self, Instant, Mutex};

/// The rate-limit headers that a layer sends: see
/// [`FixedWindowLayer::headers`](crate::FixedWindowLayer::headers).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Headers {
    /// The headers of GitHub's REST API: `x-ratelimit-limit`, `-remaining`, `-used`, `-reset` and
    /// `-resource`.
    #[default]
    GitHub,
    /// `RateLimit-Policy` and `RateLimit`, with one item for each quota, as in the tenth draft of
    /// the IETF (draft-ietf-httpapi-ratelimit-headers-10).
    #[doc(alias = "standard_headers")]
    IetfDraft10,
    /// Both sets. Some clients prefer the IETF's headers but parse them as an older draft, and then
    /// ignore GitHub's: send both only if your clients need it.
    GitHubAndIetfDraft10,
    /// The headers of OpenAI's API, for each limit by its name. For a limit `tokens`, they are
    /// `x-ratelimit-limit-tokens`, `x-ratelimit-remaining-tokens` and `x-ratelimit-reset-tokens`, a
    /// duration such as `6m0s` or `120ms`. Each limit must have a name.
    OpenAi,
    /// No rate-limit headers. A refusal still has `retry-after` and `cache-control`.
    None,
}

impl Headers {
    pub(crate) fn github(self) -> bool {
        matches!(self, Self::GitHub | Self::GitHubAndIetfDraft10)
    }

    pub(crate) fn ietf(self) -> bool {
        matches!(self, Self::IetfDraft10 | Self::GitHubAndIetfDraft10)
    }

    /// Returns whether each limit, or each quota, has a value of its own, with a distance in time.
    pub(crate) fn are_for_each(self) -> bool {
        self.ietf() || self == Self::OpenAi
    }

    pub(crate) fn names<'a>(self, limits: impl Iterator<Item = &'a str>) -> Vec<HeaderName> {
        let mut names = vec![RETRY_AFTER];
        if self.github() {
            names.extend(GITHUB);
        }
        if self.ietf() {
            names.extend([IETF_POLICY, IETF_LIMIT]);
        }
        if self == Self::OpenAi {
            names.extend(limits.filter_map(openai_names).flatten());
        }
        names
    }
}

/// `None` without a name. All characters of a name are those of header names.
fn openai_names(limit: &str) -> Option<[HeaderName; 3]> {
    let name = |of: &str| HeaderName::try_from(format!("x-ratelimit-{of}-{limit}")).ok();
    if limit.is_empty() {
        return None;
    }
    Some([name("limit")?, name("remaining")?, name("reset")?])
}

/// The name twice: the first copy marks a request that passed, the second a refusal. Two places in
/// one static have two addresses, whatever a linker merges.
static LIMITS: [[u8; 17]; 2] = [*b"x-ratelimit-limit"; 2];

const fn limit_at(i: usize) -> HeaderName {
    match std::str::from_utf8(&LIMITS[i]) {
        Ok(text) => HeaderName::from_static(text),
        Err(_) => panic!("ASCII"),
    }
}

// Constants are inserted into a map without a clone.
const LIMIT: HeaderName = limit_at(0);
const REFUSED_LIMIT: HeaderName = limit_at(1);

const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");
const USED: HeaderName = HeaderName::from_static("x-ratelimit-used");
const RESET: HeaderName = HeaderName::from_static("x-ratelimit-reset");
const RESOURCE: HeaderName = HeaderName::from_static("x-ratelimit-resource");

const GITHUB: [HeaderName; 5] = [LIMIT, REMAINING, USED, RESET, RESOURCE];

const IETF_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const IETF_LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The largest integer of a structured field.
const MAX_INTEGER: u64 = 999_999_999_999_999;

const NO_STORE: HeaderValue = HeaderValue::from_static("no-store");

#[derive(Debug)]
pub(crate) struct PreparedHeaders {
    style: Headers,
    limit: (u64, HeaderValue),
    resource: Option<HeaderValue>,
    refusal: Mutex<Option<LastResponse>>,
}

/// With its `retry-after`: during an attack, all refusals of a second are the same.
type LastResponse = ((Usage, Verdict, usize), Option<u64>, Response<Bytes>);

impl PreparedHeaders {
    pub(crate) fn new(style: Headers, name: &str, limit: u64) -> Self {
        let resource = HeaderValue::from_str(name).ok().filter(|name| !name.is_empty());
        Self { style, limit: (limit, number(limit)), resource, refusal: Mutex::default() }
    }

    /// For a request that passed (S18), unless an inner layer of this crate has refused it, or has
    /// written tighter numbers (S19). `now` is the time of the store.
    #[inline]
    pub(crate) fn stamp_passed<R>(
        &self,
        response: &mut Response<R>,
        decision: &Decision,
        now: impl FnOnce() -> i64,
        called_at: Option<Instant>,
    ) {
        let extensions = response.extensions();
        let refused = !extensions.is_empty() && extensions.get::<RefusedMark>().is_some()
            || if self.style.github() {
                self.stamp_github(response.headers_mut(), decision, now)
            } else {
                response.headers().keys().any(|name| address(name) == address(&REFUSED_LIMIT))
            };
        if self.style.are_for_each() && !refused {
            let late = called_at.map_or(Duration::ZERO, |at| at.elapsed());
            self.put_each(response.headers_mut(), decision, decision.now_after(late));
        }
    }

    fn put_each(&self, headers: &mut HeaderMap, decision: &Decision, now: i64) {
        match self.style {
            Headers::OpenAi => insert_openai(headers, decision, now),
            _ => append_ietf(headers, decision, now),
        }
    }

    /// Returns `true`, without a change, if an inner layer has refused.
    #[inline]
    fn stamp_github(
        &self,
        headers: &mut HeaderMap,
        decision: &Decision,
        now: impl FnOnce() -> i64,
    ) -> bool {
        // Most responses have no such header yet, so that inserting is the cheapest check.
        if let Some(theirs) = headers.insert(LIMIT, self.limit(decision.limit())) {
            // A refusal has replaced the value, and kept the author's name.
            let author = headers.keys().find(|name| **name == LIMIT).map(address);
            let is_refused = author == Some(address(&REFUSED_LIMIT));
            // The inner layer may have let the request wait until after this window.
            let stays = || !is_tighter(decision, headers) || decision.reset_at_ms() <= now();
            if is_refused || author == Some(address(&LIMIT)) && stays() {
                headers.insert(LIMIT, theirs);
                return is_refused;
            }
            for name in &GITHUB {
                headers.remove(name);
            }
            headers.insert(LIMIT, self.limit(decision.limit()));
        } else if self.resource.is_none() && headers.keys().any(|name| *name == RESOURCE) {
            headers.remove(RESOURCE);
        }
        headers.insert(REMAINING, number(decision.remaining()));
        headers.insert(USED, number(decision.used()));
        headers.insert(RESET, reset(decision.reset_at_ms()));
        if let Some(resource) = &self.resource {
            headers.insert(RESOURCE, resource.clone());
        }
        false
    }

    /// For a refusal by a quota (S18). It replaces headers of the same names.
    pub(crate) fn stamp_refused<R>(&self, response: &mut Response<R>, decision: &Decision) {
        self.put_refusal(response.headers_mut(), decision);
        self.finish_refused(response, decision);
    }

    #[inline]
    pub(crate) fn finish_refused<R>(&self, response: &mut Response<R>, decision: &Decision) {
        if self.style.are_for_each() {
            self.put_each(response.headers_mut(), decision, decision.now_ms());
        }
        if !self.style.github() {
            mark_refused(response);
        }
    }

    /// Returns what `make` does, with the headers of a refusal by a quota but for the IETF's.
    pub(crate) fn cached_refusal(
        &self,
        decision: &Decision,
        make: impl Fn() -> Response<Bytes>,
    ) -> Response<Bytes> {
        let make = || {
            let mut response = make();
            self.put_refusal(response.headers_mut(), decision);
            response
        };
        let Some(refusal) = decision.refusal() else { return make() };
        let Some(mut last) = sync::try_lock(&self.refusal) else { return make() };
        let after = retry_after_secs(decision);
        match &*last {
            Some((of, of_after, response)) if (*of, *of_after) == (refusal, after) => {
                response.clone()
            }
            _ => last.insert((refusal, after, make())).2.clone(),
        }
    }

    /// The value is prepared for the first quota, since a large number is costly to write.
    #[inline]
    fn limit(&self, limit: u64) -> HeaderValue {
        match &self.limit {
            (prepared, value) if *prepared == limit => value.clone(),
            _ => number(limit),
        }
    }

    #[cold]
    fn put_refusal(&self, headers: &mut HeaderMap, decision: &Decision) {
        for name in self.style.names(iter::empty()) {
            headers.remove(name);
        }
        if self.style.github() {
            let reset = decision.reset_at_ms().max(decision.retry_at_ms().unwrap_or(0));
            headers.insert(REFUSED_LIMIT, number(decision.limit()));
            headers.insert(REMAINING, number(0));
            headers.insert(USED, number(decision.used()));
            headers.insert(RESET, number(seconds(reset)));
            headers.extend(self.resource.clone().map(|resource| (RESOURCE, resource)));
        }
        let retry_after = retry_after_secs(decision);
        headers.extend(retry_after.map(|seconds| (RETRY_AFTER, number(seconds))));
        headers.insert(CACHE_CONTROL, NO_STORE);
    }
}

pub(crate) fn retry_after_secs(decision: &Decision) -> Option<u64> {
    let retry_at = decision.retry_at_ms()?;
    Some(seconds(retry_at.saturating_sub(decision.now_ms())).max(1))
}

/// The seconds that a client waits after a failure that may end soon.
pub(crate) const FAILED_RETRY_AFTER: u64 = 1;

/// The decision leaves fewer tokens than an inner layer's headers, or as many until a later reset
/// (S19).
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

pub(crate) fn put_failure_headers(headers: &mut HeaderMap, may_retry: bool) {
    headers.insert(CACHE_CONTROL, NO_STORE);
    if may_retry {
        headers.insert(RETRY_AFTER, number(FAILED_RETRY_AFTER));
    }
}

/// Follows those of inner layers, with an item for each quota of each limit that was decided.
fn append_ietf(headers: &mut HeaderMap, decision: &Decision, now: i64) {
    let (mut policies, mut standings) = (String::new(), String::new());
    for (_, decision) in decision.lines() {
        for (i, standing) in decision.usage().iter().enumerate() {
            let separator = if policies.is_empty() { "" } else { ", " };
            let (name, limit) = (decision.policy(i), standing.limit().min(MAX_INTEGER));
            let _ = write!(policies, "{separator}\"{name}\";q={limit}");
            // `w` is optional and in whole seconds: other windows have none. A calendar's window is
            // the one that runs.
            if standing.window().subsec_nanos() == 0 {
                let _ = write!(policies, ";w={}", standing.window().as_secs());
            }
            let mut end = standing.end;
            if i == decision.governing_index() {
                end = end.max(decision.retry_at_ms().unwrap_or(end));
            }
            let (left, after) = (standing.remaining().min(MAX_INTEGER), end.saturating_sub(now));
            let _ = write!(standings, "{separator}\"{name}\";r={left};t={}", seconds(after));
        }
    }
    for (name, text) in [(IETF_POLICY, policies), (IETF_LIMIT, standings)] {
        // Names of limits are ASCII, so that the text is always a valid value.
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.append(name, value);
        }
    }
}

/// They replace those of an inner layer and of an upstream.
fn insert_openai(headers: &mut HeaderMap, decision: &Decision, now: i64) {
    for (_, of) in decision.lines() {
        let Some([limit, remaining, reset]) = openai_names(of.name()) else { continue };
        let end = of.reset_at_ms().max(of.retry_at_ms().unwrap_or(0));
        headers.insert(limit, number(of.limit()));
        headers.insert(remaining, number(of.remaining()));
        let after = HeaderValue::try_from(duration(end.saturating_sub(now)));
        headers.extend(after.ok().map(|after| (reset, after)));
    }
}

/// As Go writes it. From a second on, in whole seconds, rounded up.
fn duration(ms: i64) -> String {
    let s = seconds(ms);
    match (s / 3_600, s / 60 % 60, s % 60) {
        _ if ms < 1_000 => format!("{}ms", ms.max(0)),
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s}s"),
        (h, m, s) => format!("{h}h{m}m{s}s"),
    }
}

/// The mark of a refusal that has no rate-limit headers to carry it.
#[derive(Clone, Copy)]
struct RefusedMark;

pub(crate) fn mark_refused<R>(response: &mut Response<R>) {
    response.extensions_mut().insert(RefusedMark);
}

#[inline]
fn address(name: &HeaderName) -> *const u8 {
    name.as_str().as_ptr()
}

/// Rounded up, so that a client that waits for these seconds is never too early.
pub(crate) fn seconds(ms: i64) -> u64 {
    // `div_ceil` would take twice as many instructions.
    (ms.max(0) as u64).wrapping_add(999) / 1_000
}

/// Most integers are small, and come from a table without an allocation.
#[inline]
fn number(n: u64) -> HeaderValue {
    if n >= SMALL {
        return HeaderValue::try_from(n.to_string()).expect("digits");
    }
    let digits = 1 + usize::from(n >= 10) + usize::from(n >= 100) + usize::from(n >= 1_000);
    let end = n as usize * 4 + 4;
    HeaderValue::from_static(&TABLE[end - digits..end])
}

/// The end of a window. Most requests share one, which the table does not hold: each thread keeps a
/// few, so that threads write no count in common.
#[inline]
fn reset(end: i64) -> HeaderValue {
    thread_local! {
        static ENDS: RefCell<[(u64, HeaderValue); 4]> =
            const { RefCell::new([const { (0, HeaderValue::from_static("0")) }; 4]) };
    }
    let end = seconds(end);
    let kept = ENDS.try_with(|ends| {
        let kept = &mut ends.borrow_mut()[(end.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62) as usize];
        if kept.0 != end {
            *kept = (end, number(end));
        }
        kept.1.clone()
    });
    kept.unwrap_or_else(|_| number(end))
}

const SMALL: u64 = 10_000;

/// All numbers below [`SMALL`], with four digits each.
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
