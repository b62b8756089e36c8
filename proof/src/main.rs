//! Runs scenarios, and checks their histories.

use std::process::ExitCode;
use std::time::Instant;

use tower_fixed_window_proof::history::Ask;
use tower_fixed_window_proof::limiter::{Contestant, Store};
use tower_fixed_window_proof::limiters::contestants;
use tower_fixed_window_proof::node::{self, Node};
use tower_fixed_window_proof::run::{Row, row, run};
use tower_fixed_window_proof::scenarios::{Scenario, scenarios};

const USAGE: &str = "proof [--smoke] [--only LIMITER] [--scenario NAME] [--keep FOLDER]
    runs the scenarios and prints a table; fails if a limiter of this crate is above its promise";

#[tokio::main]
async fn main() -> ExitCode {
    let mut args = std::env::args().skip(1).peekable();
    match args.peek().map(String::as_str) {
        Some("node") => {
            node::run(Node::from_args(args.skip(1)).expect("as the scenario wrote them")).await;
            ExitCode::SUCCESS
        }
        _ => match Options::new(args) {
            Some(options) => table(options).await,
            None => {
                eprintln!("{USAGE}");
                ExitCode::from(2)
            }
        },
    }
}

struct Options {
    smoke: bool,
    only: Option<String>,
    scenario: Option<String>,
    keep: Option<String>,
}

impl Options {
    fn new(mut args: impl Iterator<Item = String>) -> Option<Self> {
        let mut options = Self { smoke: false, only: None, scenario: None, keep: None };
        while let Some(arg) = args.next() {
            match &arg[..] {
                "--smoke" => options.smoke = true,
                "--only" => options.only = Some(args.next()?),
                "--scenario" => options.scenario = Some(args.next()?),
                "--keep" => options.keep = Some(args.next()?),
                _ => return None,
            }
        }
        Some(options)
    }

    fn runs(&self, scenario: &Scenario) -> bool {
        self.scenario.as_ref().map_or(!self.smoke || scenario.smoke, |name| name == scenario.name)
    }

    fn takes(&self, contestant: &Contestant) -> bool {
        match &self.only {
            Some(name) => contestant.name.starts_with(&name[..]),
            // The smoke has one limiter of each store.
            None => {
                !self.smoke || matches!(contestant.name, "ours" | "ours-redis" | "ours-postgres")
            }
        }
    }
}

/// Limiters that run the same scenario at the same time.
const AT_ONCE: usize = 2;

async fn table(options: Options) -> ExitCode {
    let (redis, postgres) = (harness::installed(), harness::Postgres::is_installed());
    let began = Instant::now();
    let contestants: Vec<_> = contestants()
        .into_iter()
        .filter(|contestant| {
            let is_installed = match contestant.store {
                Store::Memory => true,
                Store::Redis => redis,
                Store::Postgres => postgres,
            };
            options.takes(contestant) && is_installed
        })
        .collect();
    let mut rows = Vec::new();
    println!(
        "| what happens | limiter | asked | passed | no answer | slowest | silence | above | unpromised | torn | unexplained | overtaken | idle |"
    );
    println!("|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|");
    for scenario in scenarios().iter().filter(|scenario| options.runs(scenario)) {
        let who: Vec<_> = contestants
            .iter()
            .filter(|who| scenario.is_for(who))
            .filter(|who| !options.smoke || who.name != "ours" || scenario.steps_clock)
            .collect();
        // Scenarios mostly wait, so several run at once.
        for pair in who.chunks(AT_ONCE) {
            let running: Vec<_> = pair
                .iter()
                .map(|&&contestant| {
                    let scenario = scenario.clone();
                    tokio::spawn(async move { run(&scenario, &contestant).await })
                })
                .collect();
            for (contestant, running) in pair.iter().zip(running) {
                let outcome = running.await.expect("no scenario panics");
                if let Some(folder) = &options.keep {
                    keep(folder, &format!("{}-{}", scenario.name, contestant.name), &outcome.asks);
                }
                let row = row(scenario, contestant, &outcome);
                println!(
                    "| {} | {} | {} | {} | {} | {} ms | {} ms | {} | {} | {} | {} | {} | {} |",
                    scenario.name,
                    contestant.name,
                    row.asked,
                    row.passed,
                    row.failed + row.gave_up,
                    row.slowest,
                    row.silence,
                    row.above,
                    row.broken,
                    row.torn,
                    row.unexplained,
                    row.overtaken,
                    row.idle,
                );
                rows.push((scenario.name, contestant.name, row));
            }
        }
    }
    for store in [Store::Memory, Store::Redis, Store::Postgres] {
        let who: Vec<_> = contestants.iter().filter(|who| who.store == store).collect();
        matrix(&who, &rows);
    }
    eprintln!("{} s", began.elapsed().as_secs());
    let broken = |(_, name, row): &&(_, &str, Row)| {
        let Row { torn, unexplained, overtaken, idle, .. } = row;
        // What decides nothing breaks no promise.
        let harm = row.broken > 0 || row.passed == 0 || torn + unexplained + overtaken + idle > 0;
        harm && name.starts_with("ours")
    };
    for (scenario, name, row) in rows.iter().filter(broken) {
        let Row { passed, broken, torn, unexplained, overtaken, idle, .. } = row;
        eprintln!(
            "{name} has passed {passed} and is {broken} above its promise, {torn} requests have passed in part, and \
             {unexplained} were refused without a reason, {overtaken} were overtaken in line, which \
             left {idle} windows unused: {scenario}"
        );
    }
    ExitCode::from(u8::from(rows.iter().any(|row| broken(&row))))
}

/// Scenarios and limiters: by how much above the limit, and for how long without an answer.
fn matrix(who: &[&Contestant], rows: &[(&str, &str, Row)]) {
    print!("\n| |");
    who.iter().for_each(|who| print!(" {} {} |", who.name, who.version));
    println!("\n|---|{}", "---|".repeat(who.len()));
    for scenario in scenarios() {
        let row = |who: &&Contestant| {
            rows.iter().find(|row| (row.0, row.1) == (scenario.name, who.name)).map(|row| &row.2)
        };
        if !who.iter().any(|who| row(who).is_some()) {
            continue;
        }
        print!("| *{}*: {} |", scenario.name, scenario.what);
        for who in who {
            match row(who) {
                None => print!(" |"),
                Some(row) => {
                    let above =
                        if row.above > 0 { format!("**+{}**", row.above) } else { "0".to_owned() };
                    let unpromised = match row.above {
                        0 => "",
                        _ if row.broken == 0 => " (excepted)",
                        _ => "",
                    };
                    // Where anybody asks that often.
                    let often = scenario.pause / 1_000 < 500;
                    let silence = match row.silence {
                        ..500 => String::new(),
                        ms if !often && ms < 3 * scenario.pause / 1_000 => String::new(),
                        ms => format!(", silent {:.1} s", ms as f64 / 1_000.0),
                    };
                    let failed = match (row.failed + row.gave_up) * 100 / row.asked.max(1) {
                        0 => String::new(),
                        percent => format!(", {percent}% failed"),
                    };
                    print!(" {above}{unpromised}{silence}{failed} |");
                }
            }
        }
        println!();
    }
}

/// Writes a history, as `proof/checker` reads it.
fn keep(folder: &str, name: &str, asks: &[Ask]) {
    let mut text = String::new();
    for ask in asks {
        ask.lines().for_each(|line| text += &format!("{line}\n"));
    }
    let path = std::path::Path::new(folder).join(name.replace(' ', "-"));
    std::fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
