//! Waiting for a window instead of being refused, on tokio's paused clock: in one line for each key, or
//! each combination of keys (S13).

use allocation_counter::measure;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tower::util::BoxCloneService;
use tower_fixed_window::store::{Reply, Store};

use crate::prelude::*;

/// Layers of one limit, two and three, of which this one may refuse. Each is built when it is asked
/// for: then its clock shows the start of a minute.
fn in_memory(limit: Limit) -> impl Iterator<Item = FixedWindowLayer> {
    in_stores(limit, paused_memory)
}

fn far_away(limit: Limit) -> impl Iterator<Item = FixedWindowLayer> {
    in_stores(limit, || far_store(|| 20))
}

fn in_stores<S: Store>(
    limit: Limit,
    store: impl Fn() -> S,
) -> impl Iterator<Item = FixedWindowLayer> {
    (1..=3).map(move |limits| FixedWindowLayer::new(beside(limit.clone(), limits).store(store())))
}

fn ten_a_second(queue: u64, max_wait: Duration) -> impl Iterator<Item = FixedWindowLayer> {
    in_memory(Quota::per_second(10).key(Key::global()))
        .map(move |layer| layer.queue(queue, max_wait))
}

const LONG: Duration = secs(60);

/// Notes the time of each served request.
pub(crate) type Served = Arc<Mutex<Vec<(String, u128)>>>;

/// The service of [`noting`].
pub(crate) type Noting = BoxCloneService<Request<Body>, Response<Body>, Infallible>;

pub(crate) fn noting(layer: &FixedWindowLayer, served: &Served) -> Noting {
    let (served, start) = (served.clone(), Instant::now());
    BoxCloneService::new(layer.layer(service_fn(move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        served.lock().unwrap().push((path, start.elapsed().as_millis()));
        inner(request)
    })))
}

/// So many requests at once.
pub(crate) fn send(service: &Noting, requests: usize) -> Vec<Waiting> {
    (0..requests).map(|_| tokio::spawn(service.clone().oneshot(get("/")))).collect()
}

/// Sends these requests at once, each of which has to pass.
async fn all_pass(service: &Noting, requests: impl IntoIterator<Item = Request<Body>>) {
    let send = |request| tokio::spawn(service.clone().oneshot(request));
    answered(requests.into_iter().map(send).collect::<Vec<_>>()).await;
}

pub(crate) async fn answered(waiting: impl IntoIterator<Item = Waiting>) {
    for response in waiting {
        let Ok(response) = response.await.expect("no panic");
        assert_eq!(response.status(), 200);
    }
}

pub(crate) type Waiting = JoinHandle<Result<Response<Body>, Infallible>>;

/// The answer to a newcomer to a queue of two, whose first request, of `/80`, left after `change`.
async fn newcomer_after(service: &Noting, change: impl Future<Output = ()>) -> Response<Body> {
    let first = tokio::spawn(service.clone().oneshot(get("/80")));
    sleep(ms(1)).await;
    let mut others = send(service, 1);
    sleep(ms(1)).await;
    change.await;
    // It asks again soon.
    sleep(ms(1_100)).await;
    assert!(!first.is_finished());
    first.abort();
    sleep(ms(1)).await;
    others.extend(send(service, 1));
    sleep(ms(1)).await;
    let Ok(refused) = service.clone().oneshot(get("/")).await;
    refused
}

async fn used(limiter: &Limiter) -> u64 {
    limiter.peek(Key::global()).await.expect("memory").used()
}

