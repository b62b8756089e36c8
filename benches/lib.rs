//! What is measured is in the benches: `cargo bench -p benches --bench layer`.
