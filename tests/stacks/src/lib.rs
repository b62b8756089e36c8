//! A client for the programs in `tests/`: it sends HTTP/1.1 and asserts what a limit answers.

use std::net::SocketAddr;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// The limit of each program, per hour.
const LIMIT: u64 = 2;

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Names are in lower case.
    headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn new<'a>(
        status: u16,
        headers: impl IntoIterator<Item = (&'a str, &'a [u8])>,
        body: impl Into<String>,
    ) -> Self {
        let headers = headers.into_iter().map(|(name, value)| {
            (name.to_lowercase(), String::from_utf8(value.to_vec()).expect("readable"))
        });
        Self { status, headers: headers.collect(), body: body.into() }
    }

    fn parse(text: &str) -> Self {
        let (head, body) = text.split_once("\r\n\r\n").expect("the end of the headers");
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok());
        let headers = lines.map(|line| line.split_once(": ").expect("a header"));
        let headers = headers.map(|(name, value)| (name, value.as_bytes()));
        Self::new(status.expect("a status"), headers, body)
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(other, _)| other == name);
        let value = values.next().map(|(_, value)| &**value);
        assert!(values.next().is_none(), "{name} is there twice: {self:?}");
        value
    }

    fn number(&self, name: &str) -> u64 {
        let value = self.header(name).and_then(|value| value.parse().ok());
        value.unwrap_or_else(|| panic!("no {name}: {self:?}"))
    }

    /// Asserts that this is the response to the `n`th request of an hour: passed or refused, with
    /// its headers.
    pub fn assert_is(&self, n: u64) {
        assert_eq!(self.number("x-ratelimit-limit"), LIMIT);
        assert_eq!(self.number("x-ratelimit-remaining"), LIMIT.saturating_sub(n));
        assert_eq!(self.number("x-ratelimit-used"), n.min(LIMIT));
        assert!(self.number("x-ratelimit-reset") > 0);
        if n <= LIMIT {
            assert!(self.status < 400, "{self:?}");
            assert_eq!(self.header("retry-after"), None);
        } else {
            assert_eq!(self.status, 429, "{self:?}");
            assert!((1..=3600).contains(&self.number("retry-after")));
        }
    }
}

/// Sends a request with these further headers, each with its `\r\n`, and reads to the end.
pub async fn send(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    start: &str,
    headers: &str,
    body: &str,
) -> Answer {
    let length = body.len();
    let request = format!(
        "{start} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
         content-length: {length}\r\n{headers}\r\n{body}"
    );
    stream.write_all(request.as_bytes()).await.expect("the server reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("an answer");
    Answer::parse(&text)
}

pub async fn get(addr: SocketAddr) -> Answer {
    get_from(addr, "/").await
}

async fn get_from(addr: SocketAddr, path: &str) -> Answer {
    let stream = TcpStream::connect(addr).await.expect("the server listens");
    send(stream, &format!("GET {path}"), "", "").await
}

/// Asserts that two requests pass and the third is refused.
pub async fn assert_limited(mut ask: impl AsyncFnMut() -> Answer) {
    for n in 1..=LIMIT + 1 {
        ask().await.assert_is(n);
    }
}

/// Serves an app on a free port.
#[cfg(feature = "openapi")]
pub async fn serve(app: axum::Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let app = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async { axum::serve(listener, app).await });
    addr
}

/// Asserts that the document of an app describes its refusals: status, headers and body. If
/// `SCHEMATHESIS` names that program, it checks all responses against the document.
#[cfg(feature = "openapi")]
pub async fn assert_documented(addr: SocketAddr) {
    let document = get_from(addr, "/openapi.json").await;
    let document: serde_json::Value = serde_json::from_str(&document.body).expect("JSON");
    let responses = &document["paths"]["/"]["get"]["responses"];
    for status in ["200", "400", "429", "500"] {
        assert!(responses[status].is_object(), "{status} is not in {document}");
    }
    assert!(responses["503"].is_null(), "counts in memory are always there");

    assert_limited(async || get(addr).await).await;
    let (refusal, described) = (get(addr).await, &responses["429"]);
    let names = described["headers"].as_object().expect("the headers").keys();
    let sent: Vec<_> = names.filter(|name| refusal.header(name).is_some()).collect();
    let github = ["limit", "remaining", "reset", "used"].map(|name| format!("x-ratelimit-{name}"));
    let mut expected = ["cache-control", "retry-after"].map(String::from).to_vec();
    expected.extend(github);
    assert!(expected.iter().all(|name| sent.contains(&name)), "{sent:?}");
    let media = refusal.header("content-type").expect("a media type");
    let required = described["content"][media]["schema"]["required"].as_array();
    let body: serde_json::Value = serde_json::from_str(&refusal.body).expect("JSON");
    for property in required.expect("a schema") {
        assert!(!body[property.as_str().expect("a name")].is_null(), "{property}: {body}");
    }

    if let Ok(program) = std::env::var("SCHEMATHESIS") {
        let url = format!("http://{addr}/openapi.json");
        let run = tokio::process::Command::new(program)
            .args(["run", &url, "--checks=all", "--max-examples=20", "--no-color"])
            .current_dir(std::env::temp_dir())
            .output();
        let run = run.await.expect("schemathesis runs");
        let output = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success(), "{output}");
        assert!(output.contains("passed"), "it ran: {output}");
    }
}
