//! Any text is either a quota, which is printed as text that is the same quota, or an error that
//! says where.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tower_fixed_window::{Quota, Quotas};

fuzz_target!(|text: &str| {
    match text.parse::<Quotas>() {
        Ok(quotas) => {
            let printed = quotas.to_string();
            assert_eq!(printed.parse::<Quotas>().as_ref(), Ok(&quotas), "{printed}");
            for quota in &quotas {
                assert_eq!(quota.to_string().parse::<Quota>(), Ok(*quota));
                assert!(quota.capacity() >= quota.limit());
                assert!(quota.capacity() + quota.max_reserved() <= Quota::MAX_TOKENS);
                assert!(!quota.window().is_zero() && quota.window() <= Quota::MAX_WINDOW);
            }
        }
        Err(error) => assert!(error.to_string().contains("column"), "{error}"),
    }
});
