//! The JSON bodies of refusals.

use std::fmt::{self, Write};

use bytes::Bytes;
use http::StatusCode;

use super::Rejection;
use crate::middleware::headers::policy_name;
use crate::middleware::reason::Reason;
use crate::quota::Quotas;

/// Returns a problem (RFC 9457) with GitHub's `message`.
#[inline]
pub(super) fn problem(why: &Rejection<'_>) -> Bytes {
    if let Reason::RateLimited(decision) = why.reason() {
        let only_one = matches!(why.limits, [(_, quotas)] if quotas.len() == 1)
            && !decision.exceeds_capacity();
        if let Some(prepared) = why.prepared_body.filter(|_| only_one) {
            return prepared.clone();
        }
        let mut policies = String::new();
        why.write_policies(&mut policies, "\"", ",");
        return quota_exceeded(why.status(), &why.message(), &policies);
    }
    let status = why.status();
    format!(
        r#"{{"type":"about:blank","title":"{}","status":{},"message":"{}"}}"#,
        status.canonical_reason().unwrap_or_default(),
        status.as_u16(),
        Escaped(&why.message()),
    )
    .into()
}

/// Returns the body for a refusal by the layer's only quota.
pub(crate) fn prepare(name: &str, quotas: &Quotas, status: StatusCode) -> Bytes {
    let policy = policy_name(name, &quotas.as_slice()[0]);
    quota_exceeded(status, &format!("API rate limit exceeded: {policy}"), &format!("\"{policy}\""))
}

/// The IETF draft's problem type for an exceeded quota (draft-ietf-httpapi-ratelimit-headers-10).
pub(crate) const QUOTA_EXCEEDED: &str =
    "https://iana.org/assignments/http-problem-types#quota-exceeded";

fn quota_exceeded(status: StatusCode, message: &str, policies: &str) -> Bytes {
    let status = status.as_u16();
    format!(
        r#"{{"type":"{QUOTA_EXCEEDED}","title":"Quota exceeded","status":{status},"message":"{message}","violated-policies":[{policies}]}}"#
    )
    .into()
}

/// Returns the body that GitHub's API has.
pub(super) fn github(why: &Rejection<'_>) -> Bytes {
    format!(r#"{{"message":"{}"}}"#, Escaped(&why.message())).into()
}

/// Escapes text for a JSON string. Only the name of a missing key can need that.
struct Escaped<'a>(&'a str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '"' | '\\' => write!(f, "\\{c}"),
            c if c.is_control() => f.write_char(' '),
            c => f.write_char(c),
        })
    }
}
