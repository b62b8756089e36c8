//! The headers of the IETF draft (draft-ietf-httpapi-ratelimit-headers-10), which are structured
//! fields (RFC 9651): lists with one quoted item for each quota (S20).

use std::fmt::Write;

use http::header::{HeaderMap, HeaderName, HeaderValue};

use super::LimitAt;
use super::values::{policy_name, seconds};
use crate::decision::Decision;
use crate::quota::Quotas;

pub(super) const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
pub(super) const LIMIT: HeaderName = HeaderName::from_static("ratelimit");

/// The largest integer of a structured field.
const MAX_INTEGER: u64 = 999_999_999_999_999;

pub(super) fn has_name(name: &HeaderName) -> bool {
    *name == POLICY || *name == LIMIT
}

/// Appends both headers, after those of inner layers, with one item for each quota of each limit
/// that was decided.
pub(super) fn append<'a>(
    headers: &mut HeaderMap,
    limits: impl Iterator<Item = LimitAt<'a>>,
    decision: &Decision,
) {
    let (mut policies, mut standings) = (String::new(), String::new());
    for (place, name, quotas) in limits {
        if let Some(decision) = decision.at(place) {
            write(&mut policies, &mut standings, name, quotas, &decision);
        }
    }
    for (name, text) in [(POLICY, policies), (LIMIT, standings)] {
        // Names of limits are ASCII, so that the text is always a valid value.
        if let Ok(value) = HeaderValue::try_from(text) {
            headers.append(name, value);
        }
    }
}

fn write(
    policies: &mut String,
    standings: &mut String,
    name: &str,
    quotas: &Quotas,
    decision: &Decision,
) {
    for (i, (quota, standing)) in quotas.iter().zip(decision.usage()).enumerate() {
        let separator = if policies.is_empty() { "" } else { ", " };
        let name = policy_name(name, quota);
        let limit = quota.limit().min(MAX_INTEGER);
        let _ = write!(policies, "{separator}\"{name}\";q={limit}");
        // `w` is optional and in whole seconds: other windows have none. A calendar's window is the
        // one that runs.
        if standing.window().subsec_nanos() == 0 {
            let _ = write!(policies, ";w={}", standing.window().as_secs());
        }
        let mut end = standing.end();
        if i == decision.governing() {
            end = end.max(decision.retry_at_ms().unwrap_or(end));
        }
        let (remaining, after) = (standing.remaining().min(MAX_INTEGER), end - decision.now_ms());
        let _ = write!(standings, "{separator}\"{name}\";r={remaining};t={}", seconds(after));
    }
}
