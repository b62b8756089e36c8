//! Bar charts with a bar for each quota. The style sheet draws them, so they fit any width.

use crate::html::escape;
use crate::recommend::percent;
use crate::report::{Judged, Report, Windows};
use crate::table::{clients, grouped, requests, times};

/// More columns than this have no room for numbers on a phone.
const FEW: usize = 10;
/// The tallest column leaves room for its number.
const TALLEST: f64 = 88.0;

struct Column {
    /// The text below the bar.
    label: String,
    /// The text on top of the bar.
    value: String,
    /// The tooltip.
    title: String,
    /// The share of the highest possible bar.
    height: f64,
    chosen: bool,
}

pub(crate) fn all(report: &Report, windows: &Windows, judged: &[&Judged]) -> String {
    let name = escape(&windows.name);
    [
        figure(
            "How much clients ask for",
            &format!(
                "Clients by the requests in their busiest {name}, at most. A logarithmic scale"
            ),
            &busiest(windows),
            None,
        ),
        figure(
            "Clients refused",
            &format!(
                "At least once, by limit, on a logarithmic scale. Dashed: {} of all clients",
                percent(report.tolerated)
            ),
            &clients_refused(report, judged),
            Some(log_height(report.tolerated, report)),
        ),
        figure(
            "Requests refused",
            "The share of all requests, by limit",
            &requests_refused(report, judged),
            None,
        ),
        figure(
            "What the boundary adds",
            &format!(
                "The most that one client passes in any {name}, over the limit. Dashed: the limit"
            ),
            &bursts(report, judged),
            Some(0.5),
        ),
    ]
    .concat()
}

/// Bars at 1, 2, 5, 10, ..: each has the clients above the bar before.
fn busiest(windows: &Windows) -> Vec<Column> {
    let limits = (0..10).flat_map(|n| [1, 2, 5].map(|digit| digit * 10_u64.pow(n)));
    let mut columns = Vec::new();
    let mut above = windows.above(0);
    let most = above as f64;
    let mut least = 1;
    for limit in limits {
        let within = above - windows.above(limit);
        columns.push(Column {
            label: short(limit),
            value: short(within),
            title: format!("{} had {least} to {limit} requests", clients(within)),
            height: (1.0 + within as f64).log10() / (1.0 + most).log10(),
            chosen: false,
        });
        (above, least) = (above - within, limit + 1);
        if above == 0 {
            break;
        }
    }
    columns
}

fn clients_refused(report: &Report, judged: &[&Judged]) -> Vec<Column> {
    columns(report, judged, |judged| {
        let share = judged.clients_refused as f64 / report.clients as f64;
        let title = format!("{}, {}", clients(judged.clients_refused), percent(share));
        (short(judged.clients_refused), title, log_height(share, report))
    })
}

/// The height of a bar on a logarithmic scale, from all clients down to less than one.
fn log_height(share: f64, report: &Report) -> f64 {
    let least = (0.5 / report.clients as f64).min(if report.tolerated > 0.0 {
        report.tolerated / 2.0
    } else {
        1.0
    });
    if share > 0.0 { 1.0 - share.log10() / least.log10() } else { 0.0 }
}

fn requests_refused(report: &Report, judged: &[&Judged]) -> Vec<Column> {
    let share = |judged: &Judged| judged.refused as f64 / report.requests as f64;
    let most = judged.iter().map(|judged| share(judged)).fold(f64::MIN_POSITIVE, f64::max);
    columns(report, judged, |judged| {
        let share = share(judged);
        let value = if share > 0.0 && share < 0.001 { "<0.1%".to_owned() } else { percent(share) };
        let title = format!("{}, {}", requests(judged.refused), percent(share));
        (value, title, share / most)
    })
}

/// A burst is twice the limit at most.
fn bursts(report: &Report, judged: &[&Judged]) -> Vec<Column> {
    columns(report, judged, |judged| {
        let passed = judged.boundary.passed;
        let title = format!("{} passed", grouped(passed));
        (times(passed, judged.limit), title, judged.boundary.times_limit / 2.0)
    })
}

fn columns(
    report: &Report,
    judged: &[&Judged],
    column: impl Fn(&Judged) -> (String, String, f64),
) -> Vec<Column> {
    let column = |judged: &&Judged| {
        let (value, title, height) = column(judged);
        Column {
            label: short(judged.limit),
            value,
            title: format!("{}: {title}", judged.quota),
            height,
            chosen: report.recommends(judged),
        }
    };
    judged.iter().map(column).collect()
}

fn figure(title: &str, about: &str, columns: &[Column], mark: Option<f64>) -> String {
    let many = if columns.len() > FEW { " many" } else { "" };
    let mut text = format!(
        "<figure>\n<figcaption>{title}<small>{about}</small></figcaption>\n<ol class=\"plot{many}\">\n"
    );
    for Column { label, value, title, height, chosen } in columns {
        let class = if *chosen { " class=\"chosen\"" } else { "" };
        let height = height.clamp(0.0, 1.0) * TALLEST;
        text += &format!(
            "<li{class} title=\"{}\"><b>{}</b> <i style=\"height:{height:.1}%\"></i>\
             <span style=\"bottom:{height:.1}%\">{}</span></li>\n",
            escape(title),
            escape(label),
            escape(value)
        );
    }
    if let Some(height) = mark {
        let height = height.clamp(0.0, 1.0) * TALLEST;
        text += &format!("<li class=\"mark\"><em style=\"bottom:{height:.1}%\"></em></li>\n");
    }
    text + "</ol>\n</figure>\n"
}

/// Writes `2k` instead of `2,000`, where there is little room.
fn short(number: u64) -> String {
    let (divisor, unit) = match number {
        0..1_000 => return number.to_string(),
        1_000..1_000_000 => (1_000.0, "k"),
        _ => (1_000_000.0, "M"),
    };
    let number = number as f64 / divisor;
    let digits = usize::from(number < 9.95);
    let number = format!("{number:.digits$}");
    format!("{}{unit}", number.trim_end_matches(".0"))
}
