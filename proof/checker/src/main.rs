//! Checks a history in a file.

use std::process::ExitCode;

use tower_fixed_window_checker::check::{Promise, Windows, above};
use tower_fixed_window_checker::history::collect;
use tower_fixed_window_checker::several::torn;

const USAGE: &str = "cargo run --release -- FILE --limit TOKENS --window MILLISECONDS [--windows WHERE]
    [--capacity TOKENS] [--reserved TOKENS]

FILE has lines NODE ID KEY COST SENT RECEIVED ANSWER, and NODE ID returned SENT. Times are microseconds
since the Unix epoch. ANSWER is passed, passed-locally, refused, undone, failed or gave-up. A
request for several limits has a line for each, with one ID; undone: another one has refused. NODE ID due AT
says from when on a request may run that has taken tokens of later windows. WHERE is aligned (unless said),
regular, on-demand, bucket, or for a calendar when each window begins: AT,AT,AT. With a capacity, tokens of
earlier windows are kept; with reserved tokens, those of later windows may be taken. Several quotas of a key
are checked one after the other.";

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
    let (mut capacity, mut reserved, mut starts) = (None, None, Vec::new());
    while let Some(arg) = args.next() {
        let mut number = || args.next()?.parse::<u64>().ok();
        match &arg[..] {
            "--limit" => limit = number(),
            "--window" => length = number(),
            "--capacity" => capacity = number(),
            "--reserved" => reserved = number(),
            "--windows" => {
                windows = match args.next().as_deref() {
                    Some("aligned") => Windows::Aligned,
                    Some("regular") => Windows::Regular,
                    Some("on-demand") => Windows::OnDemand,
                    Some("bucket") => Windows::Bucket,
                    other => {
                        let listed = other.unwrap_or_default().split(',').map(str::parse);
                        starts = listed
                            .collect::<Result<_, _>>()
                            .map_err(|_| format!("unknown windows: {other:?}"))?;
                        Windows::Listed
                    }
                }
            }
            _ => file = Some(arg),
        }
    }
    // Listed windows say themselves how long they are.
    let length = length.or((windows == Windows::Listed).then_some(1));
    let (Some(file), Some(limit), Some(length @ 1..)) = (file, limit, length) else {
        return Err("a file, --limit and --window are needed".to_owned());
    };
    let text = std::fs::read_to_string(&file).map_err(|error| format!("{file}: {error}"))?;
    let lines = text.lines().map(str::parse).collect::<Result<Vec<_>, _>>()?;
    let asks = collect(lines);
    let capacity = capacity.unwrap_or(limit).max(limit);
    let reserved = reserved.unwrap_or(0);
    let promise = Promise { capacity, reserved, starts, ..Promise::new(windows, limit, length) };
    let known = matches!(windows, Windows::Aligned | Windows::Listed);
    if !known && promise.capacity + promise.reserved > limit {
        return Err("--capacity and --reserved need aligned or listed windows".to_owned());
    }
    let most = above(&asks, &promise);
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
