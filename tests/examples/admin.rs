//! The routes for support, by which docs/support.md goes from the question to the answer.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::{Answer, Server, example};

const SUPPORT: &str = "authorization: Bearer support";
const ANN: &str = "GET /api, authorization: Bearer ann";
const BOB: &str = "GET /api, authorization: Bearer bob";

/// Windows that begin with a test, and end after it.
fn a_day(limit: u64) -> String {
    format!("{limit}/day from-first-request")
}

fn in_hours(hours: u64) -> u64 {
    let at = SystemTime::now() + Duration::from_secs(hours * 3_600);
    at.duration_since(UNIX_EPOCH).expect("after 1970").as_secs()
}

/// A node with three a day, and its routes for support.
struct Node(Server);

impl Node {
    fn start(redis: Option<String>) -> Self {
        let mut command = example("admin");
        let redis = redis.map(|url| ("REDIS_URL", url));
        Self(Server::start_with(command.env("LIMIT", a_day(3)).envs(redis)))
    }

    fn status(&self, request: &str) -> u16 {
        self.0.send(request).status
    }

    fn limit(&self, request: &str) -> u64 {
        self.0.send(request).number("x-ratelimit-limit")
    }

    fn support(&self, request: &str, body: &str) -> Answer {
        let (method, path) = request.split_once(' ').expect("a method and a path");
        self.0.send_body(&format!("{method} /admin/{path}"), SUPPORT, body)
    }

    fn ask(&self, request: &str) -> Value {
        self.ask_with(request, "")
    }

    fn ask_with(&self, request: &str, body: &str) -> Value {
        let answer = self.support(request, body);
        assert_eq!(answer.status, 200, "{request}: {}", answer.body);
        serde_json::from_str(&answer.body).expect("JSON")
    }

    /// Why a request of support is not served.
    fn refusal(&self, request: &str, body: &str) -> String {
        let answer = self.support(request, body);
        assert_eq!(answer.status, 400, "{request}: {}", answer.body);
        answer.body
    }
}

/// Of a key what is used, and its limit.
fn used(state: &Value) -> (u64, u64) {
    let usage = &state["usage"][0];
    let [used, remaining, limit] =
        ["used", "remaining", "limit"].map(|of| usage[of].as_u64().expect("a number"));
    assert_eq!(remaining, limit.saturating_sub(used));
    (used, limit)
}

#[test]
fn support_sees_and_changes_limits_by_user_address_and_api_key() {
    let node = Node::start(None);
    let (later, uses) = (
        in_hours(8),
        [
            (ANN, "api", "1"),
            ("POST /login", "login", "127.0.0.1"),
            ("POST /upload, x-api-key: s3cret", "upload", "s3cret"),
        ],
    );
    for (request, limit, key) in uses {
        for n in 1..=3 {
            assert_eq!(node.0.send(request).number("x-ratelimit-used"), n);
            assert_eq!(used(&node.ask(&format!("GET {limit}/key/{key}"))), (n, 3));
        }
        assert_eq!(node.status(request), 429);
        let refused = node.ask(&format!("GET {limit}/refused"));
        assert_eq!((&refused[0]["count"], &refused[0]["quota"]), (&json!(1), &json!(a_day(3))));
        let times =
            ["first", "last", "retry_at"].map(|of| refused[0][of].as_u64().expect("a time"));
        assert!(times.is_sorted() && times[2] > in_hours(23), "{times:?}");

        // The list shows the key of an API key as a hash.
        let listed = refused[0]["key"].as_str().expect("text");
        let path = format!("{limit}/key/{listed}");
        assert_eq!(node.ask(&format!("GET {path}")), node.ask(&format!("GET {limit}/key/{key}")));

        let shadow = node.ask(&format!("PUT {limit}/shadow?until={later}"));
        assert_eq!(shadow["shadow"], json!(true));
        assert_eq!(shadow["changes"], json!([{ "of": "shadow", "to": "true", "until": later }]));
        assert_eq!(node.status(request), 200);
        // The list counts what would be refused.
        assert_eq!(node.ask(&format!("GET {limit}/refused"))[0]["count"], json!(2));
        let ended = node.ask(&format!("DELETE {limit}/shadow"));
        assert_eq!(ended, json!({ "quotas": a_day(3), "shadow": false, "changes": [] }));
        assert_eq!(node.status(request), 429);

        let raised = node.ask_with(&format!("PUT {limit}/quotas?until={later}"), &a_day(4));
        assert_eq!(raised["quotas"], json!(a_day(4)));
        assert_eq!(raised["changes"], json!([{ "of": "quotas", "to": a_day(4), "until": later }]));
        assert_eq!(node.ask(&format!("GET {limit}")), raised);
        assert_eq!(node.0.send(request).number("x-ratelimit-used"), 4);
        assert_eq!(used(&node.ask(&format!("DELETE {path}/used"))), (0, 4));
        assert_eq!(node.ask(&format!("DELETE {limit}/quotas")), ended);
        assert_eq!(node.limit(request), 3);
    }
}

