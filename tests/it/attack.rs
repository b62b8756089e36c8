//! What a caller can do at the worst moment.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use axum::body::Body;
use futures_util::FutureExt;
use http::{Request, Response};
use tokio::time::{Instant, sleep, sleep_until};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_fixed_window::key::global;
use tower_fixed_window::testing::block_on;
use tower_fixed_window::{
    FixedWindowLayer, Handle, Key, Limiter, ManualClock, MemoryStore, OnStoreFailure, Quota,
};

use crate::support::{FarStore, Mood, NOW_MS, Paused, TestStore, get};

const LONG: Duration = Duration::from_secs(60);

async fn inner(_: Request<Body>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::empty()))
}

async fn used(handle: &Handle) -> u64 {
    handle.peek(Key::global()).await.expect("the store answers").used()
}

type Task = Mutex<Option<Pin<Box<dyn Future<Output = ()> + Send>>>>;

/// An executor that ends: what is woken from then on is dropped.
struct Ending {
    task: Task,
    ended: AtomicBool,
}

impl Wake for Ending {
    fn wake(self: Arc<Self>) {
        if self.ended.load(Ordering::SeqCst) {
            self.task.lock().unwrap().take();
        }
    }
}

#[test]
fn whoever_is_woken_may_be_dropped_by_that() {
    let (done, is_done) = channel();
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let service = FixedWindowLayer::new(Quota::per_second(1))
                .key(global())
                .store(MemoryStore::with_clock(Paused::new()))
                .queue(5, LONG)
                .layer(service_fn(inner));
            let Ok(_) = service.clone().oneshot(get("/")).await;
            let mut first = Box::pin(service.clone().oneshot(get("/")));
            assert!((&mut first).now_or_never().is_none());
            let second = service.oneshot(get("/")).map(|_| ());
            let task: Task = Mutex::new(Some(Box::pin(second)));
            let second = Arc::new(Ending { task, ended: AtomicBool::new(false) });
            let waker = Waker::from(Arc::clone(&second));
            let poll = || {
                let mut task = second.task.lock().unwrap();
                task.as_mut().unwrap().as_mut().poll(&mut Context::from_waker(&waker))
            };
            assert!(poll().is_pending(), "it waits for its window");
            sleep(Duration::from_millis(4_500)).await;
            assert!(poll().is_pending(), "the first one goes first");
            second.ended.store(true, Ordering::SeqCst);
            first.await.expect("infallible");
        });
        done.send(()).expect("somebody waits");
    });
    is_done.recv_timeout(Duration::from_secs(20)).expect("it does not wait for itself");
}
