//! Receipts for another process: [`KeptReceipt`].

use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error};

use super::{Receipt, ReceiptLine};
use crate::decision::{Decision, KeptDecision, LimitName, MAX_LIMITS};
use crate::key::Key;
use crate::quota::Quotas;
use crate::store::{Account, Scope};

impl Receipt {
    /// Converts the receipt into one that can be stored, for a later refund or settlement in this
    /// process or another one: see [`KeptReceipt`].
    ///
    /// # Errors
    /// Returns the receipt itself if no other limiter could find the charge: the limiter has no
    /// name, or this process decided in memory because the store failed.
    #[allow(clippy::result_large_err, reason = "the receipt is returned as it is")]
    pub fn keep(self) -> Result<KeptReceipt, Self> {
        let is_named = |line: &ReceiptLine| !line.scope().name().is_empty();
        let is_kept = self.lines.iter().all(is_named) && !self.decision.is_local();
        if is_kept { Ok(KeptReceipt(self)) } else { Err(self) }
    }
}

/// A [`Receipt`] that serde can write, for a job that corrects the charge in another process.
///
/// ```
/// use tower_fixed_window::{KeptReceipt, MemoryStore, Quota};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // A RedisStore, for two processes.
/// let store = MemoryStore::new();
/// let tokens = Quota::per_day(1_000).name("llm-tokens").store(store.clone());
/// let receipt = tokens.charge("alice", 500).await??;
/// let job: String = serde_json::to_string(&receipt.keep().expect("the limiter has a name"))?;
///
/// // Later, where the job runs: the same name, the same store.
/// let tokens = Quota::per_day(1_000).name("llm-tokens").store(store);
/// let receipt: KeptReceipt = serde_json::from_str(&job)?;
/// tokens.settle(receipt, 120).await?;
/// assert_eq!(tokens.peek("alice").await?.used(), 120);
/// # Ok(()) }
/// ```
///
/// **Use it once.** Text can be copied, and each use refunds the charge again, so more than the
/// limit can pass. If a job may run twice, delete its receipt before you settle it.
///
/// **Keep it where only your servers can write.** It is not signed: a client that changes it can
/// refund tokens of any key under the limiter's name. It contains the key as a store does: an
/// address or an id is readable; a [`Key::secret`](crate::Key::secret) is hashed.
///
/// Reading text with impossible numbers, or of another version of the format, returns an error.
/// [`settle`](crate::Limiter::settle) returns an error for a receipt of a limiter with another
/// name. A receipt whose window has ended refunds nothing.
#[derive(Debug)]
pub struct KeptReceipt(Receipt);

impl From<KeptReceipt> for Receipt {
    fn from(kept: KeptReceipt) -> Self {
        kept.0
    }
}

/// The version of the format, and the lines.
type WrittenReceipt = (u8, Vec<WrittenLine>);

/// The name, the quotas, whether they are not the limiter's, the key in hexadecimal, and the
/// decision.
type WrittenLine = (String, Quotas, bool, String, KeptDecision);

const VERSION: u8 = 2;

const IMPOSSIBLE: &str = "no charge has such a receipt";

impl Serialize for KeptReceipt {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Self(Receipt { lines, decision, .. }) = self;
        let write = |(place, line): (usize, &ReceiptLine)| -> Option<WrittenLine> {
            let account = line.account.as_account();
            let key = account.key.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            let name = account.scope.name().to_owned();
            Some((name, *account.quotas, line.own, key, decision.at(place)?.to_kept()))
        };
        let lines = lines.iter().enumerate().filter_map(write).collect();
        WrittenReceipt::serialize(&(VERSION, lines), serializer)
    }
}

impl<'de> Deserialize<'de> for KeptReceipt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (version, written) = WrittenReceipt::deserialize(deserializer)?;
        if version != VERSION {
            return Err(D::Error::custom("a receipt of another version of tower-fixed-window"));
        }
        let read = |(name, quotas, own, key, decision): WrittenLine| {
            let limit_name = Scope::is_name(&name).then(|| LimitName::interned(&name))?;
            let decision = Decision::from_kept(limit_name, &quotas, &decision)?;
            let key = Key::from_encoded(&from_hex(&key)?)?;
            let account = Account::new(&Scope::named(&name), &quotas, &key).to_owned();
            Some((ReceiptLine { account, own }, decision))
        };
        let count = written.len();
        if !(1..=MAX_LIMITS).contains(&count) {
            return Err(D::Error::custom(IMPOSSIBLE));
        }
        let lines = written.into_iter().map_while(read);
        let (lines, decided): (Vec<ReceiptLine>, Vec<_>) = lines.unzip();
        let names: Vec<_> = lines.iter().map(|of| of.scope().id()).collect();
        let is_twice = names.iter().enumerate().any(|(i, name)| names[..i].contains(name));
        if lines.len() < count || is_twice {
            return Err(D::Error::custom(IMPOSSIBLE));
        }
        let decision = Decision::of_lines(count, |place| Some(decided[place].clone()));
        let decision = decision.expect("it has a line");
        Ok(Self(Receipt::new(lines, decision)))
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digit = |digit: u8| char::from(digit).to_digit(16).map(|digit| digit as u8);
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let byte = |&[high, low]: &[u8; 2]| Some(digit(high)? << 4 | digit(low)?);
    if rest.is_empty() { pairs.iter().map(byte).collect() } else { None }
}
