//! `cargo run --release -p choose_limit -- access.log`
//!
//! Finds the number to write into a limit: reads access logs and shows, for a list of quotas, which
//! clients each of them would have refused.
//!
//! `options` has the help; `order` reads logs as one stream of requests in the order of time
//! (`input`, `line`, `json`, `time`, `client`); `simulate` applies the limits, `report` collects
//! the results, and `recommend` chooses; `table` and `html` with `plots` show them.

mod client;
mod html;
mod input;
mod json;
mod line;
mod options;
mod order;
mod plots;
mod progress;
mod recommend;
mod report;
mod simulate;
mod table;
mod time;

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::process::ExitCode;

use client::Clients;
use input::Input;
use line::Format;
use options::{HELP, Options};
use order::{Merged, Reader};
use progress::Progress;
use report::Report;
use simulate::Simulation;

fn main() -> ExitCode {
    let arguments = std::env::args_os().skip(1);
    let arguments = arguments.map(|argument| argument.to_string_lossy().into_owned());
    let told = match Options::parse(arguments) {
        Ok(options) if options.help => Ok(HELP.to_owned()),
        Ok(options) => run(&options),
        Err(wrong) => {
            eprintln!("{wrong}");
            return ExitCode::from(2);
        }
    };
    match told {
        Ok(text) => print(&text),
        Err(wrong) => {
            eprintln!("{wrong}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<String, String> {
    options.html.as_deref().map_or(Ok(()), not_a_log)?;
    let mut progress = Progress::default();
    let mut inputs = Vec::new();
    for log in &options.logs {
        let input = Input::open(log, &progress.read, &mut progress.total);
        inputs.push(input.map_err(|error| format!("{log}: {error}"))?);
    }
    let clients = Clients::up_to(options.max_clients);
    let mut reader = Reader::new(Format::new(options.key.clone()), clients);
    let given = !options.quotas.is_empty();
    let quotas = if given { options.quotas.clone() } else { recommend::candidates() };
    let mut simulation = Simulation::new(quotas);
    let mut requests = Merged::new(inputs, &mut reader);
    while let Some((time, client)) = requests.next(&mut reader) {
        simulation.request(time, client);
        progress.tell(simulation.requests);
    }
    progress.clear();

    let notes = reader.notes(requests.sorted_within);
    if simulation.requests == 0 {
        return Err(["no request could be read".to_owned()]
            .into_iter()
            .chain(notes)
            .collect::<Vec<_>>()
            .join("\n"));
    }
    let names = reader.clients.names(options.hash);
    let mut report = Report::new(&simulation, &names, given);
    report.skipped = reader.skipped();
    report.notes = notes;
    report.recommend(&simulation, given, options.tolerate);
    if let Some(file) = &options.html {
        let page = html::page(&report);
        std::fs::write(file, page).map_err(|error| format!("{file}: {error}"))?;
    }
    if options.json {
        let json = serde_json::to_string_pretty(&report).map_err(|error| error.to_string())?;
        return Ok(json + "\n");
    }
    Ok(table::table(&report))
}

/// Refuses `--html access.log`, which would overwrite the log, if the page's name was forgotten.
fn not_a_log(page: &str) -> Result<(), String> {
    match File::open(page) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("{page}: {error}")),
        Ok(file) => {
            let mut begin = Vec::new();
            file.take(html::BEGIN.len() as u64)
                .read_to_end(&mut begin)
                .map_err(|error| format!("{page}: {error}"))?;
            match begin.is_empty() || begin == html::BEGIN.as_bytes() {
                true => Ok(()),
                false => Err(format!("{page} is there and is no page: --html would write over it")),
            }
        }
    }
}

fn print(text: &str) -> ExitCode {
    match io::stdout().write_all(text.as_bytes()) {
        // The reader of the output has closed it, as `head` does.
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}
