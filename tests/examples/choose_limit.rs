//! `choose_limit` on logs whose answers are known.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::process::Output;
use std::thread;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tower_fixed_window::{Limit, ManualClock, MemoryStore, Quota, Quotas};

use super::example;

/// 2026-11-20T12:00:00Z.
const NOON: u64 = 1_795_176_000;

/// A file of the running test, since another one may write one of the same name while it is read.
pub(crate) fn file(name: &str, content: impl AsRef<[u8]>) -> String {
    let test = thread::current().name().expect("a test's thread").replace("::", "-");
    let file = format!("{}/{test}-{name}", env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(&file, content).expect("a file");
    file
}

pub(crate) fn run(arguments: &[&str]) -> Output {
    example("choose_limit").args(arguments).output().expect("it ends")
}

/// The program's output, after a run without errors.
pub(crate) fn printed(arguments: &[&str]) -> String {
    let output = run(arguments);
    let wrong = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && wrong.is_empty(), "{wrong}");
    String::from_utf8(output.stdout).expect("text")
}

pub(crate) fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(&[&["--json"], arguments].concat())).expect("JSON")
}

pub(crate) fn wrong(arguments: &[&str]) -> (Option<i32>, String) {
    let output = run(arguments);
    assert!(output.stdout.is_empty());
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A line in the common format, this many seconds after noon.
pub(crate) fn line(seconds: u64, client: &str) -> String {
    let (hour, minute, second) = (12 + seconds / 3_600, seconds / 60 % 60, seconds % 60);
    format!(
        "{client} - - [20/Nov/2026:{hour:02}:{minute:02}:{second:02} +0000] \"GET / HTTP/1.1\" 200 5\n"
    )
}

fn log(requests: impl IntoIterator<Item = (u64, &'static str)>) -> String {
    requests.into_iter().map(|(seconds, client)| line(seconds, client)).collect()
}

/// Ada sends 3 requests at the end of a minute and 4 at the start of the next, Bob two in each of
/// two minutes, and Cyd one.
pub(crate) fn known() -> String {
    let ada = [57, 58, 59, 60, 61, 62, 63].map(|second| (second, "192.0.2.1"));
    let bob = [0, 30, 90, 119].map(|second| (second, "192.0.2.2"));
    let mut all = [ada.as_slice(), &bob, &[(200, "192.0.2.3")]].concat();
    all.sort();
    log(all)
}

#[test]
fn counts_the_refusals_of_each_quota() {
    let report = json(&["--quota", "3/minute", "--quota", "6/hour", &file("known", known())]);
    let keys: HashSet<_> = report.as_object().expect("an object").keys().map(|k| &**k).collect();
    let promised = ["requests", "skipped", "clients", "from", "to", "quotas", "recommended"];
    assert!(promised.iter().all(|key| keys.contains(key)), "{keys:?}");
    assert_eq!(report["requests"], 12);
    assert_eq!(report["skipped"], 0);
    assert_eq!(report["clients"], 3);
    assert_eq!(report["from"], "2026-11-20T12:00:00Z");
    assert_eq!(report["to"], "2026-11-20T12:03:20Z");
    assert_eq!(report["notes"], json!([]));

    // Ada's fourth request in the second minute is refused. Around the boundary 6 pass within a
    // minute, twice the limit. A second window of 1/10s refuses none of Bob's, which are further
    // apart.
    let minute = &report["quotas"][0];
    assert_eq!(minute["quota"], "3/minute");
    assert_eq!(minute["refused"], 1);
    assert_eq!(minute["clients_refused"], 1);
    assert_eq!((&minute["p99"], &minute["p99_9"]), (&json!(4), &json!(4)));
    assert_eq!(
        minute["busiest_window"],
        json!({"client": "192.0.2.1", "from": "2026-11-20T12:01:00Z", "requests": 4})
    );
    assert_eq!(minute["boundary"], json!({"passed": 6, "times_limit": 2.0}));
    assert_eq!(
        minute["second_window"],
        json!({"quota": "1/10s", "refused": 0, "clients_refused": 0})
    );
    assert_eq!(minute["refused_most"], json!([{"client": "192.0.2.1", "refused": 1}]));

    // All of Ada's 7 are in one hour, and in 10 minutes.
    let hour = &report["quotas"][1];
    assert_eq!(hour["quota"], "6/hour");
    assert_eq!((&hour["refused"], &hour["clients_refused"]), (&json!(1), &json!(1)));
    // Bob is never refused by 6/hour; of his 4 in ten minutes 2/10m refuses two.
    assert_eq!(
        hour["second_window"],
        json!({"quota": "2/10m", "refused": 2, "clients_refused": 1})
    );
    // The only refused client is a third of all clients, more than the default of 0.1%.
    assert_eq!(report["recommended"], Value::Null);
    let given = ["--quota", "3/minute", "--quota", "7/hour", "--tolerate", "34%"];
    let report = json(&[&given[..], &[&file("known", known())]].concat());
    assert_eq!(report["recommended"], "7/hour");
}

#[test]
fn measures_bursts_in_half_open_intervals() {
    for (second, passed) in [(118, 2), (119, 1)] {
        let log = log([(59, "192.0.2.1"), (second, "192.0.2.1")]);
        let report = json(&["--quota", "1/minute", &file("stretch", log)]);
        assert_eq!(report["quotas"][0]["boundary"]["passed"], passed);
    }
}

/// A thousand clients send two requests a minute for a quarter of an hour, and one of them another
/// one in each minute.
#[test]
fn recommends_the_smallest_quota_that_refuses_one_client_in_a_thousand() {
    let mut text = String::new();
    for second in 0..900 {
        for client in 0..1_000 {
            if second % 60 < 2 || client == 7 && second % 60 == 2 {
                text += &line(second, &format!("10.0.{}.{}", client / 250, client % 250));
            }
        }
    }
    let log = file("thousand", &text);
    let report = json(&[&log]);
    assert_eq!(report["clients"], 1_000);
    // Twice a minute: 2/minute. That is 30 in the hour, and 45 for the one: 50/hour.
    assert_eq!(report["recommended"], "2/minute, 50/hour");
    let why = report["why"].as_str().expect("a sentence");
    assert!(why.contains("at most 0.1% of the clients (1 of 1,000)"), "{why}");
    assert!(why.ends_with(": here 1."), "{why}");
    // Nobody: 5/minute. 50/hour is less than 5/minute grants.
    assert_eq!(json(&["--tolerate", "0", &log])["recommended"], "5/minute, 50/hour");
    // The row goes on up to the first that refuses nobody.
    let quotas: Vec<_> = report["quotas"].as_array().expect("a row").iter().collect();
    let names: Vec<_> = quotas.iter().map(|quota| quota["quota"].as_str().unwrap()).collect();
    let minutes = ["1/minute", "2/minute", "5/minute"];
    let hours = ["1/hour", "2/hour", "5/hour", "10/hour", "20/hour", "50/hour"];
    assert_eq!(names, [&minutes[..], &hours].concat());
    assert_eq!(quotas[1]["refused"], 15);
    assert!(printed(&[&log]).contains("recommended: 2/minute, 50/hour\n"));

    // Another client that 50/hour would refuse: together, the two are one client too many.
    let more = (15..26).flat_map(|minute| [60 * minute, 60 * minute + 1]);
    text.extend(more.map(|second| line(second, "10.0.0.8")));
    assert_eq!(json(&[&file("thousand", text)])["recommended"], "2/minute, 100/hour");
}

/// Runs the crate's own limiter on a random log, and searches the passed requests for the largest
/// burst.
#[tokio::test]
async fn decides_as_the_limiter_does() {
    let mut random = fastrand::Rng::with_seed(22);
    let mut seconds = 0;
    let mut requests: Vec<(u64, u8)> = (0..6_000)
        .map(|_| {
            // Bursts alternate with rare requests.
            seconds += if random.u8(..100) < 97 { random.u64(..2) } else { random.u64(..300) };
            (seconds % 39_000, random.u8(..4) * random.u8(..3))
        })
        .collect();
    requests.sort_by_key(|(seconds, _)| *seconds);
    let text: String = requests
        .iter()
        .map(|(second, client)| line(*second, &format!("10.0.0.{client}")))
        .collect();
    let log = file("random", text);

    let texts = [
        "1/minute",
        "4/minute",
        "9/minute",
        "30/minute",
        "20/hour",
        "100/hour",
        "7/10s",
        "5/minute from-first-request",
        "12/minute starting-at=17s",
        "0/hour",
    ];
    for text in texts {
        let report = json(&["--quota", text, &log]);
        let judged = &report["quotas"][0];
        let quota: Quota = text.parse().expect("a quota");
        let passed = passed(quota.into(), &requests).await;
        let all = requests.len() as u64;
        let count: usize = passed.values().map(Vec::len).sum();
        assert_eq!(judged["refused"], all - count as u64, "{text}");
        let asked = |client: &u8| requests.iter().filter(|(_, other)| other == client).count();
        let (never, refused): (Vec<_>, Vec<_>) =
            passed.keys().partition(|client| passed[client].len() == asked(client));
        assert_eq!(judged["clients_refused"], refused.len(), "{text}");
        // Steps of a sixtieth are exact where they are seconds.
        if quota.window() == Duration::from_secs(60) {
            let worst = passed.values().map(|times| most_within(times, 60)).max();
            assert_eq!(judged["boundary"]["passed"], worst.unwrap(), "{text}");
        }
        let second: Quotas = judged["second_window"]["quota"].as_str().unwrap().parse().unwrap();
        let both = self::passed(quota.and(second.as_ref()[0]), &requests).await;
        let cost: Vec<_> =
            never.iter().map(|client| passed[client].len() - both[client].len()).collect();
        assert_eq!(judged["second_window"]["refused"], cost.iter().sum::<usize>(), "{text}");
        let hit = cost.iter().filter(|refused| **refused > 0).count();
        assert_eq!(judged["second_window"]["clients_refused"], hit, "{text}");
    }
}

async fn passed(quotas: Quotas, requests: &[(u64, u8)]) -> HashMap<u8, Vec<u64>> {
    let clock = ManualClock::at_ms(0);
    let limiter = Limit::new(quotas).store(MemoryStore::new().clock(clock.clone()));
    let mut passed = HashMap::<_, Vec<_>>::new();
    for (seconds, client) in requests {
        clock.set_ms((NOON + seconds) * 1_000);
        let times = passed.entry(*client).or_default();
        if limiter.check(u64::from(*client)).await.expect("memory").is_allowed() {
            times.push(*seconds);
        }
    }
    passed
}

fn most_within(times: &[u64], length: u64) -> usize {
    let within =
        |start: &u64| times.iter().filter(|t| (*start..start + length).contains(t)).count();
    times.iter().map(within).max().unwrap_or(0)
}

/// A line of each kind, of one client at one time.
const KINDS: [&str; 17] = [
    // Common, combined, behind a host's name, behind syslog, with a name with spaces.
    r#"192.0.2.7 - - [20/Nov/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5"#,
    r#"192.0.2.7 - ada [20/Nov/2026:13:00:00 +0100] "GET / HTTP/1.1" 200 5 "-" "curl/8 \"x\" [y]""#,
    r#"example.com:443 192.0.2.7 - - [20/Nov/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5"#,
    r#"Nov 20 12:00:00 web nginx: 192.0.2.7 - - [20/Nov/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5"#,
    r#"192.0.2.7 - Ada [x] Lovelace [20/Nov/2026:06:30:00 -0530] "GET / HTTP/1.1" 200 5"#,
    r#"192.0.2.7 - - [2026-11-20T12:00:00+00:00] "GET / HTTP/1.1" 200 5"#,
    r#"::ffff:192.0.2.7 - - [20/Nov/2026:12:00:00 +0000] "GET / HTTP/1.1" 200 5"#,
    // nginx, Caddy, Traefik, Envoy, Elastic, and what else there is.
    r#"{"time_iso8601":"2026-11-20T12:00:00+00:00","remote_addr":"192.0.2.7","request":"GET / HTTP/1.1"}"#,
    r#"{"msec":"1795176000.000","time_local":"20/Nov/2026:12:00:00 +0000","remote_addr":"192.0.2.7"}"#,
    r#"{"level":"info","ts":1795176000.0001,"request":{"remote_ip":"10.0.0.1","client_ip":"192.0.2.7"},"status":200}"#,
    r#"{"ClientAddr":"192.0.2.7:64516","ClientHost":"192.0.2.7","StartUTC":"2026-11-20T12:00:00.000000001Z","time":"2026-11-20T12:00:01Z"}"#,
    r#"{"start_time":"2026-11-20T12:00:00.000Z","downstream_remote_address":"192.0.2.7:4711"}"#,
    r#"{"@timestamp":"2026-11-20T12:00:00.000Z","source.ip":"192.0.2.7"}"#,
    r#"{"@timestamp":"2026-11-20T12:00:00.000Z","source":{"ip":"192.0.2.7"},"message":"\u00e4 \" {"}"#,
    r#"{"timestamp":1795176000000,"client_ip":"[::ffff:192.0.2.7]:443","more":[1,{"a":null}]}"#,
    r#"{"time":"2026-11-20 12:00:00","ip":"192.0.2.7","ok":true}"#,
    r#"{"ts":1795176000000000000,"client_ip":"192.0.2.7"}"#,
];

#[test]
fn reads_common_and_combined_lines_and_json() {
    for kind in KINDS {
        let report = json(&["--quota", "5/minute", &file("kind", kind)]);
        assert_eq!((&report["requests"], &report["clients"]), (&json!(1), &json!(1)), "{kind}");
        assert_eq!(report["from"], "2026-11-20T12:00:00Z", "{kind}");
        assert_eq!(report["quotas"][0]["busiest_window"]["client"], "192.0.2.7", "{kind}");
    }
    // All in one file, packed or not, also from standard input: the same client.
    let text = KINDS.join("\r\n");
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(text.as_bytes()).expect("memory");
    let gzip = gzip.finish().expect("memory");
    for bytes in [text.as_bytes(), &gzip] {
        let log = file("kinds", bytes);
        for arguments in [["--quota", "5/minute", &*log], ["--quota", "5/minute", "-"]] {
            let mut command = example("choose_limit");
            let stdin = File::open(&log).expect("a file");
            let output = command.arg("--json").args(arguments).stdin(stdin).output();
            let output = output.expect("it ends").stdout;
            let report: Value = serde_json::from_slice(&output).expect("JSON");
            assert_eq!(report["requests"], KINDS.len());
            assert_eq!(report["quotas"][0]["refused"], KINDS.len() - 5);
        }
    }
}

#[test]
fn counts_ipv6_by_its_64_and_mapped_ipv4_as_ipv4() {
    let log = log([
        (0, "2001:db8:0:1::1"),
        (0, "2001:db8:0:1:ffff::2"),
        (0, "2001:db8:0:2::1"),
        (0, "::ffff:192.0.2.1"),
        (0, "192.0.2.1"),
    ]);
    let report = json(&["--quota", "1/minute", &file("ipv6", log)]);
    assert_eq!((&report["clients"], &report["quotas"][0]["refused"]), (&json!(3), &json!(2)));
    let most = report["quotas"][0]["refused_most"].as_array().expect("clients");
    let clients: Vec<_> = most.iter().map(|most| most["client"].as_str().unwrap()).collect();
    assert_eq!(clients, ["2001:db8:0:1::/64", "192.0.2.1"]);
}

#[test]
fn distinguishes_clients_by_a_chosen_field() {
    let nginx = r#"10.0.0.1 - ada [20/Nov/2026:12:00:00 +0000] "POST /login?a=1 HTTP/1.1" 200 5 "https://a/" "curl \"8\"" "1.2.3.4, 192.0.2.7""#;
    let fields = [
        ("remote_addr", "10.0.0.1"),
        ("remote_user", "ada"),
        ("method", "POST"),
        ("path", "/login"),
        ("request", "POST /login?a=1 HTTP/1.1"),
        ("http_referer", "https://a/"),
        ("http_user_agent", r#"curl \"8\""#),
        ("http_x_forwarded_for", "192.0.2.7"),
    ];
    let log = file("fields", nginx);
    for (field, client) in fields {
        let report = json(&["--key", field, &log]);
        assert_eq!(report["quotas"][0]["busiest_window"]["client"], client, "{field}");
    }
    let caddy = r#"{"ts":1795176000.5,"request":{"client_ip":"192.0.2.7","headers":{"X-Api-Key":["a","b"]}},"user_id":42}"#;
    let log = file("fields", caddy);
    for (field, client) in [("request.headers.X-Api-Key", "b"), ("user_id", "42")] {
        let report = json(&["--key", field, &log]);
        assert_eq!(report["quotas"][0]["busiest_window"]["client"], client, "{field}");
    }
    let (code, why) = wrong(&["--key", "user", &log]);
    assert_eq!(code, Some(1));
    assert!(why.contains("lines that don't say who the client is: 1"), "{why}");
}

#[test]
fn sorts_and_merges_lines() {
    let sorted = json(&["--quota", "3/minute", &file("known", known())]);
    let mut lines: Vec<_> = known().lines().map(str::to_owned).collect();
    lines.reverse();
    let reversed = file("reversed", lines.join("\n"));
    assert_eq!(json(&["--quota", "3/minute", &reversed]), sorted);
    // Rotated, the newest first; and from two servers.
    let (newer, older) =
        (file("newer", lines[..6].join("\n")), file("older", lines[6..].join("\n")));
    assert_eq!(json(&["--quota", "3/minute", &newer, &older]), sorted);
    let servers = [0, 1].map(|server| {
        let lines: Vec<_> = lines.iter().skip(server).step_by(2).cloned().collect();
        file(&format!("server{server}"), lines.join("\n"))
    });
    assert_eq!(json(&["--quota", "3/minute", &servers[0], &servers[1]]), sorted);
}
