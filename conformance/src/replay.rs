//! Replays traces from JSON and reports wrong answers.

use std::fmt;
use std::time::UNIX_EPOCH;

use serde::Deserialize;

use tower_fixed_window::{
    Decision, Limit, Limiter, Limits, Line, ManualClock, Quotas, Receipt, Store, StoreError,
};

mod lines;
mod quota;

use lines::LinesTrace;
use quota::QuotaSpec;

/// The result of replaying the traces of a file: [`replay`].
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// How many traces got every expected answer.
    pub passed: usize,
    /// The wrong answers in the others.
    pub failures: Vec<Failure>,
    /// How many traces have a failure.
    pub failed: usize,
}

/// A step that got the wrong answer, in a [`Report`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The trace's id.
    pub trace: String,
    /// What the trace is about.
    pub note: String,
    /// The step's index in the trace.
    pub step: usize,
    /// The expected and the actual answer.
    pub what: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Failure { trace, note, step, what } in &self.failures {
            let note = if note.is_empty() { "a trace without a note" } else { note };
            writeln!(f, "{note} ({trace}, step {step}): {what}")?;
        }
        write!(f, "{} traces passed, {} failed", self.passed, self.failed)
    }
}

#[derive(Deserialize)]
struct File {
    /// A trace of one limit, or of several.
    traces: Vec<serde_json::Value>,
}

#[derive(Deserialize)]
struct Trace {
    id: String,
    quotas: Vec<QuotaSpec>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    at_ms: u64,
    #[serde(flatten)]
    op: Op,
    expect: Expect,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Op {
    Charge { cost: u64 },
    Reserve { cost: u64 },
    Peek { cost: u64 },
    Refund { of: usize },
    Settle { of: usize, actual: u64 },
    Reset,
    Limits { limits: Vec<u64> },
}

/// `retry_at_ms` of a refusal may be `null`, never; it is absent, and reads the same, elsewhere.
#[derive(Deserialize, PartialEq, Debug)]
struct Expect {
    allowed: bool,
    remaining: Vec<u64>,
    used: Vec<u64>,
    reset_ms: Vec<u64>,
    retry_at_ms: Option<u64>,
    ready_at_ms: Option<u64>,
}

impl Expect {
    fn of(decision: &Decision) -> Self {
        let standings = decision.usage();
        let ms = |at: std::time::SystemTime| {
            at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
        };
        Self {
            allowed: decision.is_allowed(),
            remaining: standings.iter().map(|standing| standing.remaining()).collect(),
            used: standings.iter().map(|standing| standing.used()).collect(),
            reset_ms: standings.iter().map(|standing| ms(standing.reset_at())).collect(),
            retry_at_ms: decision.retry_at().map(ms),
            ready_at_ms: decision.ready_at().map(ms),
        }
    }
}

/// Replays every trace of a file in the format of [`VECTORS`](super::VECTORS) or
/// [`TOGETHER_VECTORS`](super::TOGETHER_VECTORS). `new` creates a store for each trace, which must
/// read the time from the clock.
///
/// ```
/// use tower_fixed_window::MemoryStore;
/// use tower_fixed_window::testing::block_on;
/// use tower_fixed_window_conformance::{VECTORS, replay};
///
/// let report = block_on(replay(VECTORS, |clock| MemoryStore::new().clock(clock)))?;
/// // The wrong answers: `report` as text lists them.
/// assert!(report.failures.is_empty(), "{report}");
/// assert_eq!(report.failed, 0);
/// assert!(report.passed > 0);
/// # Ok::<_, serde_json::Error>(())
/// ```
///
/// # Errors
/// If the text is not in that format.
pub async fn replay<S: Store>(
    json: &str,
    new: impl Fn(ManualClock) -> S,
) -> Result<Report, serde_json::Error> {
    let file: File = serde_json::from_str(json)?;
    let mut report = Report::default();
    for trace in file.traces {
        let clock = ManualClock::default();
        let store = new(clock.clone());
        let note = trace["note"].as_str().unwrap_or_default().to_owned();
        let (id, wrong) = if trace.get("limits").is_some() {
            let trace: LinesTrace = serde_json::from_value(trace)?;
            let wrong = trace.replay(store, &clock).await;
            (trace.id, wrong)
        } else {
            let trace: Trace = serde_json::from_value(trace)?;
            let limiter = Limit::new(quota::all(&trace.quotas)).name("trace").store(store);
            let wrong = trace.replay(limiter, &clock).await;
            (trace.id, wrong)
        };
        match wrong.is_empty() {
            true => report.passed += 1,
            false => report.failed += 1,
        }
        let failure = |(step, what)| Failure { trace: id.clone(), note: note.clone(), step, what };
        report.failures.extend(wrong.into_iter().map(failure));
    }
    Ok(report)
}

impl Trace {
    /// The steps that got the wrong answer.
    async fn replay(&self, limiter: Limiter, clock: &ManualClock) -> Vec<(usize, String)> {
        let mut wrong = Vec::new();
        let mut receipts: Vec<Option<Receipt>> = self.steps.iter().map(|_| None).collect();
        for (i, step) in self.steps.iter().enumerate() {
            clock.set_ms(step.at_ms);
            let what = match step.take(i, &limiter, &mut receipts).await {
                Ok(decision) if Expect::of(&decision) == step.expect => continue,
                Ok(decision) => {
                    format!("expected {:?}, got {:?}", step.expect, Expect::of(&decision))
                }
                Err(error) => format!("the store failed: {error}"),
            };
            wrong.push((i, what));
        }
        wrong
    }
}

/// The key of a trace.
const KEY: &str = "trace";

async fn peek(limiter: &Limiter, cost: u64) -> Result<Decision, StoreError> {
    Limits::from(limiter).peek([Line::new(limiter.name(), KEY, cost)]).await
}

impl Step {
    async fn take(
        &self,
        i: usize,
        limiter: &Limiter,
        receipts: &mut [Option<Receipt>],
    ) -> Result<Decision, StoreError> {
        let charged = match &self.op {
            Op::Charge { cost } => limiter.charge(KEY, *cost).await?,
            Op::Reserve { cost } => limiter.reserve(KEY, *cost).await?,
            Op::Peek { cost } => return peek(limiter, *cost).await,
            Op::Refund { of } => {
                if let Some(receipt) = receipts[*of].take() {
                    limiter.refund(receipt).await?;
                }
                return peek(limiter, 0).await;
            }
            Op::Settle { of, actual } => {
                if let Some(receipt) = receipts[*of].take() {
                    limiter.settle(receipt, *actual).await?;
                }
                return peek(limiter, 0).await;
            }
            Op::Reset => {
                receipts.fill_with(|| None);
                limiter.reset(KEY).await?;
                return peek(limiter, 0).await;
            }
            Op::Limits { limits } => {
                let plan = limiter.quotas().expect("no plans");
                let old = plan.quotas().expect("a limit");
                let mut new =
                    old.as_ref().iter().zip(limits).map(|(quota, limit)| quota.with_limit(*limit));
                let first = Quotas::from(new.next().expect("a quota"));
                limiter.set_quotas(new.fold(first, Quotas::and));
                return peek(limiter, 0).await;
            }
        };
        Ok(match charged {
            Ok(receipt) => receipts[i].insert(receipt).decision().clone(),
            Err(refused) => refused.decision().clone(),
        })
    }
}
