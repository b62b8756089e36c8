//! `cargo run -p sqlite -- counts.db alice`, in several terminals at once: charges a key until it
//! is refused, and prints how many of the 1,000 of a minute this process got.

use std::env::args;

use sqlite::SqliteCounters;
use tower_fixed_window::store::Shared;
use tower_fixed_window::{Limit, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (path, key) = (args().nth(1).unwrap_or("counts.db".to_owned()), args().nth(2));
    // Without a `Remote`, which would count in memory if the machine is too busy for its deadline.
    let store = Shared::around(SqliteCounters::open(path)?);
    let limit = Limit::new(Quota::per_minute(1_000)).name("sqlite").store(store);
    let key = key.unwrap_or("alice".to_owned());
    let mut passed = 0;
    while limit.check(&*key).await?.is_allowed() {
        passed += 1;
    }
    println!("{passed}");
    Ok(())
}
