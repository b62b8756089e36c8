//! A [`Decision`] as the fields of a response, in the style of GitHub's REST API.
//!
//! Layers of ours may be stacked, and upstream services may send fields of the same names. Which
//! is which is told by the *name* that stands in the map: a name that points into this module's own
//! statics was put there by us, in this process. It costs nothing, where a marker in the response's
//! extensions would cost a third of what the whole layer does. The statics are byte arrays, since
//! equal string literals may be merged by the linker, and statics are not.

use http::header::{CACHE_CONTROL, Entry, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};

use crate::decision::Decision;
use crate::rejection::{Reason, Rejection};

macro_rules! names {
    ($($name:ident = $text:literal;)*) => {$(
        static $name: HeaderName = {
            static TEXT: [u8; $text.len()] = *$text;
            match std::str::from_utf8(&TEXT) {
                Ok(text) => HeaderName::from_static(text),
                Err(_) => panic!("ASCII"),
            }
        };
    )*};
}

names! {
    LIMIT = b"x-ratelimit-limit";
    REMAINING = b"x-ratelimit-remaining";
    USED = b"x-ratelimit-used";
    RESET = b"x-ratelimit-reset";
    RESOURCE = b"x-ratelimit-resource";
    // The same text as REMAINING in another place: the mark of a refusal.
    REFUSED_REMAINING = b"x-ratelimit-remaining";
}

/// Who wrote the fields of a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Author {
    Nobody,
    /// An inner layer of ours, whose request passed.
    Passed,
    /// An inner layer of ours that refused.
    Refused,
    Upstream,
}

fn author(headers: &mut HeaderMap) -> Author {
    let at = |name: &HeaderName| name.as_str().as_ptr();
    match headers.entry(&REMAINING) {
        Entry::Vacant(_) => Author::Nobody,
        Entry::Occupied(entry) if at(entry.key()) == at(&REMAINING) => Author::Passed,
        Entry::Occupied(entry) if at(entry.key()) == at(&REFUSED_REMAINING) => Author::Refused,
        Entry::Occupied(_) => Author::Upstream,
    }
}

/// Adds the fields to the response to a request that passed (S18), unless those of an inner layer
/// are tighter (S19).
pub(crate) fn stamp_passed(headers: &mut HeaderMap, decision: &Decision, fixed: &Fixed) {
    match author(headers) {
        Author::Nobody => {}
        Author::Refused => return,
        Author::Passed if !is_tighter(decision, headers) => return,
        Author::Passed | Author::Upstream => clear(headers),
    }
    headers.insert(&LIMIT, fixed.limit(decision.limit()));
    headers.insert(&REMAINING, number(decision.remaining()));
    stamp(headers, decision, fixed, decision.reset_at_ms());
}

/// Adds the fields to a refusal: all of them where the limit is spent (S18), else only those that
/// keep it from being cached and repeated at once (S33).
pub(crate) fn stamp_refusal(headers: &mut HeaderMap, why: &Rejection<'_>, fixed: &Fixed) {
    headers.insert(CACHE_CONTROL, const { HeaderValue::from_static("no-store") });
    match why.reason() {
        Reason::RateLimited(decision) => stamp_refused(headers, decision, fixed),
        Reason::StoreFailed => drop(headers.insert(RETRY_AFTER, number(1))),
        Reason::MissingKey(_) => {}
    }
}

fn stamp_refused(headers: &mut HeaderMap, decision: &Decision, fixed: &Fixed) {
    clear(headers);
    headers.insert(&LIMIT, fixed.limit(decision.limit()));
    headers.insert(&REFUSED_REMAINING, number(0));
    let reset = decision.reset_at_ms();
    stamp(headers, decision, fixed, decision.retry_at_ms().map_or(reset, |retry| reset.max(retry)));
    if let Some(retry) = decision.retry_at_ms() {
        headers
            .insert(RETRY_AFTER, number(seconds(retry.saturating_sub(decision.now_ms())).max(1)));
    }
}

fn stamp(headers: &mut HeaderMap, decision: &Decision, fixed: &Fixed, reset: i64) {
    headers.insert(&USED, number(decision.used()));
    headers.insert(&RESET, number(seconds(reset)));
    match &fixed.resource {
        Some(resource) => headers.insert(&RESOURCE, resource.clone()),
        // An upstream's, beside our numbers, would be wrong.
        None => headers.remove(&RESOURCE),
    };
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
fn seconds(ms: i64) -> u64 {
    (ms.max(0) as u64).div_ceil(1_000)
}

/// The values that a layer's responses share.
#[derive(Clone, Debug)]
pub(crate) struct Fixed {
    limit: (u64, HeaderValue),
    resource: Option<HeaderValue>,
}

impl Fixed {
    pub(crate) fn new(name: &str, limit: u64) -> Self {
        let resource = HeaderValue::from_str(name).ok().filter(|name| !name.is_empty());
        Self { limit: (limit, number(limit)), resource }
    }

    /// The limit that speaks: mostly the one that was expected.
    fn limit(&self, limit: u64) -> HeaderValue {
        match &self.limit {
            (known, value) if *known == limit => value.clone(),
            _ => number(limit),
        }
    }
}

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
