//! Redis or Valkey, for one test: started on a free port, killed, frozen, started again.
//!
//! `REDIS_SERVER=valkey-server` chooses another binary. Where there is none, tests are skipped with a
//! line about it, or fail if `REQUIRE_REDIS` is set.

use std::hash::{BuildHasher, RandomState};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::sync::Mutex;

/// A server process in a directory of its own. The process ends with this value, also when a test
/// panics.
pub struct Server {
    child: Option<Child>,
    dir: TempDir,
    pub port: u16,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
}

/// A library that, preloaded, shifts the clocks of a process. `None` where there is no C compiler.
pub fn shifted_clock() -> Option<tempfile::NamedTempFile> {
    let library = tempfile::Builder::new().suffix(".so").tempfile().expect("a file");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/shifted_clock.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-o"])
        .arg(library.path())
        .arg(source)
        .status();
    if !compiled.is_ok_and(|status| status.success()) {
        eprintln!("skipped: there is no C compiler");
        return None;
    }
    Some(library)
}

impl Server {
    /// A server that writes nothing to its disk. `None`: no server is installed, and none is
    /// required.
    pub fn start() -> Option<Self> {
        Self::with(&["--save", ""])
    }

    /// A server with further options, such as `["--appendonly", "yes"]`.
    pub fn with(args: &[&str]) -> Option<Self> {
        Self::on_free_port(args, &[])
    }

    /// A server with options, on this port; 0 if an option names the port.
    pub fn on(port: u16, args: &[&str]) -> Option<Self> {
        let mut server = Self::prepare(port, args, Vec::new())?;
        server.restart();
        Some(server)
    }

    /// A server whose clock is ahead by some seconds. `None` also where there is no C compiler for
    /// the library that shifts the clock.
    pub fn ahead(seconds: i64) -> Option<Self> {
        let library = shifted_clock()?;
        let path = library.path().display().to_string();
        let env = [("LD_PRELOAD", path), ("CLOCK_SHIFT", seconds.to_string())];
        // The library may go once the server has loaded it, which it has when it answers.
        Self::on_free_port(&["--save", ""], &env)
    }

    /// Another process may have got the port meanwhile, and the server then ends at once.
    fn on_free_port(args: &[&str], env: &[(&'static str, String)]) -> Option<Self> {
        for _ in 0..10 {
            let mut server = Self::prepare(free_port(), args, env.to_vec())?;
            if server.starts() {
                return Some(server);
            }
        }
        panic!("the server ends at once, on each of ten ports");
    }

    fn prepare(port: u16, args: &[&str], env: Vec<(&'static str, String)>) -> Option<Self> {
        if !installed() {
            return None;
        }
        // A server that waits for a disk, which may take seconds on a busy machine, answers no one.
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let dir = dir.expect("a directory");
        // Sentinel keeps its state in this file, which comes before all other options.
        let config = dir.path().join("server.conf");
        std::fs::write(&config, "").expect("a file");
        let mut all = vec![config.display().to_string()];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        Some(Self { child: None, dir, port, args: all, env })
    }

    /// Starts the server again, on the same port and in the same directory.
    pub fn restart(&mut self) {
        assert!(self.starts(), "the server ends at once: is its port {} taken?", self.port);
    }

    /// Starts the process, and returns whether the server answers. If not, the process has ended.
    fn starts(&mut self) -> bool {
        assert!(self.child.is_none(), "the server runs");
        let mut child = Command::new(binary())
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .args(&self.args)
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--dir", &self.dir.path().display().to_string(), "--loglevel", "warning"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        // Under TLS there is no plain port to ask.
        let mut ended = false;
        if self.port != 0 {
            wait_for("the server to answer", || {
                ended = child.try_wait().expect("a process").is_some();
                ended || ping(self.port)
            });
        }
        self.child = (!ended).then_some(child);
        !ended
    }

    /// Kills the server, which may have ended before.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// `SIGSTOP`: the server hangs.
    pub fn freeze(&self) {
        signal(self.process(), "-STOP");
    }

    /// `SIGCONT`: the server goes on.
    pub fn thaw(&self) {
        signal(self.process(), "-CONT");
    }

    /// Of the process.
    pub fn id(&self) -> u32 {
        self.process().id()
    }

    fn process(&self) -> &Child {
        self.child.as_ref().expect("the server runs")
    }

    /// The address for clients.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Waits until so many apps have connected. An app that has not yet counts by itself.
    pub fn wait_for_apps(&self, apps: usize) {
        // One more client asks for the list.
        let clients = || self.ask::<String>(&["CLIENT", "LIST"]).lines().count();
        wait_for("the apps to connect", || clients() > apps);
    }

    /// Sends a command to the server, past the store. A live Sentinel may need seconds to answer
    /// where it waits for a disk to keep its state.
    pub fn ask<T: redis::FromRedisValue>(&self, command: &[&str]) -> T {
        ask_within(Duration::from_secs(30), &self.url(), command).expect("the server answers")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a command to the server at an address.
pub fn ask<T: redis::FromRedisValue>(url: &str, command: &[&str]) -> redis::RedisResult<T> {
    ask_within(Duration::from_secs(5), url, command)
}

fn ask_within<T: redis::FromRedisValue>(
    patience: Duration,
    url: &str,
    command: &[&str],
) -> redis::RedisResult<T> {
    let client = redis::Client::open(url)?;
    let mut connection = client.get_connection_with_timeout(patience)?;
    connection.set_read_timeout(Some(patience))?;
    redis::cmd(command[0]).arg(&command[1..]).query(&mut connection)
}

/// A port that no process uses now, and that this process gets once. Ports of outgoing connections
/// are higher, so none of these takes a killed server's port before the server starts again.
pub fn free_port() -> u16 {
    const FIRST: u16 = 10_000;
    /// The bus of a cluster's node is so much above the node's port.
    const BUS: u16 = 10_000;
    static NEXT: LazyLock<AtomicU16> =
        LazyLock::new(|| AtomicU16::new(RandomState::new().hash_one(()) as u16));
    let is_free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        let port = FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % BUS;
        if is_free(port) && is_free(port + BUS) {
            return port;
        }
    }
}

/// Waits until `done`, for half a minute at most.
pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited too long for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Tests that measure time lock this, and do not run beside each other.
pub static ALONE: Mutex<()> = Mutex::const_new(());

fn ping(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let mut answer = [0; 5];
    // A server with passwords answers -NOAUTH.
    stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && (&answer == b"+PONG" || &answer == b"-NOAU")
}

/// Sends a signal to a process.
pub fn signal(process: &Child, signal: &str) {
    let id = process.id().to_string();
    let status = Command::new("kill").args([signal, &id]).status().expect("kill runs");
    assert!(status.success(), "kill {signal} works");
}

fn binary() -> String {
    std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

/// Returns whether there is a server to start.
pub fn installed() -> bool {
    let version = Command::new(binary()).arg("--version").stdout(Stdio::null()).status();
    if version.is_ok_and(|status| status.success()) {
        return true;
    }
    let binary = binary();
    assert!(
        std::env::var("REQUIRE_REDIS").is_err(),
        "REQUIRE_REDIS is set, and there is no {binary}"
    );
    eprintln!("skipped: there is no {binary}");
    false
}
