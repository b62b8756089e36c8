//! The examples of this folder need more than axum, so they are in a package of their own: then the
//! other examples build without what these need. `cargo run -p stacks --example tonic` starts one.
