//! The cost of the layer: the same service bare, limited and passing, limited and
//! refusing; one key, and 100,000 of them. Read the times as ratios to `bare`.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::hint::black_box;
use std::net::SocketAddr;
use std::task::{Context, Poll};

#[path = "timing.rs"]
mod timing;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderValue, Request, Response};
use http_body_util::Full;
use timing::{calls, print, timed};
use tower_fixed_window::key::PeerAddr;
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{FixedWindowLayer, Quota};
use tower_layer::Layer;
use tower_service::Service;

/// An inner service that answers with a few bytes and a content-type.
#[derive(Clone)]
struct Bare;

impl Service<Request<()>> for Bare {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        let mut response = Response::new(Full::from("hello"));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
        ready(Ok(response))
    }
}

fn request(client: u32) -> Request<()> {
    let mut request = Request::new(());
    let peer = SocketAddr::from((client.to_be_bytes(), 4711));
    request.extensions_mut().insert(PeerAddr(peer));
    request
}

fn run<S>(service: &mut S, client: u32) -> u16
where
    S: Service<Request<()>, Response = Response<Full<Bytes>>, Error = Infallible>,
{
    let Ok(response) = block_on(service.call(request(client)));
    black_box(response).status().as_u16()
}

fn main() {
    let unlimited = FixedWindowLayer::new(Quota::per_hour(1 << 40));
    let spent = FixedWindowLayer::new(Quota::per_hour(0));
    let mut functions = Vec::new();
    for (keys, clients) in [("hot key", 1), ("100k keys", 100_000)] {
        let clients = || {
            let mut next = 0_u32;
            move || {
                next = next.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                next % clients
            }
        };
        let (mut bare, mut client) = (Bare, clients());
        let call = move || run(&mut bare, client());
        functions.push(timed(format!("bare, {keys}"), calls(call)));
        let (mut passing, mut client) = (unlimited.layer(Bare), clients());
        let call = move || assert_eq!(run(&mut passing, client()), 200);
        functions.push(timed(format!("passing, {keys}"), calls(call)));
        let (mut refusing, mut client) = (spent.layer(Bare), clients());
        let call = move || assert_eq!(run(&mut refusing, client()), 429);
        functions.push(timed(format!("refusing, {keys}"), calls(call)));
    }
    print(functions);
}
