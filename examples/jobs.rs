//! `cargo run --example jobs`
//!
//! Sends mails at the rate that a mail server allows, without HTTP. The example ends by itself.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_fixed_window::{Limiter, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(4), |limit| limit.parse())?;

    // The limit is LIMIT mails a second. A mail that waits may also take tokens of the next two
    // seconds.
    let mails = Limiter::new(Quota::per_second(limit).reserve_up_to(2 * limit).name("mails"));
    let start = Instant::now();
    let at = move || format!("{:>4} ms", start.elapsed().as_millis());
    let mut jobs = JoinSet::new();

    for n in 1..=3 * limit + 3 {
        let receipt = match mails.reserve("smtp.example.org", 1).await? {
            Ok(receipt) => receipt,
            Err(refused) => {
                println!("{}  mail {n}: {refused}", at());
                continue;
            }
        };
        if n == 2 {
            // This mail is not sent, so its token goes to another one.
            mails.refund(receipt).await?;
            println!("{}  mail {n} has no address; its token is refunded", at());
            continue;
        }
        jobs.spawn(async move {
            sleep(receipt.decision().ready_after()).await;
            println!("{}  mail {n} is sent", at());
        });
    }
    while jobs.join_next().await.is_some() {}

    // A charge that does not wait passes at once or not at all, here for a whole batch.
    sleep(Duration::from_secs(1)).await;
    let receipt = mails.charge("smtp.example.org", limit).await??;
    println!("{}  a batch of {limit} may be sent", at());
    mails.refund(receipt).await?;
    let left = mails.peek("smtp.example.org").await?.remaining();
    println!("{}  the mail server disconnected: refunded, {left} can be sent", at());
    Ok(())
}
