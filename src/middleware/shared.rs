//! What all services of a layer have in common.

use std::sync::{Arc, Mutex, PoisonError};

use super::live::{Live, Settings};
use super::options::Options;
use super::twice::Watch;
use crate::limiter::Limiter;

pub(crate) struct Shared<J> {
    pub(crate) limiter: Limiter,
    pub(crate) options: Options,
    pub(crate) live: Arc<Live>,
    pub(crate) reject: Arc<J>,
    pub(crate) watch: Watch,
    /// The newest settings that were needed. Services have copies of them, and come here when
    /// theirs are old.
    settings: Mutex<Arc<Settings>>,
}

impl<J> Shared<J> {
    pub(crate) fn new(limiter: Limiter, options: Options, live: Arc<Live>, reject: Arc<J>) -> Self {
        let settings = live.settings(limiter.scope().name(), &options);
        let (watch, settings) = (Watch::default(), Mutex::new(Arc::new(settings)));
        Self { limiter, options, live, reject, watch, settings }
    }

    #[cold]
    pub(crate) fn settings(&self) -> Arc<Settings> {
        let mut settings = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.live.is_current(&settings) {
            let name = self.limiter.scope().name();
            *settings = Arc::new(self.live.settings(name, &self.options));
        }
        Arc::clone(&settings)
    }
}
