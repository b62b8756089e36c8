//! Looks at every state of the protocol, and then at what happens without each of its safeties.

use std::process::ExitCode;

use tower_fixed_window_model::{Fault, Protocol, SMALL, look};

fn main() -> ExitCode {
    let smoke = std::env::args().any(|arg| arg == "--smoke");
    let mut well = true;
    println!(
        "| nodes | limit | ticks | lease | refunds | memory | failover | states | steps | seconds | holds |"
    );
    println!("|---:|---:|---:|---:|---|---|---|---:|---:|---:|---|");
    let three = Protocol { nodes: 3, refunds: false, ..SMALL };
    let larger = [
        Protocol { refunds: false, failover: true, ..SMALL },
        Protocol { refunds: false, local: true, ..SMALL },
        Protocol { failover: true, ..SMALL },
        Protocol { length: 3, ..SMALL },
        Protocol { limit: 3, lease: 3, ..SMALL },
        Protocol { refunds: false, local: true, failover: true, ..SMALL },
        three.clone(),
        Protocol { failover: true, ..three.clone() },
        Protocol { limit: 3, failover: true, ..three.clone() },
        Protocol { lease: 1, refunds: true, ..three.clone() },
        Protocol { refunds: true, ..three },
    ];
    for protocol in [SMALL].into_iter().chain(larger.into_iter().filter(|_| !smoke)) {
        let looked = look(&protocol);
        let holds = looked.broken.is_empty() && looked.never.is_empty();
        well &= holds;
        let Protocol { nodes, limit, length, lease, refunds, local, failover, .. } = &protocol;
        println!(
            "| {nodes} | {limit} | {length} | {lease} | {refunds} | {local} | {failover} | {} | {} | {:.1} | {holds} |",
            looked.states,
            looked.depth,
            looked.took.as_secs_f64(),
        );
        looked.broken.iter().for_each(|broken| println!("{broken:?}"));
        looked.never.iter().for_each(|never| println!("never: {never}"));
    }
    println!("\n| fault | steps | broken | which |\n|---|---:|---|---|");
    for fault in Fault::ALL {
        let looked = look(&fault.protocol());
        let broken = looked.broken.iter().find(|(what, _)| *what == fault.breaks());
        well &= broken.is_some();
        match broken {
            Some((what, steps)) => {
                println!("| {fault:?} | {} | {what} | {} |", steps.len(), steps.join(" "));
            }
            None => println!("| {fault:?} | never | {} | |", fault.breaks()),
        }
    }
    ExitCode::from(u8::from(!well))
}
