//! Looks at every state of the protocol, and then at what happens without each of its safeties.

use std::fmt::Debug;
use std::process::ExitCode;

use tower_fixed_window_protocol::charges::{self, Protocol, SMALL};
use tower_fixed_window_protocol::groups::{
    self, AND_ALONE, BOTH_WAYS, Groups, IN_ONE_STEP, IN_ORDER,
};
use tower_fixed_window_protocol::tables::{self, TABLE, Tables};
use tower_fixed_window_protocol::{Looked, look};

fn main() -> ExitCode {
    let smoke = std::env::args().any(|arg| arg == "--smoke");
    let well = [charges(smoke), groups(smoke), tables(smoke)];
    ExitCode::from(u8::from(well != [true; 3]))
}

/// Charges of one limit.
fn charges(smoke: bool) -> bool {
    let mut well = true;
    println!(
        "| nodes | limit | ticks | refunds | memory | failover | states | steps | seconds | holds |"
    );
    println!("|---:|---:|---:|---|---|---|---:|---:|---:|---|");
    let three = Protocol { nodes: 3, refunds: false, ..SMALL };
    let larger = [
        Protocol { refunds: false, failover: true, ..SMALL },
        Protocol { refunds: false, local: true, ..SMALL },
        Protocol { failover: true, ..SMALL },
        Protocol { local: true, ..SMALL },
        Protocol { local: true, failover: true, ..SMALL },
        Protocol { length: 3, ..SMALL },
        Protocol { limit: 3, ..SMALL },
        Protocol { refunds: false, local: true, failover: true, ..SMALL },
        three.clone(),
        Protocol { failover: true, ..three.clone() },
        Protocol { limit: 3, failover: true, ..three.clone() },
        Protocol { refunds: true, ..three },
    ];
    for protocol in [SMALL].into_iter().chain(larger.into_iter().filter(|_| !smoke)) {
        let Protocol { nodes, limit, length, refunds, local, failover, .. } = &protocol;
        print!("| {nodes} | {limit} | {length} | {refunds} | {local} | {failover} | ");
        well &= holds(&look(&protocol));
    }
    print_faults_header();
    for fault in charges::Fault::ALL {
        well &= is_found(fault, fault.breaks(), &look(&fault.protocol()));
    }
    well
}

/// Charges of several limits.
fn groups(smoke: bool) -> bool {
    let mut well = true;
    println!(
        "\n| charged | nodes | limits | costs | requests | refunds | memory | states | steps | seconds | holds |"
    );
    println!("|---|---:|---|---|---|---|---|---:|---:|---:|---|");
    let each = |base: Groups| {
        let one = Groups { limits: [1, 1], ..base.clone() };
        let three = Groups { nodes: 3, ..one.clone() };
        [
            Groups { refunds: true, asked: AND_ALONE, ..base.clone() },
            Groups { limits: [3, 2], costs: [2, 1], asked: AND_ALONE, ..base.clone() },
            Groups { limits: [2, 2], asked: BOTH_WAYS, ..base.clone() },
            Groups { limits: [2, 2], refunds: true, ..base.clone() },
            Groups { local: true, ..one.clone() },
            Groups { local: true, refunds: true, ..one.clone() },
            Groups { local: true, asked: AND_ALONE, ..one },
            three.clone(),
            Groups { asked: AND_ALONE, ..three },
        ]
    };
    let larger = each(IN_ORDER).into_iter().chain(each(IN_ONE_STEP));
    for groups in [IN_ORDER, IN_ONE_STEP].into_iter().chain(larger.filter(|_| !smoke)) {
        let Groups { nodes, limits, costs, asked, in_order, refunds, local, .. } = &groups;
        let charged = if *in_order { "in order" } else { "in one step" };
        let asked = asked.iter().map(|limits| limits.iter().map(|&l| ["A", "B"][l]).collect());
        let asked = asked.collect::<Vec<String>>().join(", ");
        print!("| {charged} | {nodes} | {limits:?} | {costs:?} | {asked} | {refunds} | {local} | ");
        well &= holds(&look(&groups));
    }
    print_faults_header();
    for fault in groups::Fault::ALL {
        well &= is_found(fault, fault.breaks(), &look(&fault.model()));
    }
    well
}

/// Charges of one counter of a table.
fn tables(smoke: bool) -> bool {
    let mut well = true;
    println!("\n| nodes | limit | together | adds | states | steps | seconds | holds |");
    println!("|---:|---:|---:|---|---:|---:|---:|---|");
    let three = Tables { limit: 3, ..TABLE };
    let larger = [
        Tables { adds: false, ..TABLE },
        Tables { adds: false, ..three.clone() },
        three,
        Tables { nodes: 3, together: 1, ..TABLE },
    ];
    for table in [TABLE].into_iter().chain(larger.into_iter().filter(|_| !smoke)) {
        let Tables { nodes, limit, together, adds, .. } = &table;
        print!("| {nodes} | {limit} | {together} | {adds} | ");
        well &= holds(&look(&table));
    }
    print_faults_header();
    for fault in tables::Fault::ALL {
        well &= is_found(fault, fault.breaks(), &look(&fault.model()));
    }
    well
}

fn holds(looked: &Looked) -> bool {
    let holds = looked.broken.is_empty() && looked.never.is_empty();
    let took = looked.took.as_secs_f64();
    println!("{} | {} | {took:.1} | {holds} |", looked.states, looked.depth);
    looked.broken.iter().for_each(|broken| println!("{broken:?}"));
    looked.never.iter().for_each(|never| println!("never: {never}"));
    holds
}

fn print_faults_header() {
    println!("\n| fault | steps | seconds | broken | which |\n|---|---:|---:|---|---|");
}

fn is_found(fault: impl Debug, breaks: &str, looked: &Looked) -> bool {
    match looked.broken.iter().find(|(what, _)| *what == breaks) {
        Some((what, steps)) => {
            let took = looked.took.as_secs_f64();
            let steps = format!("{} | {took:.1} | {what} | {}", steps.len(), steps.join(" "));
            println!("| {fault:?} | {steps} |");
            true
        }
        None => {
            println!("| {fault:?} | never | | {breaks} | |");
            false
        }
    }
}
