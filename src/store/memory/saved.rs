//! Counts that outlive the process: [`CountsFile`].
//!
//! A thread saves them, at an interval, on request, and when the store is dropped. One process at a
//! time has the file, and replaces it whole or not at all.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader, ErrorKind, Seek};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::super::charged_quotas::ChargedQuotas;
use super::super::sharded::seeds::Seeds;
use super::super::sharded::{Sharded, shares};
use super::format::{self, CHUNK, Saved};
use super::time::Time;
use super::{Memory, MemoryStore};
use crate::clock::Clock;
use crate::observe::{self, Saves};

/// A file in which the counts of a [`MemoryStore`] outlive the process. [`MemoryStore::open`] is
/// short for the usual one.
///
/// ```
/// use std::time::Duration;
/// use tower_fixed_window::testing::block_on;
/// use tower_fixed_window::{CountsFile, Quota};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = std::env::temp_dir().join(format!("tfw-file-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// # let path = folder.join("counts");
/// let file = || CountsFile::new(&path, Duration::from_secs(1)).max_keys(100_000);
/// let limiter = || {
///     let exports = Quota::per_month(3).name("exports");
///     std::io::Result::Ok(exports.store(file().open()?))
/// };
///
/// let first = limiter()?;
/// assert_eq!(block_on(first.check("alice"))?.used(), 1);
/// drop(first); // saves
///
/// let second = limiter()?; // another process, after a deploy
/// assert_eq!(block_on(second.check("alice"))?.used(), 2);
/// # drop(second);
/// # std::fs::remove_dir_all(folder)?;
/// # Ok(()) }
/// ```
pub struct CountsFile {
    path: PathBuf,
    every: Duration,
    max_keys: usize,
    time: Time,
    error_if_broken: bool,
}

impl CountsFile {
    /// The file at a path, saved at this interval. What was counted since the last save is lost if
    /// the process is killed or the system stops: it may pass once more.
    pub fn new(path: impl Into<PathBuf>, every: Duration) -> Self {
        let (path, time) = (path.into(), Time::system());
        Self { path, every, max_keys: 1_000_000, time, error_if_broken: false }
    }

    /// Sets the number of entries, as [`MemoryStore::with_max_keys`] does. It can differ from that
    /// of the process before. If the file has more entries, the store has room for them.
    ///
    /// # Panics
    /// If it is 0.
    #[must_use]
    #[track_caller]
    pub fn max_keys(mut self, max_keys: usize) -> Self {
        assert!(
            max_keys > 0,
            "a store of no keys can't count: write CountsFile::new(..).max_keys(100_000)"
        );
        self.max_keys = max_keys;
        self
    }

    /// Reads another clock, for tests.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::{CountsFile, ManualClock};
    ///
    /// # fn main() -> std::io::Result<()> {
    /// # let folder = std::env::temp_dir().join(format!("tfw-clock-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// # let path = folder.join("counts");
    /// let clock = ManualClock::at_ms(1_700_000_040_000);
    /// let store = CountsFile::new(&path, Duration::from_secs(1)).clock(clock.clone()).open()?;
    /// assert!(store.is_empty());
    /// # drop(store);
    /// # std::fs::remove_dir_all(folder)
    /// # }
    /// ```
    #[must_use]
    pub fn clock(mut self, clock: impl Clock) -> Self {
        self.time = Time::Other(Box::new(clock));
        self
    }

    /// Has [`open`](Self::open) fail if the file is of another version, damaged, or not a file of
    /// counts. Without this, such a file is renamed to `.broken`, the log has the reason, and the
    /// store starts empty.
    #[must_use]
    pub fn error_if_broken(mut self) -> Self {
        self.error_if_broken = true;
        self
    }

