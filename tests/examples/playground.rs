//! The playground: what it serves, and its page in a browser.

use serde_json::{Value, json};

use crate::browser::Browser;
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

/// Sets a field of the page, and leaves it, as a user does.
fn set(browser: &mut Browser, selector: &str, value: &str) {
    browser.value(&format!(
        "(() => {{ const field = document.querySelector({selector:?}); field.value = {value:?}; \
         field.dispatchEvent(new Event('change', {{ bubbles: true }})); }})()"
    ));
}

/// Attacks, again if the machine was too busy to send in time, and returns the verdict.
fn attack(browser: &mut Browser, limit: &str, said: &str) -> String {
    set(browser, "#attacking [name=said]", said);
    for _ in 0..8 {
        browser.click(&format!("[data-target={limit}] button"));
        let ended = "document.querySelector('#verdict').textContent.includes(' passed within ')";
        browser.wait(ended);
        let verdict = browser.text("#verdict");
        if !verdict.contains("late") {
            return verdict;
        }
    }
    panic!("the machine is too busy for an attack of one second");
}

/// The outcome of an experiment. If another request got in the way, the experiment is repeated.
fn outcome(browser: &mut Browser, form: &str) -> String {
    for _ in 0..3 {
        browser.click(&format!("{form} button"));
        browser.wait(&format!(
            "!document.querySelector('{form} .outcome').textContent.startsWith('Waiting') \
             && document.querySelector('{form} button').textContent !== 'Stop'"
        ));
        let outcome = browser.text(&format!("{form} .outcome"));
        if !outcome.contains("Try again") {
            return outcome;
        }
    }
    panic!("the machine is too busy for an experiment of one second");
}

