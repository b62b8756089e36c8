//! Receipts of several limits for another process: [`KeptReceipts`].

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use super::Receipts;
use crate::decision::{MAX_LIMITS, Merging};
use crate::limiter::{KeptReceipt, Receipt};

#[cfg_attr(docsrs, doc(cfg(feature = "serde")))]
impl Receipts {
    /// Turns the receipts into ones that can be stored, for a job that refunds or settles the
    /// charge later, in this process or in another one: see [`KeptReceipts`].
    ///
    /// # Errors
    /// The receipts themselves, if this process decided in memory because the store failed.
    #[allow(clippy::result_large_err, reason = "the receipts are returned as they are")]
    pub fn keep(self) -> Result<KeptReceipts, Self> {
        if self.decision.is_local() {
            return Err(self);
        }
        let keep = |receipt: Receipt| receipt.keep().expect("each of several limits has a name");
        Ok(KeptReceipts(self.receipts.into_iter().map(keep).collect()))
    }
}

/// [`Receipts`] that serde can write, for a job that refunds or settles the charge in another
/// process. What [`KeptReceipt`] says of use, storage and errors applies to these, too.
///
/// ```
/// use tower_fixed_window::{KeptReceipts, Limits, Line, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let store = MemoryStore::new();
/// let limits = || {
///     let requests = Quota::per_day(9).name("requests");
///     let tokens = Quota::per_day(1_000).name("tokens");
///     Limits::new([requests, tokens]).store(store.clone()) // A RedisStore, for two processes.
/// };
///
/// let lines = [Line::new("requests", "acme", 1), Line::new("tokens", "acme", 600)];
/// let receipts = limits().charge(lines).await??;
/// let job: String = serde_json::to_string(&receipts.keep().expect("the store answered"))?;
///
/// // Later, where the job runs: the same names, the same store.
/// let receipts: KeptReceipts = serde_json::from_str(&job)?;
/// limits().settle(receipts, [("tokens", 812)]).await?;
/// assert_eq!(limits().of("tokens").peek("acme").await?.used(), 812);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct KeptReceipts(Vec<KeptReceipt>);

impl From<KeptReceipts> for Receipts {
    fn from(kept: KeptReceipts) -> Self {
        let receipts: Vec<Receipt> = kept.0.into_iter().map(Into::into).collect();
        let mut merging = Merging::new();
        for receipt in &receipts {
            merging.push(receipt.scope().shared_name(), receipt.decision().clone());
        }
        Self { decision: merging.done(), receipts }
    }
}

impl Serialize for KeptReceipts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for KeptReceipts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let receipts = Vec::<KeptReceipt>::deserialize(deserializer)?;
        if (1..=MAX_LIMITS).contains(&receipts.len()) {
            Ok(Self(receipts))
        } else {
            Err(D::Error::custom("no charge of several limits has such receipts"))
        }
    }
}