    /// Loads the counts, and starts the thread that saves them. Without a file, the store is empty.
    ///
    /// # Errors
    /// If another store has the file open (`ErrorKind::ResourceBusy`), if the file can't be read,
    /// or if there can be no file in its directory. If the interval is zero
    /// (`ErrorKind::InvalidInput`). On systems other than Unix (`ErrorKind::Unsupported`).
    pub fn open(self) -> io::Result<MemoryStore> {
        let Self { path, every, max_keys, time, error_if_broken } = self;
        if every.is_zero() {
            let error = "an interval of zero would save all the time: a second is usual";
            return Err(io::Error::new(ErrorKind::InvalidInput, error));
        }
        let mut file = LockedFile::lock(&path)?;
        let name = file.path().display().to_string();
        let now = time.now().at;
        let found = match load(&file, max_keys, now) {
            Err(reason) if reason.kind() == ErrorKind::InvalidData && !error_if_broken => {
                let aside = file.set_aside()?;
                observe::counts_broken(&reason, &aside.display());
                None
            }
            found => found?,
        };
        let Saved { shards, buckets, counters, seeds, .. } = match found {
            Some(saved) => saved,
            None => {
                let ((shards, buckets), seeds) = (shares(max_keys), Seeds::random());
                let shards = Sharded::seeded(shards, seeds);
                Saved { shards, buckets, counters: ChargedQuotas::default(), seeds, at: now }
            }
        };
        let quiet_until = AtomicU64::new(0);
        let memory = Memory { shards, buckets, counters, time, max_keys, quiet_until };
        let mut store = MemoryStore::of(memory);
        let memory = Arc::clone(&store.memory);
        let save = move || file.replace(|out| format::write(&memory, seeds, out));
        store.saver = Some(Arc::new(Saver::start(name, every, save)?));
        Ok(store)
    }
}

/// Reads the file, if there is one.
fn load(file: &LockedFile, max_keys: usize, now: i64) -> io::Result<Option<Saved>> {
    let Some((input, len)) = file.open()? else { return Ok(None) };
    let mut input = BufReader::with_capacity(CHUNK, input);
    let name = file.path().display();
    let read = |input: &mut BufReader<_>| {
        format::check(input, len)?;
        input.rewind()?;
        format::read(input, max_keys, now)
    };
    let saved = read(&mut input)
        .map_err(|error| io::Error::new(error.kind(), format!("can't use {name}: {error}")))?;
    observe::counts_loaded(&name, len, now.saturating_sub(saved.at));
    Ok(Some(saved))
}

impl MemoryStore {
    /// Opens a store of a million entries whose counts outlive the process: it loads those of the
    /// file whose windows still run, and saves them at the interval, on [`save`](Self::save), and
    /// when its last clone is dropped. [`CountsFile`] has options.
    ///
    /// If the process is killed, what was counted since the last save may pass once more, for each
    /// key at most its limit. One process at a time can have the file open. `docs/operating.md` has
    /// the rest.
    ///
    /// ```no_run
    /// use std::time::Duration;
    /// use tower_fixed_window::{FixedWindowLayer, MemoryStore, Quota};
    ///
    /// # fn main() -> std::io::Result<()> {
    /// let store = MemoryStore::open("/var/lib/app/counts", Duration::from_secs(1))?;
    /// let plan = FixedWindowLayer::new(Quota::per_month(1_000).name("plan").store(store.clone()));
    /// // ... serve until SIGTERM
    /// store.save()?;
    /// # let _ = plan;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`CountsFile::open`].
    pub fn open(path: impl Into<PathBuf>, every: Duration) -> io::Result<Self> {
        CountsFile::new(path, every).open()
    }

    /// Saves all that is counted so far, and waits until it is on the disk. Call it when the
    /// process has to stop: then nothing is lost, even if clones of the store are not dropped.
    /// It blocks its thread: for a million counters some 0.1 s, and for as long as the disk takes.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tower_fixed_window::MemoryStore;
    ///
    /// # let folder = std::env::temp_dir().join(format!("tfw-save-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// # let path = folder.join("counts");
    /// let store = MemoryStore::open(&path, Duration::from_secs(1))?;
    /// store.save()?;
    /// assert!(path.exists());
    /// # drop(store);
    /// # std::fs::remove_dir_all(folder)?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// If the file can't be written; it is then as it was before. If the store has no file
    /// (`ErrorKind::Unsupported`).
    pub fn save(&self) -> io::Result<()> {
        match &self.saver {
            Some(saver) => saver.save(),
            None => Err(io::Error::new(
                ErrorKind::Unsupported,
                "this store has no file: write MemoryStore::open(path, interval)",
            )),
        }
    }
}

