fn main() {
    println!("cargo:rerun-if-changed=src/random.c");
    cc::Build::new().file("src/random.c").compile("random");
}
