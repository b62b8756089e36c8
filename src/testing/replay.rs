//! The replay of traces: JSON in, what differs out.

use std::fmt;
use std::time::{Duration, UNIX_EPOCH};

use serde::Deserialize;

use crate::clock::ManualClock;
use crate::decision::Decision;
use crate::limiter::{Limiter, Receipt};
use crate::quota::{Quota, Quotas};
use crate::store::{Store, StoreError};

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
    /// The step's index in the trace.
    pub step: usize,
    /// The expected and the actual answer.
    pub what: String,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Failure { trace, step, what } in &self.failures {
            writeln!(f, "{trace} step {step}: {what}")?;
        }
        write!(f, "{} traces passed, {} failed", self.passed, self.failed)
    }
}

#[derive(Deserialize)]
struct File {
    traces: Vec<Trace>,
}

#[derive(Deserialize)]
struct Trace {
    id: String,
    quotas: Vec<QuotaSpec>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct QuotaSpec {
    limit: u64,
    /// The windows are of this length, or of a calendar.
    #[serde(default)]
    window_ms: u64,
    /// `day`, `week`, `month` or `year`.
    calendar: Option<String>,
    zone: Option<String>,
    first: Option<FirstSpec>,
    #[serde(default)]
    anchor: AnchorSpec,
    #[serde(default)]
    start_ms: u64,
    capacity: Option<u64>,
    #[serde(default)]
    max_reserved: u64,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "snake_case")]
enum AnchorSpec {
    #[default]
    Aligned,
    StartingAt,
    FirstRequest,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum FirstSpec {
    /// Of the month.
    Day(u8),
    /// A weekday, or `MM-DD`.
    Name(String),
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
            allowed: decision.allowed(),
            remaining: standings.iter().map(|standing| standing.remaining()).collect(),
            used: standings.iter().map(|standing| standing.used()).collect(),
            reset_ms: standings.iter().map(|standing| ms(standing.reset_at())).collect(),
            retry_at_ms: decision.retry_at().map(ms),
            ready_at_ms: decision.ready_at().map(ms),
        }
    }
}

/// Replays every trace of a file in the format of [`VECTORS`](super::VECTORS). `new` creates a
/// store for each trace, which must read the time from the clock.
///
/// # Errors
/// If the text is not in that format. The report contains wrong answers.
pub async fn replay<S: Store>(
    json: &str,
    new: impl Fn(ManualClock) -> S,
) -> Result<Report, serde_json::Error> {
    let file: File = serde_json::from_str(json)?;
    let mut report = Report::default();
    for trace in &file.traces {
        let clock = ManualClock::default();
        let limiter = Limiter::new(trace.quotas())
            .name("trace")
            .store(new(clock.clone()))
            .without_fallback()
            .without_front();
        let before = report.failures.len();
        trace.replay(limiter, &clock, &mut report.failures).await;
        if report.failures.len() == before {
            report.passed += 1;
        } else {
            report.failed += 1;
        }
    }
    Ok(report)
}

impl Trace {
    fn quotas(&self) -> Quotas {
        let mut quotas = self.quotas.iter().map(QuotaSpec::quota);
        let first = Quotas::from(quotas.next().expect("a trace has a quota"));
        quotas.fold(first, Quotas::and)
    }

    async fn replay(&self, mut limiter: Limiter, clock: &ManualClock, failures: &mut Vec<Failure>) {
        let mut receipts: Vec<Option<Receipt>> = self.steps.iter().map(|_| None).collect();
        for (i, step) in self.steps.iter().enumerate() {
            clock.set_ms(step.at_ms);
            let what = match step.take(i, &mut limiter, &mut receipts).await {
                Ok(decision) if Expect::of(&decision) == step.expect => continue,
                Ok(decision) => {
                    format!("expected {:?}, got {:?}", step.expect, Expect::of(&decision))
                }
                Err(error) => format!("the store failed: {error}"),
            };
            failures.push(Failure { trace: self.id.clone(), step: i, what });
        }
    }
}

impl Step {
    async fn take(
        &self,
        i: usize,
        limiter: &mut Limiter,
        receipts: &mut [Option<Receipt>],
    ) -> Result<Decision, StoreError> {
        const KEY: &str = "trace";

        let charged = match &self.op {
            Op::Charge { cost } => limiter.charge(KEY, *cost).await?,
            Op::Reserve { cost } => limiter.reserve(KEY, *cost).await?,
            Op::Peek { cost } => return limiter.peek_cost(KEY, *cost).await,
            Op::Refund { of } => {
                if let Some(receipt) = receipts[*of].take() {
                    limiter.refund(receipt).await?;
                }
                return limiter.peek_cost(KEY, 0).await;
            }
            Op::Settle { of, actual } => {
                if let Some(receipt) = receipts[*of].take() {
                    limiter.settle(receipt, *actual).await?;
                }
                return limiter.peek_cost(KEY, 0).await;
            }
            Op::Reset => {
                receipts.fill_with(|| None);
                limiter.reset(KEY).await?;
                return limiter.peek_cost(KEY, 0).await;
            }
            Op::Limits { limits } => {
                let old = limiter.quotas().as_slice();
                let mut new = old.iter().zip(limits).map(|(quota, limit)| quota.with_limit(*limit));
                let first = Quotas::from(new.next().expect("a quota"));
                *limiter = limiter.with_quotas(new.fold(first, Quotas::and));
                return limiter.peek_cost(KEY, 0).await;
            }
        };
        Ok(match charged {
            Ok(receipt) => receipts[i].insert(receipt).decision().clone(),
            Err(refused) => refused.decision().clone(),
        })
    }
}

impl QuotaSpec {
    fn quota(&self) -> Quota {
        let mut quota = match &self.calendar {
            Some(calendar) => self.on_calendar(calendar),
            None => Quota::new(self.limit, Duration::from_millis(self.window_ms)),
        };
        quota = match self.anchor {
            AnchorSpec::Aligned => quota,
            AnchorSpec::StartingAt => quota.starting_at(Duration::from_millis(self.start_ms)),
            AnchorSpec::FirstRequest => quota.from_first_request(),
        };
        if let Some(capacity) = self.capacity {
            quota = quota.rollover_up_to(capacity);
        }
        quota.reserve_up_to(self.max_reserved)
    }
    fn on_calendar(&self, calendar: &str) -> Quota {
        let mut text = format!("{}/{calendar}", self.limit);
        match &self.first {
            Some(FirstSpec::Day(day)) => text += &format!(" from day {day}"),
            Some(FirstSpec::Name(name)) => text += &format!(" from {name}"),
            None => {}
        }
        if let Some(zone) = &self.zone {
            text += &format!(" in {zone}");
        }
        text.parse().unwrap_or_else(|error| panic!("a calendar of a trace: {error}"))
    }
}
