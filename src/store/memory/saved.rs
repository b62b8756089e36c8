//! Counts that outlive the process: [`MemoryStore::open`].
//!
//! Saved are the entries whose windows run, each shard's times, and the quotas that each scope
//! was charged under (`format`), at an interval, at `save`, and when the last clone of the
//! store is dropped, by a thread. A save that would change nothing leaves the file. One process at
//! a time has it, and replaces it whole or not at all.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

#[cfg(unix)]
use rustix::fs::{FlockOperation, flock};

use super::super::sharded::{Sharded, seeds};
use super::format;
use super::locked::ShardLock;
use super::{Memory, MemoryStore};
use crate::observe::{self, Saves};
use crate::sync::unique_number;

fn load(file: &LockedFile, memory: &mut Memory) -> io::Result<Option<u64>> {
    let Some(bytes) = file.read()? else { return Ok(None) };
    let (name, now) = (file.path.display(), memory.time.now().at);
    let (seed, at) = format::read(&bytes, memory, now)
        .map_err(|error| io::Error::new(error.kind(), format!("can't use {name}: {error}")))?;
    observe::counts_loaded(&name, bytes.len() as u64, now.saturating_sub(at));
    Ok(Some(seed))
}

impl MemoryStore {
    /// Opens a store of a million entries whose counts survive the process. It loads the counts of
    /// the file whose windows still run, and saves them at the interval, on [`save`](Self::save),
    /// and when its last clone is dropped. For another number of entries, use
    /// [`saved_to`](Self::saved_to), which has an example.
    ///
    /// If the process is killed or the system stops, the counts since the last save are lost, and
    /// these tokens can be spent again: for each key, at most its limit ([the
    /// guide](crate::guide::operating#counts-that-outlive-a-deploy)).
    ///
    /// # Errors
    /// As [`saved_to`](Self::saved_to).
    pub fn open(path: impl Into<PathBuf>, every: Duration) -> io::Result<Self> {
        Self::new().saved_to(path, every)
    }

    /// Loads the counts of a file into this new store, and saves them from now on, as
    /// [`open`](Self::open) does. If the file has more entries than this store, the store gets room
    /// for them. Without a file, the store is empty.
    ///
    /// ```
    /// use std::time::Duration;
    /// use tower_fixed_window::testing::block_on;
    /// use tower_fixed_window::{MemoryStore, Quota};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = std::env::temp_dir().join(format!("tfw-file-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// # let path = folder.join("counts");
    /// let limiter = || {
    ///     let store = MemoryStore::with_max_keys(100_000).saved_to(&path, Duration::from_secs(1))?;
    ///     std::io::Result::Ok(Quota::per_month(3).name("exports").store(store))
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
    ///
    /// # Errors
    /// If another store has the file open (`ErrorKind::ResourceBusy`), or if the file can't be
    /// read, or can't be created in its directory. If the interval is zero
    /// (`ErrorKind::InvalidInput`). On systems other than Unix (`ErrorKind::Unsupported`).
    ///
    /// # Panics
    /// If the store was cloned, or has a file already.
    #[track_caller]
    pub fn saved_to(self, path: impl Into<PathBuf>, every: Duration) -> io::Result<Self> {
        let Some(mut memory) = Arc::into_inner(self.memory) else {
            panic!("a store gets its file before it is cloned: write MemoryStore::open(..)")
        };
        if every.is_zero() {
            let error = "an interval of zero would save all the time: a second is usual";
            return Err(io::Error::new(ErrorKind::InvalidInput, error));
        }
        let mut file = LockedFile::lock(&path.into())?;
        let name = file.path.display().to_string();
        let found = match load(&file, &mut memory) {
            Err(reason) if reason.kind() == ErrorKind::InvalidData && !memory.error_if_broken => {
                let aside = file.set_aside()?;
                observe::counts_broken(&reason, &aside.display());
                None
            }
            found => found?,
        };
        // Receipts of what was counted before are another store's.
        memory.number = unique_number();
        let seed = found.unwrap_or_else(|| {
            let seed = seeds::random();
            let empty = (0..memory.shards.count).map(|_| ShardLock::default());
            memory.shards = Sharded::seeded(empty, seed);
            seed
        });
        let mut store = Self::around(memory);
        let memory = Arc::clone(&store.memory);
        let save = move || file.replace(|out| format::write(&memory, seed, out));
        store.saver = Some(Arc::new(Saver::start(name, every, save)?));
        Ok(store)
    }

    /// Makes [`saved_to`](Self::saved_to) return an error if the file is damaged, of another
    /// version, or not a file of counts. By default, the file is renamed to `.broken` or, if that
    /// exists, `.broken-1`; the log has the reason, and the store starts empty.
    ///
    /// # Panics
    /// If the store was cloned, or has a file already.
    #[must_use]
    #[track_caller]
    pub fn error_if_broken(mut self) -> Self {
        let memory = Arc::get_mut(&mut self.memory);
        memory.expect("this is set before the store gets its file").error_if_broken = true;
        self
    }

