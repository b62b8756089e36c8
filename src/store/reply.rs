//! The answer of a store, [`Reply`]; why there is none, [`StoreError`]; and the policy for that,
//! [`OnStoreFailure`].

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// The answer of a store: a future that may already contain its value, so a store in memory needs
/// no allocation and no second poll.
///
/// ```
/// use tower_fixed_window::StoreError;
/// use tower_fixed_window::store::Reply;
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// assert_eq!(Reply::now(7).await.unwrap(), 7);
/// assert_eq!(Reply::later(async { Ok(7) }).await.unwrap(), 7);
/// assert!(matches!(Reply::now(7).into_now(), Ok(Ok(7))));
/// assert!(Reply::<u8>::from(Err(StoreError::new("no answer"))).await.is_err());
/// # }
/// ```
#[must_use = "a reply does nothing unless it is awaited"]
pub struct Reply<T>(When<T>);

enum When<T> {
    Now(Option<Result<T, StoreError>>),
    Later(Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>),
}

impl<T> Unpin for Reply<T> {}

impl<T> Reply<T> {
    /// Creates a reply that is done. For one that has failed, write `Reply::from(Err(error))`.
    #[inline]
    pub fn now(value: T) -> Self {
        Self::from(Ok(value))
    }

    /// Creates a reply that is done when the future is.
    pub fn later(future: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Self {
        Self(When::Later(Box::pin(future)))
    }

    pub(crate) fn map<U>(self, f: impl FnOnce(T) -> U + Send + 'static) -> Reply<U>
    where
        T: Send + 'static,
    {
        match self.into_now() {
            Ok(answer) => Reply::from(answer.map(f)),
            Err(later) => Reply::later(async { later.await.map(f) }),
        }
    }

    /// In the background: a correction never delays a response (S14). Outside of a tokio runtime, a
    /// reply that comes later may be lost.
    pub(crate) fn detach(self)
    where
        T: Send + 'static,
    {
        let Err(mut later) = self.into_now() else { return };
        #[cfg(feature = "tokio")]
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(later);
            return;
        }
        let _ = Pin::new(&mut later).poll(&mut Context::from_waker(Waker::noop()));
    }

    pub(crate) fn as_now(&self) -> Option<&Result<T, StoreError>> {
        match &self.0 {
            When::Now(answer) => answer.as_ref(),
            When::Later(_) => None,
        }
    }

    /// Returns the value if the reply is done.
    ///
    /// # Errors
    /// Returns the reply itself if it must be awaited.
    #[inline]
    pub fn into_now(self) -> Result<Result<T, StoreError>, Self> {
        match self.0 {
            When::Now(Some(answer)) => Ok(answer),
            when => Err(Self(when)),
        }
    }
}

impl<T: Send + 'static> Reply<T> {
    /// Awaits all of them. The error is that of the first one that has failed.
    pub(crate) fn all(mut replies: Vec<Self>) -> Reply<Vec<T>> {
        if replies.iter().all(|reply| reply.as_now().is_some()) {
            let now = replies.into_iter().filter_map(|reply| reply.into_now().ok());
            return Reply::from(now.collect::<Result<_, _>>());
        }
        let mut answers: Vec<_> = replies.iter().map(|_| None).collect();
        Reply::later(poll_fn(move |cx| {
            for (answer, reply) in answers.iter_mut().zip(&mut replies) {
                if answer.is_some() {
                    continue;
                }
                // A store of the app that panics leaves the other replies as they are (S15).
                let polled = catch_unwind(AssertUnwindSafe(|| Pin::new(reply).poll(cx)));
                *answer = match polled {
                    Ok(Poll::Ready(done)) => Some(done),
                    Ok(Poll::Pending) => None,
                    Err(_) => Some(Err(StoreError::new("a store panicked"))),
                };
            }
            match answers.iter().all(Option::is_some) {
                true => Poll::Ready(answers.drain(..).flatten().collect()),
                false => Poll::Pending,
            }
        }))
    }
}

