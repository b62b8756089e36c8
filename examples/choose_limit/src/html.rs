//! The report as a page: one file, without scripts, which loads nothing.

use crate::plots;
use crate::recommend::percent;
use crate::report::{Judged, Report, Windows};
use crate::table::{clients, counted, grouped, requests, times};

pub(crate) const BEGIN: &str = "<!doctype html>";

pub(crate) fn page(report: &Report) -> String {
    let choice = report.recommended.as_deref().unwrap_or("none of these");
    let notes: String =
        report.notes.iter().map(|note| format!("<li>{}</li>", escape(note))).collect();
    let notes = if notes.is_empty() { notes } else { format!("<ul class=\"notes\">{notes}</ul>") };
    let sections: String = (0..report.windows.len()).map(|i| section(report, i)).collect();
    format!(
        "{BEGIN}\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta http-equiv=\"Content-Security-Policy\" \
         content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <title>Which limit?</title>\n<style>\n{style}</style>\n</head>\n<body>\n<header>\n\
         <h1>Which limit?</h1>\n<p class=\"choice\">{choice}</p>\n<p>{why}</p>\n\
         <p class=\"about\">{requests} of {clients}, <time>{from}</time> to <time>{to}</time>{skipped}.</p>\n\
         {notes}\n</header>\n<main>\n{sections}{most}</main>\n</body>\n</html>\n",
        style = include_str!("style.css"),
        choice = escape(choice),
        why = escape(&report.why),
        requests = requests(report.requests),
        clients = clients(report.clients),
        from = escape(&report.from),
        to = escape(&report.to),
        skipped = match report.skipped {
            0 => String::new(),
            n => format!("; {} skipped", counted(n, "line")),
        },
        most = refused_most(report),
    )
}

fn section(report: &Report, i: usize) -> String {
    let windows = &report.windows[i];
    let judged: Vec<_> = report.quotas.iter().filter(|judged| judged.windows == i).collect();
    let name = escape(&windows.name);
    format!(
        "<section>\n<h2>Limits per {name}</h2>\n<p>{busiest}</p>\n<div class=\"plots\">\n{plots}</div>\n\
         {table}</section>\n",
        busiest = busiest(windows),
        plots = plots::all(report, windows, &judged),
        table = table(report, windows, &judged),
    )
}

fn busiest(windows: &Windows) -> String {
    let Windows { name, busiest, .. } = windows;
    format!(
        "In their busiest {name}, 99% of clients had {p99} at most, 99.9% had {p99_9} at most. The \
         most was {most}, by {client} from <time>{from}</time>.",
        name = escape(name),
        p99 = requests(windows.permille(990).into()),
        p99_9 = grouped(windows.permille(999).into()),
        most = grouped(busiest.requests),
        client = escape(&busiest.client),
        from = escape(&busiest.from),
    )
}

fn table(report: &Report, windows: &Windows, judged: &[&Judged]) -> String {
    let rows: String = judged.iter().map(|judged| row(report, judged)).collect();
    format!(
        "<h3>The numbers</h3>\n<div class=\"scroll\" tabindex=\"0\" role=\"region\" \
         aria-label=\"Numbers per quota\"><table>\n\
         <tr><th>Quota<th>Requests<br>refused<th>Clients<br>refused<th>Limit to<br>p99<th>Limit to<br>p99.9\
         <th>Most passed<br>in any {name}<th>What a second window would refuse<br>of clients that \
         this one never refuses</tr>\n{rows}</table></div>\n",
        name = escape(&windows.name),
    )
}

fn row(report: &Report, judged: &Judged) -> String {
    let share = |part: u64, whole: u64| percent(part as f64 / whole as f64);
    let second = judged.second_window.as_ref().map_or("-".to_owned(), |second| {
        let cost = match second.clients_refused {
            0 => "nothing".to_owned(),
            n => format!("{} of {}", requests(second.refused), clients(n)),
        };
        format!("<small>{}:</small> {cost}", escape(&second.quota))
    });
    format!(
        "<tr{class}><td>{quota}<td>{refused} <small>{refused_share}</small>\
         <td>{clients} <small>{clients_share}</small><td>{p99}<td>{p99_9}\
         <td>{passed} <small>{times}</small><td>{second}</tr>\n",
        class = if report.recommends(judged) { " class=\"chosen\"" } else { "" },
        quota = escape(&judged.quota),
        refused = grouped(judged.refused),
        refused_share = share(judged.refused, report.requests),
        clients = grouped(judged.clients_refused),
        clients_share = share(judged.clients_refused, report.clients),
        p99 = times(judged.limit, judged.p99.into()),
        p99_9 = times(judged.limit, judged.p99_9.into()),
        passed = grouped(judged.boundary.passed),
        times = times(judged.boundary.passed, judged.limit),
    )
}

/// Lists the clients that the recommended quotas refuse most; without a recommendation, those of
/// all quotas.
fn refused_most(report: &Report) -> String {
    let chosen = |judged: &&Judged| report.recommended.is_none() || report.recommends(judged);
    let mut text = String::new();
    for judged in report.quotas.iter().filter(chosen).filter(|judged| judged.refused > 0) {
        text += &format!(
            "<section>\n<h2>Refused most by {}</h2>\n<div class=\"scroll\"><table class=\"most\">\n\
             <tr><th>Requests<th>Client</tr>\n",
            escape(&judged.quota)
        );
        for most in &judged.refused_most {
            let (refused, client) = (grouped(most.refused.into()), escape(&most.client));
            text += &format!("<tr><td>{refused}<td>{client}</tr>\n");
        }
        text += "</table></div>\n</section>\n";
    }
    text
}

/// Escapes text for HTML, since an attacker may have written text in a log.
pub(crate) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            '\'' => escaped += "&#39;",
            char => escaped.push(char),
        }
    }
    escaped
}
