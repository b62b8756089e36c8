//! The examples in this folder need more than axum, so they are in a package of their own, and the
//! other examples build without these dependencies. `cargo run -p stacks --example tonic` starts
//! one.
