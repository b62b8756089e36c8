//! The examples as a reader starts them: their binaries, over real sockets.
//!
//! `scripts/test` builds them beforehand; for `cargo test -p tests --test examples` alone, run
//! `cargo build --workspace --bins --examples` first.

use std::collections::HashMap;
use std::env::{self, consts::EXE_SUFFIX};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

mod admin;
mod ai_gateway;
mod choose_limit;
mod hostile_logs;
mod playground;
mod tutorial;

fn example(name: &str) -> Command {
    // The test is target/<profile>/deps/examples-<hash>.
    let test = env::current_exe().expect("tests run from a file");
    let profile = test.ancestors().nth(2).expect("a file in target/<profile>/deps");
    let file = format!("{name}{EXE_SUFFIX}");
    // An example of a package, or a package of its own.
    let mut binaries = [profile.join("examples").join(&file), profile.join(file)].into_iter();
    let binary = binaries.find(|binary| binary.exists());
    let binary = binary.unwrap_or_else(|| panic!("no {name}: see the head of this file"));
    let mut command = Command::new(binary);
    let settings = [
        "ADDR",
        "COUNTS",
        "LIMIT",
        "LIMITS",
        "PLANS",
        "CORE",
        "ANON",
        "SEARCH",
        "STATUS",
        "HEADERS",
        "WINDOW",
        "REDIS_URL",
    ];
    for setting in settings {
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
        // The child ends with this value, whatever fails from here on.
        let mut server = Self { child, address: String::new(), stdout };
        let mut line = String::new();
        while !line.contains("http://") {
            line.clear();
            let read = server.stdout.read_line(&mut line).expect("an example prints what to try");
            assert!(read > 0, "the example has ended");
        }
        let (_, url) = line.split_once("http://").expect("as looked for");
        server.address = url[..url.find('/').expect("a path")].to_owned();
        server
    }

    fn send(&self, line: &str) -> Answer {
        let (request, field) = line.split_once(", ").unwrap_or((line, "accept: */*"));
        self.send_body(request, field, "")
    }

    fn send_body(&self, request: &str, field: &str, body: &str) -> Answer {
        let mut stream = TcpStream::connect(&self.address).expect("the example listens");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("not zero");
        let (address, length) = (&self.address, body.len());
        write!(
            stream,
            "{request} HTTP/1.1\r\nhost: {address}\r\n{field}\r\ncontent-length: {length}\r\n\
             connection: close\r\n\r\n{body}"
        )
        .expect("the example reads");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        Answer::parse(&text)
    }

    /// Sends all requests within one window. If the minute ends between two of them, the answers
    /// have two resets, and all are sent again from the start of a window.
    fn round(&self, requests: &[&str]) -> Vec<Answer> {
        self.round_of(requests, |request| self.send(request))
    }

    fn round_of<T>(&self, requests: &[T], send: impl Fn(&T) -> Answer) -> Vec<Answer> {
        let first: Vec<_> = requests.iter().map(&send).collect();
        if resets(&first) == 1 {
            return first;
        }
        // The requests after the turn count, too, so they have to expire before the next try.
        let last = first.last().expect("a request").number("x-ratelimit-reset");
        while std::time::UNIX_EPOCH.elapsed().expect("after 1970").as_secs() < last {
            std::thread::sleep(Duration::from_millis(100));
        }
        let second: Vec<_> = requests.iter().map(&send).collect();
        assert_eq!(resets(&second), 1, "a window is enough for {} requests", requests.len());
        second
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The server may have ended by itself.
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

/// The number of windows in the answers.
fn resets(answers: &[Answer]) -> usize {
    let mut resets: Vec<_> = answers.iter().map(|a| a.number("x-ratelimit-reset")).collect();
    resets.dedup();
    resets.len()
}

/// Sends all requests within one window that is too long to wait for: a restarted server has
/// counted nothing.
fn round_anew(start: impl Fn() -> Server, requests: &[&str]) -> Vec<Answer> {
    let round = |_| {
        let server = start();
        requests.iter().map(|request| server.send(request)).collect::<Vec<_>>()
    };
    (0..3).map(round).find(|answers| resets(answers) == 1).expect("windows that last longer")
}

/// Asserts that three requests pass and the fourth is refused.
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
    three_pass(&Server::start("quickstart").round(&["GET /"; 4]), None);
    let server = Server::start_with(&mut example("quickstart"));
    let answers = server.round(&["GET /"; 61]);
    answers[0].passed(1, 60);
    answers[59].passed(60, 60);
    answers[60].refused(60);
    as_in_the_readme("HTTP/1.1 200 OK", &answers[0]);
    as_in_the_readme("HTTP/1.1 429 Too Many Requests", &answers[60]);
}

/// The transcript in the README has the same headers and, except for times, the same values.
fn as_in_the_readme(status: &str, answer: &Answer) {
    let readme = include_str!("../../README.md");
    let (_, told) = readme.split_once(status).expect("a transcript");
    let (told, _) = told.split_once("\n```").expect("its end");
    let told = Answer::parse(&format!("{status}{told}").replace('\n', "\r\n"));
    let timeless = |answer: &Answer| {
        // The body has the wait, too.
        let times = ["content-length", "date", "retry-after", "x-ratelimit-reset"];
        let fields = answer.fields.clone().into_iter();
        fields
            .map(|(name, value)| match times.contains(&name.as_str()) {
                true => (name, String::new()),
                false => (name, value),
            })
            // Here curl would keep the connection.
            .filter(|(name, _)| name != "connection")
            .collect::<std::collections::BTreeMap<_, _>>()
    };
    assert_eq!(timeless(&told), timeless(answer));
    let body_of = |answer: &Answer| match answer.body.trim_end().split_once("\"retry_after\":") {
        Some((start, end)) => format!("{start}{}", end.trim_start_matches(char::is_numeric)),
        None => answer.body.trim_end().to_owned(),
    };
    assert_eq!(body_of(&told), body_of(answer));
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
    std::fs::write(
        &file,
        "login = \"1/minute\"\nsearch = \"7/minute, 70/hour\"\ninternal = \"unlimited\"\n",
    )
    .expect("a file");
    let server = Server::start_with(example("config").env("LIMITS", &file));
    let answers = server.round(&["POST /login", "POST /login", "GET /search"]);
    answers[0].passed(1, 1);
    answers[1].refused(1);
    answers[2].passed(1, 7);
    let unlimited = server.send("GET /internal");
    assert_eq!((unlimited.status, unlimited.field("x-ratelimit-limit")), (200, None));

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
fn plans() {
    let (free, pro) = ("GET /, authorization: Bearer free", "GET /, authorization: Bearer pro");
    let answers = round_anew(|| Server::start("plans"), &[free, free, free, free, pro]);
    for (used, answer) in (1..).zip(&answers[..3]) {
        answer.passed(used, 3);
    }
    assert_eq!(answers[3].status, 429);
    assert!((1..=3_600).contains(&answers[3].number("retry-after")));
    assert_eq!(answers[3].field("x-ratelimit-resource"), Some("api"));
    answers[4].passed(1, 3);

    let server = Server::start_with(&mut example("plans"));
    server.send(free).passed(1, 60);
    server.send("POST /, authorization: Bearer pro").passed(5, 5_000);
    assert_eq!(server.send("GET /").status, 401);
}

#[test]
fn database_plans() {
    let server = Server::start("database_plans");
    let (ann, ours) = ("GET /, authorization: Bearer ann", "GET /, authorization: Bearer ours");
    three_pass(&server.round(&[ann; 4]), Some("api"));
    server.send("GET /, authorization: Bearer bob").passed(1, 3);
    assert_eq!(server.send("GET /, authorization: Bearer made-up").status, 401);
    for _ in 0..5 {
        let unlimited = server.send(ours);
        assert_eq!((unlimited.status, unlimited.field("x-ratelimit-limit")), (200, None));
    }
}

#[test]
fn priority() {
    let (export, purchase) = ("GET /export", "POST /purchase");
    let start = || Server::start_with(example("priority").env("LIMIT", "5"));
    let answers = round_anew(start, &[export, export, export, export, export, purchase, purchase]);
    answers[3].passed(4, 4);
    answers[4].refused(4);
    answers[5].passed(5, 5);
    answers[6].refused(5);
}

#[test]
fn billing() {
    let server = Server::start("billing");
    let (ask, usage) =
        ("GET /, authorization: Bearer ann", "GET /usage, authorization: Bearer ann");
    for used in 1..=3 {
        server.send(ask).passed(used, 3);
    }
    assert_eq!(server.send(ask).status, 429);
    let plan = |limit: u32, used: u32| {
        format!(r#""plan":{{"limit":{limit},"used":{used},"remaining":{},"#, limit - used)
    };
    let answer = server.send(usage);
    assert!(answer.body.contains(&plan(3, 3)), "{}", answer.body);

    // Another limit for what is counted already.
    assert_eq!(server.send("POST /upgrade, authorization: Bearer ann").status, 200);
    assert_eq!(server.send(ask).status, 200);
    let answer = server.send(usage);
    assert!(answer.body.contains(&plan(10_000, 4)), "{}", answer.body);
    // Another customer has another count, and one without a token has none.
    server.send("GET /, authorization: Bearer yuki").passed(1, 3);
    assert_eq!(server.send("GET /").status, 401);
}

#[cfg(unix)]
#[test]
fn billing_after_a_deploy() {
    let folder = tempfile::tempdir().expect("a folder");
    let counts = folder.path().join("counts");
    let start = || Server::start_with(example("billing").env("LIMIT", "3").env("COUNTS", &counts));
    let ask = "GET /, authorization: Bearer ann";

    let mut server = start();
    for used in 1..=3 {
        server.send(ask).passed(used, 3);
    }
    let id = server.child.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().expect("kill runs").success());
    assert!(server.child.wait().expect("it ends").success());

    let server = start();
    assert_eq!(server.send(ask).status, 429);
    server.send("GET /, authorization: Bearer yuki").passed(1, 3);
}

#[test]
fn failed_logins() {
    let server = Server::start_with(&mut example("failed_logins"));
    let log_in = |password: &str| {
        let form = "content-type: application/x-www-form-urlencoded";
        server.send_body("POST /login", form, &format!("user=ali&password={password}"))
    };
    // Any number of right passwords passes, at most four at a time, since undecided attempts count.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..250 {
                    let answer = log_in("open+sesame");
                    assert_eq!((answer.status, &*answer.body), (200, "welcome, ali\n"));
                }
            });
        }
    });
    let answers = server.round_of(&["guess"; 6], |guess| log_in(guess));
    for (used, wrong) in (1..).zip(&answers[..5]) {
        assert_eq!(wrong.status, 401);
        assert_eq!(wrong.number("x-ratelimit-used"), used);
    }
    answers[5].refused(5);
}

