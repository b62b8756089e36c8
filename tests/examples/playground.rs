//! The playground: what it serves.

use serde_json::{Value, json};

use crate::{Server, example};

const LIMITS: [&str; 4] = ["aligned", "two-at-once", "staggered", "first-request"];

fn start(window: u64) -> Server {
    Server::start_with(example("playground").env("WINDOW", window.to_string()))
}

fn standing(server: &Server, visitor: &str) -> Value {
    let answer = server.send(&format!("GET /standing, x-visitor: {visitor}"));
    assert_eq!(answer.status, 200);
    serde_json::from_str(&answer.body).expect("JSON")
}

fn ms(told: &Value) -> u64 {
    told.as_u64().expect("milliseconds")
}

#[test]
fn the_page_loads_nothing_from_other_servers() {
    let server = start(10);
    let page = server.send("GET /");
    assert_eq!(page.field("content-type"), Some("text/html; charset=utf-8"));
    let policy = page.field("content-security-policy").expect("a policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self';"));
    assert!(!policy.contains("unsafe") && !policy.contains("http") && !policy.contains('*'));
    for (path, kind) in [("style.css", "text/css"), ("script.js", "text/javascript")] {
        assert!(page.body.contains(&format!("=\"{path}\"")), "the page has {path}");
        let part = server.send(&format!("GET /{path}"));
        assert_eq!(part.field("content-type"), Some(&*format!("{kind}; charset=utf-8")));
        assert!(!part.body.contains("//www") && !part.body.contains("https:"), "{path}");
    }
}

#[test]
fn the_page_shows_the_code_that_the_server_runs() {
    let source = include_str!("../../examples/playground.rs");
    let page = include_str!("../../examples/playground/index.html");
    let shown: Vec<_> = page.split("<code>Quota::").skip(1).collect();
    assert_eq!(shown.len(), LIMITS.len());
    let bare = |text: &str| text.split_whitespace().collect::<String>();
    for code in shown {
        let (code, _) = code.split_once("</code>").expect("as opened");
        assert!(bare(source).contains(&bare(&format!("=Quota::{code};"))), "{code}");
    }
    for limit in LIMITS {
        assert!(page.contains(&format!("value=\"{limit}\"")));
        assert!(page.contains(&format!("data-target=\"{limit}\"")));
    }
}

#[test]
fn the_standing_is_exact_to_the_millisecond_and_free() {
    let server = start(600);
    let ada = |limit: &str| format!("GET /try/{limit}, x-visitor: ada");
    for limit in LIMITS {
        assert_eq!(server.send(&ada(limit)).status, 200);
    }
    for _ in 0..20 {
        standing(&server, "ada");
    }
    let told = standing(&server, "ada");
    for limit in LIMITS {
        let (at, quotas) = (ms(&told[limit]["at"]), &told[limit]["quotas"]);
        let quotas = quotas.as_array().expect("quotas");
        assert_eq!(quotas.len(), if limit == "two-at-once" { 2 } else { 1 });
        for quota in quotas {
            assert!((at + 1..=at + 600_000).contains(&ms(&quota["ends"])));
            // The request counts once, unless the window has turned since.
            assert!(quota["used"] == 1 || quota["used"] == 0, "{quota}");
            assert_eq!((&quota["limit"], &quota["window"]), (&json!(5), &json!(600_000)));
        }
        // The inner handler shows the decision, too, and the headers have whole seconds.
        let answer = server.send(&ada(limit));
        let decided: Value = serde_json::from_str(&answer.body).expect("JSON");
        let decided = decided["quotas"].as_array().expect("quotas");
        assert_eq!(decided.len(), quotas.len());
        let reset = answer.number("x-ratelimit-reset");
        assert!(decided.iter().any(|quota| ms(&quota["ends"]).div_ceil(1_000) == reset));
        assert!(decided.iter().all(|quota| quota["used"] == 1 || quota["used"] == 2));
    }
    // A window from the first request does not end this soon. Another visitor has another count.
    let used = |told: Value| told["first-request"]["quotas"][0]["used"].clone();
    assert_eq!((used(told), used(standing(&server, "ada"))), (json!(1), json!(2)));
    assert_eq!(used(standing(&server, "ben")), 0);
}

#[test]
fn limit_and_window_are_set_in_the_page_within_what_it_can_show() {
    let server = start(600);
    let told = |query: &str| {
        let answer = server.send(&format!("GET /standing{query}, x-visitor: cleo"));
        let told: Value = serde_json::from_str(&answer.body).expect("JSON");
        let quota = told["aligned"]["quotas"][0].clone();
        (quota["limit"].clone(), quota["window"].clone(), quota["used"].clone())
    };
    let send = |query: &str| server.send(&format!("GET /try/aligned{query}, x-visitor: cleo"));
    assert_eq!(send("?limit=2&window=500").number("x-ratelimit-limit"), 2);
    assert_eq!(told("?limit=2&window=500"), (json!(2), json!(500_000), json!(1)));
    // Another limit finds what is counted, another window is another counter.
    assert_eq!(send("?limit=1&window=500").status, 429);
    assert_eq!(told("?limit=9&window=500"), (json!(9), json!(500_000), json!(1)));
    assert_eq!(told("?limit=2&window=400"), (json!(2), json!(400_000), json!(0)));
    assert_eq!(told("?limit=0&window=0"), (json!(1), json!(4_000), json!(0)));
    assert_eq!(told("?limit=99999&window=99999"), (json!(20), json!(600_000), json!(0)));
    assert_eq!(told("?limit=x&window=-1"), (json!(5), json!(600_000), json!(0)));
}
