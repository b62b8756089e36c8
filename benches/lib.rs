//! What more than one bench needs. What is measured is in the benches: `cargo bench -p benches --bench
//! layer`.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A Redis of this bench's own, on a free port. It ends with this value.
#[derive(Debug)]
pub struct Server {
    child: Child,
    pub port: u16,
}

impl Server {
    /// `None`, with a line about it, where there is no server. `REDIS_SERVER` names another one.
    pub fn start() -> Option<Self> {
        let binary = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let free = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("it").port();
        drop(free);
        let child = Command::new(&binary)
            .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
            .args(["--dir", &std::env::temp_dir().display().to_string()])
            .stdout(Stdio::null())
            .spawn();
        let Ok(child) = child else {
            println!("skipped: there is no {binary}");
            return None;
        };
        let server = Self { child, port };
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            std::thread::sleep(Duration::from_millis(10));
        }
        Some(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
