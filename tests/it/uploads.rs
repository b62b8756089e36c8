//! Clients that are refused while they send a body can still read why.

use std::pin::{Pin, pin};

use axum::body::Bytes;
use axum::response::IntoResponse;
use axum::routing::{Route, post};
use futures_util::{StreamExt, stream};
use http::Version;
use hyper::body::Incoming;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Builder;
use tower_fixed_window::FixedWindow;
use tower_http::decompression::{DecompressionBody, RequestDecompressionLayer};
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::timeout::{RequestBodyTimeoutLayer, TimeoutBody};

use crate::prelude::*;

const MIB: usize = 1 << 20;
const UPLOAD: usize = 10 * MIB;
/// A client that finds its connection closed reads the 429 by luck, about once in ten times.
const TRIES: usize = 10;

/// A server that refuses everything.
async fn refusing(mood: Mood) -> SocketAddr {
    let app = Router::new().route("/", post(async |body: Bytes| body)).layer(per_minute(0, mood));
    serve(app).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_upload_of_10_mib_reads_its_429() {
    for mood in ANSWERS {
        reads_its_429(refusing(mood).await).await;
    }
}

/// With its length said beforehand, and in chunks.
async fn reads_its_429(addr: SocketAddr) {
    let upload = Bytes::from(vec![7; UPLOAD]);
    for _ in 0..TRIES {
        let chunks = upload.chunks(MIB / 4).map(|chunk| Ok::<_, Infallible>(chunk.to_vec()));
        let chunks = stream::iter(chunks.collect::<Vec<_>>());
        for body in [upload.clone().into(), reqwest::Body::wrap_stream(chunks)] {
            let request = client().post(format!("http://{addr}/")).body(body);
            let response = request.send().await.expect("no broken pipe");
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert!(response.text().await.expect("a body").contains("API rate limit exceeded"));
        }
    }
}

/// Reads an answer's head, and the body of the length it says.
async fn read_answer(socket: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.expect("a head"));
    }
    let head = String::from_utf8(head).expect("ASCII");
    let (_, length) = head.split_once("\r\ncontent-length: ").expect("a length");
    let length: usize = length.lines().next().and_then(|n| n.parse().ok()).expect("an integer");
    socket.read_exact(&mut vec![0; length]).await.expect("a body");
    head
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_sends_the_whole_body_before_reading_keeps_its_connection() {
    for mood in ANSWERS {
        let mut socket = TcpStream::connect(refusing(mood).await).await.expect("connected");
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {UPLOAD}\r\n\r\n");
        for _ in 0..2 {
            socket.write_all(head.as_bytes()).await.expect("open");
            socket.write_all(&vec![7; UPLOAD]).await.expect("no broken pipe");
            let answer = read_answer(&mut socket).await;
            assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
        }
    }
}

/// It awaits a `100 Continue`, or is declared too long to be read.
#[tokio::test]
async fn an_upload_that_will_not_be_read_is_refused_at_once() {
    let awaited = format!("expect: 100-continue\r\ncontent-length: {UPLOAD}");
    let too_long = format!("content-length: {}", 20 * MIB);
    for (mood, fields) in ANSWERS.into_iter().flat_map(|mood| [(mood, &awaited), (mood, &too_long)])
    {
        let mut socket = TcpStream::connect(refusing(mood).await).await.expect("connected");
        let head = format!("POST / HTTP/1.1\r\nhost: x\r\n{fields}\r\n\r\n");
        socket.write_all(head.as_bytes()).await.expect("open");
        let answer = read_answer(&mut socket).await;
        assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
        assert!(answer.contains("\r\nconnection: close\r\n"), "{answer}");
    }
}

fn upload(body: impl Into<Body>) -> Request<Body> {
    Request::post("/").body(body.into()).expect("a request")
}

/// Has a layer refuse a request.
async fn refuse<B: Send + 'static>(
    layer: &FixedWindowLayer,
    request: Request<B>,
) -> Response<Body> {
    let service = layer
        .layer(service_fn(async |_: Request<B>| Ok::<_, Infallible>(Response::new(Body::empty()))));
    let Ok(response) = service.oneshot(request).await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    response
}