#[test]
fn a_shadow_run_says_by_key_and_by_route_what_would_be_refused() {
    let node = Node::start(None);
    node.ask(&format!("PUT api/shadow?until={}", in_hours(8)));
    let search = |token: &str| format!("GET /api/search, authorization: Bearer {token}");
    for request in [ANN, ANN, ANN, ANN, BOB, &search("ann"), &search("ann"), &search("ann")] {
        assert_eq!(node.status(request), 200);
    }
    let keys = node.ask("GET api/refused");
    assert_eq!(
        (&keys[0]["key"], &keys[0]["count"], &keys[1]),
        (&json!("u1"), &json!(4), &json!(null))
    );
    let routes = json!([
        { "route": "/api/search", "count": 3, "share": 0.75 },
        { "route": "/api", "count": 1, "share": 0.25 },
    ]);
    assert_eq!(node.ask("GET api/refused/routes"), routes);
    assert_eq!(node.ask("GET login/refused/routes"), json!([]));
}

#[test]
fn support_is_warned_of_each_key_once() {
    let node = Node::start(None);
    for _ in 0..2 {
        assert_eq!([(); 3].map(|()| node.status(ANN)), [200; 3]);
        let near = node.ask("GET api/near");
        assert_eq!(near.as_array().expect("a list").len(), 1, "{near}");
        assert_eq!((&near[0]["key"], &near[0]["quota"]), (&json!("u1"), &json!(a_day(3))));
        node.ask("DELETE api/key/u1/used");
    }
}

#[test]
fn an_exception_of_a_key_wins_over_the_limit_of_all() {
    let (node, later) = (Node::start(None), in_hours(8));
    let exception = format!("PUT api/key/u1/quotas?until={later}");
    let state = node.ask_with(&exception, &a_day(1_000));
    assert_eq!((used(&state), &state["exception_until"]), ((0, 1_000), &json!(later)));
    node.ask_with(&format!("PUT api/quotas?until={later}"), &a_day(9));
    assert_eq!((node.limit(ANN), node.limit(BOB)), (1_000, 9));

    let ended = node.ask("DELETE api/key/u1/quotas");
    assert_eq!((used(&ended), &ended["exception_until"]), ((1, 9), &Value::Null));
    assert_eq!(node.ask("DELETE api/quotas")["changes"], json!([]));
    assert_eq!((node.limit(ANN), node.limit(BOB)), (3, 3));
}

