//! Counts that outlive the process: [`CountsFile`].

use std::fmt;
use std::io::{self, BufReader, ErrorKind, Seek};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use super::super::charged_quotas::ChargedQuotas;
use super::super::sharded::seeds::Seeds;
use super::super::sharded::{Sharded, shares};
use super::file::LockedFile;
use super::format::{self, CHUNK, Saved};
use super::saver::Saver;
use super::time::Time;
use super::{Memory, MemoryStore};
use crate::clock::Clock;
use crate::observe;

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
