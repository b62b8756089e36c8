//! What becomes of the body of a refused HTTP/1 request.
//!
//! Servers close a connection whose request was not read to its end, and a client that is still
//! sending then finds a broken pipe in place of its 429. So the rest is read first, and thrown away.
//!
//! The service takes request bodies of any type, and only some can be read: which, is known to those
//! who set the layer up ([`Drain::of`]).

use std::any::Any;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Buf;
use http::Version;
use http::header::EXPECT;
use http::request::Parts;
use http_body::Body;

use crate::timer::Sleep;

/// How much is read: more would cost more than the answer is worth.
const MOST: u64 = 16 << 20;
/// For how long nothing may come: the client may be waiting for the answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// How to read bodies of some type.
#[derive(Clone)]
pub(crate) struct Drain(Arc<dyn Any + Send + Sync>);

/// What can be done with bodies of type `B`.
struct Reader<B> {
    /// The fewest bytes that are still to come; `None` if nothing is.
    left: fn(&B) -> Option<u64>,
    /// The length of what has come, `None` at the end.
    read: fn(&mut B, &mut Context<'_>) -> Poll<Option<u64>>,
}

/// A body of which the rest is being read.
pub(crate) struct Rest<B> {
    body: B,
    read: fn(&mut B, &mut Context<'_>) -> Poll<Option<u64>>,
    so_far: u64,
    patience: Option<Sleep>,
}

impl Drain {
    pub(crate) fn of<B: Body + Unpin + 'static>() -> Self {
        Self(Arc::new(Reader::<B> {
            left: |body| (!body.is_end_stream()).then(|| body.size_hint().lower()),
            read: |body, cx| {
                let frame = ready!(Pin::new(body).poll_frame(cx)).and_then(Result::ok);
                let length = |frame: http_body::Frame<B::Data>| {
                    frame.data_ref().map_or(0, |data| data.remaining() as u64)
                };
                Poll::Ready(frame.map(length))
            },
        }))
    }

    /// The body of a request that was refused, if the rest of it is to be read.
    pub(crate) fn rest<B: 'static>(&self, parts: &Parts, body: B) -> Option<Rest<B>> {
        let reader = self.0.downcast_ref::<Reader<B>>()?;
        // HTTP/2 ends one stream, not the connection. A client that asks first has not begun. And
        // what is too long would be cut off all the same.
        let worth_it = (reader.left)(&body).is_some_and(|left| left <= MOST)
            && parts.version < Version::HTTP_2
            && !parts.headers.contains_key(EXPECT);
        worth_it.then_some(Rest { body, read: reader.read, so_far: 0, patience: None })
    }
}

impl<B> Rest<B> {
    /// Done at the end, and when enough was read or waited.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.so_far <= MOST {
            match (self.read)(&mut self.body, cx) {
                Poll::Ready(Some(length)) => {
                    self.so_far += length;
                    self.patience = None;
                }
                Poll::Ready(None) => break,
                Poll::Pending => {
                    return self.patience.get_or_insert_with(|| Sleep::new(PATIENCE)).poll(cx);
                }
            }
        }
        Poll::Ready(())
    }
}
