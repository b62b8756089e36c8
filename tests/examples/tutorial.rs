//! The app of docs/tutorial.md after each of its steps.

use super::{Answer, Server, example};

fn step(n: u32) -> Server {
    Server::start_with(&mut example(&format!("step{n}")))
}

/// How many requests with a header are left after this one.
fn left(server: &Server, header: &str) -> u64 {
    server.send_body("GET /search", header, "").number("x-ratelimit-remaining")
}

#[test]
fn the_app_has_no_limit_at_first() {
    let server = step(1);
    let answers = [server.send("POST /login"), server.send("GET /search")];
    for answer in answers {
        assert_eq!(answer.status, 200);
        assert!(!answer.fields.contains_key("x-ratelimit-limit"));
    }
}

#[test]
fn each_route_has_a_limit() {
    let server = step(2);
    let answers = server.round(&["POST /login"; 6]);
    let statuses: Vec<_> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 200, 429]);
    assert_eq!(answers[5].fields["x-ratelimit-resource"], "login");
    assert_eq!(server.send("GET /search").number("x-ratelimit-limit"), 30);
}

#[test]
fn each_user_has_a_count() {
    let server = step(3);
    let requests = ["Bearer ann", "Bearer ann", "Bearer bob", "nobody"];
    let requests = requests.map(|user| format!("GET /search, authorization: {user}"));
    let answers = server.round(&requests.each_ref().map(|request| &**request));
    let left: Vec<_> = answers.iter().map(|one| one.number("x-ratelimit-remaining")).collect();
    assert_eq!(left, [29, 28, 29, 29]);
}

#[test]
fn a_proxy_names_the_client() {
    let server = step(4);
    let requests = ["192.0.2.7", "192.0.2.7", "192.0.2.8"];
    let requests = requests.map(|client| format!("GET /search, x-forwarded-for: {client}"));
    let answers = server.round(&requests.each_ref().map(|request| &**request));
    let left: Vec<_> = answers.iter().map(|one| one.number("x-ratelimit-remaining")).collect();
    assert_eq!(left, [29, 28, 29]);
}

#[test]
fn plans_have_limits_of_their_own() {
    for n in [5, 6] {
        let server = step(n);
        assert_eq!(left(&server, "authorization: Bearer ann"), 299);
        assert_eq!(left(&server, "accept: */*"), 29);
        let internal = server.send_body("GET /search", "authorization: Bearer bob", "");
        assert_eq!(internal.status, 200);
        assert!(!internal.fields.contains_key("x-ratelimit-limit"));
    }
}

#[test]
fn two_nodes_share_a_count() {
    let Some(redis) = harness::Server::start() else { return };
    let node = || Server::start_with(example("step6").env("REDIS_URL", redis.url()));
    let nodes = [node(), node()];
    redis.wait_for_apps(nodes.len());
    let ask = |n: &usize| -> Answer { nodes[*n].send("GET /search") };
    let answers = nodes[0].round_of(&[0, 1, 0, 1], ask);
    let left: Vec<_> = answers.iter().map(|one| one.number("x-ratelimit-remaining")).collect();
    assert_eq!(left, [29, 28, 27, 26]);
}

#[test]
fn decisions_are_counted() {
    for n in [7, 8] {
        let server = step(n);
        assert_eq!(server.send("GET /search").status, 200);
        let metrics = server.send("GET /metrics").body;
        let counted = "tower_fixed_window_decisions_total{scope=\"search\",outcome=\"passed\"} 1";
        assert!(metrics.contains(counted), "{metrics}");
    }
}
