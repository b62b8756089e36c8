//! Checks a history in a file.

use std::process::ExitCode;

use tower_fixed_window_checker::check::{Promise, Windows, above};
use tower_fixed_window_checker::history::collect;
use tower_fixed_window_checker::several::torn;

const USAGE: &str = "cargo run --release -- FILE --limit TOKENS --window MILLISECONDS [--windows WHERE]

FILE has lines NODE ID KEY COST SENT RECEIVED ANSWER, and NODE ID returned SENT. Times are microseconds
since the Unix epoch. ANSWER is passed, passed-locally, refused, undone, failed or gave-up. A
request for several limits has a line for each, with one ID; undone: another one has refused. WHERE is aligned
(unless said), regular, on-demand or bucket.";

fn main() -> ExitCode {
    match check(std::env::args().skip(1)) {
        Ok(holds) => ExitCode::from(u8::from(!holds)),
        Err(error) => {
            eprintln!("{error}\n\n{USAGE}");
            ExitCode::from(2)
        }
    }
}

fn check(mut args: impl Iterator<Item = String>) -> Result<bool, String> {
    let (mut file, mut limit, mut length, mut windows) = (None, None, None, Windows::Aligned);
    while let Some(arg) = args.next() {
        let mut number = || args.next()?.parse::<u64>().ok();
        match &arg[..] {
            "--limit" => limit = number(),
            "--window" => length = number(),
            "--windows" => {
                windows = match args.next().as_deref() {
                    Some("aligned") => Windows::Aligned,
                    Some("regular") => Windows::Regular,
                    Some("on-demand") => Windows::OnDemand,
                    Some("bucket") => Windows::Bucket,
                    other => return Err(format!("unknown windows: {other:?}")),
                }
            }
            _ => file = Some(arg),
        }
    }
    let (Some(file), Some(limit), Some(length @ 1..)) = (file, limit, length) else {
        return Err("a file, --limit and --window are needed".to_owned());
    };
    let text = std::fs::read_to_string(&file).map_err(|error| format!("{file}: {error}"))?;
    let lines = text.lines().map(str::parse).collect::<Result<Vec<_>, _>>()?;
    let asks = collect(lines);
    let most = above(&asks, &Promise { windows, limit, length, losses: Vec::new(), local: false });
    match most.at {
        None => println!("{} requests: not seen above the limit", asks.len()),
        Some((key, start)) => {
            println!("key {key} is at least {} above the limit, from {start} on", most.above);
        }
    }
    let torn = torn(&asks);
    if let Some((node, id)) = torn.first() {
        println!("{} requests have passed in part, such as {id} of node {node}", torn.len());
    }
    Ok(most.above == 0 && torn.is_empty())
}
