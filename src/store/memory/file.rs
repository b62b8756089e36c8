//! A file that one process at a time replaces, whole or not at all.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The path of a file, with the lock of the file beside it while this value lives.
pub(super) struct LockedFile {
    path: PathBuf,
    lock: File,
    /// The hash and the size of the content that was written last.
    last: Option<(u64, u64)>,
}

impl LockedFile {
    /// Locks the file, which may be missing.
    pub(super) fn lock(path: &Path) -> io::Result<Self> {
        let path = resolve(path).map_err(|error| explain("find", path, error))?;
        let beside = with_suffix(&path, ".lock");
        let locked = open(OpenOptions::new().read(true).append(true).create(true), &beside)
            .and_then(|lock| exclusively(&lock).map(|()| lock));
        let lock = locked.map_err(|error| explain("lock", &beside, error))?;
        Ok(Self { path, lock, last: None })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the file. Returns `None` if there is none.
    pub(super) fn open(&self) -> io::Result<Option<(File, u64)>> {
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
    pub(super) fn set_aside(&self) -> io::Result<PathBuf> {
        let aside = with_suffix(&self.path, ".broken");
        let renamed = fs::rename(&self.path, &aside);
        renamed.map(|()| aside).map_err(|error| explain("rename", &self.path, error))
    }

    /// Replaces the file. Returns its size. Until all of the new one is on the disk, the old one
    /// stays, also if the system stops. `write` returns a hash of the content: a new file of the
    /// same content is dropped before it reaches the disk.
    pub(super) fn replace(
        &mut self,
        write: impl FnOnce(&mut File) -> io::Result<u64>,
    ) -> io::Result<u64> {
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
