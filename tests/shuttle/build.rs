//! Chooses shuttle's locks in `src/sync.rs`.

fn main() {
    println!("cargo::rustc-cfg=tfw_shuttle");
}
