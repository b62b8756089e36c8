//! Looks at keys whose lease may be idle: each when it is due, or at once when the limiter that
//! could spend the lease is gone. One task does so for all keys, and ends when there is none:
//! [`Idle`].

use std::collections::{BTreeMap, HashSet};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::stopwatch::passed;
use crate::sync::AtEnd;
use crate::timer::Instant;

/// Keys that are scheduled, of 10 MB at most.
const MAX_KEYS: usize = 16_384;
/// The task is given up when it is later than this, in milliseconds.
const LATE: i64 = 1_000;

pub(super) struct Idle {
    keys: Mutex<Due>,
    due_sooner: Notify,
    since: Instant,
}

type LookAtKey = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Due {
    /// The owner of each key's lease, and the look at the key, by the time when it is due.
    due: BTreeMap<(i64, u64), (Weak<Owner>, LookAtKey)>,
    ids: HashSet<u64>,
    /// When the task is given up, if there is one: its runtime may stand still.
    runs_until: Option<i64>,
}

/// Held by a limiter and its requests, which may spend leased tokens. When it is dropped, all its
/// leases are due.
pub(super) type Owner = AtEnd<Box<dyn Fn() + Send + Sync>>;

impl Idle {
    pub(super) fn new(since: Instant) -> Self {
        Self { keys: Mutex::default(), due_sooner: Notify::new(), since }
    }

    pub(super) fn owner(self: &Arc<Self>) -> Arc<Owner> {
        let this = Arc::clone(self);
        Arc::new(AtEnd(Box::new(move || this.hurry_unowned())))
    }

    /// Schedules a look at a key, unless one is scheduled. Returns `false` if there are too many.
    pub(super) fn schedule_look(
        self: &Arc<Self>,
        id: u64,
        due: i64,
        owner: &Weak<Owner>,
        look: impl FnOnce() + Send + 'static,
    ) -> bool {
        let (mut keys, now) = (self.keys(), passed(self.since));
        let mut first = false;
        if !keys.ids.contains(&id) {
            if keys.ids.len() >= MAX_KEYS {
                return false;
            }
            first = keys.due.first_key_value().is_none_or(|((first, _), _)| due < *first);
            keys.due.insert((due, id), (Weak::clone(owner), Box::new(look)));
            keys.ids.insert(id);
        }
        let starts = keys.runs_until.is_none_or(|until| until < now);
        if starts {
            keys.runs_until = Some(now + LATE);
        }
        // Unlock first: a runtime that shuts down drops the task at once, which takes the lock.
        drop(keys);
        if starts {
            tokio::spawn(Arc::clone(self).run());
        } else if first {
            self.due_sooner.notify_one();
        }
        true
    }

    /// Makes leases without an owner due at once.
    fn hurry_unowned(&self) {
        let mut keys = self.keys();
        let due = mem::take(&mut keys.due).into_iter().map(|((due, id), key)| {
            let is_left = key.0.strong_count() == 0;
            ((if is_left { i64::MIN } else { due }, id), key)
        });
        keys.due = due.collect();
        drop(keys);
        self.due_sooner.notify_one();
    }

    /// Looks at keys when they are due, until there is none. May also end with its runtime.
    async fn run(self: Arc<Self>) {
        let this = Arc::clone(&self);
        // If another task has begun meanwhile, a third one does no harm.
        let _end = AtEnd(move || this.keys().runs_until = None);
        while let Some(wait) = self.look_at_due() {
            // Wait until then, or until a key is due sooner.
            let _ = timeout(wait, self.due_sooner.notified()).await;
        }
    }

    /// Looks at all keys that are due. Returns the time until the next one is due, if there is one.
    fn look_at_due(&self) -> Option<Duration> {
        let now = passed(self.since);
        loop {
            let mut keys = self.keys();
            let Some(((due, _), _)) = keys.due.first_key_value() else {
                keys.runs_until = None;
                return None;
            };
            let due = *due;
            if due > now {
                keys.runs_until = Some(due + LATE);
                return Some(Duration::from_millis((due - now) as u64));
            }
            let ((_, id), (_, look)) = keys.due.pop_first().expect("there is a first");
            // A lease taken from here on schedules a new look.
            keys.ids.remove(&id);
            drop(keys);
            look();
        }
    }

    fn keys(&self) -> MutexGuard<'_, Due> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
