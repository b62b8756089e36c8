//! A service whose body can't be made from bytes, for `tests/it/compile_errors.rs`.
#![allow(unused_imports)]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::task::{Context, Poll};

use http::{Request, Response};
use tower_fixed_window::{EmptyBody, FixedWindowLayer, Key, Quota};
use tower::ServiceExt;
use tower_layer::Layer;
use tower_service::Service;

#[derive(Default)]
struct Own;

#[derive(Clone)]
struct Inner;

impl<B> Service<Request<B>> for Inner {
    type Response = Response<Own>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Own>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<B>) -> Self::Future {
        ready(Ok(Response::new(Own)))
    }
}

fn serve(_: impl Service<Request<String>>) {}

fn main() {
    let limit = FixedWindowLayer::new(Quota::per_minute(60));
    serve((LIMIT).layer(Inner));
}
