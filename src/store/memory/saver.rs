//! The thread that saves: at an interval, on request, and when the store is dropped.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::observe::{self, Saves};

/// Ends the thread when it is dropped, after a last save.
pub(super) struct Saver {
    thread: Mutex<Option<Thread>>,
    #[cfg_attr(not(feature = "metrics"), allow(dead_code))]
    saves: Arc<Saves>,
}

struct Thread {
    requests: Sender<Sender<io::Result<()>>>,
    ended: JoinHandle<()>,
}

impl Saver {
    /// Starts the thread. `save` returns how many bytes it has written to `file`.
    pub(super) fn start(
        file: String,
        every: Duration,
        mut save: impl FnMut() -> io::Result<u64> + Send + 'static,
    ) -> io::Result<Self> {
        let saves = Arc::<Saves>::default();
        let mut outcomes = Outcomes { file, saves: Arc::clone(&saves), failing: None };
        let mut save = move || outcomes.note(Instant::now(), save());
        let (requests, received) = mpsc::channel::<Sender<_>>();
        let ended = thread::Builder::new().name("tfw-counts".into()).spawn(move || {
            loop {
                match received.recv_timeout(every) {
                    // The request may have been given up.
                    Ok(request) => _ = request.send(save()),
                    Err(RecvTimeoutError::Timeout) => _ = save(),
                    Err(RecvTimeoutError::Disconnected) => {
                        let _ = save();
                        return;
                    }
                }
            }
        })?;
        Ok(Self { thread: Mutex::new(Some(Thread { requests, ended })), saves })
    }

    /// Waits until all charges before this call are saved.
    pub(super) fn save(&self) -> io::Result<()> {
        let (request, saved) = mpsc::channel();
        if let Some(thread) = &*self.thread.lock().unwrap_or_else(PoisonError::into_inner) {
            // If this fails, the request is dropped, and nothing can be received.
            let _ = thread.requests.send(request);
        }
        saved.recv().unwrap_or_else(|_| Err(io::Error::other("the thread that saves is gone")))
    }

    /// The results of the saves so far.
    #[cfg(feature = "metrics")]
    pub(super) fn saves(&self) -> &Saves {
        &self.saves
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Thread { requests, ended }) = thread {
            drop(requests);
            let _ = ended.join();
        }
    }
}

/// Logs failures when they begin and when they end, and each save at the debug level.
struct Outcomes {
    file: String,
    saves: Arc<Saves>,
    /// The time since which saves fail.
    failing: Option<Instant>,
}

impl Outcomes {
    fn note(&mut self, start: Instant, saved: io::Result<u64>) -> io::Result<()> {
        let Self { file, saves, failing } = self;
        match &saved {
            Ok(bytes) => {
                let took = start.elapsed();
                saves.note(*bytes, took);
                observe::counts_saved(file, *bytes, took);
                if let Some(since) = failing.take() {
                    observe::counts_saved_again(file, since.elapsed());
                }
            }
            Err(error) => {
                saves.note_failure();
                if failing.is_none() {
                    *failing = Some(start);
                    observe::counts_not_saved(error);
                }
            }
        }
        saved.map(|_| ())
    }
}
