//! The app of `docs/tutorial.md` after each step: `cargo run -p tutorial --example step1`, to
//! `step8`. `ADDR` is the address to listen on, and from `step6` on, `REDIS_URL` the store.