#[tokio::test(start_paused = true)]
async fn forty_concurrent_requests_are_served_in_order_in_four_windows_and_the_next_is_refused() {
    for layer in ten_a_second(30, LONG) {
        let served = Served::default();
        let service = noting(&layer, &served);
        let mut waiting = Vec::new();
        for i in 0..40 {
            waiting.push(tokio::spawn(service.clone().oneshot(get(&format!("/{i:02}")))));
            tokio::task::yield_now().await;
        }
        let Ok(refused) = service.oneshot(get("/refused")).await;
        assert_eq!(refused.status(), 429);
        // The waiting requests fill the fourth window: the fifth begins in 4 s (S13).
        assert_eq!(refused.headers()["retry-after"], "4");
        // They have taken nothing, of no limit.
        for limiter in &Limits::from(&layer) {
            assert_eq!(used(limiter).await, 10, "{}", limiter.name());
        }
        answered(waiting).await;
        let served = served.lock().unwrap();
        let order: Vec<_> = served.iter().map(|(path, _)| path.clone()).collect();
        assert_eq!(order, (0..40).map(|i| format!("/{i:02}")).collect::<Vec<_>>());
        for (i, (path, at)) in served.iter().enumerate() {
            let due = i as u128 / 10 * 1_000;
            assert!((due..due + 10).contains(at), "{path} at {at} ms, due at {due}");
        }
    }
}

/// The second window begins in a second.
#[tokio::test(start_paused = true)]
async fn a_request_may_wait_for_exactly_as_long_as_max_wait() {
    for layer in ten_a_second(30, secs(1)) {
        let served = Served::default();
        all_pass(&noting(&layer, &served), (0..20).map(|_| get("/"))).await;
        let seconds: Vec<_> = served.lock().unwrap().iter().map(|(_, at)| at / 1_000).collect();
        assert_eq!(seconds, [[0; 10], [1; 10]].concat());
    }
}

/// The timer of a request behind the first one may fire earlier.
#[tokio::test(start_paused = true)]
async fn a_request_at_its_deadline_lets_the_first_one_go_before() {
    for layer in in_memory(Quota::per_second(2).key(Key::global())) {
        let service = noting(&layer.queue(5, secs(1)), &Served::default());
        let ask = || Box::pin(service.clone().oneshot(get("/")));
        let passes = |response: Option<Result<Response<Body>, Infallible>>| {
            response.is_some_and(|response| response.expect("infallible").status() == 200)
        };
        assert!(passes(ask().now_or_never()) && passes(ask().now_or_never()));
        let (mut first, mut second) = (ask(), ask());
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        tokio::time::advance(secs(1)).await;
        assert!((&mut second).now_or_never().is_none());
        assert!(passes(first.now_or_never()) && passes(second.now_or_never()));
    }
}

/// Others take the tokens that three requests wait for.
#[tokio::test(start_paused = true)]
async fn those_who_waited_in_vain_are_told_to_come_after_all_that_are_before_them() {
    for layer in in_memory(Quota::per_second(2).key(Key::global())) {
        let layer = layer.queue(5, ms(2_500));
        let (limiter, service) = (limiter_of(&layer), noting(&layer, &Served::default()));
        let take_all = || limiter.charge(Key::global(), 2).now_or_never().expect("memory");
        assert!(take_all().expect("memory").is_ok());
        let mut waiting = [(); 3].map(|()| Box::pin(service.clone().oneshot(get("/"))));
        for second in 1..=2 {
            assert!(waiting.iter_mut().all(|request| request.now_or_never().is_none()));
            tokio::time::advance(secs(1)).await;
            assert!(take_all().expect("memory").is_ok(), "in second {second}");
        }
        assert!(waiting.iter_mut().all(|request| request.now_or_never().is_none()));
        tokio::time::advance(ms(500)).await;
        // The next window is for the two before the last one.
        for (request, retry_after) in waiting.iter_mut().zip(["1", "1", "2"]).rev() {
            let Some(Ok(refused)) = request.now_or_never() else { panic!("its time is over") };
            assert_eq!(refused.status(), 429);
            assert_eq!(refused.headers()["retry-after"], retry_after);
        }
    }
}

