//! The examples as a reader starts them: their binaries, over real sockets.
//!
//! `cargo test` builds them beforehand; for `cargo test --test examples` alone, run
//! `cargo build --examples` first.

use std::collections::HashMap;
use std::env::{self, consts::EXE_SUFFIX};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

fn example(name: &str) -> Command {
    // The test is target/<profile>/deps/examples-<hash>.
    let test = env::current_exe().expect("tests run from a file");
    let profile = test.ancestors().nth(2).expect("a file in target/<profile>/deps");
    let binary = profile.join("examples").join(format!("{name}{EXE_SUFFIX}"));
    assert!(binary.exists(), "no {}: run `cargo build --examples`", binary.display());
    let mut command = Command::new(binary);
    for setting in ["ADDR", "LIMIT", "LIMITS"] {
        command.env_remove(setting);
    }
    command
}

/// An example that serves, until it is dropped.
struct Server {
    child: Child,
    address: String,
    /// Kept open: printing to a closed pipe would end the example.
    stdout: BufReader<ChildStdout>,
}

impl Server {
    fn start(name: &str) -> Self {
        Self::start_with(example(name).env("LIMIT", "3"))
    }

    fn start_with(command: &mut Command) -> Self {
        let command = command.env("ADDR", "127.0.0.1:0").stdout(Stdio::piped());
        let mut child = command.spawn().expect("an example starts");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        // Whatever goes wrong from here on, the child ends with the value.
        let mut server = Self { child, address: String::new(), stdout };
        let mut line = String::new();
        server.stdout.read_line(&mut line).expect("an example prints what to try");
        let (_, url) = line.split_once("http://").unwrap_or_else(|| panic!("no URL in {line:?}"));
        server.address = url[..url.find('/').expect("a path")].to_owned();
        server
    }

