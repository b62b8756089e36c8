//! The log of one test, beside others.

use std::cell::RefCell;
use std::io;
use std::sync::{Arc, Mutex, Once};

use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::{Layer as _, fmt, layer::SubscriberExt, util::SubscriberInitExt};

/// The events of this thread while the value lives, down to the finest level.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<u8>>>);

thread_local! {
    static LOG: RefCell<Option<Log>> = const { RefCell::new(None) };
}

impl Log {
    /// Starts to collect. The program has one subscriber, which asks each thread: with a subscriber
    /// for each thread, an event that is first met on a thread without one may be switched off for
    /// all of them.
    pub(crate) fn start() -> Self {
        static SUBSCRIBER: Once = Once::new();
        SUBSCRIBER.call_once(|| {
            let is_wanted = dynamic_filter_fn(|_, _| LOG.with_borrow(Option::is_some));
            let writer = || LOG.with_borrow(Option::clone).expect("wanted");
            let layer = fmt::layer().with_ansi(false).with_writer(writer).with_filter(is_wanted);
            tracing_subscriber::registry().with(layer).try_init().expect("the only one");
        });
        let log = Self::default();
        LOG.set(Some(log.clone()));
        log
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.0.lock().expect("no panic").clone()).expect("text")
    }

    /// The lines that an operator reads who has not asked for more.
    pub(crate) fn warnings(&self) -> String {
        let text = self.text();
        let told = |line: &&str| line.contains(" WARN ") || line.contains(" ERROR ");
        text.split_inclusive('\n').filter(told).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").write(text)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
