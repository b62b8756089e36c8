//! Memory: of each store, in a process of its own: see `bin_memory.rs`.

use std::process::Command;

#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Bytes that are held for each key.
    pub held: f64,
    /// The most there were while it grew.
    pub most: f64,
    /// What the system had to give.
    pub resident: f64,
}

pub fn measure(who: &str, keys: u32) -> Memory {
    let program = std::env::current_exe().expect("this program").with_file_name("peers-memory");
    let output = Command::new(program).arg(who).arg(keys.to_string()).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let problem = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{who}, {keys} keys: {problem}");
    let mut numbers = text
        .split_whitespace()
        .map(|number| number.parse::<f64>().expect("a number") / f64::from(keys));
    let mut next = || numbers.next().expect("three numbers");
    Memory { held: next(), most: next(), resident: next() }
}
