//! The body of a refused request.
//!
//! Why it is read is on the page of [`FixedWindowLayer`](crate::FixedWindowLayer#refused-uploads).
//! The bounds below keep a client from sending for ever.
//!
//! A gRPC call and an extended CONNECT may go on for hours, and their clients read an early answer
//! (S17). What they have sent by then is read all the same: hyper closes the connection after a
//! thousand calls that were reset with a message on its way.
//!
//! Request bodies may have any type; [`drain`] names those that can be read.

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Buf;
use http::header::{CONTENT_LENGTH, EXPECT, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Version};
use http_body::Body;

use crate::key::grpc;
use crate::sync::{Instant, Sleep};

/// The most bytes that are read. Beyond that, the 429 is not worth the traffic.
const MAX_BYTES: u64 = 16 << 20;
const MAX_TIME: Duration = Duration::from_secs(30);
/// If the client reads an early answer.
const MAX_TIME_OF_A_CALL: Duration = Duration::from_millis(100);
/// Reading ends when no data came for this long: the client may be waiting for the response.
const MAX_SILENCE: Duration = Duration::from_secs(1);
/// The most frames in one poll, so that a body that always has data does not block other tasks.
const MAX_FRAMES_OF_A_POLL: usize = 64;

/// [`RestOf`] a type of bodies.
pub(crate) type Drain = Arc<dyn Any + Send + Sync>;

/// The rest of a body. If nothing is to be read, whether something is left.
type RestOf<B> = fn(&Parts, B) -> Result<Rest<B>, bool>;

pub(crate) struct Rest<B> {
    body: Pin<Box<B>>,
    /// A frame's length, or `None` at the end of the body. An error is longer than any bound.
    read: fn(Pin<&mut B>, &mut Context<'_>) -> Poll<Option<u64>>,
    left: u64,
    since: Instant,
    time: Duration,
    silence: Option<Sleep>,
}

pub(crate) fn drain<B: Body + 'static>() -> Drain {
    Arc::new(Rest::new as RestOf<B>)
}

/// As [`RestOf`].
pub(crate) fn rest<B: 'static>(drains: &[Drain], parts: &Parts, body: B) -> Result<Rest<B>, bool> {
    match drains.iter().find_map(|drain| drain.downcast_ref::<RestOf<B>>()) {
        Some(rest_of) => rest_of(parts, body),
        None => Err(announces_body(parts)),
    }
}

impl<B: Body> Rest<B> {
    fn new(parts: &Parts, body: B) -> Result<Self, bool> {
        if body.is_end_stream() {
            return Err(false);
        }
        // A client that waits for `100-continue` has sent nothing. A longer upload would exceed the
        // bound and be cut off anyway.
        if body.size_hint().lower() > MAX_BYTES || parts.headers.contains_key(EXPECT) {
            return Err(true);
        }
        Ok(Self {
            body: Box::pin(body),
            read: |body, cx| {
                let length = |frame: Result<http_body::Frame<B::Data>, _>| match frame {
                    Ok(frame) => frame.data_ref().map_or(0, |data| data.remaining() as u64),
                    Err(_) => u64::MAX,
                };
                body.poll_frame(cx).map(|frame| frame.map(length))
            },
            left: MAX_BYTES,
            since: Instant::now(),
            time: if reads_early_answer(parts) { MAX_TIME_OF_A_CALL } else { MAX_TIME },
            silence: None,
        })
    }
}

/// For bodies of a type that was not named.
fn announces_body(parts: &Parts) -> bool {
    // To look at a few names takes fewer instructions than to hash two.
    let announces = |(name, value): (&HeaderName, &HeaderValue)| {
        *name == TRANSFER_ENCODING || *name == CONTENT_LENGTH && value != "0"
    };
    parts.headers.iter().any(announces)
}

fn reads_early_answer(parts: &Parts) -> bool {
    let is_grpc = grpc(parts).is_some_and(|(_, web)| !web);
    // Not a call over HTTP/1, nor gRPC-web, which has requests of one message.
    parts.version >= Version::HTTP_2 && (is_grpc || parts.method == Method::CONNECT)
}

impl<B> Rest<B> {
    /// Returns how long this has taken, and whether something is left.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(Duration, bool)> {
        self.poll_read(cx).map(|is_unread| (self.since.elapsed(), is_unread))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let time = self.time.saturating_sub(self.since.elapsed());
        if time.is_zero() {
            return Poll::Ready(true);
        }
        for _ in 0..MAX_FRAMES_OF_A_POLL {
            match (self.read)(self.body.as_mut(), cx) {
                // An empty frame counts as a byte, so that endless empty frames reach the bound.
                Poll::Ready(Some(length)) if length.max(1) <= self.left => {
                    self.left -= length.max(1);
                    self.silence = None;
                }
                Poll::Ready(more) => return Poll::Ready(more.is_some()),
                Poll::Pending => {
                    if self.silence.is_none() {
                        self.silence = Sleep::until(Instant::now() + MAX_SILENCE.min(time));
                    }
                    // Without a timer, reading could wait for ever.
                    let Some(silence) = &mut self.silence else { return Poll::Ready(true) };
                    return silence.poll(cx).map(|()| true);
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
