//! Waiting for a window. Only this file uses a runtime; without the feature `tokio` nothing waits.

/// A clock that only goes on; a test with tokio's can stop it.
#[cfg(not(feature = "tokio"))]
pub(crate) use std::time::Instant;
#[cfg(feature = "tokio")]
pub(crate) use tokio::time::Instant;
#[cfg(feature = "tokio")]
pub(crate) use with_tokio::{Closing, Runtime, Sleep, Wait};
#[cfg(not(feature = "tokio"))]
pub(crate) use without::{Closing, Runtime, Sleep, Wait};

/// The queue was closed before the time had come.
pub(crate) struct Closed;

#[cfg(feature = "tokio")]
mod with_tokio {
    use std::cell::Cell;
    use std::future::{Future, poll_fn};
    use std::panic::catch_unwind;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll};
    use std::time::Duration;

    use tokio::runtime::Handle;
    use tokio::sync::watch;
    use tokio::time;

    use super::Closed;

    /// The runtime of this thread, for what is done later and perhaps on a thread without one.
    pub(crate) struct Runtime(Option<Handle>);

    impl Runtime {
        pub(crate) fn current() -> Self {
            Self(Handle::try_current().ok())
        }

        pub(crate) fn run(&self, f: impl FnOnce()) {
            let missing = self.0.as_ref().filter(|_| Handle::try_current().is_err());
            let _entered = missing.map(Handle::enter);
            f();
        }
    }

    pub(crate) struct Sleep(Pin<Box<time::Sleep>>);

    impl Sleep {
        pub(crate) fn new(duration: Duration) -> Self {
            Self(Box::pin(time::sleep(duration)))
        }

        /// `None`: outside of a runtime, or in one without timers.
        pub(crate) fn try_new(duration: Duration) -> Option<Self> {
            thread_local! {
                static HAS_NO_TIMERS: Cell<bool> = const { Cell::new(false) };
            }
            if Handle::try_current().is_err() || HAS_NO_TIMERS.get() {
                return None;
            }
            // Only by this panic does tokio show it, with the line to write: once on each thread.
            let sleep = catch_unwind(|| Self::new(duration)).ok();
            HAS_NO_TIMERS.set(sleep.is_none());
            sleep
        }

        pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
            self.0.as_mut().poll(cx)
        }
    }

    /// Whether requests that wait are to give up.
    #[derive(Default)]
    pub(crate) struct Closing(watch::Sender<bool>);

    impl Closing {
        pub(crate) fn close(&self) {
            self.0.send_replace(true);
        }
    }

    pub(crate) struct Wait(Pin<Box<dyn Future<Output = Result<(), Closed>> + Send>>);

    impl Wait {
        pub(crate) fn new(duration: Duration, closing: &Closing) -> Self {
            let mut closed = closing.0.subscribe();
            Self(Box::pin(async move {
                let mut due = pin!(time::sleep(duration));
                let mut closed = pin!(closed.wait_for(|closed| *closed));
                poll_fn(|cx| {
                    // The sender lives as long as the layer: an error can't come.
                    if let Poll::Ready(Ok(_)) = closed.as_mut().poll(cx) {
                        return Poll::Ready(Err(Closed));
                    }
                    due.as_mut().poll(cx).map(Ok)
                })
                .await
            }))
        }

        pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Closed>> {
            self.0.as_mut().poll(cx)
        }
    }
}

#[cfg(not(feature = "tokio"))]
mod without {
    use std::task::{Context, Poll};
    use std::time::Duration;

    use super::Closed;

    pub(crate) struct Runtime;

    impl Runtime {
        pub(crate) fn current() -> Self {
            Self
        }

        pub(crate) fn run(&self, f: impl FnOnce()) {
            f();
        }
    }

    /// It never ends.
    pub(crate) struct Sleep;

    impl Sleep {
        pub(crate) fn new(_: Duration) -> Self {
            Self
        }

        pub(crate) fn try_new(_: Duration) -> Option<Self> {
            None
        }

        pub(crate) fn poll(&mut self, _: &mut Context<'_>) -> Poll<()> {
            Poll::Pending
        }
    }

    #[derive(Default)]
    pub(crate) struct Closing;

    /// Nothing waits: a queue can't be set.
    pub(crate) struct Wait;

    impl Wait {
        pub(crate) fn new(_: Duration, _: &Closing) -> Self {
            Self
        }

        pub(crate) fn poll(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Closed>> {
            Poll::Ready(Err(Closed))
        }
    }
}