#[test]
fn llm_tokens() {
    let server = Server::start_with(&mut example("llm_tokens"));
    let answers = server.round(&[
        "GET /whole?tokens=250",
        "GET /streamed?tokens=30",
        "GET /whole?tokens=0",
        "GET /whole?tokens=900",
        "GET /whole",
    ]);
    answers[0].passed(250, 1_000);
    // The estimate counts while the request is in flight, and the true cost from the next request
    // on.
    answers[1].passed(250 + 100, 1_000);
    answers[2].passed(250 + 30, 1_000);
    // The response cost more than was left, which was not known before: the rest is debt.
    assert_eq!(answers[3].status, 200);
    assert_eq!(answers[3].number("x-ratelimit-used"), 250 + 30 + 900);
    assert_eq!(answers[3].number("x-ratelimit-remaining"), 0);
    assert_eq!(answers[4].status, 429);
    assert_eq!(answers[4].number("x-ratelimit-used"), 250 + 30 + 900);
}

#[test]
fn outbound() {
    let ended = example("outbound").output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{told}");
    assert_eq!(told.lines().filter(|line| line.ends_with("200 OK")).count(), 12, "{told}");
}

#[test]
fn proxy_protocol() {
    let ended = example("proxy_protocol").output().expect("it ends");
    assert!(ended.status.success());
    let told = String::from_utf8_lossy(&ended.stdout);
    let [seven, eight, again]: [_; 3] = Vec::from_iter(told.lines()).try_into().expect("3 lines");
    assert_eq!([seven, eight], ["192.0.2.7: HTTP/1.1 200 OK", "192.0.2.8: HTTP/1.1 200 OK"]);
    assert_eq!(again, "192.0.2.7: HTTP/1.1 429 Too Many Requests");
}

