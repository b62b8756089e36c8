//! Writes numbers, times and the names of quotas as header values.

use http::header::HeaderValue;

use crate::quota::Quota;

/// Returns whole seconds, rounded up, so that a client that waits for them is never too early.
pub(crate) fn seconds(ms: i64) -> u64 {
    (ms.max(0) as u64).div_ceil(1_000)
}

/// Returns the name of a quota for clients, such as `login:5/minute`.
pub(crate) fn policy_name(name: &str, quota: &Quota) -> String {
    format!("{name}{}{}", if name.is_empty() { "" } else { ":" }, quota.rate())
}

/// Returns an integer as a value. Most integers are small, and come from a table without an
/// allocation.
#[inline]
pub(super) fn number(n: u64) -> HeaderValue {
    if n < SMALL { HeaderValue::from_static(digits(n)) } else { large(n) }
}

fn large(n: u64) -> HeaderValue {
    HeaderValue::from_str(itoa::Buffer::new().format(n)).expect("digits")
}

fn digits(n: u64) -> &'static str {
    let digits = 1 + usize::from(n >= 10) + usize::from(n >= 100) + usize::from(n >= 1_000);
    let end = n as usize * 4 + 4;
    &TABLE[end - digits..end]
}

/// Integers below this are in the table.
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
