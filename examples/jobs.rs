//! Without HTTP: mails that leave at the rate that a mail server allows. Finishes by itself.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio::time::sleep;
use tower_fixed_window::{Limiter, Quota};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limit = std::env::var("LIMIT").map_or(Ok(4), |limit| limit.parse())?;

    // So many a second; whoever is willing to wait may also have those of the next two seconds.
    let mails = Limiter::new(Quota::per_second(limit).reserve_up_to(2 * limit)).name("mails");
    let start = Instant::now();
    let at = move || format!("{:>4} ms", start.elapsed().as_millis());
    let mut jobs = JoinSet::new();

    for n in 1..=3 * limit + 3 {
        let (decision, receipt) = mails.reserve("smtp.example.org", 1).await?;
        let Some(receipt) = receipt else {
            let retry = decision.retry_after().unwrap_or_default();
            println!("{}  mail {n} finds all taken; the next try is due in {retry:?}", at());
            continue;
        };
        if n == 2 {
            // It will not be sent, so its place goes to another one.
            mails.refund(receipt).await?;
            println!("{}  mail {n} has no address; its token is given back", at());
            continue;
        }
        jobs.spawn(async move {
            sleep(decision.ready_after()).await;
            println!("{}  mail {n} is sent", at());
        });
    }
    while jobs.join_next().await.is_some() {}

    // The same without waiting: a charge that passes or doesn't, here for five mails at once.
    sleep(Duration::from_secs(1)).await;
    let (decision, _) = mails.charge("smtp.example.org", limit + 1).await?;
    println!("{}  {} mails at once: allowed: {}", at(), limit + 1, decision.allowed());
    Ok(())
}