#[test]
fn a_mistake_of_support_changes_nothing_and_gets_a_sentence() {
    let node = Node::start(None);
    let without = [node.status("GET /admin/api"), node.status("GET /admin/api/key/1, x-a: b")];
    assert_eq!(without, [401, 401]);
    assert_eq!(node.support("GET none", "").status, 404);

    let exception = format!("PUT api/key/1/quotas?until={}", in_hours(8));
    node.ask_with(&exception, &a_day(1_000));
    let times = ["", "?until=1", "?until=20:00", &format!("?until={}", in_hours(24 * 32))];
    let millis = format!("?until={}000", in_hours(8));
    for until in times.into_iter().chain([millis.as_str()]) {
        for change in ["api/key/1/quotas", "api/quotas", "api/shadow"] {
            let why = node.refusal(&format!("PUT {change}{until}"), &a_day(7));
            assert!(why.contains("the next 31 days, in seconds since 1970"), "{until}: {why}");
        }
    }
    let why = node.refusal(&format!("PUT api/shadow?until={}", in_hours(8)), "false");
    assert_eq!(why, "shadow mode takes no body: DELETE ends it");
    let why = node.refusal(&exception, "many");
    assert!(why.contains("column 1: expected a limit"), "{why}");
    assert_eq!((node.limit(ANN), node.limit(BOB)), (1_000, 3));

    let hash = format!("upload/key/s{}", "0".repeat(64));
    for (key, advice) in [
        ("api/key/bob", "the user's number, such as u1"),
        ("login/key/localhost", "an address"),
        (&hash, "the value of x-api-key"),
    ] {
        let why = node.refusal(&format!("GET {key}"), "");
        assert!(why.contains(advice), "{why}");
        assert_eq!(node.refusal(&format!("DELETE {key}/used"), ""), why);
    }
}

/// What is of all nodes, what is of one, and what is left while Redis is gone.
#[test]
fn support_over_two_nodes() {
    let Some(mut redis) = harness::Server::start() else { return };
    let nodes = [Node::start(Some(redis.url())), Node::start(Some(redis.url()))];
    redis.wait_for_apps(nodes.len());
    let [one, other] = &nodes;
    let of_ann = |node: &Node| used(&node.ask("GET api/key/u1"));

    let statuses = [one, other, one, one, other].map(|node| node.status(ANN));
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
    for node in &nodes {
        assert_eq!(of_ann(node), (3, 3));
        let refused = node.ask("GET api/refused");
        assert_eq!((&refused[0]["key"], &refused[0]["count"]), (&json!("u1"), &json!(1)));
    }
    // The node whose charge was the third warns.
    let near = [one, other].map(|node| node.ask("GET api/near")[0]["key"].clone());
    assert_eq!(near, [json!("u1"), Value::Null]);

    // A reset is of all nodes: the other one asks again after a second.
    assert_eq!(used(&one.ask("DELETE api/key/u1/used")), (0, 3));
    harness::wait_for("the other node to let ann in", || other.status(ANN) == 200);
    assert_eq!(of_ann(one), (1, 3));

    // An exception is of one node, and so is shadow mode.
    one.ask_with(&format!("PUT api/key/u1/quotas?until={}", in_hours(8)), &a_day(1_000));
    one.ask(&format!("PUT api/shadow?until={}", in_hours(8)));
    assert_eq!((of_ann(one), of_ann(other)), ((1, 1_000), (1, 3)));
    assert_eq!(other.ask("GET api")["changes"], json!([]));
    assert_eq!(one.ask("GET api")["changes"].as_array().map(Vec::len), Some(2));
    one.ask("DELETE api/shadow");
    one.ask("DELETE api/key/u1/quotas");
    assert_eq!(one.ask("GET api"), other.ask("GET api"));
    assert_eq!(one.ask("GET api/key/u1")["store_fails"], json!(false));

    redis.kill();
    assert_eq!([one, one, other].map(|node| node.status(ANN)), [200; 3]);
    for (node, count) in [(one, 2), (other, 1)] {
        let state = node.ask("GET api/key/u1");
        assert_eq!((used(&state), &state["store_fails"]), ((count, 3), &json!(true)));
        let answer = node.support("DELETE api/key/u1/used", "");
        assert_eq!(answer.status, 503);
        assert!(answer.body.contains("on this node at most"), "{}", answer.body);
        assert_eq!(of_ann(node), (0, 3));
    }
}
