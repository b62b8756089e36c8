//! Tokens that come back, and those in this process who wait for them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use super::reply::Reply;
use super::scope::Scope;
use crate::key::Key;

/// Waits for tokens of a scope.
pub(crate) trait Waiting: Send + Sync {
    /// Tokens of this key may have come back to a scope.
    fn note_freed(&self, scope: u64, key: &Key);

    /// The quotas have changed.
    fn note_changed(&self);
}

/// By the identity of their scope, whatever the store: who is woken in vain asks once more.
static WAITING: RwLock<Vec<(u64, Weak<dyn Waiting>)>> = RwLock::new(Vec::new());
/// Most processes have none.
static ANY: AtomicBool = AtomicBool::new(false);

/// Lets them know of tokens that come back to the scope.
pub(crate) fn add_waiting(scope: &Scope, waiting: Weak<dyn Waiting>) {
    let mut all = WAITING.write().unwrap_or_else(PoisonError::into_inner);
    let id = scope.id();
    let is_this = |of: u64, other: &Weak<dyn Waiting>| of == id && other.ptr_eq(&waiting);
    all.retain(|(of, other)| other.strong_count() > 0 && !is_this(*of, other));
    all.push((id, waiting));
    ANY.store(true, Ordering::Release);
}

/// Lets those who wait know when a reply is done that returns tokens of the key.
pub(crate) fn note_after(scope: &Scope, key: &Key, reply: Reply<()>) -> Reply<()> {
    if !ANY.load(Ordering::Acquire) {
        return reply;
    }
    match reply.into_now() {
        Ok(answer) => {
            note(scope.id(), key);
            Reply::from(answer)
        }
        Err(later) => {
            let (scope, key) = (scope.id(), key.clone());
            Reply::later(async move {
                let answer = later.await;
                note(scope, &key);
                answer
            })
        }
    }
}

/// Lets those who wait know that the quotas of the scope have changed.
pub(crate) fn note_changed(scope: &Scope) {
    waiting_of(scope.id()).iter().for_each(|waiting| waiting.note_changed());
}

fn note(scope: u64, key: &Key) {
    waiting_of(scope).iter().for_each(|waiting| waiting.note_freed(scope, key));
}

fn waiting_of(scope: u64) -> Vec<Arc<dyn Waiting>> {
    let all = WAITING.read().unwrap_or_else(PoisonError::into_inner);
    let of_scope = all.iter().filter(|(other, _)| *other == scope);
    of_scope.filter_map(|(_, of)| of.upgrade()).collect()
}
