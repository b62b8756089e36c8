//! Three limits in one decision, with true costs and plans from a file.

use std::fs;
use std::time::{Duration, Instant};

use crate::{Answer, Server, example};

const ANN: &str = "x-org: acme\r\nx-user: ann";

fn chat(server: &Server, who: &str, max_tokens: u64, uses: u64) -> Answer {
    let body = format!(r#"{{"max_tokens":{max_tokens},"uses":{uses}}}"#);
    server.send_body("POST /v1/chat", who, &body)
}

/// The used part of each limit; `None` for limits that the client does not have.
fn usage(server: &Server, who: &str) -> [Option<u64>; 3] {
    let told = server.send_body("GET /usage", who, "").body;
    let told: serde_json::Value = serde_json::from_str(&told).expect("JSON");
    ["requests", "tokens", "cents"].map(|name| told["resources"][name]["used"].as_u64())
}

/// Corrections over Redis and changes of the plans' file take effect a moment later, so this waits.
fn wait_for_usage(server: &Server, who: &str, expected: [Option<u64>; 3]) {
    let start = Instant::now();
    while usage(server, who) != expected {
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", usage(server, who));
        std::thread::sleep(Duration::from_millis(20));
    }
}

// The windows are days and longer: only a test at midnight would see their end.
const LIMITS: &str = "requests=3/day tokens=1_000/day cents=5/month";

#[test]
fn ai_gateway() {
    let server = Server::start_with(example("ai_gateway").env("LIMITS", LIMITS));
    assert_eq!(chat(&server, "x-org: acme", 1, 1).status, 401);
    assert_eq!(server.send_body("POST /v1/chat", ANN, "{}").status, 400);

    // The estimate at first. What was used is known when the next request comes.
    let answer = chat(&server, ANN, 900, 40);
    assert_eq!((answer.status, answer.field("x-ratelimit-resource")), (200, Some("tokens")));
    assert_eq!(answer.number("x-ratelimit-used"), 900);
    assert!(answer.body.contains(r#"{"usage":{"total_tokens":40}}"#), "{}", answer.body);
    assert_eq!(usage(&server, ANN), [Some(1), Some(40), Some(1)]);

    // The limit of tokens refuses, and no limit counts the request.
    let refused = chat(&server, ANN, 961, 1);
    assert_eq!((refused.status, refused.field("x-ratelimit-resource")), (429, Some("tokens")));
    assert_eq!(usage(&server, ANN), [Some(1), Some(40), Some(1)]);

    // A model that fails costs nothing.
    let failed = server.send_body("POST /v1/chat", ANN, r#"{"max_tokens":900,"fails":true}"#);
    assert_eq!(failed.status, 502);
    assert_eq!(usage(&server, ANN), [Some(1), Some(40), Some(1)]);

    // Another user has other cents, and shares the organization's tokens.
    let bob = "x-org: acme\r\nx-user: bob";
    assert_eq!(chat(&server, bob, 10, 10).status, 200);
    assert_eq!(usage(&server, bob), [Some(2), Some(50), Some(1)]);
    assert_eq!(usage(&server, ANN), [Some(2), Some(50), Some(1)]);
    assert_eq!(chat(&server, bob, 10, 10).status, 200);
    let refused = chat(&server, ANN, 1, 1);
    assert_eq!((refused.status, refused.field("x-ratelimit-resource")), (429, Some("requests")));
}

/// Two gateways count in one Redis, and in this process while it is gone.
#[test]
fn ai_gateways_over_redis() {
    let Some(mut redis) = harness::Server::start() else { return };
    let gateway = || {
        let mut command = example("ai_gateway");
        Server::start_with(command.env("LIMITS", LIMITS).env("REDIS_URL", redis.url()))
    };
    let (one, other) = (gateway(), gateway());
    redis.wait_for_apps(2);
    let answer = chat(&one, ANN, 900, 40);
    assert_eq!((answer.status, answer.number("x-ratelimit-used")), (200, 900));
    wait_for_usage(&other, ANN, [Some(1), Some(40), Some(1)]);

    // The limit of tokens refuses, and no limit counts the request.
    let refused = chat(&other, ANN, 961, 1);
    assert_eq!((refused.status, refused.field("x-ratelimit-resource")), (429, Some("tokens")));
    // Another user has other cents, and shares the organization's tokens.
    let bob = "x-org: acme\r\nx-user: bob";
    assert_eq!(chat(&other, bob, 10, 10).status, 200);
    wait_for_usage(&one, bob, [Some(2), Some(50), Some(1)]);
    assert_eq!(chat(&one, bob, 10, 10).status, 200);
    for gateway in [&one, &other] {
        let refused = chat(gateway, ANN, 1, 1);
        assert_eq!(
            (refused.status, refused.field("x-ratelimit-resource")),
            (429, Some("requests"))
        );
    }

    redis.kill();
    let eve = "x-org: other\r\nx-user: eve";
    for (gateway, uses) in [(&one, 30), (&other, 50)] {
        assert_eq!(chat(gateway, eve, 100, uses).status, 200);
        wait_for_usage(gateway, eve, [Some(1), Some(uses), Some(1)]);
    }
}

#[test]
fn ai_gateway_with_plans() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("plans");
    fs::write(&file, "acme: tokens=unlimited\n").expect("a file");
    let mut command = example("ai_gateway");
    let server = Server::start_with(command.env("LIMITS", LIMITS).env("PLANS", &file));
    let wait_for = |expected| wait_for_usage(&server, ANN, expected);
    wait_for([Some(0), None, Some(0)]);
    assert_eq!(chat(&server, ANN, 3_000, 3_000).status, 200);
    assert_eq!(usage(&server, ANN), [Some(1), None, Some(3)]);
    assert_eq!(chat(&server, "x-org: other\r\nx-user: ann", 3_000, 1).status, 429);

    // A file that can't be read changes nothing, and what is counted stays counted.
    fs::write(&file, "acme: tokens=many\n").expect("a file");
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(usage(&server, ANN), [Some(1), None, Some(3)]);
    fs::write(&file, "acme: requests=unlimited\n").expect("a file");
    wait_for([None, Some(0), Some(3)]);
}
