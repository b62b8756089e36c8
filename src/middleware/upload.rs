//! The body of a refused request.
//!
//! HTTP/1 servers close a connection if the request was not read to its end, and a client that is
//! still sending finds a broken pipe instead of its 429. HTTP/2 servers reset such a stream, and
//! close a connection after many resets. So the rest is read and discarded first, within bounds,
//! since a client could send for ever.
//!
//! The service accepts request bodies of any type, and can read only some of them. [`Drain::of`]
//! names the types.

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Buf;
use http::header::EXPECT;
use http::request::Parts;
use http_body::Body;

use crate::timer::{Instant, Sleep};

/// How much is read: more would cost more than the response is worth.
const MAX_BYTES: u64 = 16 << 20;
/// For how long.
const MAX_TIME: Duration = Duration::from_secs(30);
/// For how long nothing may come: the client may be waiting for the answer.
const MAX_SILENCE: Duration = Duration::from_secs(1);
/// How much at once: a body that always has more must not keep other tasks from running.
const MAX_FRAMES_OF_A_POLL: usize = 64;

/// How to read bodies of some type.
#[derive(Clone)]
pub(crate) struct Drain(Arc<dyn Any + Send + Sync>);

type Read<B> = fn(Pin<&mut B>, &mut Context<'_>) -> Poll<Option<u64>>;

/// What can be done with bodies of type `B`.
struct Reader<B> {
    /// The fewest bytes that are still to come; `None` if nothing is.
    left: fn(&B) -> Option<u64>,
    /// The length of what has come, `None` at the end.
    read: Read<B>,
}

/// A body of which the rest is being read.
pub(crate) struct Rest<B> {
    body: Pin<Box<B>>,
    read: Read<B>,
    left: u64,
    until: Instant,
    silence: Option<Sleep>,
}

impl Drain {
    pub(crate) fn of<B: Body + 'static>() -> Self {
        Self(Arc::new(Reader::<B> {
            left: |body| (!body.is_end_stream()).then(|| body.size_hint().lower()),
            read: |body, cx| {
                let frame = ready!(body.poll_frame(cx)).and_then(Result::ok);
                let length = |frame: http_body::Frame<B::Data>| {
                    frame.data_ref().map_or(0, |data| data.remaining() as u64)
                };
                Poll::Ready(frame.map(length))
            },
        }))
    }

    fn reader<B: 'static>(drains: &[Self]) -> Option<&Reader<B>> {
        drains.iter().find_map(|drain| drain.0.downcast_ref())
    }

    /// Whether a layer that refuses may find something to read in this body, perhaps as a body of
    /// another type.
    pub(crate) fn may_read<B: 'static>(drains: &[Self], body: &B) -> bool {
        size_of::<B>() > 0
            && Self::reader(drains).is_none_or(|reader| (reader.left)(body).is_some())
    }

    /// The body of a request that was refused, if the rest of it is to be read and one of `drains`
    /// can do it.
    pub(crate) fn rest<B: 'static>(drains: &[Self], parts: &Parts, body: B) -> Option<Rest<B>> {
        let reader = Self::reader(drains)?;
        // A client that waits for `100-continue` has not begun. A longer upload would be cut off in
        // any case.
        let worth_it = (reader.left)(&body).is_some_and(|left| left <= MAX_BYTES)
            && !parts.headers.contains_key(EXPECT);
        worth_it.then(|| Rest {
            body: Box::pin(body),
            read: reader.read,
            left: MAX_BYTES,
            until: Instant::now() + MAX_TIME,
            silence: None,
        })
    }
}

impl<B> Rest<B> {
    /// Done at the end, and when enough was read or waited.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let time = self.until.saturating_duration_since(Instant::now());
        if time.is_zero() {
            return Poll::Ready(());
        }
        for _ in 0..MAX_FRAMES_OF_A_POLL {
            match (self.read)(self.body.as_mut(), cx) {
                // Frames without a byte in them come to an end, too.
                Poll::Ready(Some(length)) if length.max(1) < self.left => {
                    self.left -= length.max(1);
                    self.silence = None;
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => {
                    if self.silence.is_none() {
                        self.silence = Sleep::try_new(MAX_SILENCE.min(time));
                    }
                    // Without a timer it could wait for ever.
                    let Some(silence) = &mut self.silence else { return Poll::Ready(()) };
                    return silence.poll(cx);
                }
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}
