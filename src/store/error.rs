//! Why a store did not answer, [`StoreError`], and the policy for that, [`OnStoreFailure`].

use std::borrow::Cow;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

/// Why a store did not answer. `Display` shows no key and no address.
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
/// ```
#[derive(Clone, Debug)]
pub struct StoreError {
    message: Cow<'static, str>,
    /// A code of the store or of the system, such as `OOM`.
    code: Option<Box<str>>,
    source: Option<Arc<dyn Error + Send + Sync>>,
    fault: Fault,
    /// What the policy says of the request, if there is one.
    policy: Option<OnStoreFailure>,
}

/// The part of a store that an error blames.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    Store,
    /// None: the store was not called.
    Unsent,
    /// This one key: the store works.
    Key,
    /// None: the store works, but can't charge several limits in one step. Nothing was done.
    Apart,
}

impl StoreError {
    /// Creates an error with a short message, which must not contain keys or addresses.
    pub fn new(message: impl Into<Cow<'static, str>>) -> Self {
        let message = message.into();
        Self { message, code: None, source: None, fault: Fault::Store, policy: None }
    }

    /// Creates an error with a source. `Display` does not show the source, since it may contain an
    /// address.
    pub fn with_source(
        message: impl Into<Cow<'static, str>>,
        source: impl Into<Box<dyn Error + Send + Sync>>,
    ) -> Self {
        Self { source: Some(Arc::from(source.into())), ..Self::new(message) }
    }

    /// Adds a code that says more, and contains no secret.
    #[cfg(feature = "redis")]
    pub(crate) fn with_code(self, code: &str) -> Self {
        Self { code: Some(code.into()), ..self }
    }

    /// Marks the error of a call that was never sent: it says nothing about the store.
    #[cfg(feature = "redis")]
    pub(crate) fn unsent(self) -> Self {
        Self { fault: Fault::Unsent, ..self }
    }

    /// Marks the error of a single key that can't be read.
    #[cfg(feature = "redis")]
    pub(crate) fn of_key(self) -> Self {
        Self { fault: Fault::Key, ..self }
    }

    /// Marks the error of limits that can't be charged in one step. Nothing was done.
    #[cfg(feature = "redis")]
    pub(crate) fn apart(self) -> Self {
        Self { fault: Fault::Apart, ..self }
    }

    pub(crate) fn is_apart(&self) -> bool {
        self.fault == Fault::Apart
    }

    /// Marks an error of a call that this policy answers.
    pub(crate) fn under(self, policy: OnStoreFailure) -> Self {
        Self { policy: Some(policy), ..self }
    }

    /// Returns whether the policy is to refuse the request.
    pub(crate) fn denies(&self) -> bool {
        self.policy == Some(OnStoreFailure::Deny)
    }

    /// Returns whether the policy is to let the request pass.
    pub(crate) fn allows(&self) -> bool {
        self.policy == Some(OnStoreFailure::Allow)
    }

    pub(crate) fn is_unsent(&self) -> bool {
        self.fault == Fault::Unsent
    }

    /// Returns whether a call was sent and failed, or was not answered in time.
    pub(crate) fn is_failed_call(&self) -> bool {
        matches!(self.fault, Fault::Store | Fault::Key)
    }

    pub(crate) fn is_of_key(&self) -> bool {
        self.fault == Fault::Key
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
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

/// The policy for requests while the store fails: see
/// [`Remote::on_failure`](crate::store::Remote::on_failure).
///
/// The response is never a 429, which would blame the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum OnStoreFailure {
    /// Enforces the same quotas in this process's memory until the store is back: at most one
    /// further limit passes on each node.
    #[default]
    Local,
    /// Lets the request pass, without rate-limit headers, since the count is unknown.
    Allow,
    /// Refuses the request with 503 and `retry-after`.
    Deny,
}