    /// Saves all counts, and waits until they are on the disk. Call it before the process stops:
    /// then nothing is lost, even if clones of the [`open`](Self::open) store are not dropped. It
    /// blocks its thread, for a million counters about 0.1 s plus the time of the disk.
    ///
    /// # Errors
    /// If the file can't be written; the old file then stays. If the store has no file
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

pub(super) struct Saver {
    requests: Option<Sender<SaveRequest>>,
    thread: Option<JoinHandle<()>>,
    #[cfg_attr(not(feature = "metrics"), allow(dead_code))]
    pub(super) saves: Arc<Saves>,
}

/// A request for a save, with where to send its result.
type SaveRequest = Sender<io::Result<()>>;

impl Saver {
    /// `save` returns how many bytes it has written. Failures are logged when they begin and when
    /// they end, and each save at the debug level.
    fn start(
        file: String,
        every: Duration,
        mut save: impl FnMut() -> io::Result<u64> + Send + 'static,
    ) -> io::Result<Self> {
        let saves = Arc::<Saves>::default();
        let (counted, mut failing_since) = (Arc::clone(&saves), None::<Instant>);
        let mut save = move || {
            let start = Instant::now();
            let saved = save();
            match &saved {
                Ok(bytes) => {
                    let took = start.elapsed();
                    counted.note(*bytes, took);
                    observe::counts_saved(&file, *bytes, took);
                    if let Some(since) = failing_since.take() {
                        observe::counts_saved_again(&file, since.elapsed());
                    }
                }
                Err(error) => {
                    counted.note_failure();
                    if failing_since.is_none() {
                        failing_since = Some(start);
                        observe::counts_not_saved(error);
                    }
                }
            }
            saved.map(drop)
        };
        let (requests, received) = mpsc::channel::<SaveRequest>();
        let thread = thread::Builder::new().name("tfw-counts".into()).spawn(move || {
            loop {
                match received.recv_timeout(every) {
                    Ok(request) => _ = request.send(save()),
                    Err(RecvTimeoutError::Timeout) => _ = save(),
                    Err(RecvTimeoutError::Disconnected) => {
                        let _ = save();
                        return;
                    }
                }
            }
        })?;
        Ok(Self { requests: Some(requests), thread: Some(thread), saves })
    }

    fn save(&self) -> io::Result<()> {
        let (request, saved) = mpsc::channel();
        // If this fails, nothing can be received.
        let _ = self.requests.as_ref().map(|requests| requests.send(request));
        saved.recv().unwrap_or_else(|_| Err(io::Error::other("the thread that saves is gone")))
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        drop(self.requests.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The lock is of a file beside it, and is held while this value lives.
struct LockedFile {
    path: PathBuf,
    #[cfg_attr(not(unix), allow(dead_code))]
    lock: File,
    /// The hash and the size of the content that was written last.
    last: Option<(u64, u64)>,
}

impl LockedFile {
    fn lock(path: &Path) -> io::Result<Self> {
        let path = resolve(path).map_err(|error| explain("find", path, error))?;
        let beside = with_suffix(&path, ".lock");
        let locked = open(OpenOptions::new().read(true).append(true).create(true), &beside)
            .and_then(|lock| exclusively(&lock).map(|()| lock));
        let lock = locked.map_err(|error| explain("lock", &beside, error))?;
        Ok(Self { path, lock, last: None })
    }

    fn read(&self) -> io::Result<Option<Vec<u8>>> {
        // Opening a pipe, for one, might block for ever.
        let read = fs::metadata(&self.path).and_then(|found| match found.is_file() {
            true => fs::read(&self.path).map(Some),
            false => Err(io::Error::other("it is not a file")),
        });
        match read {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            read => read.map_err(|error| explain("read", &self.path, error)),
        }
    }

    fn set_aside(&self) -> io::Result<PathBuf> {
        let name = |others| match others {
            0 => with_suffix(&self.path, ".broken"),
            _ => with_suffix(&self.path, &format!(".broken-{others}")),
        };
        // An earlier one may be all that is left of its counts.
        let is_free = |path: &PathBuf| fs::symlink_metadata(path).is_err();
        let aside = (0..).map(name).find(is_free).expect("a name is free");
        let renamed = fs::rename(&self.path, &aside);
        renamed.map(|()| aside).map_err(|error| explain("rename", &self.path, error))
    }

    /// Until all of the new file is on the disk, the old one stays, also if the system stops.
    /// `write` returns a hash of the content: a new file of the same content is dropped before it
    /// reaches the disk.
    fn replace(&mut self, write: impl FnOnce(&mut File) -> io::Result<u64>) -> io::Result<u64> {
        let new = with_suffix(&self.path, ".new");
        let written = catch_unwind(AssertUnwindSafe(|| self.write(&new, write)));
        let written =
            written.unwrap_or_else(|_| Err(io::Error::other("the store's clock panicked")));
        if !matches!(written, Ok((_, true))) {
            let _ = fs::remove_file(&new);
        }
        written.map(|(len, _)| len).map_err(|error| explain("replace", &self.path, error))
    }

    /// Returns the size of the new file, and whether it has replaced the old one.
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
        #[cfg(unix)]
        let _ = flock(&self.lock, FlockOperation::Unlock);
    }
}

/// An absolute path with links followed stays valid if the process changes its directory.
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

/// Only the owner can read it.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    options.open(path)
}

#[cfg(unix)]
fn exclusively(file: &File) -> io::Result<()> {
    match flock(file, FlockOperation::NonBlockingLockExclusive).map_err(io::Error::from) {
        Err(error) if error.kind() == ErrorKind::WouldBlock => {
            let holder = "another store has this file open: a process that still runs, or this one";
            Err(io::Error::new(ErrorKind::ResourceBusy, holder))
        }
        locked => locked,
    }
}

#[cfg(not(unix))]
fn exclusively(_: &File) -> io::Result<()> {
    Err(io::Error::new(ErrorKind::Unsupported, "counts in a file need the file locks of Unix"))
}
