//! Why a store could not answer, [`StoreError`], and what is done then, [`OnStoreFailure`].

use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Why a store could not answer. Its text names no key and no address.
#[derive(Clone, Debug)]
pub struct StoreError {
    message: &'static str,
    /// A code of the store's or of the system's, such as `OOM`.
    code: Option<Box<str>>,
    source: Option<Arc<dyn Error + Send + Sync>>,
    fault: Fault,
}

/// What an error says of the store.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    Store,
    /// It was not asked.
    Unsent,
    /// It is well, but for this one key.
    Key,
}

impl StoreError {
    /// A failure in a few words, without keys or addresses in them.
    pub fn new(message: &'static str) -> Self {
        Self { message, code: None, source: None, fault: Fault::Store }
    }

    /// The same, with the error behind it. It is not part of the text, since it may name an
    /// address.
    pub fn with_source(
        message: &'static str,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { source: Some(Arc::from(source.into())), ..Self::new(message) }
    }

    /// The same with a code that says more, and no secret.
    #[cfg(feature = "redis")]
    pub(crate) fn with_code(self, code: &str) -> Self {
        Self { code: Some(code.into()), ..self }
    }

    /// It was never sent: that says nothing of how the store does.
    #[cfg(feature = "redis")]
    pub(crate) fn unsent(self) -> Self {
        Self { fault: Fault::Unsent, ..self }
    }

    /// Only this key can't be read.
    #[cfg(feature = "redis")]
    pub(crate) fn of_key(self) -> Self {
        Self { fault: Fault::Key, ..self }
    }

    pub(crate) fn is_unsent(&self) -> bool {
        self.fault == Fault::Unsent
    }

    pub(crate) fn is_of_key(&self) -> bool {
        self.fault == Fault::Key
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.message)?;
        match &self.code {
            Some(code) => write!(f, " ({code})"),
            None => Ok(()),
        }
    }
}

impl Error for StoreError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// What a layer does with a request when its store can't say whether it may pass.
///
/// Never a 429: that would blame the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// Enforce the same quotas in this process's memory until the store is back: at most one
    /// further limit passes on each node.
    #[default]
    Local,
    /// Let it pass, without rate-limit fields: the standing is unknown.
    Allow,
    /// Refuse with 503 and `retry-after`.
    Deny,
}