impl fmt::Debug for CountsFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { path, every, max_keys, error_if_broken, .. } = self;
        f.debug_struct("CountsFile")
            .field("path", path)
            .field("every", every)
            .field("max_keys", max_keys)
            .field("error_if_broken", error_if_broken)
            .finish_non_exhaustive()
    }
}

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
    fn start(
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
    fn save(&self) -> io::Result<()> {
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

/// The path of a file, with the lock of the file beside it while this value lives.
struct LockedFile {
    path: PathBuf,
    lock: File,
    /// The hash and the size of the content that was written last.
    last: Option<(u64, u64)>,
}

impl LockedFile {
    /// Locks the file, which may be missing.
    fn lock(path: &Path) -> io::Result<Self> {
        let path = resolve(path).map_err(|error| explain("find", path, error))?;
        let beside = with_suffix(&path, ".lock");
        let locked = open(OpenOptions::new().read(true).append(true).create(true), &beside)
            .and_then(|lock| exclusively(&lock).map(|()| lock));
        let lock = locked.map_err(|error| explain("lock", &beside, error))?;
        Ok(Self { path, lock, last: None })
    }

    fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file. Returns `None` if there is none.
    fn open(&self) -> io::Result<Option<(File, u64)>> {
        // Opening a pipe, for one, might block for ever.
        let opened = fs::metadata(&self.path).and_then(|found| match found.is_file() {
            true => File::open(&self.path).map(|file| Some((file, found.len()))),
            false => Err(io::Error::other("it is not a file")),
        });
        match opened {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            opened => opened.map_err(|error| explain("read", &self.path, error)),
        }
    }

    /// Renames the file, so that there is none.
    fn set_aside(&self) -> io::Result<PathBuf> {
        let aside = with_suffix(&self.path, ".broken");
        let renamed = fs::rename(&self.path, &aside);
        renamed.map(|()| aside).map_err(|error| explain("rename", &self.path, error))
    }

    /// Replaces the file. Returns its size. Until all of the new one is on the disk, the old one
    /// stays, also if the system stops. `write` returns a hash of the content: a new file of the
    /// same content is dropped before it reaches the disk.
    fn replace(&mut self, write: impl FnOnce(&mut File) -> io::Result<u64>) -> io::Result<u64> {
        let new = with_suffix(&self.path, ".new");
        let written = self.write(&new, write);
        if !matches!(written, Ok((_, true))) {
            // The new file has the old content, or a part of the new one.
            let _ = fs::remove_file(&new);
        }
        written.map(|(len, _)| len).map_err(|error| explain("replace", &self.path, error))
    }

    /// Writes the new file. Returns its size, and whether it has replaced the old one.
    fn write(
        &mut self,
        new: &Path,
        write: impl FnOnce(&mut File) -> io::Result<u64>,
    ) -> io::Result<(u64, bool)> {
        // A killed process may have left a file, perhaps of another owner.
        match fs::remove_file(new) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let mut file = open(OpenOptions::new().write(true).create_new(true), new)?;
        let content = write(&mut file)?;
        let len = file.metadata()?.len();
        let is_there = fs::metadata(&self.path).is_ok_and(|found| found.len() == len);
        if is_there && self.last == Some((content, len)) {
            return Ok((len, false));
        }
        file.sync_all()?;
        fs::rename(new, &self.path)?;
        if let Some(folder) = self.path.parent() {
            File::open(folder)?.sync_all()?;
        }
        self.last = Some((content, len));
        Ok((len, true))
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // A process that is being forked has the lock's file, too, and would keep it locked.
        let _ = unlock(&self.lock);
    }
}

/// Returns an absolute path with links followed, which stays valid if the process changes its
/// directory.
fn resolve(path: &Path) -> io::Result<PathBuf> {
    if let Ok(found) = fs::canonicalize(path) {
        return Ok(found);
    }
    let name = path.file_name().ok_or_else(|| io::Error::other("it has no file's name"))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    Ok(fs::canonicalize(folder.unwrap_or(Path::new(".")))?.join(name))
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or(OsStr::new("")).to_owned();
    name.push(suffix);
    path.with_file_name(name)
}

fn explain(verb: &str, path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("can't {verb} {}: {error}", path.display()))
}

/// Opens a file that only its owner can read.
#[cfg(unix)]
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;

    options.mode(0o600).open(path)
}

/// Locks a file until it is closed.
#[cfg(unix)]
fn exclusively(file: &File) -> io::Result<()> {
    use rustix::fs::{FlockOperation, flock};

    match flock(file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            let holder = "another store has this file open: a process that still runs, or this one";
            Err(io::Error::new(ErrorKind::ResourceBusy, holder))
        }
        locked => locked,
    }
}

#[cfg(unix)]
fn unlock(file: &File) -> io::Result<()> {
    Ok(rustix::fs::flock(file, rustix::fs::FlockOperation::Unlock)?)
}

#[cfg(not(unix))]
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    options.open(path)
}

#[cfg(not(unix))]
fn exclusively(_: &File) -> io::Result<()> {
    Err(io::Error::new(ErrorKind::Unsupported, "counts in a file need the file locks of Unix"))
}

#[cfg(not(unix))]
fn unlock(_: &File) -> io::Result<()> {
    Ok(())
}
