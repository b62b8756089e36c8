//! The report for a terminal.

use std::fmt::Write;

use crate::recommend::percent;
use crate::report::{Judged, Report, Windows};

pub(crate) fn table(report: &Report) -> String {
    let mut text = format!(
        "{} of {}, {} to {}\n",
        requests(report.requests),
        clients(report.clients),
        report.from,
        report.to
    );
    if report.skipped > 0 {
        text += &format!("{} skipped\n", counted(report.skipped, "line"));
    }
    for note in &report.notes {
        text += &format!("  note: {note}\n");
    }
    for (i, windows) in report.windows.iter().enumerate() {
        let busiest = &windows.busiest;
        let head = format!(
            "\nbusiest {} of a client: {} at most for 99% of clients, {} for 99.9%; {} for {} \
             from {}\n",
            windows.name,
            grouped(windows.permille(990).into()),
            grouped(windows.permille(999).into()),
            grouped(busiest.requests),
            busiest.client,
            busiest.from,
        );
        text += &head;
        let judged: Vec<_> = report.quotas.iter().filter(|judged| judged.windows == i).collect();
        text += &rows(report, windows, &judged);
    }
    for judged in report.quotas.iter().filter(|judged| report.recommends(judged)) {
        text += &format!("\nrefused most by {}:", judged.quota);
        text += if judged.refused == 0 { " none\n" } else { "\n" };
        for most in &judged.refused_most {
            text += &format!("  {:>12}  {}\n", grouped(most.refused.into()), most.client);
        }
    }
    let recommended = report.recommended.as_deref().unwrap_or("none of these");
    text + &format!("\nrecommended: {recommended}\n{}\n", report.why)
}

fn rows(report: &Report, windows: &Windows, judged: &[&Judged]) -> String {
    let any = format!("in any {}", windows.name);
    let mut rows = vec![
        [
            "",
            "requests",
            "",
            "clients",
            "",
            "limit to",
            "limit to",
            "most passed",
            "a second window, for",
        ],
        ["quota", "refused", "", "refused", "", "p99", "p99.9", &any, "clients never refused"],
    ]
    .into_iter()
    .map(|row| row.map(str::to_owned))
    .collect::<Vec<_>>();
    for row in judged {
        let second = row.second_window.as_ref().map_or("-".to_owned(), |second| {
            match second.clients_refused {
                0 => format!("{}: costs nothing", second.quota),
                n => format!("{}: {}, {}", second.quota, clients(n), requests(second.refused)),
            }
        });
        rows.push([
            row.quota.clone(),
            grouped(row.refused),
            percent(row.refused as f64 / report.requests as f64),
            grouped(row.clients_refused),
            percent(row.clients_refused as f64 / report.clients as f64),
            times(row.limit, row.p99.into()),
            times(row.limit, row.p99_9.into()),
            format!(
                "{} {:>5}",
                grouped(row.boundary.passed),
                times(row.boundary.passed, row.limit)
            ),
            second,
        ]);
    }
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let widths: [usize; 9] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
            // The first and the last column are words, so they are aligned to the left.
            match column {
                0 => write!(text, "  {cell:<width$}").expect("a string"),
                8 => write!(text, "   {cell}").expect("a string"),
                _ => write!(text, "  {cell:>width$}").expect("a string"),
            }
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

/// `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(crate) fn clients(n: u64) -> String {
    counted(n, "client")
}

pub(crate) fn requests(n: u64) -> String {
    counted(n, "request")
}

pub(crate) fn counted(n: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// `1.5x`.
pub(crate) fn times(number: u64, of: u64) -> String {
    let times = number as f64 / of as f64;
    let digits = if times < 0.095 { 2 } else { 1 };
    if of == 0 { "-".to_owned() } else { format!("{times:.digits$}x") }
}
