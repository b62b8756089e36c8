//! A Redis that is started, and harmed.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// A server in a directory of its own, which ends with this value.
pub struct Server {
    child: Option<Child>,
    dir: TempDir,
    pub port: u16,
}

impl Server {
    /// One that has on disk what it has acknowledged, so that it loses nothing when it is killed.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a port");
        let port = listener.local_addr().expect("it has an address").port();
        drop(listener);
        let dir = tempfile::tempdir().expect("there is room for files");
        let mut server = Self { child: None, dir, port };
        server.restart();
        server
    }

    /// Whether there is a server to start.
    pub fn is_installed() -> bool {
        Command::new(binary()).arg("--version").stdout(Stdio::null()).status().is_ok()
    }

    /// Starts it with what is on its disk.
    pub fn restart(&mut self) {
        self.kill();
        let child = Command::new(binary())
            .args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--appendonly", "yes", "--appendfsync", "always", "--loglevel", "warning"])
            .args(["--repl-diskless-sync-delay", "0", "--dir"])
            .arg(self.dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        self.child = Some(child);
        self.wait_for(&["PING"], "PONG");
    }

    /// Asks until the answer has something in it.
    pub fn wait_for(&self, command: &[&str], answer: &str) {
        let began = Instant::now();
        while !self.ask(command).is_some_and(|text| text.contains(answer)) {
            assert!(began.elapsed() < Duration::from_secs(20), "{command:?} is never {answer}");
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// `SIGSTOP`.
    pub fn freeze(&self) {
        self.child.iter().for_each(|child| signal("-STOP", child));
    }

    /// `SIGCONT`.
    pub fn thaw(&self) {
        self.child.iter().for_each(|child| signal("-CONT", child));
    }

    /// The first bytes of the answer, if there is one.
    pub fn ask(&self, command: &[&str]) -> Option<String> {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        let mut request = format!("*{}\r\n", command.len());
        for word in command {
            request += &format!("${}\r\n{word}\r\n", word.len());
        }
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = vec![0; 4096];
        let length = stream.read(&mut answer).ok().filter(|length| *length > 0)?;
        answer.truncate(length);
        Some(String::from_utf8_lossy(&answer).into_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Sends a signal to a process.
pub fn signal(signal: &str, child: &Child) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status();
    assert!(status.is_ok_and(|status| status.success()), "kill {signal} works");
}

fn binary() -> String {
    std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned())
}
