//! The JSON bodies of refusals.

use std::fmt::{self, Write};

use bytes::Bytes;

use super::Rejection;
use crate::middleware::reason::Reason;

/// Returns a problem (RFC 9457) with GitHub's `message` and the wait as a number.
pub(super) fn problem(why: &Rejection<'_>) -> Bytes {
    if let Reason::RateLimited(_) = why.reason() {
        return quota_exceeded(why);
    }
    let (status, wait) = (why.status(), wait(why));
    format!(
        r#"{{"type":"about:blank","title":"{}","status":{},"message":"{}"{wait}}}"#,
        status.canonical_reason().unwrap_or_default(),
        status.as_u16(),
        Escaped(&why.message()),
    )
    .into()
}

fn wait(why: &Rejection<'_>) -> String {
    let wait = why.retry_after().map(|after| format!(r#","retry_after":{}"#, after.as_secs()));
    wait.unwrap_or_default()
}

/// The IETF draft's problem type for an exceeded quota (draft-ietf-httpapi-ratelimit-headers-10).
pub(crate) const QUOTA_EXCEEDED: &str =
    "https://iana.org/assignments/http-problem-types#quota-exceeded";

#[cold]
pub(super) fn quota_exceeded(why: &Rejection<'_>) -> Bytes {
    let (status, message, wait) = (why.status().as_u16(), why.message(), wait(why));
    let mut policies = String::new();
    why.write_policies(&mut policies, "\"", ",");
    format!(
        r#"{{"type":"{QUOTA_EXCEEDED}","title":"Quota exceeded","status":{status},"message":"{message}"{wait},"violated-policies":[{policies}]}}"#
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
