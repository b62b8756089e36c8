//! Traces of charges of several lines (S37).

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Deserialize;

use super::quota::{self, QuotaSpec};
use tower_fixed_window::{Decision, Limit, Limits, Line, ManualClock, Receipt, Store, StoreError};

#[derive(Deserialize)]
pub(super) struct LinesTrace {
    pub(super) id: String,
    limits: Vec<LimitSpec>,
    steps: Vec<TogetherStep>,
}

#[derive(Deserialize)]
struct LimitSpec {
    name: String,
    quotas: Vec<QuotaSpec>,
}

#[derive(Deserialize)]
struct TogetherStep {
    at_ms: u64,
    #[serde(flatten)]
    op: TogetherOp,
    /// The expected answer; a correction or a reset has none.
    expect: Option<TogetherExpect>,
}

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
enum TogetherOp {
    Charge(KeysAndCosts),
    Reserve(KeysAndCosts),
    Peek(KeysAndCosts),
    Refund { of: usize },
    Settle { of: usize, actuals: Vec<Option<u64>> },
    Reset { limit: usize, key: String },
}

/// The key and the cost of each limit. A limit without a cost takes no part.
#[derive(Deserialize)]
struct KeysAndCosts {
    keys: Vec<Option<String>>,
    costs: Vec<Option<u64>>,
}

/// `retry_at_ms` of a refusal may be `null`, never; it is absent, and reads the same, elsewhere.
#[derive(Deserialize, PartialEq, Debug)]
struct TogetherExpect {
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

/// The receipt of a step, with the keys of the limits that took part, by name.
struct ChargedLimits {
    receipt: Receipt,
    keys: HashMap<String, String>,
}

impl LinesTrace {
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
        op: &TogetherOp,
        limits: &Limits,
        charged: &mut HashMap<usize, ChargedLimits>,
    ) -> Result<Option<TogetherExpect>, StoreError> {
        let asked = match op {
            TogetherOp::Charge(lines) | TogetherOp::Reserve(lines) | TogetherOp::Peek(lines) => {
                lines
            }
            TogetherOp::Refund { of } => {
                self.correct(limits, charged.remove(of), |_| Some(0)).await?;
                return Ok(None);
            }
            TogetherOp::Settle { of, actuals } => {
                self.correct(limits, charged.remove(of), |i| actuals[i]).await?;
                return Ok(None);
            }
            TogetherOp::Reset { limit, key } => {
                let name = &self.limits[*limit].name;
                for ChargedLimits { keys, .. } in charged.values_mut() {
                    keys.retain(|limit, charged| (limit, &*charged) != (name, key));
                }
                limits.limiter(name).reset(&key[..]).await?;
                return Ok(None);
            }
        };
        let lines = self.lines(asked);
        if lines.is_empty() {
            let limits = self.limits.iter().map(|_| None).collect();
            return Ok(Some(TogetherExpect {
                allowed: true,
                limits,
                retry_at_ms: None,
                ready_at_ms: None,
            }));
        }
        let receipt = match op {
            TogetherOp::Charge(_) => limits.charge(&lines).await?,
            TogetherOp::Reserve(_) => limits.reserve(&lines).await?,
            _ => return Ok(Some(self.expect(&limits.peek(&lines).await?))),
        };
        Ok(Some(match receipt {
            Err(refused) => self.expect(refused.decision()),
            Ok(receipt) => {
                let expect = self.expect(receipt.decision());
                let keys = self.limits.iter().zip(&asked.keys);
                let keys = keys.filter_map(|(limit, key)| Some((limit.name.clone(), key.clone()?)));
                charged.insert(i, ChargedLimits { receipt, keys: keys.collect() });
                expect
            }
        }))
    }

    fn lines(&self, KeysAndCosts { keys, costs }: &KeysAndCosts) -> Vec<Line<'_>> {
        let limits = self.limits.iter().zip(keys).zip(costs);
        limits
            .filter_map(|((limit, key), cost)| {
                let key = key.as_deref().unwrap_or_default();
                Some(Line::new(&limit.name, key, (*cost)?))
            })
            .collect()
    }

    /// Corrects the costs of the limits that took part, except of a key that was reset.
    async fn correct(
        &self,
        limits: &Limits,
        charged: Option<ChargedLimits>,
        actual: impl Fn(usize) -> Option<u64>,
    ) -> Result<(), StoreError> {
        let Some(ChargedLimits { receipt, keys }) = charged else { return Ok(()) };
        let decision = receipt.decision();
        let took_part = |name: &str| decision.of(name).is_some() && keys.contains_key(name);
        let costs: Vec<_> = self
            .limits
            .iter()
            .enumerate()
            .filter(|(_, limit)| took_part(&limit.name))
            .filter_map(|(i, limit)| Some((&limit.name[..], actual(i)?)))
            .collect();
        limits.settle(receipt, costs).await
    }

    fn expect(&self, decision: &Decision) -> TogetherExpect {
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
        TogetherExpect {
            allowed: decision.is_allowed(),
            limits: self.limits.iter().map(standing).collect(),
            retry_at_ms: decision.retry_at().map(ms),
            ready_at_ms: decision.ready_at().map(ms),
        }
    }
}
