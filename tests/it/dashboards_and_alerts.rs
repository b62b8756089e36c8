//! `docs/operations/`: the dashboard and the alerts name what the crate exports, and nothing else.
//! What the alerts do is tested by Prometheus's own promtool: `scripts/test`.

use std::collections::{BTreeMap, BTreeSet};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde_json::Value;

use crate::prelude::*;

const PAGE: &str = include_str!("../../docs/operations/README.md");
const DASHBOARD: &str = include_str!("../../docs/operations/dashboard.json");
const ALERTS: &str = include_str!("../../docs/operations/alerts.yml");
const ALERTS_TEST: &str = include_str!("../../docs/operations/alerts-test.yml");

/// The values of each label of each metric.
type Exported = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// The metrics in Prometheus after one request through a store that needs a call, and one reading
/// of a store in memory.
async fn exported() -> Exported {
    let buckets = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &[0.1])
        .expect("a bucket");
    let recorder = buckets.build_recorder();
    let handle = recorder.handle();
    let _guard = metrics::set_default_local_recorder(Box::leak(Box::new(recorder)));
    let inner = service_fn(async |_| Ok::<_, Infallible>(Response::<Body>::default()));
    let queued = named("api", 1, Mood::Later).queue(1, secs(3_600));
    let service = queued.layer(inner);
    let Ok(_) = service.clone().oneshot(get("/")).await;
    let waits = tokio::time::timeout(ms(50), service.oneshot(get("/")));
    assert!(waits.await.is_err());
    MemoryStore::with_max_keys(100).record_metrics("api");

    let mut exported = Exported::new();
    for line in handle.render().lines().filter(|line| line.contains('{')) {
        let (name, rest) = line.split_once('{').expect("labels");
        let (labels, _) = rest.split_once('}').expect("their end");
        let known = exported.entry(name.to_owned()).or_default();
        for (label, _, value) in matchers(labels) {
            known.entry(label).or_default().insert(value);
        }
    }
    exported
}

/// `label="value"` and `label=~"value"`, as name, operator and value.
fn matchers(text: &str) -> Vec<(String, String, String)> {
    let parts: Vec<_> = text.split('"').collect();
    let pairs = parts.chunks_exact(2).map(|pair| {
        let left = pair[0].trim_matches([',', ' ']);
        let at = left.find(['=', '!']).expect("an operator");
        (left[..at].to_owned(), left[at..].to_owned(), pair[1].to_owned())
    });
    pairs.collect()
}

/// Asserts that all metrics, labels and values in a text of queries are exported ones.
fn assert_exported(queries: &str, exported: &Exported) {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut labels = BTreeSet::new();
    for (at, _) in queries.match_indices("tower_fixed_window_") {
        let (name, rest) = queries[at..].split_at(queries[at..].find(|c| !is_word(c)).unwrap());
        let known = exported.get(name).unwrap_or_else(|| panic!("{name} is not exported"));
        labels.extend(known.keys().map(String::as_str));
        let Some(selector) = rest.strip_prefix('{') else { continue };
        for (label, operator, value) in matchers(selector.split_once('}').expect("its end").0) {
            let values = known.get(&label).unwrap_or_else(|| panic!("{name} has no {label}"));
            if label == "outcome" {
                assert!(operator == "=" || operator == "=~", "{operator}");
                for value in value.split('|') {
                    assert!(values.contains(value), "{name} has no {label} {value}");
                }
            }
        }
    }
    assert!(!labels.is_empty(), "no metric in {queries}");
    let grouped = queries
        .split(" by (")
        .skip(1)
        .flat_map(|rest| rest.split_once(')').expect("its end").0.split(',').map(str::trim));
    let shown = ["$labels.", "{{"].map(|before| {
        let words = queries.split(before).skip(1);
        words.map(move |rest| rest.split(|c| !is_word(c)).next().unwrap_or_default())
    });
    for label in grouped.chain(shown.into_iter().flatten()).filter(|label| !label.is_empty()) {
        assert!(labels.contains(label), "{label} is no label of what {queries} is about");
    }
}

