//! Postgres, for one test: started on a free port, killed, frozen, started again.
//!
//! Where there is none, tests are skipped with a line about it, or fail if `REQUIRE_POSTGRES` is
//! set. Its processes are another user's where the tests run as root, which Postgres refuses.

use std::fs;
use std::net::TcpStream;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;

use tempfile::TempDir;

use crate::{free_port, signal, wait_for};

/// A server with a database of its own. Its processes end with this value, also when a test panics.
pub struct Postgres {
    child: Option<Child>,
    dir: TempDir,
    pub port: u16,
    args: Vec<String>,
}

/// The folder of the server's programs.
static PROGRAMS: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let told = Command::new("pg_config").arg("--bindir").output().ok();
    let told = told.map(|told| PathBuf::from(String::from_utf8_lossy(&told.stdout).trim()));
    let debian = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut folders: Vec<_> = debian.map(|version| version.path().join("bin")).collect();
    folders.sort();
    let chosen = std::env::var_os("POSTGRES_BIN").map(PathBuf::from);
    let mut all = chosen.into_iter().chain(folders.into_iter().rev()).chain(told);
    all.find(|folder| folder.join("initdb").exists())
});

/// An empty database, which each server copies.
static TEMPLATE: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = folder();
    let data = dir.path().join("data");
    let made = program("initdb", dir.path())
        .args(["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--pgdata"])
        .arg(&data)
        .output();
    let Output { status, stderr, .. } = made.expect("initdb runs");
    assert!(status.success(), "initdb: {}", String::from_utf8_lossy(&stderr));
    dir
});

impl Postgres {
    pub fn is_installed() -> bool {
        PROGRAMS.is_some()
    }

    /// `None`: no server is installed, and none is required.
    pub fn start() -> Option<Self> {
        Self::with(&[])
    }

    /// A server with settings, such as `["max_connections=5"]`.
    pub fn with(settings: &[&str]) -> Option<Self> {
        if PROGRAMS.is_none() {
            let is_required = std::env::var_os("REQUIRE_POSTGRES").is_some();
            assert!(!is_required, "REQUIRE_POSTGRES is set, and there is no initdb");
            eprintln!("skipped: there is no Postgres");
            return None;
        }
        let args = settings.iter().flat_map(|setting| ["-c".to_owned(), (*setting).to_owned()]);
        let args: Vec<_> = args.collect();
        for _ in 0..10 {
            let dir = folder();
            let copied = program_of(dir.path(), Path::new("cp"))
                .arg("-r")
                .arg(TEMPLATE.path().join("data"))
                .arg(dir.path().join("data"))
                .status();
            assert!(copied.is_ok_and(|status| status.success()), "the template is copied");
            let mut server = Self { child: None, dir, port: free_port(), args: args.clone() };
            if server.starts() {
                return Some(server);
            }
        }
        panic!("the server ends at once, on each of ten ports");
    }

    /// Another server that receives what this one writes, and only reads until it is promoted.
    pub fn replica(&self) -> Self {
        let dir = folder();
        let copied = program("pg_basebackup", dir.path())
            .args(["-R", "--no-sync", "--checkpoint=fast", "-U", "postgres", "-h", "127.0.0.1"])
            .args(["-p", &self.port.to_string(), "-D"])
            .arg(dir.path().join("data"))
            .output();
        let Output { status, stderr, .. } = copied.expect("pg_basebackup runs");
        assert!(status.success(), "pg_basebackup: {}", String::from_utf8_lossy(&stderr));
        let mut replica = Self { child: None, dir, port: free_port(), args: self.args.clone() };
        replica.restart();
        replica
    }

    /// Starts the server again, on the same port and with the same data.
    pub fn restart(&mut self) {
        assert!(self.starts(), "the server ends at once: is its port {} taken?", self.port);
    }

    fn starts(&mut self) -> bool {
        assert!(self.child.is_none(), "the server runs");
        let mut child = program("postgres", self.dir.path())
            .arg("-D")
            .arg(self.dir.path().join("data"))
            .args(["-p", &self.port.to_string(), "-h", "127.0.0.1", "-k", ""])
            // A restart after a kill reads what was written, and no test cuts the power.
            .args(["-c", "fsync=off", "-c", "logging_collector=off"])
            .args(&self.args)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        let mut ended = false;
        wait_for("the server to answer", || {
            ended = child.try_wait().expect("a process").is_some();
            ended || self.try_run("SELECT 1").is_some()
        });
        self.child = (!ended).then_some(child);
        !ended
    }

