//! Traces of several limits that are charged together (S37).

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;

use super::quota::{self, QuotaSpec};
use crate::clock::ManualClock;
use crate::decision::Decision;
use crate::limit::Limit;
use crate::limits::{Limits, Line, Receipts};
use crate::store::{Store, StoreError};

#[derive(Deserialize)]
pub(super) struct SeveralTrace {
    pub(super) id: String,
    limits: Vec<LimitSpec>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct LimitSpec {
    name: String,
    quotas: Vec<QuotaSpec>,
}

#[derive(Deserialize)]
struct Step {
    at_ms: u64,
    #[serde(flatten)]
    op: Op,
    /// There is nothing to expect of a correction or a reset.
    expect: Option<Expect>,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum Op {
    Charge(Lines),
    Reserve(Lines),
    Peek(Lines),
    Refund { of: usize },
    Settle { of: usize, actuals: Vec<Option<u64>> },
    Reset { limit: usize, key: String },
}

/// For each limit its key and its cost. Without a cost it takes no part.
#[derive(Deserialize)]
struct Lines {
    keys: Vec<Option<String>>,
    costs: Vec<Option<u64>>,
}

/// `retry_at_ms` of a refusal may be `null`, never; it is absent, and reads the same, elsewhere.
#[derive(Deserialize, PartialEq, Debug)]
struct Expect {
    allowed: bool,
    limits: Vec<Option<Standing>>,
    retry_at_ms: Option<u64>,
    ready_at_ms: Option<u64>,
}

#[derive(Deserialize, PartialEq, Debug)]
struct Standing {
    remaining: Vec<u64>,
    used: Vec<u64>,
    reset_ms: Vec<u64>,
}

/// The receipts of a step, with the keys of the limits that took part, by name.
struct Charged {
    receipts: Receipts,
    keys: HashMap<String, String>,
}

impl SeveralTrace {
    /// The steps that got the wrong answer.
    pub(super) async fn replay<S: Store>(
        &self,
        store: S,
        clock: &ManualClock,
    ) -> Vec<(usize, String)> {
        let limits = self
            .limits
            .iter()
            .map(|LimitSpec { name, quotas }| Limit::new(quota::all(quotas)).name(name));
        let limits = Limits::new(limits).store(store);
        let mut charged = HashMap::new();
        let mut wrong = Vec::new();
        for (i, step) in self.steps.iter().enumerate() {
            clock.set_ms(step.at_ms);
            match self.take(i, &step.op, &limits, &mut charged).await {
                Ok(got) if got.as_ref() == step.expect.as_ref() => {}
                Ok(got) => wrong.push((i, format!("expected {:?}, got {got:?}", step.expect))),
                Err(error) => wrong.push((i, format!("the store failed: {error}"))),
            }
        }
        wrong
    }

    async fn take(
        &self,
        i: usize,
        op: &Op,
        limits: &Limits,
        charged: &mut HashMap<usize, Charged>,
    ) -> Result<Option<Expect>, StoreError> {
        let asked = match op {
            Op::Charge(lines) | Op::Reserve(lines) | Op::Peek(lines) => lines,
            Op::Refund { of } => {
                self.correct(limits, charged.remove(of), |_| Some(0)).await?;
                return Ok(None);
            }
            Op::Settle { of, actuals } => {
                self.correct(limits, charged.remove(of), |i| actuals[i]).await?;
                return Ok(None);
            }
            Op::Reset { limit, key } => {
                let name = &self.limits[*limit].name;
                for Charged { keys, .. } in charged.values_mut() {
                    keys.retain(|limit, charged| (limit, &*charged) != (name, key));
                }
                limits.of(name).reset(&key[..]).await?;
                return Ok(None);
            }
        };
        let lines = self.lines(asked);
        if lines.is_empty() {
            let limits = self.limits.iter().map(|_| None).collect();
            return Ok(Some(Expect {
                allowed: true,
                limits,
                retry_at_ms: None,
                ready_at_ms: None,
            }));
        }
        let receipts = match op {
            Op::Charge(_) => limits.charge(&lines).await?,
            Op::Reserve(_) => limits.reserve(&lines).await?,
            _ => return Ok(Some(self.expect(&limits.peek(&lines).await?))),
        };
        Ok(Some(match receipts {
            Err(refused) => self.expect(refused.decision()),
            Ok(receipts) => {
                let expect = self.expect(receipts.decision());
                let keys = self.limits.iter().zip(&asked.keys);
                let keys = keys.filter_map(|(limit, key)| Some((limit.name.clone(), key.clone()?)));
                charged.insert(i, Charged { receipts, keys: keys.collect() });
                expect
            }
        }))
    }

    fn lines(&self, Lines { keys, costs }: &Lines) -> Vec<Line<'_>> {
        let limits = self.limits.iter().zip(keys).zip(costs);
        limits
            .filter_map(|((limit, key), cost)| {
                let key = key.as_deref().unwrap_or_default();
                Some(Line::new(&limit.name, key, (*cost)?))
            })
            .collect()
    }

    /// Corrects the costs of the limits that took part, but those of a key that was reset.
    async fn correct(
        &self,
        limits: &Limits,
        charged: Option<Charged>,
        actual: impl Fn(usize) -> Option<u64>,
    ) -> Result<(), StoreError> {
        let Some(Charged { receipts, keys }) = charged else { return Ok(()) };
        let decision = receipts.decision();
        let took_part = |name: &str| decision.of(name).is_some() && keys.contains_key(name);
        let costs: Vec<_> = self
            .limits
            .iter()
            .enumerate()
            .filter(|(_, limit)| took_part(&limit.name))
            .filter_map(|(i, limit)| Some((&limit.name[..], actual(i)?)))
            .collect();
        limits.settle(receipts, costs).await
    }

    fn expect(&self, decision: &Decision) -> Expect {
        let ms = |at: SystemTime| {
            at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
        };
        let standing = |limit: &LimitSpec| {
            let decision = decision.of(&limit.name)?;
            let usage = decision.usage();
            Some(Standing {
                remaining: usage.iter().map(|usage| usage.remaining()).collect(),
                used: usage.iter().map(|usage| usage.used()).collect(),
                reset_ms: usage.iter().map(|usage| ms(usage.reset_at())).collect(),
            })
        };
        Expect {
            allowed: decision.allowed(),
            limits: self.limits.iter().map(standing).collect(),
            retry_at_ms: decision.retry_at().map(ms),
            ready_at_ms: decision.ready_at().map(ms),
        }
    }
}
