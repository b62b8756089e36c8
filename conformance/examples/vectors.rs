//! `cargo run -p tower-fixed-window-conformance --example vectors`
//!
//! Replays traces of charges with their expected decisions, through a store in memory: those in the
//! crate, or with `-- FILE` those of a file. The traces have one limit,
//! or several that are charged together.

use std::process::ExitCode;

use tower_fixed_window::MemoryStore;
use tower_fixed_window_conformance::{TOGETHER_VECTORS, VECTORS, replay};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let files = match std::env::args_os().nth(1) {
        Some(file) => vec![std::fs::read_to_string(file)?],
        None => vec![VECTORS.to_owned(), TOGETHER_VECTORS.to_owned()],
    };
    let mut code = ExitCode::SUCCESS;
    for json in files {
        let report = replay(&json, |clock| MemoryStore::new().clock(clock)).await?;
        println!("{report}");
        if !report.failures.is_empty() {
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}
