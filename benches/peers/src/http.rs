//! axum over loopback: the CPU time that a server needs for a request, by what the system says of its
//! threads, while `wrk` asks. Each contestant is a server of its own; they are asked in turns.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use axum::routing::get;
use tower::util::MapResponseLayer;
use tower_layer::layer_fn;
use tower_service::Service;

use crate::batch::Verdict;
use crate::layers::{self, BY_HAND, OURS, TOWER_GOVERNOR};
use crate::tower_governor;

pub const BARE: &str = "bare service";

/// What axum itself needs for any layer.
pub const NOTHING: &str = "a layer that does nothing";

pub const CONTESTANTS: [(&str, Verdict); 7] = [
    (BARE, Verdict::Allowed),
    (NOTHING, Verdict::Allowed),
    (BY_HAND, Verdict::Allowed),
    (OURS, Verdict::Allowed),
    (OURS, Verdict::Refused),
    (TOWER_GOVERNOR, Verdict::Allowed),
    (TOWER_GOVERNOR, Verdict::Refused),
];

/// `peers serve WHO allowed|refused`: a server that tells its port and serves until it is ended.
pub fn serve(mut args: impl Iterator<Item = String>) {
    let mut next = || args.next().expect("serve WHO allowed|refused");
    let (who, verdict) = (next(), Verdict::parse(&next()));
    let app = Router::new().route("/", get(async || "hello\n"));
    let app = match who.as_str() {
        BARE => app,
        NOTHING => app.layer(layer_fn(Through)),
        BY_HAND => app.layer(MapResponseLayer::new(|mut response: Response| {
            layers::insert_four(response.headers_mut());
            response
        })),
        OURS => app.layer(layers::ours(verdict)),
        TOWER_GOVERNOR => app.layer(tower_governor!(verdict)),
        _ => panic!("there is no server {who}"),
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        println!("{}", listener.local_addr().expect("it is bound").port());
        let app = app.into_make_service_with_connect_info::<SocketAddr>();
        axum::serve(listener, app).await.expect("it serves");
    });
}

#[derive(Clone)]
struct Through<S>(S);

impl<S: Service<R>, R> Service<R> for Through<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: R) -> S::Future {
        self.0.call(request)
    }
}

/// Why this can't be measured here, if it can't.
pub fn obstacle() -> Option<&'static str> {
    if Command::new("wrk").arg("-v").output().is_err() {
        return Some("there is no wrk");
    }
    cpu(std::process::id()).is_none().then_some("the system doesn't tell the CPU time of threads")
}

/// Microseconds of CPU for a request: for each contestant, those of each round.
pub fn measure(rounds: usize, span: Duration) -> Vec<Vec<f64>> {
    let servers: Vec<Server> =
        CONTESTANTS.iter().map(|&(who, verdict)| Server::start(who, verdict)).collect();
    let mut measured: Vec<Vec<f64>> = servers.iter().map(|_| vec![]).collect();
    for round in 0..=rounds {
        for i in 0..servers.len() {
            let i = (i + round) % servers.len();
            let each = servers[i].load(span);
            // The first warms up.
            if round > 0 {
                measured[i].push(each);
            }
        }
    }
    measured
}

struct Server {
    child: Child,
    port: u16,
}

impl Server {
    fn start(who: &str, verdict: Verdict) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut child = on_core(0, &program.to_string_lossy())
            .args(["serve", who, verdict.id()])
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("it is piped");
        BufReader::new(stdout).read_line(&mut line).expect("it tells its port");
        let server = Self { child, port: line.trim().parse().expect("a port") };
        assert_eq!(server.status(), "200", "the first request of {who}");
        let expected = if verdict == Verdict::Allowed { "200" } else { "429" };
        assert_eq!(server.status(), expected, "the second request of {who}");
        server
    }

    fn status(&self) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("it listens");
        stream
            .write_all(b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .expect("it reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        text.split(' ').nth(1).expect("a status").to_owned()
    }

    /// Microseconds of CPU for a request.
    fn load(&self, span: Duration) -> f64 {
        let before = cpu(self.child.id()).expect("it runs");
        let output = on_core(1, "wrk")
            .args(["-t1", "-c16", &format!("-d{}s", span.as_secs())])
            .arg(format!("http://127.0.0.1:{}/", self.port))
            .output()
            .expect("wrk runs");
        let after = cpu(self.child.id()).expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout);
        let requests = text
            .lines()
            .find_map(|line| line.split_once(" requests in "))
            .and_then(|(count, _)| count.trim().parse::<f64>().ok())
            .expect("wrk counts");
        (after - before) as f64 / 1_000.0 / requests
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The server and the clients each have a core, where there are two.
fn on_core(core: usize, program: &str) -> Command {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    if cores < 2 || Command::new("taskset").arg("--version").output().is_err() {
        return Command::new(program);
    }
    let mut command = Command::new("taskset");
    command.args(["-c", &core.to_string(), program]);
    command
}

/// Nanoseconds that the threads of a process have run.
fn cpu(pid: u32) -> Option<u64> {
    let mut sum = 0;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let text = fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        sum += text.split(' ').next()?.parse::<u64>().ok()?;
    }
    Some(sum)
}