    /// Ends all of the server's processes at once, as a crash does.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            signal(&child, "-CONT");
            self.signal_all(&child, "-CONT");
            signal(&child, "-QUIT");
            let _ = child.wait();
        }
    }

    /// `SIGSTOP`: the server hangs, and all of its processes with it.
    pub fn freeze(&self) {
        self.signal_all(self.process(), "-STOP");
    }

    /// `SIGCONT`: the server goes on.
    pub fn thaw(&self) {
        self.signal_all(self.process(), "-CONT");
    }

    fn signal_all(&self, process: &Child, name: &str) {
        signal(process, name);
        let id = process.id().to_string();
        // A child may end meanwhile.
        let _ = Command::new("pkill").args([name, "-P", &id]).status();
    }

    /// Of the process that starts all others.
    pub fn id(&self) -> u32 {
        self.process().id()
    }

    fn process(&self) -> &Child {
        self.child.as_ref().expect("the server runs")
    }

    /// The address for clients.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }

    /// Runs SQL, past the store, and returns its rows as text.
    pub fn run(&self, sql: &str) -> String {
        self.try_run(sql).unwrap_or_else(|| panic!("it fails: {sql}"))
    }

    fn try_run(&self, sql: &str) -> Option<String> {
        run(&self.url(), sql)
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        self.kill();
    }
}

/// PgBouncer before a server, in transaction mode: each transaction of a client runs in any of three
/// sessions, which all clients share.
pub struct Pooler {
    child: Child,
    _dir: TempDir,
    port: u16,
}

impl Pooler {
    /// `None`: it is not installed.
    pub fn before(server: &Postgres) -> Option<Self> {
        let version = Command::new("pgbouncer").arg("--version").stdout(Stdio::null()).status();
        if !version.is_ok_and(|status| status.success()) {
            eprintln!("skipped: there is no pgbouncer");
            return None;
        }
        let (dir, port) = (folder(), free_port());
        let settings = format!(
            "[databases]\npostgres = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\n\
             listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n\
             pool_mode = transaction\ndefault_pool_size = 3\n",
            server.port
        );
        fs::write(dir.path().join("pgbouncer.ini"), settings).expect("it is written");
        let child = program_of(dir.path(), Path::new("pgbouncer"))
            .args(["--quiet", "pgbouncer.ini"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        wait_for("the pooler", || TcpStream::connect(("127.0.0.1", port)).is_ok());
        Some(Self { child, _dir: dir, port })
    }

    /// Runs SQL in any of the sessions, past the store.
    pub fn run(&self, sql: &str) -> String {
        run(&self.url(), sql).unwrap_or_else(|| panic!("it fails: {sql}"))
    }

    /// The address for clients.
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/postgres", self.port)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lets the user of the servers, and nobody else, read a file.
pub fn give(file: &Path) {
    fs::set_permissions(file, fs::Permissions::from_mode(0o600)).expect("a file");
    own(file);
}

fn own(path: &Path) {
    if is_root() {
        let owned = Command::new("chown").arg("postgres").arg(path).status();
        assert!(owned.is_ok_and(|status| status.success()), "there is a user postgres");
    }
}

fn run(url: &str, sql: &str) -> Option<String> {
    let psql = PROGRAMS.as_ref().expect("it is installed").join("psql");
    let asked = Command::new(psql)
        .args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-c", sql, url])
        .env("PGCONNECT_TIMEOUT", "5")
        .output();
    let asked = asked.expect("psql runs");
    asked.status.success().then(|| String::from_utf8_lossy(&asked.stdout).trim().to_owned())
}

/// A server that waits for a disk, which may take seconds on a busy machine, answers no one.
fn folder() -> TempDir {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let dir = dir.expect("a directory");
    own(dir.path());
    dir
}

fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|of| of.uid() == 0)
}

fn program(name: &str, dir: &Path) -> Command {
    program_of(dir, &PROGRAMS.as_ref().expect("it is installed").join(name))
}

fn program_of(dir: &Path, program: &Path) -> Command {
    let mut command = if is_root() {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]);
        command.arg(program);
        command
    } else {
        Command::new(program)
    };
    command.current_dir(dir);
    command
}