/// The questions of the page, each with its queries on one line.
fn questions() -> Vec<(&'static str, Vec<String>)> {
    let (_, section) = PAGE.split_once("## Questions").expect("a section");
    let (section, _) = section.split_once("\n## ").expect("another one after it");
    let questions = section.split("\n**").skip(1).map(|part| {
        let (question, body) = part.split_once("**").expect("as opened");
        let queries = body.split("```promql\n").skip(1).map(|query| {
            let (query, _) = query.split_once("```").expect("as opened");
            query.split_whitespace().collect::<Vec<_>>().join(" ")
        });
        (question, queries.collect())
    });
    questions.collect()
}

/// Each rule with its text, as far as the next.
fn rules() -> Vec<(&'static str, &'static str)> {
    let rules = ALERTS.split("- alert: ").skip(1);
    rules.map(|rule| rule.split_once('\n').expect("more than a name")).collect()
}

#[tokio::test]
async fn queries_name_only_what_the_crate_exports() {
    let exported = exported().await;
    for (_, queries) in questions() {
        for query in queries {
            assert_exported(&query, &exported);
        }
    }
    for (_, rule) in rules() {
        assert_exported(rule, &exported);
    }
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let text = |field: &str| target[field].as_str().expect("text").to_owned();
            assert_exported(&format!("{} {}", text("expr"), text("legendFormat")), &exported);
        }
    }
    // Each exported metric is part of the dashboard or an alert.
    for name in exported.keys() {
        let is_shown = DASHBOARD.contains(name.as_str());
        // These metrics are part of others, such as the requests and calls that panels divide by.
        let elsewhere = ["_sum", "wait_seconds_count", "_remembered_refusals_total"];
        assert!(is_shown || elsewhere.iter().any(|end| name.ends_with(end)), "{name}");
    }
}

#[test]
fn the_dashboard_has_a_panel_for_each_question_with_the_queries_of_the_page() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let shown: Vec<_> = panels
        .iter()
        .map(|panel| {
            let targets = panel["targets"].as_array().expect("targets");
            let query = |target: &Value| {
                let query = target["expr"].as_str().expect("a query");
                query.replace("$__rate_interval", "5m")
            };
            (panel["title"].as_str().expect("a title"), targets.iter().map(query).collect())
        })
        .collect();
    assert_eq!(shown, questions());
    assert_eq!(shown.len(), 12);
}

#[test]
fn the_dashboard_is_one_that_grafana_imports() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    assert_eq!(dashboard["uid"], "tower-fixed-window");
    assert!(dashboard["title"].is_string() && dashboard["schemaVersion"].as_u64() >= Some(36));
    assert_eq!(dashboard.get("id"), None, "an id belongs to the Grafana that it was saved in");
    let variable = &dashboard["templating"]["list"][0];
    assert_eq!(
        (&variable["name"], &variable["type"]),
        (&"datasource".into(), &"datasource".into())
    );

    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        assert!(ids.insert(panel["id"].as_u64().expect("a number")), "twice the same id");
        assert_eq!(panel["type"], "timeseries");
        let mut refs = BTreeSet::new();
        for target in panel["targets"].as_array().expect("targets") {
            assert_eq!(target["datasource"]["uid"], "${datasource}");
            assert!(refs.insert(target["refId"].as_str().expect("a letter")));
        }
        for change in panel["fieldConfig"]["overrides"].as_array().expect("overrides") {
            assert!(refs.contains(change["matcher"]["options"].as_str().expect("a letter")));
        }
    }
}

#[test]
fn each_alert_is_on_the_page_and_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() {
    assert!(!rules().is_empty());
    for (alert, rule) in rules() {
        let (_, severity) = rule.split_once("severity: ").expect("a severity");
        let severity = severity.lines().next().expect("a word");
        assert!(PAGE.contains(&format!("| `{alert}` | {severity} |")), "not on the page: {alert}");
        let cases: Vec<_> = ALERTS_TEST
            .split("- eval_time: ")
            .filter(|case| case.contains(&format!("alertname: {alert}\n")))
            .collect();
        assert!(cases.iter().any(|case| case.contains("exp_labels:")), "{alert} never fires");
        assert!(cases.iter().any(|case| case.contains("exp_alerts: []")), "{alert} always fires");
    }
}
