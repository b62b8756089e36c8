//! `cargo run --example vectors`
//!
//! Replays traces of charges with their expected answers, through a store in memory: `cargo run
//! --example vectors -- FILE` (without a file: the traces in the crate).

use std::process::ExitCode;

use tower_fixed_window::MemoryStore;
use tower_fixed_window::testing::{VECTORS, replay};

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let json = match std::env::args_os().nth(1) {
        Some(file) => std::fs::read_to_string(file)?,
        None => VECTORS.to_owned(),
    };
    let report = replay(&json, MemoryStore::with_clock).await?;
    println!("{report}");
    Ok(if report.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
