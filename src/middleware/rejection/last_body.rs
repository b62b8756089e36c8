//! The body that many refusals have: [`LastBody`].

use std::sync::Mutex;

use bytes::Bytes;

/// The body of the last refusal by a layer's only quota, by its wait. During an attack, all
/// refusals of a second have the same.
#[derive(Debug, Default)]
pub(crate) struct LastBody(Mutex<(Option<u64>, Bytes)>);

impl LastBody {
    #[inline(always)]
    pub(super) fn get(&self, retry_after: Option<u64>, make: impl Fn() -> Bytes) -> Bytes {
        let Ok(mut last) = self.0.try_lock() else { return make() };
        if last.0 != retry_after || last.1.is_empty() {
            *last = (retry_after, make());
        }
        last.1.clone()
    }
}
