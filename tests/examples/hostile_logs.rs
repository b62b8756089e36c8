//! `choose_limit` on broken and malicious logs.

use std::fmt::Write as _;
use std::io::Write;
use std::process::Stdio;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use super::choose_limit::{file, json, known, line, printed, wrong};
use super::example;

/// The bound is 65536 lines: later lines are left out, and a line from the year 2099 or 1999 does
/// not shift the others.
#[test]
fn ignores_lines_that_are_years_out_of_order() {
    let mut text = String::from("192.0.2.9 - - [20/Nov/2099:12:00:00 +0000] \"GET /\" 200 5\n");
    for i in 0..70_000 {
        text += &line(i / 100, "192.0.2.1");
    }
    text += "192.0.2.9 - - [20/Nov/1999:12:00:00 +0000] \"GET /\" 200 5\n";
    text += &line(1, "192.0.2.1");
    let report = json(&["--quota", "5000/minute", &file("years", text)]);
    assert_eq!((&report["requests"], &report["skipped"]), (&json!(70_001), &json!(2)));
    assert_eq!(report["to"], "2099-11-20T12:00:00Z");
    assert_eq!(report["notes"], json!(["lines out of order by more than 65536 lines: 2"]));
    // 11 minutes of 6000, and 40 seconds of 4000.
    assert_eq!(report["quotas"][0]["refused"], 11_000);
}

#[test]
fn counts_unreadable_lines() {
    let mut bytes = known().into_bytes();
    let many = (0..20_000).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 24) as u8);
    bytes.extend(many.filter(|byte| *byte != b'\n'));
    bytes.push(b'\n');
    let broken = [
        "{\"ts\": 1795176000, \"client_ip\": \"192.0.2.1\"",
        "{\"ts\": 0.003, \"client_ip\": \"192.0.2.1\"}",
        "{\"client_ip\": \"192.0.2.1\"}",
        "192.0.2.1 - - [31/Feb/2026:12:00:00 +0000] \"GET / HTTP/1.1\" 200 5",
        "192.0.2.1 - - [20/Nov/2026:25:00:00 +0000] \"GET / HTTP/1.1\" 200 5",
        "192.0.2.1 - - [20/Nov/2026:12:00:00 +9900] \"GET / HTTP/1.1\" 200 5",
        "192.0.2.1 - - [[[[[[[[[",
        "nothing",
    ];
    bytes.extend(broken.join("\n").bytes());
    bytes.extend(b"\n\n  \n- - - [20/Nov/2026:12:00:00 +0000] \"GET / HTTP/1.1\" 200 5\n");
    bytes.extend([b'['; 70_000]);
    bytes.push(b'\n');
    bytes.extend(b"{\"a\":".repeat(10_000));
    let log = file("broken", bytes);
    let report = json(&["--quota", "3/minute", &log]);
    assert_eq!((&report["requests"], &report["skipped"]), (&json!(12), &json!(12)));
    assert_eq!(
        report["notes"],
        json!([
            "lines that could not be read: 10",
            "lines of more than 65536 bytes: 1",
            "lines that don't say who the client is: 1",
            format!("the first line that could not be read: {log}:13"),
        ])
    );
    assert_eq!(report["quotas"][0]["refused"], 1);
}

#[test]
fn reads_a_truncated_archive_as_far_as_possible() {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::none());
    gzip.write_all(known().as_bytes()).expect("memory");
    let mut gzip = gzip.finish().expect("memory");
    gzip.truncate(gzip.len() - 8);
    let report = json(&["--quota", "3/minute", &file("cut.gz", gzip)]);
    assert_eq!(report["requests"], 12);
    let note = report["notes"][0].as_str().expect("a note");
    assert!(note.contains("cut.gz ends at line 13: "), "{note}");
}

