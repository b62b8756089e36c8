//! All limiters under test.

use crate::limiter::{Contestant, Limiter, Setup};
use crate::ours;
#[cfg(feature = "peers")]
use crate::peers;

/// All limiters, in the order of the tables.
pub fn contestants() -> Vec<Contestant> {
    #[cfg(not(feature = "peers"))]
    let peers = [];
    #[cfg(feature = "peers")]
    let peers = peers::CONTESTANTS;
    ours::CONTESTANTS.into_iter().chain(peers).collect()
}

/// Makes the limiter that a setup names.
pub async fn make(setup: &Setup) -> Box<dyn Limiter> {
    if setup.name.starts_with("ours") {
        return ours::make(setup);
    }
    #[cfg(not(feature = "peers"))]
    panic!("there is no {}: --features peers has more", setup.name);
    #[cfg(feature = "peers")]
    peers::make(setup).await
}