impl<T> From<Result<T, StoreError>> for Reply<T> {
    #[inline]
    fn from(answer: Result<T, StoreError>) -> Self {
        Self(When::Now(Some(answer)))
    }
}

impl<T> Future for Reply<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            When::Now(answer) => Poll::Ready(answer.take().expect("polled after it was done")),
            When::Later(future) => future.as_mut().poll(cx),
        }
    }
}

impl<T> fmt::Debug for Reply<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            When::Now(_) => "Reply::now(..)",
            When::Later(_) => "Reply::later(..)",
        })
    }
}

/// The error of a store that did not answer. `Display` shows no key and no address.
///
/// ```
/// use std::error::Error;
/// use tower_fixed_window::StoreError;
///
/// assert_eq!(StoreError::new("no answer in time").to_string(), "no answer in time");
/// assert_eq!(StoreError::new(format!("SQLSTATE {}", 40001)).to_string(), "SQLSTATE 40001");
/// let error = StoreError::with_source("no connection", "refused by 192.0.2.1:6379");
/// assert_eq!(error.to_string(), "no connection");
/// assert!(error.source().is_some());
///
/// // What a store can say about the call, for `Remote` and its breaker.
/// let busy = StoreError::new("all connections are in use").unsent();
/// let foreign = StoreError::new("this key holds no count").of_key();
/// let sharded = StoreError::new("the keys are on several servers").apart();
/// # let _ = (busy, foreign, sharded);
/// ```
#[derive(Clone, Debug)]
pub struct StoreError {
    message: Cow<'static, str>,
    source: Option<Arc<dyn Error + Send + Sync>>,
    pub(super) fault: Fault,
    policy: Option<OnStoreFailure>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum Fault {
    Store,
    /// The store was not called.
    Unsent,
    /// This one key: the store works.
    Key,
    /// The store works, but can't charge several limits in one step. Nothing was done.
    Apart,
}

impl StoreError {
    /// Creates an error with a short message, which must not contain keys or addresses.
    pub fn new(message: impl Into<Cow<'static, str>>) -> Self {
        let message = message.into();
        Self { message, source: None, fault: Fault::Store, policy: None }
    }

    /// Creates an error with a source, which `Display` does not show: it may contain an address.
    pub fn with_source(
        message: impl Into<Cow<'static, str>>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { source: Some(Arc::from(source.into())), ..Self::new(message) }
    }

    /// Marks the error as one before anything was sent, for example because all connections are in
    /// use. It does not count as a failure of the store.
    #[must_use]
    pub fn unsent(self) -> Self {
        Self { fault: Fault::Unsent, ..self }
    }

    /// Marks the error as one of this key only, for example because its row is not a count, or
    /// there is no right to it. The store works, and requests for other keys still call it.
    #[must_use]
    pub fn of_key(self) -> Self {
        Self { fault: Fault::Key, ..self }
    }

    /// Marks the error as one of a charge whose lines are in different places. Nothing was done;
    /// the lines are then charged one after the other.
    #[must_use]
    pub fn apart(self) -> Self {
        Self { fault: Fault::Apart, ..self }
    }

    pub(crate) fn under(self, policy: OnStoreFailure) -> Self {
        Self { policy: Some(policy), ..self }
    }

    pub(crate) fn denies(&self) -> bool {
        self.policy == Some(OnStoreFailure::Deny)
    }

    pub(crate) fn allows(&self) -> bool {
        self.policy == Some(OnStoreFailure::Allow)
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// The policy for requests while the store fails:
/// [`Remote::on_failure`](crate::store::Remote::on_failure).
///
/// The response is never a 429, which would blame the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// Enforces the same quotas in this process's memory until the store is back. Each node grants
    /// each window's limit at most once more.
    #[default]
    Local,
    /// Lets the request pass, without rate-limit headers, because the count is unknown.
    #[doc(alias = "fail_open")]
    Allow,
    /// Refuses the request with 503 and `retry-after`.
    #[doc(alias = "fail_closed")]
    Deny,
}