/// Runs an example that asserts what it prints, and compares its output with docs/recipes.md.
fn as_in_the_recipes(mut example: Command, lines: usize) {
    let ended = example.output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{told}\n{}", String::from_utf8_lossy(&ended.stderr));
    assert_eq!(told.lines().count(), lines);
    let page = include_str!("../../docs/recipes.md");
    assert!(page.contains(&format!("\n```text\n{told}```\n")), "not in docs/recipes.md:\n{told}");
}

#[test]
fn recipes() {
    as_in_the_recipes(example("login"), 5);
    as_in_the_recipes(example("payment"), 4);
    as_in_the_recipes(example("password_reset"), 5);
}

#[test]
fn reload() {
    let file = format!("{}/reload.txt", env!("CARGO_TARGET_TMPDIR"));
    let server = Server::start_with(example("reload").env("LIMIT", "3").env("LIMITS", &file));
    three_pass(&server.round(&["GET /"; 4]), None);
    for (text, limit) in [("7/minute, 700/hour", 7), ("5/minute", 5)] {
        std::fs::write(&file, text).expect("a file");
        let follows = || server.send("GET /").number("x-ratelimit-limit") == limit;
        let in_time = (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            follows()
        });
        assert!(in_time, "it follows {text:?}");
    }
}

/// What its environment sets. `client_libraries` of `tests/it` has the app itself.
#[test]
fn github() {
    let limited = |status: u16, headers: &str| {
        let mut command = example("github");
        command.env("CORE", "7").env("ANON", "3").env("SEARCH", "2");
        Server::start_with(command.env("STATUS", status.to_string()).env("HEADERS", headers))
    };
    let limits = |server: &Server| {
        ["GET /user", "GET /user, authorization: token alpha", "GET /search/code"]
            .map(|request| server.send(request).number("x-ratelimit-limit"))
    };
    // Windows begin with the first request: there is time enough.
    for status in [403, 429] {
        let server = limited(status, "github");
        assert_eq!(limits(&server), [3, 7, 2]);
        let statuses =
            ["GET /user", "GET /user", "GET /repos/a/b"].map(|of| server.send(of).status);
        assert_eq!(statuses, [200, 200, status]);
    }
    assert_eq!(limits(&Server::start_with(&mut example("github"))), [60, 5_000, 30]);
    let answer = limited(403, "ietf").send("GET /user");
    assert_eq!(answer.field("ratelimit"), Some(r#""core:3/hour";r=2;t=3600"#));
    assert_eq!(answer.field("x-ratelimit-limit"), None);
    let answer = limited(403, "both").send("GET /user");
    assert_eq!(answer.field("ratelimit-policy"), Some(r#""core:3/hour";q=3;w=3600"#));
    assert_eq!(answer.number("x-ratelimit-limit"), 3);
}

#[test]
fn stacked() {
    let server = Server::start_with(&mut example("stacked"));
    let answers = server.round(&["GET /, x-api-key: alpha"; 6]);
    for (used, answer) in (1..).zip(&answers[..5]) {
        assert_eq!((answer.status, answer.number("x-ratelimit-used")), (200, used));
        assert_eq!(answer.field("x-ratelimit-resource"), Some("key"));
    }
    assert_eq!(answers[5].status, 429);
    assert_eq!(answers[5].number("x-ratelimit-limit"), 5);
    assert_eq!(answers[5].field("x-ratelimit-resource"), Some("key"));

    let server = Server::start_with(example("stacked").env("LIMIT", "0"));
    assert_eq!(server.send("GET /").field("x-ratelimit-resource"), Some("all"));
}

#[test]
fn tonic() {
    let server = Server::start_with(example("tonic").env("LIMIT", "2"));
    let ended = example("tonic").arg(format!("http://{}/", server.address)).output();
    let told = String::from_utf8(ended.expect("it ends").stdout).expect("text");
    let passed = told.lines().filter(|line| line.starts_with("serving; ")).count();
    // Four, where the minute turns meanwhile.
    assert!((2..=4).contains(&passed), "{told}");
    assert!(
        told.contains("ResourceExhausted: API rate limit exceeded: health:2/minute\n"),
        "{told}"
    );
    for field in ["retry-after: ", "x-ratelimit-remaining: 0\n", "x-ratelimit-resource: health\n"] {
        assert!(told.contains(field), "{told}");
    }
}

#[test]
fn behind_proxy() {
    let body = |server: &Server, header: &str| server.send(&format!("GET /, {header}")).body;
    let start = |settings: &[(&str, &str)]| {
        let settings = settings.iter().copied();
        Server::start_with(example("behind_proxy").envs(settings))
    };

    let nobody = start(&[]);
    assert_eq!(body(&nobody, "x-forwarded-for: 192.0.2.7"), "127.0.0.1\n");

    let server = start(&[("TRUSTED", "127.0.0.0/8, 10.0.0.0/8")]);
    assert_eq!(body(&server, "x-forwarded-for: 8.8.8.8, 192.0.2.7, 10.0.0.1"), "192.0.2.7\n");
    assert_eq!(body(&server, "x-forwarded-for: unknown"), "127.0.0.1\n");
    assert_eq!(body(&server, "forwarded: for=192.0.2.7"), "127.0.0.1\n");
    let mapped = body(&server, "x-forwarded-for: [::ffff:192.0.2.7]:4711");
    assert_eq!(mapped, "192.0.2.7\n");
    let v6 = body(&server, "x-forwarded-for: 2001:db8:1:2::7");
    assert_eq!(v6, "2001:db8:1:2::7 (2001:db8:1:2::/64)\n");

    let settings = [("TRUSTED", "127.0.0.1"), ("SOURCE", "forwarded"), ("PREFIX", "48")];
    let server = start(&settings);
    let v6 = body(&server, "forwarded: for=\"[2001:db8:1:2::7]:4711\";proto=https");
    assert_eq!(v6, "2001:db8:1:2::7 (2001:db8:1::/48)\n");

    let server = start(&[("TRUSTED", "127.0.0.1"), ("SOURCE", "cf-connecting-ip"), ("LIMIT", "3")]);
    let (one, other) = ("GET /, cf-connecting-ip: 192.0.2.1", "GET /, cf-connecting-ip: 192.0.2.2");
    let answers = server.round(&[other, one, one, one, one]);
    assert_eq!(answers[0].body, "192.0.2.2\n");
    answers[0].passed(1, 3);
    three_pass(&answers[1..], None);

    let wrong = example("behind_proxy").env("TRUSTED", "10.0.0/8").output().expect("it ends");
    let told = String::from_utf8_lossy(&wrong.stderr);
    assert!(!wrong.status.success() && told.contains("10.0.0/8"), "{told}");
}

#[test]
fn jobs() {
    let ended = example("jobs").env("LIMIT", "2").output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{told}");
    // Two mails leave at once and four are reserved. The second mail is refunded, and another takes
    // its place.
    let sent = told.lines().filter(|line| line.ends_with("is sent")).count();
    assert!(sent >= 6, "{told}");
    assert!(told.contains("a batch of 2 may be sent"), "{told}");
}

/// The example starts without a Redis; `tests/redis` has one.
#[test]
fn redis() {
    let nowhere = [("REDIS_URL", "redis://127.0.0.1:1/"), ("LIMIT", "3/minute")];
    let server = Server::start_with(example("redis").envs(nowhere));
    let answers = server.round(&["GET /, x-api-key: alice"; 4]);
    assert_eq!(answers[0].body, "hello\n");
    three_pass(&answers, Some("demo"));
}

#[test]
fn sqlite() {
    let file = format!("{}/example.db", env!("CARGO_TARGET_TMPDIR"));
    for end in ["", "-shm", "-wal"] {
        let _ = std::fs::remove_file(format!("{file}{end}"));
    }
    let ended = example("sqlite").args([&file, "alice"]).output().expect("it ends");
    let passed = String::from_utf8_lossy(&ended.stdout);
    let passed: u64 = passed.trim().parse().expect("a number");
    // Another thousand, if a minute has just ended.
    assert!((1_000..=2_000).contains(&passed), "{passed}");
}

#[test]
fn each_example_is_in_the_index_and_is_started_here() {
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    let stacks = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/stacks");
    let redis = concat!(env!("CARGO_MANIFEST_DIR"), "/../redis/examples");
    let index = include_str!("../../examples/README.md");
    let tests = concat!(env!("CARGO_MANIFEST_DIR"), "/examples");
    let tests = std::fs::read_dir(tests)
        .expect("a directory")
        .map(|entry| std::fs::read_to_string(entry.expect("readable").path()).expect("a source"));
    let tests = tests.collect::<String>();
    let mut files = 0;
    let files_of = |dir| std::fs::read_dir(dir).expect("a directory");
    for entry in [examples, stacks, redis].into_iter().flat_map(files_of) {
        let path = entry.expect("readable").path();
        let name = path.file_stem().and_then(|name| name.to_str()).expect("a name");
        let mains = [path.join("main.rs"), path.join("src/main.rs")];
        let source = mains.into_iter().find(|main| main.exists()).unwrap_or(path.clone());
        if source.extension().is_none_or(|extension| extension != "rs") || name == "lib" {
            continue;
        }
        files += 1;
        assert!(index.contains(&format!("\n| `{name}` |")), "{name} is not in examples/README.md");
        let source = std::fs::read_to_string(source).expect("readable");
        let first = source.lines().next().unwrap_or_default();
        let command = first.split('`').nth(1).unwrap_or_default();
        let starts = ["--example", "-p"].iter().any(|by| command.contains(&format!("{by} {name}")));
        assert!(starts, "the first line of {name} is not its command");
        assert!(index.contains(command), "examples/README.md starts {name} in another way");
        let is_started = tests.contains(&format!("example(\"{name}\")"))
            || tests.contains(&format!("start(\"{name}\")"));
        assert!(is_started, "nothing here starts {name}");
    }
    assert_eq!(index.matches("\n| `").count(), files, "the index has examples that are not there");
}

#[test]
fn vectors() {
    let ended = example("vectors").output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{told}");
    assert!(told.trim_end().ends_with(" traces passed, 0 failed"), "{told}");

    // A trace with a wrong second answer.
    let file = format!("{}/wrong.json", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&file, WRONG).expect("a file");
    let ended = example("vectors").arg(&file).output().expect("it ends");
    let told = String::from_utf8_lossy(&ended.stdout);
    assert_eq!(ended.status.code(), Some(1), "{told}");
    assert!(told.contains("(wrong, step 1): "), "{told}");
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
