use super::*;
use tower_fixed_window::store::Scope;
use tower_fixed_window::{Key, Quota, Quotas};

/// Whatever a server answers is a decision or an error. The arithmetic is checked for overflows
/// here.
#[test]
fn no_answer_of_a_server_panics() {
    const MAX: i64 = Quota::MAX_TOKENS as i64;
    const NOW: i64 = 1_700_000_040_000;
    let (scope, key) = (Scope::named("any"), Key::from(1_u64));
    let texts = [
        "5/minute",
        "5/minute rollover-up-to=20",
        "5/minute reserve-up-to=9",
        "5/hour from-first-request",
        "0/minute",
        "9007199254740991/minute",
        "5/month",
    ];
    let numbers = [i64::MIN, -MAX - 1, -MAX, -1, 0, 3, NOW, MAX, MAX + 1, i64::MAX];
    let some: Vec<_> = numbers.map(Some).into_iter().chain([None]).collect();
    let mut decided = 0;
    for text in texts {
        let quotas: Quotas = text.parse().expect("a quota");
        let charge = Charge::new(Account::new(&scope, &quotas, &key), 2);
        let mut decide = |answer: RedisResult<Answer>| {
            decided += u32::from(
                answer.is_ok_and(|answer| super::decide(&[answer], &charge, None).is_some()),
            );
        };
        for micros in numbers {
            for used in numbers {
                decide(Answer::plain(micros, used));
            }
        }
        let more = if text.contains("month") { &some[..] } else { &[] };
        let times = [(NOW, 2), (NOW, -1), (NOW, 0), (MAX, 2), (-MAX, -1)];
        for case in 0..times.len() * some.len().pow(3) * more.len().max(1) {
            let mut rest = case;
            let mut next = |count: usize| {
                let i = rest % count;
                rest /= count;
                i
            };
            let (now, taken) = times[next(times.len())];
            let mut all = vec![Some(now), Some(taken)];
            all.extend([(); 3].map(|()| some[next(some.len())]));
            if !more.is_empty() {
                all.extend([more[next(more.len())], Some(1)]);
            }
            let value = |number: Option<i64>| number.map_or(Value::Nil, Value::Int);
            decide(Answer::general(Value::Array(all.into_iter().map(value).collect())));
        }
    }
    assert!(decided > 100, "{decided} answers are decisions");
}