#[test]
#[ignore = "it needs Chromium: examples/README.md"]
fn in_a_browser() {
    let server = start(10);
    let mut browser = Browser::open(&format!("http://{}/", server.address));
    let browser = &mut browser;
    browser.wait("document.querySelectorAll('.panes i').length === 5");

    let lit = "document.querySelectorAll('.panes .on').length";
    // Early in a window, so that it doesn't turn before the pictures are taken.
    let early = "parseFloat(document.querySelector('.turns b')?.textContent) > 8";
    browser.wait(early);
    browser.click("#one");
    browser.wait("document.querySelector('#said').textContent === 'Passed; 4 left.'");
    assert_eq!(browser.value(lit), 1);
    assert!(browser.text("#fields").starts_with("200 OK"));
    assert!(browser.text("#fields").contains("x-ratelimit-remaining: 4\n"));

    browser.wait(&format!("{early} && {lit} === 0"));
    browser.click("#burst");
    browser.wait("document.querySelector('#said').textContent.startsWith('5 passed, 3 refused')");
    assert_eq!(browser.value(lit), 5);
    assert_eq!(browser.text(".strip .now .count"), "5\u{2009}+3");
    assert!(browser.text("#fields").starts_with("429 Too Many Requests"));
    assert!(browser.text("#fields").contains("x-ratelimit-remaining: 0\n"));
    assert!(browser.text("#fields").contains("\nretry-after: "));
    // The window empties by itself, and the strip shows its count.
    browser.wait("document.querySelectorAll('.panes .on').length === 0");
    assert_eq!(browser.text(".strip .hit .count"), "5\u{2009}+3");

    // Without a prediction, no experiment begins.
    browser.click("#bursting button");
    assert_eq!(browser.value("document.activeElement.closest('form')?.id"), "bursting");
    assert_eq!(browser.text("#bursting .outcome"), "");

    // The first experiment: a burst of 8.
    set(browser, "#bursting [name=said]", "8");
    let told = outcome(browser, "#bursting");
    assert!(told.starts_with("5 of 8 passed; you said 8. The limit is 5: "), "{told}");

    // The second: the next reset, of each kind of window.
    for (kind, found, other) in [
        ("aligned", "clock", "last"),
        ("first-request", "first", "clock"),
        ("staggered", "own", "first"),
    ] {
        browser.click(&format!("[name=limit][value={kind}]"));
        browser.click(&format!("#resetting [value={found}]"));
        let told = outcome(browser, "#resetting");
        assert!(told.starts_with("As you said: it was back at :"), "{kind}: {told}");
        if kind == "aligned" {
            browser.click(&format!("#resetting [value={other}]"));
            let told = outcome(browser, "#resetting");
            assert!(told.starts_with("Not as you said: it was back at :"), "{kind}: {told}");
            assert!(told.ends_with("the clock's next multiple of 10 s."), "{told}");
        }
    }

    // The third: the boundary attack, and the second window as the remedy.
    let verdict = attack(browser, "aligned", "5");
    assert!(verdict.starts_with("10 of 10 passed within "), "{verdict}");
    assert!(verdict.ends_with("you said 5. The limit is 5. The remedy: two windows at once."));
    let verdict = attack(browser, "two-at-once", "5");
    assert!(verdict.starts_with("5 of 10 passed within "), "{verdict}");
    assert!(verdict.ends_with("you said 5. The limit of 5 holds."), "{verdict}");
    assert_eq!(browser.value("document.querySelectorAll('#lens .passed').length"), 5);
    assert_eq!(browser.value("document.querySelectorAll('#lens .refused').length"), 5);
    let verdict = attack(browser, "staggered", "10");
    assert!(verdict.starts_with("10 of 10 passed within "), "{verdict}");
    let verdict = attack(browser, "first-request", "10");
    assert!(verdict.starts_with("9 of 10 passed within "), "{verdict}");

    // Another limit and another window, and the burst once more.
    set(browser, "#limit", "12");
    set(browser, "#window", "6");
    browser.wait("document.querySelectorAll('.panes i').length === 12");
    browser.wait("document.querySelector('[data-fill=window]').textContent === '6'");
    assert_eq!(browser.text("[data-fill=twice]"), "24");
    set(browser, "#bursting [name=said]", "8");
    let told = outcome(browser, "#bursting");
    assert!(told.starts_with("8 of 8 passed; you said 8. The limit is 12: "), "{told}");
    let verdict = attack(browser, "aligned", "24");
    assert!(verdict.starts_with("24 of 24 passed within "), "{verdict}");
    set(browser, "#limit", "0");
    assert_eq!(browser.value("document.querySelector('#limit').matches(':invalid')"), true);
    set(browser, "#limit", "5");
    set(browser, "#window", "10");
    browser.wait("document.querySelectorAll('.panes i').length === 5");

    // By keyboard alone: the choice, and the button after it, in visible focus.
    browser.click("[name=limit][value=first-request]");
    browser.value("document.querySelector('.kinds :checked').focus()");
    browser.press("ArrowLeft", 37, "");
    assert_eq!(browser.value("document.activeElement.value"), "staggered");
    browser.press("Tab", 9, "");
    assert_eq!(browser.value("document.activeElement.id"), "one");
    let outline = browser.value("getComputedStyle(document.activeElement).outlineStyle");
    assert_eq!(outline, "solid");
    browser.value("document.querySelector('#said').textContent = ''");
    browser.press("Enter", 13, "\r");
    browser.wait("document.querySelector('#said').textContent !== ''");
    // An experiment: the number, Enter, and Enter on its button to stop it.
    browser.value("document.querySelector('#bursting [name=said]').value = ''");
    browser.value("document.querySelector('#bursting [name=said]').focus()");
    browser.press("3", 51, "3");
    browser.press("Enter", 13, "\r");
    browser.wait("document.querySelector('#bursting .outcome').textContent.startsWith('Waiting')");
    browser.press("Tab", 9, "");
    browser.press("Enter", 13, "\r");
    browser.wait("document.querySelector('#bursting .outcome').textContent === 'Stopped.'");

    assert_eq!(browser.value("document.querySelector('#attacking [name=said]').value"), "");
    set(browser, "#attacking [name=said]", "10");
    browser.click("[data-target=aligned] button");
    browser.wait("document.querySelector('#verdict').textContent.startsWith('Waiting')");
    browser.click("[data-target=aligned] button");
    browser.wait("document.querySelector('#verdict').textContent === 'Stopped.'");

    drop(server);
    browser.click("#one");
    browser.wait("document.querySelector('#said').textContent === 'The server does not answer.'");

    assert_eq!(browser.complaints(), &[] as &[Value]);
}