/// Far away, the last big one is charged at the same time as the small one before it.
#[tokio::test(start_paused = true)]
async fn each_request_waits_by_its_own_plan() {
    let plan = |parts: &Parts, _: &Key| match parts.uri.path() {
        "/small" => Quota::per_second(1),
        _ => Quota::per_second(10),
    };
    let limit = Limit::by_plan(plan).key(Key::global());
    let near = in_memory(limit.clone()).map(|layer| (layer, [0, 0, 1, 1, 2]));
    let far = far_away(limit).map(|layer| (layer, [0, 0, 0, 1, 2]));
    for (layer, expected) in near.chain(far) {
        let served = Served::default();
        let service = noting(&layer.queue(30, LONG), &served);
        all_pass(&service, ["/big", "/big", "/small", "/big", "/small"].map(get)).await;
        let seconds: Vec<_> = served.lock().unwrap().iter().map(|(_, at)| at / 1_000).collect();
        assert_eq!(seconds, expected);
    }
}

/// The headers are about the quota with the longest wait; the body names all that are exceeded. The
/// quotas may be of one limit, or each of its own.
#[tokio::test(start_paused = true)]
async fn requests_that_would_wait_too_long_are_told_which_quotas_are_exceeded() {
    let second = Quota::per_second(10);
    let (few, many) = (Quota::per_minute(15), Quota::per_minute(100));
    for (quotas, limit, retry_after, exceeded) in [
        ([second, few], "15", "60", r#""a:10/second","b:15/minute""#),
        ([few, second], "15", "60", r#""a:15/minute","b:10/second""#),
        ([second, many], "10", "2", r#""a:10/second""#),
        ([many, second], "10", "2", r#""b:10/second""#),
    ] {
        for apart in [false, true] {
            let [a, b] = quotas;
            let (limits, exceeded) = match apart {
                false => {
                    (vec![a.and(b).name("a").key(Key::global())], exceeded.replace("b:", "a:"))
                }
                true => (
                    vec![a.name("a").key(Key::global()), b.name("b").key(Key::global())],
                    exceeded.to_owned(),
                ),
            };
            let limits = Limits::new(limits).store(paused_memory());
            let layer = FixedWindowLayer::new(limits).queue(30, ms(1_500));
            let service = noting(&layer, &Served::default());
            let _waiting = send(&service, 20);
            sleep(ms(1)).await;
            let Ok(refused) = service.clone().oneshot(get("/")).await;
            assert_eq!(refused.headers()["x-ratelimit-limit"], limit, "{quotas:?}");
            assert_eq!(refused.headers()["retry-after"], retry_after, "{quotas:?}");
            let body = text_of(refused).await;
            let named = format!(r#""violated-policies":[{exceeded}]"#);
            assert!(body.contains(&named), "{quotas:?}: {body}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn closing_the_queue_answers_all_waiters_with_503() {
    for layer in ten_a_second(30, LONG) {
        let service = noting(&layer, &Served::default());
        let requests = send(&service, 12);
        sleep(ms(1)).await;
        let start = Instant::now();
        layer.close_queue();
        for (request, status) in requests.into_iter().zip([vec![200; 10], vec![503; 2]].concat()) {
            let Ok(response) = request.await.expect("no panic");
            assert_eq!(response.status(), status);
        }
        assert_eq!(start.elapsed(), Duration::ZERO, "at once");
        for limiter in &Limits::from(&layer) {
            assert_eq!(used(limiter).await, 10, "{}: given back", limiter.name());
        }
        // Other requests don't wait, either.
        let Ok(response) = service.oneshot(get("/")).await;
        assert_eq!(response.status(), 503);
    }
}

/// As many ask at the same time as all quotas have room for, those of one limit or of two: each second
/// passes all that it grants.
#[tokio::test(start_paused = true)]
async fn a_line_before_a_store_far_away_asks_for_many_at_the_same_time() {
    let (seconds, minutes) = (Quota::per_second(500), Quota::per_minute(1_250));
    let one = vec![seconds.and(minutes).name("one").key(Key::global())];
    let two = vec![
        seconds.name("seconds").key(Key::global()),
        minutes.name("minutes").key(Key::global()),
    ];
    for limits in [one, two] {
        let served = Served::default();
        let layer = FixedWindowLayer::new(Limits::new(limits).store(far_store(|| 20)));
        let service = noting(&layer.queue(2_000, secs(100)), &served);
        all_pass(&service, (0..1_750).map(|i| get(&format!("/{i:04}")))).await;
        let served = served.lock().unwrap();
        assert!(served.is_sorted_by_key(|(path, _)| path), "{served:?}");
        let in_second = |second| served.iter().filter(|(_, at)| at / 1_000 == second).count();
        assert_eq!([0, 1, 2, 3, 60].map(in_second), [500, 500, 250, 0, 500]);
    }
}

/// Requests that are charged at the same time take their tokens one after the other.
#[tokio::test(start_paused = true)]
async fn each_of_those_that_are_charged_at_the_same_time_shows_its_own_count() {
    for layer in far_away(Quota::per_minute(100).key(Key::global()).cost_fn(|_| 2)) {
        let service = noting(&layer.queue(30, LONG), &Served::default());
        let waiting = send(&service, 5);
        for (i, response) in (1..).zip(waiting) {
            let Ok(response) = response.await.expect("no panic");
            let number = |name: &str| response.headers()[name].to_str().expect("text").parse().ok();
            assert_eq!(number("x-ratelimit-limit"), Some(100));
            assert_eq!(number("x-ratelimit-used"), Some(i * 2), "{i}");
        }
    }
}

/// A limit was lowered while the first one waited. Those behind it wait for the other limit.
#[tokio::test(start_paused = true)]
async fn those_behind_one_that_can_never_pass_are_told_when_to_come_back() {
    let cost = |parts: &Parts| if parts.uri.path() == "/never" { 5 } else { 1 };
    let limits = Limits::new([
        Quota::per_minute(10).name("lowered").key(Key::global()).cost_fn(cost),
        Quota::per_hour(1).name("full").key(Key::global()),
    ]);
    let layer = FixedWindowLayer::new(limits.store(paused_memory())).queue(2, secs(7_200));
    let service = noting(&layer, &Served::default());
    all_pass(&service, [get("/")]).await;
    let never = tokio::spawn(service.clone().oneshot(get("/never")));
    tokio::task::yield_now().await;
    let mut behind = send(&service, 1);
    sleep(ms(1)).await;
    Limits::from(&layer).limiter("lowered").set_quotas(Quota::per_minute(4));
    let Ok(never) = never.await.expect("no panic");
    assert_eq!(never.status(), 429);
    assert!(!never.headers().contains_key("retry-after"));

    behind.extend(send(&service, 1));
    sleep(ms(1)).await;
    let Ok(refused) = service.clone().oneshot(get("/")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["x-ratelimit-resource"], "full");
    assert!(refused.headers().contains_key("retry-after"));
}

/// The first one was refused by its own cost, too, for longer or not, and left.
#[tokio::test(start_paused = true)]
async fn a_newcomer_is_told_when_it_could_pass_and_not_when_the_first_one_could() {
    let cost = |parts: &Parts| if parts.uri.path() == "/80" { 80 } else { 5 };
    for (requests, tokens, used, (name, more), policy) in [
        (Quota::per_minute(2), Quota::per_hour(100), [2, 10], ("tokens", 30), "requests:2/minute"),
        (Quota::per_hour(9), Quota::per_minute(85), [0, 20], ("requests", 9), "requests:9/hour"),
    ] {
        let limits = Limits::new([
            requests.name("requests").key(Key::global()),
            tokens.name("tokens").key(Key::global()).cost_fn(cost),
        ]);
        let limits = limits.store(paused_memory());
        let take = async |name, cost| {
            let taken = limits.limiter(name).charge(Key::global(), cost).await;
            assert!(taken.expect("it answers").is_ok());
        };
        take("requests", used[0]).await;
        take("tokens", used[1]).await;
        let layer = FixedWindowLayer::new(&limits).queue(2, secs(70)).on_decision(|_, all| {
            assert!(all.of("tokens").expect("it is there").is_allowed());
        });
        let service = noting(&layer, &Served::default());
        let refused = newcomer_after(&service, take(name, more)).await;
        assert_eq!(refused.headers()["x-ratelimit-resource"], "requests");
        let retry_after = refused.headers()["retry-after"].to_str().expect("text").parse();
        assert!(secs(retry_after.expect("seconds")) <= 2 * requests.window());
        let body = text_of(refused).await;
        assert!(body.contains(&format!(r#""violated-policies":["{policy}"]"#)), "{body}");
    }
}

/// S13: for good, not after a wait for a limit that their cost never fits.
#[tokio::test(start_paused = true)]
async fn all_whose_cost_is_above_a_lowered_limit_are_told_soon() {
    for lowered in [0, 2] {
        let limit = Quota::per_minute(3).name("lowered").key(Key::global());
        let cost = |parts: &Parts| if parts.uri.path() == "/1" { 1 } else { 3 };
        let limit = limit.cost_fn(cost).store(paused_memory());
        let layer = FixedWindowLayer::new(limit).queue(6, secs(7_200));
        let service = noting(&layer, &Served::default());
        all_pass(&service, [get("/")]).await;
        let _first = tokio::spawn(service.clone().oneshot(get("/1")));
        let (waiting, start) = (send(&service, 5), Instant::now());
        sleep(ms(1)).await;
        Limits::from(&layer).limiter("lowered").set_quotas(Quota::per_minute(lowered));
        for waiting in waiting {
            let Ok(refused) = waiting.await.expect("no panic");
            assert_eq!(refused.status(), 429);
            assert!(!refused.headers().contains_key("retry-after"), "{lowered}");
        }
        assert!(start.elapsed() < secs(3), "{lowered}: {:?}", start.elapsed());
    }
}

#[tokio::test(start_paused = true)]
async fn what_others_return_is_noticed_when_the_first_asks_again() {
    returned_elsewhere(paused_memory()).await;
    returned_elsewhere(far_store(|| 1)).await;
}

/// By other limiters of the name, by other layers, by a charge of several limits, and by new quotas.
async fn returned_elsewhere(store: impl Store + Clone) {
    let limiter = || Quota::per_minute(2).name("of-queue").store(store.clone());
    let layer = || {
        let limit = Quota::per_minute(2).name("of-queue").key(Key::global());
        FixedWindowLayer::new(limit.store(store.clone()))
    };
    let limits = || {
        let limits = Limits::new([Quota::per_minute(2).name("of-queue")]);
        limits.store(store.clone())
    };
    for way in 0..6 {
        limiter().reset(Key::global()).await.expect("it answers");
        let charged = limiter().charge(Key::global(), 2).await.expect("it answers");
        let receipt = charged.expect("there is room");
        let own = layer();
        let service = noting(&own.clone().queue(9, LONG), &Served::default());
        let waiting = tokio::spawn(service.oneshot(get("/")));
        sleep(secs(1)).await;
        let start = Instant::now();
        let returned = match way {
            0 => limiter().refund(receipt),
            1 => limiter().settle(receipt, 1),
            2 => limiter().reset(Key::global()),
            3 => Limits::from(&layer()).limiter("of-queue").reset(Key::global()),
            4 => limits().limiter("of-queue").reset(Key::global()),
            _ => {
                Limits::from(&own).limiter("of-queue").set_quotas(Quota::per_minute(3));
                Reply::now(())
            }
        };
        returned.await.expect("it answers");
        let Ok(response) = waiting.await.expect("no panic");
        assert_eq!(response.status(), 200);
        assert!(start.elapsed() <= ms(2_010), "{way}: {:?}", start.elapsed());
    }
}

/// S13: also if the cost is above a lowered limit, for good (S8), or if one or all were lifted. Not
/// even a store that fails has the service called, which is not ready.
#[tokio::test(start_paused = true)]
async fn a_wait_for_the_service_ends_whatever_becomes_of_the_limits() {
    let [lowered, same] = [2, 3].map(|tokens| Quota::per_minute(tokens).into());
    let lifted = Plan::UNLIMITED;
    let changes = [(same, 1), (lowered, 2), (lifted, 2), (lifted, 1), (lowered, 3)];
    let ends = [(429, Mood::Later), (429, Mood::FailsLater), (503, Mood::Later)];
    for ((change, n), (status, mood)) in changes.iter().flat_map(|of| ends.map(|end| (*of, end))) {
        let limit = |of: &&str| Quota::per_minute(1).name(of).key(Key::global()).cost_fn(|_| 3);
        let store = TestStore::new(Mood::Later).on_failure(OnStoreFailure::Allow);
        let limits = ["changed", "other", "lifted"][..n].iter().map(limit);
        let limits = Limits::new(limits).store(store.clone());
        limits.into_iter().for_each(|limiter| limiter.set_quotas(same));
        let layer = FixedWindowLayer::new(&limits).queue(5, secs(70));
        let mut service = layer.layer(ReadyIf::never());
        let [first, waiting] = [(); 2].map(|()| tokio::spawn(service.call(get("/"))));
        answered([first]).await;
        sleep(ms(1)).await;
        limits.limiter("changed").set_quotas(change);
        limits.into_iter().skip(2).for_each(|limiter| limiter.set_quotas(lifted));
        sleep(secs(65)).await;
        assert_eq!(used(limits.limiter("changed")).await, 3, "no more is taken");
        store.set(mood);
        if status == 503 {
            layer.close_queue();
        }
        let answer = tokio::time::timeout(secs(6), waiting).await.expect("it waits on");
        let Ok(response) = answer.expect("no panic");
        assert_eq!(response.status(), status);
        let retries = response.headers().contains_key("retry-after");
        assert_eq!(retries, (status, mood) != (429, Mood::Later) || change != lowered);
    }
}

/// The first one was refused by the hour, too, and left. The other limit refuses for longer, or not.
#[tokio::test(start_paused = true)]
async fn a_newcomer_is_told_of_no_quota_that_the_first_ones_cost_exceeds() {
    let cost = |parts: &Parts| if parts.uri.path() == "/80" { 80 } else { 1 };
    let quotas = Quota::per_minute(85).and(Quota::per_hour(110));
    for requests in [2, 9] {
        let tokens = quotas.name("tokens").key(Key::global()).cost_fn(cost);
        let requests = Quota::per_day(requests).name("requests").key(Key::global());
        let limits = Limits::new([tokens, requests]).store(paused_memory());
        let layer = FixedWindowLayer::new(&limits).queue(2, secs(70)).headers(Headers::OpenAi);
        let service = noting(&layer, &Served::default());
        let [tokens, requests] = ["tokens", "requests"].map(|name| limits.limiter(name));
        let charge = |of: &Limiter, cost| of.charge(Key::global(), cost);
        let receipt = charge(tokens, 20).await.expect("it answers").expect("it passes");
        let change = async {
            tokens.settle(receipt, 94).await.expect("it answers");
            assert!(charge(requests, 2).await.expect("it answers").is_ok());
        };
        let refused = newcomer_after(&service, change).await;
        assert_eq!(refused.headers()["x-ratelimit-limit-tokens"], "85");
        assert_eq!(refused.headers()["x-ratelimit-reset-tokens"], "59s");
        let body = text_of(refused).await;
        assert!(body.contains(r#""tokens:85/minute""#) && !body.contains("hour"), "{body}");
    }
}

/// The queue asks again later.
#[tokio::test(start_paused = true)]
async fn a_newcomer_is_told_of_no_window_that_has_ended() {
    let quotas = [Quota::new(1, secs(40)), Quota::per_day(1)].map(Quota::from_first_request);
    let limit = quotas[0].and(quotas[1]).key(Key::global()).store(paused_memory());
    let service = noting(&FixedWindowLayer::new(limit).queue(1, secs(99_999)), &Served::default());
    all_pass(&service, [get("/")]).await;
    let _waits = send(&service, 1);
    sleep(secs(50)).await;
    let Ok(refused) = service.oneshot(get("/")).await;
    assert!(text_of(refused).await.contains(r#"["1/day"]"#));
}

/// Whoever waits costs nothing there.
#[tokio::test(start_paused = true)]
async fn a_newcomer_does_not_wait_for_a_limit_of_0_that_was_raised() {
    let limit = |tokens, name| Quota::per_minute(tokens).name(name).key(Key::global());
    let cost = |parts: &Parts| u64::from(parts.uri.path() == "/some");
    let limits =
        Limits::new([limit(1, "all"), limit(0, "some").cost_fn(cost)]).store(paused_memory());
    let service = noting(&FixedWindowLayer::new(&limits).queue(1, LONG), &Served::default());
    all_pass(&service, [get("/")]).await;
    let _waits = send(&service, 1);
    sleep(ms(1)).await;
    limits.limiter("some").set_quotas(Quota::per_minute(9));
    let Ok(refused) = service.oneshot(get("/some")).await;
    assert_eq!(refused.headers()["x-ratelimit-resource"], "all");
    assert_eq!(refused.headers()["retry-after"], "120");
}

#[tokio::test(start_paused = true)]
async fn a_request_in_the_last_millisecond_of_a_window_is_charged_once() {
    let quota = |window| Quota::new(2, ms(window)).key(Key::global());
    let layers = |window| in_memory(quota(window)).map(move |layer| (window, layer));
    for (window, layer) in [1, 2, 1_000].into_iter().flat_map(layers) {
        let service = noting(&layer.queue(9, LONG), &Served::default());
        sleep(ms(window - 1)).await;
        let start = Instant::now();
        for _ in 0..5 {
            let Ok(response) = service.clone().oneshot(get("/")).await;
            assert_eq!(response.status(), 200);
        }
        assert!(start.elapsed() <= ms(2 * window + 2), "of {window} ms");
    }
}

#[test]
fn queues_that_are_dropped_keep_no_memory() {
    let limit = Quota::per_second(1).name("of-queue").store(MemoryStore::new());
    let layer = || FixedWindowLayer::new(&limit).queue(2, LONG);
    let build = || drop(noting(&layer(), &Served::default()));
    build();
    let used = measure(|| (0..1_000).for_each(|_| build()));
    assert!(used.bytes_current < 10_000, "{} bytes are kept", used.bytes_current);
}

#[tokio::test(start_paused = true)]
async fn lines_that_all_have_left_keep_no_memory() {
    const KEYS: u64 = 1_000;
    let limit = Quota::per_second(1).key(header("x-user"));
    let layer = in_memory(limit).next().expect("of one limit").queue(2, LONG);
    let (limiter, served) = (limiter_of(&layer), Served::default());
    let service = noting(&layer, &served);
    let get =
        |user: u64| Request::get("/").header("x-user", user).body(Body::empty()).expect("valid");
    for user in 0..KEYS {
        assert!(limiter.check(Key::secret(user.to_string())).await.expect("memory").is_allowed());
    }
    let used = measure(|| {
        for user in 0..KEYS {
            // The head waits for the next second, and is dropped.
            assert!(service.clone().oneshot(get(user)).now_or_never().is_none());
        }
    });
    assert!(used.bytes_current < 20 * KEYS as i64, "{} bytes are kept", used.bytes_current);
}

/// A request of one of an organization's users.
fn of_user(path: &str, user: &str) -> Request<Body> {
    let request = Request::get(path).header("x-org", "acme").header("x-user", user);
    request.body(Body::empty()).expect("valid")
}

#[tokio::test(start_paused = true)]
async fn users_wait_in_lines_of_their_own_for_the_limit_that_they_share() {
    let (org, user) = (Quota::per_second(10).name("org"), Quota::per_second(4).name("user"));
    let limits = Limits::new([org.key(header("x-org")), user.key(header("x-user"))]);
    let layer = FixedWindowLayer::new(limits.store(paused_memory()));
    let served = Served::default();
    let service = noting(&layer.queue(30, LONG), &served);
    let mut waiting = Vec::new();
    // In one line, those of the others would wait behind the fifth of the first.
    for user in ["ann", "bob", "eve"] {
        for i in 0..8 {
            let call = service.clone().oneshot(of_user(&format!("/{user}/{i}"), user));
            waiting.push(tokio::spawn(call));
            tokio::task::yield_now().await;
        }
    }
    answered(waiting).await;
    let served = served.lock().unwrap();
    let in_second = |second| served.iter().filter(move |(_, at)| at / 1_000 == second);
    assert_eq!((0..3).map(|second| in_second(second).count()).collect::<Vec<_>>(), [10, 10, 4]);
    for user in ["/ann", "/bob", "/eve"] {
        let of_user = || served.iter().filter(|(path, _)| path.starts_with(user));
        assert!(of_user().is_sorted(), "{served:?}");
        assert!((0..3).all(|second| of_user().filter(|(_, at)| at / 1_000 == second).count() <= 4));
    }
}

/// Two of the requests that are charged are gone when the reply comes. Their tokens are returned,
/// and a request that waits elsewhere for that limit notices.
#[tokio::test(start_paused = true)]
async fn tokens_of_those_that_are_gone_are_for_another_line() {
    let limits = Limits::new([
        Quota::per_day(3).name("org").key(header("x-org")),
        Quota::per_day(9).name("user").key(header("x-user")),
    ]);
    let (limits, served) = (limits.store(far_store(|| 20)), Served::default());
    let layer = FixedWindowLayer::new(&limits);
    let service = noting(&layer.queue(30, secs(100_000)), &served);
    let call = |user| tokio::spawn(service.clone().oneshot(of_user("/", user)));
    let anns: Vec<_> = (0..3).map(|_| call("ann")).collect();
    sleep(ms(5)).await;
    let bob = call("bob");
    sleep(ms(5)).await;
    anns[1..].iter().for_each(JoinHandle::abort);
    answered([bob]).await;
    assert!(served.lock().unwrap().iter().all(|(_, at)| *at < 2_000), "{served:?}");
    assert_eq!(limits.limiter("org").peek(Key::secret("acme")).await.expect("memory").used(), 2);
}

/// The limits have room, but the service is not ready: the refusal has a time to come back all the
/// same.
#[tokio::test(start_paused = true)]
async fn a_request_whose_service_is_not_ready_in_time_is_refused_for_the_limit_that_governs() {
    let limits = Limits::new([
        Quota::per_minute(10).name("org").key(header("x-org")),
        Limit::new(Quota::per_hour(100).and(Quota::per_second(1)))
            .name("user")
            .key(header("x-user")),
    ]);
    let limits = limits.store(far_store(|| 20));
    let layer = FixedWindowLayer::new(limits).queue(30, secs(2));
    // It is ready for one call only.
    let service = layer.layer(ReadyIf::new(|_, calls| calls == 0));
    let mut calls = Vec::new();
    for _ in 0..2 {
        // The request is made ready before the other one is called.
        let mut service = service.clone();
        let Ok(service) = service.ready().await;
        calls.push(tokio::spawn(service.call(of_user("/", "ann"))));
    }
    let refused = calls.pop().expect("two");
    answered(calls).await;
    let Ok(refused) = refused.await.expect("no panic");
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["x-ratelimit-resource"], "user");
    assert!(refused.headers().contains_key("retry-after"));
    let body = text_of(refused).await;
    assert!(body.contains(r#""violated-policies":["user:1/second"]"#), "{body}");
}