    fn send(&self, line: &str) -> Answer {
        let (request, field) = line.split_once(", ").unwrap_or((line, "accept: */*"));
        let mut stream = TcpStream::connect(&self.address).expect("the example listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("not zero");
        let address = &self.address;
        write!(
            stream,
            "{request} HTTP/1.1\r\nhost: {address}\r\n{field}\r\nconnection: close\r\n\r\n"
        )
        .expect("the example reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        Answer::parse(&text)
    }

    /// Sends all the requests within one window. Between two of them the minute may turn: the
    /// answers then tell of two resets, and it is done again, from the start of a window.
    fn round(&self, requests: &[&str]) -> Vec<Answer> {
        let resets = |answers: &[Answer]| {
            let mut resets: Vec<_> =
                answers.iter().map(|a| a.number("x-ratelimit-reset")).collect();
            resets.dedup();
            resets.len()
        };
        let first: Vec<_> = requests.iter().map(|request| self.send(request)).collect();
        if resets(&first) == 1 {
            return first;
        }
        // What was counted after the turn has to be gone as well.
        let last = first.last().expect("a request").number("x-ratelimit-reset");
        while std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_secs() < last {
            std::thread::sleep(Duration::from_millis(100));
        }
        let second: Vec<_> = requests.iter().map(|request| self.send(request)).collect();
        assert_eq!(resets(&second), 1, "a minute is enough for {requests:?}");
        second
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _killed = self.child.kill();
        let _waited = self.child.wait();
    }
}

struct Answer {
    status: u16,
    fields: HashMap<String, String>,
    body: String,
}

impl Answer {
    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        let (status, fields) = head.split_once("\r\n").expect("fields");
        let fields = fields.lines().map(|line| {
            let (name, value) = line.split_once(": ").expect("a name and a value");
            (name.to_ascii_lowercase(), value.to_owned())
        });
        Self {
            status: status.split(' ').nth(1).and_then(|s| s.parse().ok()).expect("a status"),
            fields: fields.collect(),
            body: body.to_owned(),
        }
    }

    fn field(&self, name: &str) -> Option<&str> {
        self.fields.get(name).map(String::as_str)
    }

    fn number(&self, name: &str) -> u64 {
        let value = self.field(name).unwrap_or_else(|| panic!("no {name}"));
        value.parse().unwrap_or_else(|_| panic!("{name}: {value}"))
    }

    /// A request that passed, as the `used`th of `limit`.
    fn passed(&self, used: u64, limit: u64) {
        assert_eq!(self.status, 200, "{}", self.body);
        assert_eq!(self.number("x-ratelimit-limit"), limit);
        assert_eq!(self.number("x-ratelimit-used"), used);
        assert_eq!(self.number("x-ratelimit-remaining"), limit - used);
        assert_eq!(self.number("x-ratelimit-reset") % 60, 0);
        assert_eq!(self.field("retry-after"), None);
    }

    fn refused(&self, limit: u64) {
        assert_eq!(self.status, 429, "{}", self.body);
        assert_eq!(self.number("x-ratelimit-limit"), limit);
        assert_eq!(self.number("x-ratelimit-remaining"), 0);
        assert_eq!(self.number("x-ratelimit-used"), limit);
        assert_eq!(self.number("x-ratelimit-reset") % 60, 0);
        assert!((1..=60).contains(&self.number("retry-after")));
        assert_eq!(self.field("cache-control"), Some("no-store"));
        assert_eq!(self.field("content-type"), Some("application/problem+json"));
        assert!(self.body.contains("API rate limit exceeded"), "{}", self.body);
    }
}

/// Three pass, the fourth is refused.
fn three_pass(answers: &[Answer], resource: Option<&str>) {
    assert_eq!(answers.len(), 4);
    for (used, answer) in (1..).zip(&answers[..3]) {
        answer.passed(used, 3);
    }
    answers[3].refused(3);
    assert!(answers.iter().all(|answer| answer.field("x-ratelimit-resource") == resource));
}

#[test]
fn quickstart() {
    let server = Server::start("quickstart");
    let answers = server.round(&["GET /"; 4]);
    assert_eq!(answers[0].body, "hello\n");
    three_pass(&answers, None);
}

#[test]
fn quickstart_grants_sixty() {
    let server = Server::start_with(&mut example("quickstart"));
    let answers = server.round(&["GET /"; 61]);
    answers[0].passed(1, 60);
    answers[59].passed(60, 60);
    answers[60].refused(60);
}

#[test]
fn hyper() {
    let server = Server::start("hyper");
    let answers = server.round(&["GET /"; 4]);
    assert_eq!(answers[0].body, "hello\n");
    three_pass(&answers, None);
}

#[test]
fn per_route() {
    let server = Server::start("per_route");
    logins_and_searches(&server);
    let server = Server::start_with(&mut example("per_route"));
    let answers = server.round(&["POST /login", "GET /search"]);
    answers[0].passed(1, 5);
    answers[1].passed(1, 30);
}

#[test]
fn config() {
    let server = Server::start("config");
    logins_and_searches(&server);
}

#[test]
fn config_from_a_file() {
    let file = format!("{}/limits.toml", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&file, "login = \"1/minute\"\nsearch = \"7/minute, 70/hour\"\n")
        .expect("a file");
    let server = Server::start_with(example("config").env("LIMITS", &file));
    let answers = server.round(&["POST /login", "POST /login", "GET /search"]);
    answers[0].passed(1, 1);
    answers[1].refused(1);
    answers[2].passed(1, 7);

    std::fs::write(&file, "login = \"1/minute\"\nsearch = \"7/fortnight\"\n").expect("a file");
    let ended = example("config").env("LIMITS", &file).output().expect("it ends");
    assert!(!ended.status.success());
    let told = String::from_utf8_lossy(&ended.stderr);
    assert!(told.contains("line 2") && told.contains("expected a unit"), "{told}");
}

fn logins_and_searches(server: &Server) {
    let (login, search) = ("POST /login", "GET /search");
    let answers = server.round(&[login, search, login, search, login, search, login, search]);
    let (logins, searches): (Vec<_>, Vec<_>) =
        (0..).zip(answers).partition(|(i, _): &(usize, _)| i % 2 == 0);
    let answers = |half: Vec<(usize, Answer)>| half.into_iter().map(|(_, answer)| answer);
    three_pass(&answers(logins).collect::<Vec<_>>(), Some("login"));
    three_pass(&answers(searches).collect::<Vec<_>>(), Some("search"));
}

#[test]
fn custom_key() {
    let server = Server::start("custom_key");
    let (alpha, beta) = ("GET /, x-api-key: alpha", "GET /, x-api-key: beta");
    let (made_up, none) = ("GET /, x-api-key: made-up", "GET /");
    let answers = server.round(&[
        alpha, alpha, alpha, alpha, // spent,
        beta,  // but not beta's,
        none, made_up, made_up, none, // nor the address's, which made-up keys share
    ]);
    three_pass(&answers[..4], None);
    answers[4].passed(1, 3);
    three_pass(&answers[5..], None);
}

#[test]
fn jobs() {
    let ended = example("jobs").env("LIMIT", "2").output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{told}");
    // Two, and four reserved; the second is given back, and another one takes its place.
    let sent = told.lines().filter(|line| line.ends_with("is sent")).count();
    assert!(sent >= 6, "{told}");
    assert!(told.contains("a batch of 2 may be sent"), "{told}");
}

#[test]
fn vectors() {
    let ended = example("vectors").output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{told}");
    assert!(told.trim_end().ends_with(" traces passed, 0 failed"), "{told}");

    // One trace whose second answer is wrong on purpose.
    let file = format!("{}/wrong.json", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&file, WRONG).expect("a file");
    let ended = example("vectors").arg(&file).output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("wrong step 1: "), "{told}");
    assert!(told.trim_end().ends_with("0 traces passed, 1 failed"), "{told}");
}

const WRONG: &str = r#"{"traces": [{
    "id": "wrong",
    "quotas": [{"limit": 1, "window_ms": 60000}],
    "steps": [
        {"op": "charge", "at_ms": 1700000040000, "cost": 1, "expect":
            {"allowed": true, "remaining": [0], "used": [1], "reset_ms": [1700000100000]}},
        {"op": "charge", "at_ms": 1700000040001, "cost": 1, "expect":
            {"allowed": true, "remaining": [0], "used": [1], "reset_ms": [1700000100000]}}
    ]
}]}"#;
