//! Looks after keys whose lease may lie idle: each at its time, or at once when the limiter that
//! could spend it is gone. One task does so for all, and ends when there is none.

use std::collections::{BTreeMap, HashSet};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::stopwatch::passed;
use crate::sync::AtEnd;
use crate::timer::Instant;

/// Keys that are looked after: 10 MB of them at most.
const MAX_KEYS: usize = 16_384;
/// A task that is later than this is given up, in milliseconds.
const LATE: i64 = 1_000;

pub(super) struct Idle {
    keys: Mutex<Due>,
    sooner: Notify,
    since: Instant,
}

type Look = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Due {
    /// Those who may spend it, and what to do, by the time at which to look after a key.
    due: BTreeMap<(i64, u64), (Weak<Owner>, Look)>,
    ids: HashSet<u64>,
    /// When the task is given up, if there is one: its runtime may stand still.
    runs_until: Option<i64>,
}

/// Held by a limiter and its requests, which may spend what is leased. When it is dropped, all of
/// that is due.
pub(super) type Owner = AtEnd<Box<dyn Fn() + Send + Sync>>;

impl Idle {
    pub(super) fn new(since: Instant) -> Self {
        Self { keys: Mutex::default(), sooner: Notify::new(), since }
    }

    pub(super) fn owner(self: &Arc<Self>) -> Arc<Owner> {
        let this = Arc::clone(self);
        Arc::new(AtEnd(Box::new(move || this.hurry())))
    }

    /// Looks after a key when it is due, unless it is looked after already. `false`: there are too
    /// many.
    pub(super) fn look_after(
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
        // A runtime that shuts down drops the task at once, and the task takes the lock again.
        drop(keys);
        if starts {
            tokio::spawn(Arc::clone(self).run());
        } else if first {
            self.sooner.notify_one();
        }
        true
    }

    /// What has no owner any more is due at once.
    fn hurry(&self) {
        let mut keys = self.keys();
        let due = mem::take(&mut keys.due).into_iter().map(|((due, id), key)| {
            let is_left = key.0.strong_count() == 0;
            ((if is_left { i64::MIN } else { due }, id), key)
        });
        keys.due = due.collect();
        drop(keys);
        self.sooner.notify_one();
    }

    /// The task. It may also end with the runtime that it runs in.
    async fn run(self: Arc<Self>) {
        let this = Arc::clone(&self);
        // If another one has begun meanwhile, a third one does no harm.
        let _end = AtEnd(move || this.keys().runs_until = None);
        while let Some(wait) = self.look() {
            // Until then, or until something is due sooner.
            let _ = timeout(wait, self.sooner.notified()).await;
        }
    }

    /// Looks after what is due. How long the next one has time, if there is any.
    fn look(&self) -> Option<Duration> {
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
            // What is leased from here on is looked after anew.
            keys.ids.remove(&id);
            drop(keys);
            look();
        }
    }

    fn keys(&self) -> MutexGuard<'_, Due> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