fn declared(name: &'static str, value: &'static str, mut request: Request<Body>) -> Request<Body> {
    request.headers_mut().insert(name, http::HeaderValue::from_static(value));
    request
}

/// Frames, and then nothing more; or else an error.
fn stops(is_broken: bool) -> Body {
    let half = stream::iter([Ok::<_, std::io::Error>("half")]);
    match is_broken {
        true => {
            Body::from_stream(half.chain(stream::iter([Err(std::io::ErrorKind::Other.into())])))
        }
        false => Body::from_stream(half.chain(stream::pending())),
    }
}

fn endless() -> Body {
    Body::from_stream(stream::repeat_with(|| Ok::<_, Infallible>(vec![7; MIB])))
}

/// The next request on the connection would be read from the middle of this one.
#[tokio::test(start_paused = true)]
async fn over_http1_a_refusal_says_that_the_connection_closes_if_the_rest_is_unread() {
    type Case = (&'static str, fn() -> Request<Body>, bool, bool);
    const CASES: &[Case] = &[
        // Whether it is unread, and unread if no body is read.
        ("none", || get("/"), false, false),
        ("empty", || declared("content-length", "0", upload("")), false, false),
        ("whole", || declared("content-length", "5", upload("hello")), false, true),
        ("in chunks", || declared("transfer-encoding", "chunked", upload("hello")), false, true),
        ("as much as is read", || upload(vec![0; 16 * MIB]), false, false),
        ("too long", || upload(vec![0; 16 * MIB + 1]), true, false),
        ("awaited", || declared("expect", "100-continue", upload("hello")), true, false),
        ("awaited, but empty", || declared("expect", "100-continue", upload("")), false, false),
        ("that stops", || upload(stops(false)), true, false),
        ("that breaks off", || upload(stops(true)), true, false),
        ("without an end", || upload(endless()), true, false),
    ];
    for mood in ANSWERS {
        for &(what, request, unread, unread_by_nobody) in CASES {
            for version in [Version::HTTP_10, Version::HTTP_11, Version::HTTP_2] {
                for (layer, unread) in [
                    (per_minute(0, mood), unread),
                    (per_minute(0, mood).drain_nothing(), unread_by_nobody),
                ] {
                    let mut request = request();
                    *request.version_mut() = version;
                    let response = refuse(&layer, request).await;
                    let says = response.headers().get("connection").is_some_and(|is| is == "close");
                    let closes = unread && version < Version::HTTP_2;
                    assert_eq!(says, closes, "a body {what}, {version:?}, {mood:?}");
                }
            }
        }
    }
}

#[tokio::test]
async fn an_endless_body_is_read_up_to_a_limit() {
    for mood in ANSWERS {
        for version in [Version::HTTP_11, Version::HTTP_2] {
            let read = Arc::new(AtomicUsize::new(0));
            let counter = Arc::clone(&read);
            let frames = stream::repeat_with(move || {
                counter.fetch_add(1, Ordering::SeqCst);
                Ok::<_, Infallible>(vec![7; MIB])
            });
            let mut request = upload(Body::from_stream(frames));
            *request.version_mut() = version;
            refuse(&per_minute(0, mood), request).await;
            let read = read.load(Ordering::SeqCst);
            assert!((16..=17).contains(&read), "{read} MiB");
        }
    }
}

/// A request of so many bytes, each of which comes after so many milliseconds.
fn slow(bytes: usize, each: u64, method: &str, version: Version, kind: &str) -> Request<Body> {
    let frames = stream::iter(0..bytes).then(move |_| async move {
        sleep(ms(each)).await;
        Ok::<_, Infallible>("x")
    });
    let request = Request::builder().method(method).uri("/").version(version);
    let request = request.header("content-type", kind);
    request.body(Body::from_stream(frames)).expect("a request")
}

/// The rest of an upload is read as long as it comes, for half a minute at most; a client that pauses
/// may wait for the answer. Some clients read an early one.
#[tokio::test(start_paused = true)]
async fn a_refusal_waits_for_an_upload_within_bounds_and_not_for_a_call() {
    const GRPC: &str = "application/grpc";
    const CALL: usize = 1_000;
    let text = "text/plain";
    for mood in ANSWERS {
        let layer = per_minute(0, mood);
        // After how many tenths of a second.
        for (request, tenths) in [
            (upload(stops(false)), 10),
            (slow(10, 900, "POST", Version::HTTP_11, text), 90),
            (slow(16 * MIB, 900, "POST", Version::HTTP_11, text), 300),
            (slow(CALL, 500, "POST", Version::HTTP_2, text), 300),
            (slow(CALL, 500, "POST", Version::HTTP_2, GRPC), 1),
            (slow(CALL, 500, "POST", Version::HTTP_2, "application/grpc+proto"), 1),
            (slow(CALL, 500, "POST", Version::HTTP_2, "application/grpc-web+proto"), 300),
            (slow(CALL, 500, "POST", Version::HTTP_3, GRPC), 1),
            (slow(CALL, 500, "POST", Version::HTTP_11, GRPC), 300),
            (slow(CALL, 500, "CONNECT", Version::HTTP_2, ""), 1),
        ] {
            let (start, of) = (tokio::time::Instant::now(), format!("{request:?}"));
            refuse(&layer, request).await;
            assert_eq!(start.elapsed().as_millis() / 100, tenths, "{of}");
        }
        let start = tokio::time::Instant::now();
        refuse(&layer.drain_nothing(), slow(CALL, 500, "POST", Version::HTTP_2, text)).await;
        assert!(start.elapsed().is_zero());
    }
}

/// A request whose body has the next byte whenever it is asked, and the bytes read so far.
fn always_ready() -> (Request<Body>, Arc<AtomicU64>) {
    let read = Arc::new(AtomicU64::new(0));
    let counter = Arc::clone(&read);
    let frames = stream::repeat_with(move || {
        counter.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Infallible>("x")
    });
    (upload(Body::from_stream(frames)), read)
}

#[tokio::test(start_paused = true)]
async fn a_body_that_never_pauses_lets_other_tasks_run_and_is_read_for_half_a_minute() {
    for mood in ANSWERS {
        let (request, read) = always_ready();
        let mut refused = pin!(per_minute(0, mood).layer(Router::new()).oneshot(request));
        let mut poll = || refused.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let (mut polls, mut before) = (0, 0);
        let start = tokio::time::Instant::now();
        while start.elapsed() <= secs(29) {
            assert!(poll().is_pending());
            let now = read.load(Ordering::SeqCst);
            assert!(now - before <= 256, "{} frames in one poll", now - before);
            before = now;
            polls += 1;
            tokio::time::advance(ms(500)).await;
        }
        tokio::time::advance(secs(3)).await;
        let Poll::Ready(Ok(response)) = poll() else { panic!("read on after 30 s") };
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert!(before > polls, "{before} frames in {polls} polls");
    }
}

#[tokio::test]
async fn bodies_of_other_servers_are_read_if_their_type_is_named() {
    for mood in ANSWERS {
        let both = per_minute(0, mood).drain_refused::<Noting>().drain_refused::<Incoming>();
        for (layer, expected) in [
            (per_minute(0, mood), false),
            (per_minute(0, mood).drain_refused::<Noting>(), true),
            (both, true),
        ] {
            let read = Arc::new(AtomicBool::new(false));
            let body = Noting(Arc::clone(&read));
            refuse(&layer, Request::post("/").body(body).expect("a request")).await;
            assert_eq!(read.load(Ordering::SeqCst), expected);
        }
    }
}

/// A server that refuses everything, under layers that change the type of its bodies.
async fn refusing_under<L>(mood: Mood, outside: L) -> SocketAddr
where
    L: Layer<FixedWindow<Route>> + Clone + Send + Sync + 'static,
    L::Service: Service<Request<Body>, Error = Infallible, Response: IntoResponse, Future: Send>
        + Clone
        + Send
        + Sync
        + 'static,
{
    let limit = per_minute(0, mood)
        .drain_refused::<tower_http::body::Limited<Body>>()
        .drain_refused::<TimeoutBody<Body>>()
        .drain_refused::<DecompressionBody<Body>>();
    let layers = ServiceBuilder::new().layer(outside).layer(limit);
    serve(Router::new().route("/", post(async |body: Bytes| body)).layer(layers)).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_wrapped_by_other_layers_are_read_if_their_type_is_named_or_hidden() {
    for mood in ANSWERS {
        reads_its_429(refusing_under(mood, RequestBodyLimitLayer::new(12 * MIB)).await).await;
        let timeout = RequestBodyTimeoutLayer::new(secs(60));
        reads_its_429(refusing_under(mood, timeout).await).await;
        reads_its_429(refusing_under(mood, RequestDecompressionLayer::new()).await).await;
        // Under axum, a layer that is added by itself sees axum's own type.
        let app = Router::new().route("/", post(async |body: Bytes| body));
        let app = app.layer(per_minute(0, mood)).layer(RequestBodyLimitLayer::new(12 * MIB));
        reads_its_429(serve(app).await).await;
    }
}

/// Uploads; and calls: unary ones, those of a large message, and those that are never done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_thousand_refused_requests_do_not_block_an_http2_connection() {
    let endless = || {
        let messages = stream::repeat("x").then(async |x| {
            sleep(ms(500)).await;
            Ok::<_, Infallible>(x)
        });
        reqwest::Body::wrap_stream(messages)
    };
    let large = || vec![7; 100_000].into();
    let requests: [(&str, &dyn Fn() -> reqwest::Body); 4] = [
        ("text/plain", &large),
        ("application/grpc", &|| "unary".into()),
        ("application/grpc", &large),
        ("application/grpc", &endless),
    ];
    let app = || Router::new().route("/", post(async |body: Bytes| body));
    for (content_type, body) in requests {
        let is_call = content_type != "text/plain";
        let limited = match is_call {
            true => app().layer(per_minute(0, Mood::Now).reject(Grpc)),
            false => app().layer(per_minute(0, Mood::Now)),
        };
        let app = limited.route("/passes", post(async |body: Bytes| body));
        let (addr, connections) = serve_hyper(app).await;
        let client = reqwest::Client::builder().no_proxy().http2_prior_knowledge().build();
        let client = client.expect("a client");
        let refused = async || {
            let request = client.post(format!("http://{addr}/")).body(body());
            let request = request.header("content-type", content_type);
            let response = request.send().await.expect("no broken connection");
            let grpc_status = response.headers().get("grpc-status");
            assert_eq!(grpc_status.is_some_and(|status| status == "8"), is_call);
            assert_eq!(response.status(), if is_call { 200 } else { 429 });
            response.bytes().await.expect("no broken body");
        };
        stream::iter(0..3_000).for_each_concurrent(20, async |_| refused().await).await;
        let request = client.post(format!("http://{addr}/passes")).body("hello");
        assert_eq!(request.send().await.expect("an answer").status(), StatusCode::OK);
        assert_eq!(connections.load(Ordering::SeqCst), 1);
    }
}

/// A body without frames that notes that it was asked for one.
struct Noting(Arc<AtomicBool>);

impl http_body::Body for Noting {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Infallible>>> {
        self.0.store(true, Ordering::SeqCst);
        Poll::Ready(None)
    }
}

#[test]
fn without_a_timer_a_refused_upload_is_read_only_as_far_as_it_is_there() {
    let layer = per_minute(0, Mood::Now);
    block_on(refuse(&layer, upload(stops(false))));
    // A runtime whose builder was not told `enable_time`.
    for mut builder in [Builder::new_current_thread(), Builder::new_multi_thread()] {
        let runtime = builder.build().expect("a runtime");
        for _ in 0..2 {
            runtime.block_on(refuse(&layer, upload(stops(false))));
        }
    }
}
