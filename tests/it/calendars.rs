//! Calendar windows (S35) over HTTP: the numbers in responses are those of the current window.

use axum::response::Response;

use crate::prelude::*;

/// 2026-03-29 00:00:00.500 UTC: in Berlin, two and a half hours before clocks are set forward.
const NOW_MS: u64 = 1_774_742_400_500;
/// The ends of that day, of a month from the 15th, and of March, in Berlin.
const DAY_S: u64 = 1_774_821_600;
const BILL_S: u64 = 1_776_204_000;
const MARCH_S: u64 = 1_774_994_400;

fn layer(quotas: impl Into<Quotas>, clock: &ManualClock) -> FixedWindowLayer {
    let store = MemoryStore::new().clock(clock.clone());
    FixedWindowLayer::new(Limit::new(quotas).name("plan").key(Key::global()).store(store))
}

async fn get(app: &Router, path: &str) -> Response {
    let request = Request::get(path).body(Body::empty()).expect("a request");
    app.clone().oneshot(request).await.expect("infallible")
}

fn header<'a>(response: &'a Response, name: &str) -> &'a str {
    response.headers()[name].to_str().expect("ASCII")
}

#[tokio::test]
async fn headers_describe_the_window_that_runs() {
    let clock = ManualClock::at_ms(NOW_MS);
    let month = Quota::per_month(1).in_zone("Europe/Berlin");
    let day = Quota::per_day(7).in_zone("Europe/Berlin");
    let bill = month.from_day(15).with_limit(9);
    for (quota, reset, window) in [
        (day, DAY_S, 23 * 3_600),
        (bill, BILL_S, 31 * 86_400 - 3_600),
        (month.with_limit(3), MARCH_S, 31 * 86_400 - 3_600),
    ] {
        let layer = layer(quota, &clock).headers(Headers::GitHubAndIetfDraft10);
        let app = Router::new().route("/", on_get(async || "hello")).layer(layer);
        let response = get(&app, "/").await;
        let (rate, limit) = (quota.to_string(), quota.limit());
        let rate = rate.split(' ').next().expect("a rate");
        assert_eq!(header(&response, "x-ratelimit-reset"), reset.to_string(), "{quota}");
        let policy = format!("\"plan:{rate}\";q={limit};w={window}");
        assert_eq!(header(&response, "ratelimit-policy"), policy);
        // Half a second is rounded up.
        let after = reset - NOW_MS / 1_000;
        let rest = format!("\"plan:{rate}\";r={};t={after}", limit - 1);
        assert_eq!(header(&response, "ratelimit"), rest);
    }

    let app = Router::new().route("/", on_get(async || "hello")).layer(layer(month, &clock));
    assert_eq!(get(&app, "/").await.status(), StatusCode::OK);
    let refused = get(&app, "/").await;
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(header(&refused, "retry-after"), (MARCH_S - NOW_MS / 1_000).to_string());
    assert_eq!(header(&refused, "x-ratelimit-reset"), MARCH_S.to_string());
    let body = text_of(refused).await;
    assert!(body.contains("API rate limit exceeded: plan:1/month"), "{body}");
    // The first millisecond of April.
    clock.set_ms(MARCH_S * 1_000 - 1);
    assert_eq!(get(&app, "/").await.status(), StatusCode::TOO_MANY_REQUESTS);
    clock.set_ms(MARCH_S * 1_000);
    assert_eq!(get(&app, "/").await.status(), StatusCode::OK);
}
