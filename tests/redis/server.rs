//! Servers of a test's own.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::sync::Mutex;

/// A server process in a directory of its own. It ends with this value, also when a test panics.
pub(crate) struct Server {
    child: Option<Child>,
    dir: TempDir,
    pub(crate) port: u16,
    args: Vec<String>,
    env: Vec<(&'static str, String)>,
}

impl Server {
    /// `None`: no server is installed, and none is required.
    pub(crate) fn start() -> Option<Self> {
        Self::with(&["--save", ""])
    }

    /// A server with further options, such as `["--appendonly", "yes"]`.
    pub(crate) fn with(args: &[&str]) -> Option<Self> {
        Self::on(free_port(), args)
    }

    pub(crate) fn on(port: u16, args: &[&str]) -> Option<Self> {
        Self::on_with_env(port, args, Vec::new())
    }

    /// A server whose clock is ahead by so many seconds. `None` also where there is no compiler for what
    /// shifts it.
    pub(crate) fn ahead(seconds: i64) -> Option<Self> {
        let library = tempfile::Builder::new().suffix(".so").tempfile().expect("a file");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/redis/shifted_clock.c");
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-o"])
            .arg(library.path())
            .arg(source)
            .status();
        if !compiled.is_ok_and(|status| status.success()) {
            eprintln!("skipped: there is no C compiler");
            return None;
        }
        let path = library.path().display().to_string();
        let env = vec![("LD_PRELOAD", path), ("CLOCK_SHIFT", seconds.to_string())];
        // It is loaded when the server answers.
        Self::on_with_env(free_port(), &["--save", ""], env)
    }

    fn on_with_env(port: u16, args: &[&str], env: Vec<(&'static str, String)>) -> Option<Self> {
        if !installed() {
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        // A Sentinel writes down what it knows; a file comes before all other options.
        let config = dir.path().join("server.conf");
        std::fs::write(&config, "").expect("it is written");
        let mut all = vec![config.display().to_string()];
        all.extend(args.iter().map(|arg| (*arg).to_owned()));
        let mut server = Self { child: None, dir, port, args: all, env };
        server.restart();
        Some(server)
    }

    /// Starts it on the same port, in the same directory.
    pub(crate) fn restart(&mut self) {
        assert!(self.child.is_none(), "it runs");
        let child = Command::new(binary())
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .args(&self.args)
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1"])
            .args(["--dir", &self.dir.path().display().to_string(), "--loglevel", "warning"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the server starts");
        self.child = Some(child);
        // Under TLS there is no plain port to ask.
        if self.port != 0 {
            wait_for("the server to answer", || ping(self.port));
        }
    }

    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// `SIGSTOP` and `SIGCONT`: a machine that hangs, and comes to.
    pub(crate) fn freeze(&self) {
        self.signal("-STOP");
    }

    pub(crate) fn thaw(&self) {
        self.signal("-CONT");
    }

    fn signal(&self, signal: &str) {
        let id = self.child.as_ref().expect("it runs").id().to_string();
        let status = Command::new("kill").args([signal, &id]).status().expect("kill runs");
        assert!(status.success());
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// Asks the server itself, past the store.
    pub(crate) fn ask<T: redis::FromRedisValue>(&self, command: &[&str]) -> T {
        ask(&self.url(), command).expect("the server answers")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(crate) fn ask<T: redis::FromRedisValue>(url: &str, command: &[&str]) -> redis::RedisResult<T> {
    let client = redis::Client::open(url)?;
    let mut connection = client.get_connection_with_timeout(Duration::from_secs(2))?;
    connection.set_read_timeout(Some(Duration::from_secs(5)))?;
    redis::cmd(command[0]).arg(&command[1..]).query(&mut connection)
}

pub(crate) fn free_port() -> u16 {
    // A cluster's second port is 10,000 above.
    loop {
        let port =
            TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("it").port();
        if port < 55_000 {
            return port;
        }
    }
}

pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(30), "waited too long for {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Tests that measure time take this, and have the machine to themselves.
pub(crate) static ALONE: Mutex<()> = Mutex::const_new(());

fn ping(port: u16) -> bool {
    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else { return false };
    let _ = stream.set_read_timeout(Some(Duration::from_secs(1)));
    let mut answer = [0; 5];
    // A server with passwords answers -NOAUTH, which is an answer.
    stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut answer).is_ok()
        && (&answer == b"+PONG" || &answer == b"-NOAU")
}

fn binary() -> String {
    std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}

fn installed() -> bool {
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