/// A line of 64 MiB, and the memory of the process that waits for more.
#[test]
#[cfg(target_os = "linux")]
fn does_not_load_a_long_line() {
    let mut command = example("choose_limit");
    let command = command.args(["--json", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("an example starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(line(0, "192.0.2.1").as_bytes()).expect("it reads");
    for _ in 0..64 {
        stdin.write_all(&vec![b'x'; 1 << 20]).expect("it reads");
    }
    stdin.write_all(b"\n").expect("it reads");
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).expect("it runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let peak: u64 = peak.trim().trim_end_matches(" kB").parse().expect("a number");
    drop(stdin);
    let report = child.wait_with_output().expect("it ends").stdout;
    let report: Value = serde_json::from_slice(&report).expect("JSON");
    assert_eq!((&report["requests"], &report["skipped"]), (&json!(1), &json!(1)));
    assert!(peak < 32 << 10, "{peak} KiB");
}

#[test]
fn says_when_there_were_more_clients_than_it_can_distinguish() {
    let mut text = String::new();
    for client in 0..30 {
        text += &line(client, &format!("192.0.2.{client}"));
        text += &line(client, "192.0.2.0");
    }
    let log = file("many", text);
    let report = json(&["--max-clients", "10", &log]);
    assert_eq!((&report["clients"], &report["requests"]), (&json!(10), &json!(40)));
    let note = "requests left out, because there were more than 10 clients: 20";
    assert_eq!((&report["notes"], &report["skipped"]), (&json!([note]), &json!(20)));
    assert!(printed(&["--max-clients", "10", &log]).contains(note));
    assert_eq!(json(&["--max-clients", "30", &log])["notes"], json!([]));
}

#[test]
fn hides_clients_behind_hashes() {
    let page = format!("{}/hidden.html", env!("CARGO_TARGET_TMPDIR"));
    let log = file("known", known());
    let arguments = ["--hash", "--quota", "3/minute", "--tolerate", "1", "--html", &page, &log];
    let (table, report) = (printed(&arguments), json(&arguments));
    let page = std::fs::read_to_string(&page).expect("a page");
    assert!(![&table, &report.to_string(), &page].iter().any(|text| text.contains("192.0.2.")));
    let hash = |report: &Value| report["quotas"][0]["refused_most"][0]["client"].clone();
    assert_eq!(hash(&report), report["quotas"][0]["busiest_window"]["client"]);
    assert_eq!(hash(&report).as_str().map(str::len), Some(16));
    // Addresses are few: a constant hash could be looked up in a table.
    assert_ne!(hash(&report), hash(&json(&arguments)));
}

/// The page has no script, loads nothing, and shows names from the log as text.
#[test]
fn escapes_hostile_logs_in_its_page() {
    let page = format!("{}/hostile.html", env!("CARGO_TARGET_TMPDIR"));
    let evil = "</td><script>alert('1')</script><img src=\\\"//evil\\\">&amp;\\u001b[2J\\u202e";
    let mut text = String::new();
    for _ in 0..3 {
        writeln!(text, "{{\"ts\":1795176000,\"user\":\"{evil}\"}}").expect("a string");
    }
    let log = file("<b>hostile", text + "broken");
    let arguments = ["--key", "user", "--tolerate", "1", "--html", &page, &log];
    let table = printed(&arguments);
    assert!(!table.contains('\u{1b}') && table.contains("\\u{1b}[2J\\u{202e}"), "{table}");
    let page = std::fs::read_to_string(&page).expect("a page");
    for raw in ["<script", "<img", "<b>hostile", "alert('1')", "\u{1b}", "\u{202e}", "&amp;\u{1b}"]
    {
        assert!(!page.contains(raw), "{raw}");
    }
    assert!(page.contains("&lt;/td&gt;&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;"));
    assert!(page.contains("&lt;b&gt;hostile:4"));
    assert!(page.contains("default-src 'none'; style-src 'unsafe-inline'"));
    assert!(page.contains("prefers-color-scheme: dark"));
    for loads in ["http:", "https:", "url(", "@import", "<link", "src=\"", "href=\""] {
        assert!(!page.contains(loads), "{loads}");
    }
}

#[test]
fn explains_wrong_arguments() {
    assert!(printed(&["--help"]).contains("--tolerate SHARE"));
    let log = &*file("known", known());
    for (arguments, why) in [
        (&[][..], "which log?"),
        (&["--qouta", log], "\"--qouta\" is no option"),
        (&["--quota", "60/fortnight", log], "expected a unit"),
        (&["--quota", "60/minute, 100/hour", log], "write --quota twice"),
        (&["--quota", "60/minute rollover-up-to=90", log], "rollover"),
        (&["--tolerate", "two", log], "write a share"),
        (&["--max-clients", "0", log], "write a number"),
        (&["--key"], "--key needs a value"),
    ] {
        let (code, told) = wrong(arguments);
        assert!(code == Some(2) && told.contains(why), "{arguments:?}: {told}");
    }
    let (code, told) = wrong(&["--html", log, log]);
    assert!(code == Some(1) && told.contains("is no page"), "{told}");
    assert_eq!(std::fs::read_to_string(log).expect("still there"), known());
    let (code, told) = wrong(&["no-such-file"]);
    assert!(code == Some(1) && told.starts_with("no-such-file: "), "{told}");
    let (code, told) = wrong(&[&*file("empty", "")]);
    assert!(code == Some(1) && told == "no request could be read\n", "{told}");
}
