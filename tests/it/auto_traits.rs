//! A feature adds to the crate, and takes nothing from the types that are there without it.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::{fs, str};

#[path = "../ui/auto_traits.rs"]
mod program;

#[test]
fn no_feature_changes_the_auto_traits_of_a_type() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the repository");
    let package = Path::new(env!("CARGO_TARGET_TMPDIR")).join("auto_traits");
    fs::create_dir_all(&package).expect("a writable target directory");
    let program = here.join("tests/ui/auto_traits.rs");
    let manifest = format!(
        "[package]\nname = \"auto-traits\"\nedition = \"2024\"\n\
         [dependencies]\ntower-fixed-window = {{ path = {here:?}, default-features = false }}\n\
         [[bin]]\nname = \"auto-traits\"\npath = {program:?}\n[workspace]\n"
    );
    fs::write(package.join("Cargo.toml"), manifest).expect("written");
    // The versions that are here already: nothing is downloaded.
    fs::copy(here.join("Cargo.lock"), package.join("Cargo.lock")).expect("a lock file");
    let output = Command::new(env!("CARGO"))
        .args(["run", "--offline", "--quiet", "--color=never", "--target-dir"])
        .arg(package.with_file_name("without_features"))
        .current_dir(&package)
        .output()
        .expect("cargo runs");
    let without_features = str::from_utf8(&output.stdout).expect("UTF-8");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let (without, with) = (without_features.lines(), program::table());
    for (without, with) in without.zip(with.lines()) {
        assert_eq!(with, without, "with all features, and with none");
    }
    assert_eq!(without_features.lines().count(), with.lines().count());
}

/// The types that a file exports without a feature.
fn exported(file: &str) -> BTreeSet<String> {
    let text = fs::read_to_string(file).expect(file);
    let mut is_featured = false;
    let mut names = BTreeSet::new();
    for item in text.split_inclusive([';', ']']) {
        let item = item.trim();
        if item.starts_with("#[cfg(feature") {
            is_featured = true;
        } else if let Some(list) = item.strip_prefix("pub use ") {
            let is_name = |c: char| c.is_alphanumeric() || c == '_';
            let words = list.split(|c| !is_name(c)).filter(|_| !is_featured);
            let is_type = |word: &&str| {
                word.starts_with(char::is_uppercase) && word.contains(char::is_lowercase)
            };
            names.extend(words.filter(is_type).map(str::to_owned));
            is_featured = false;
        } else if item.ends_with(';') {
            is_featured = false;
        }
    }
    names
}

#[test]
fn all_public_types_are_in_the_table_of_auto_traits() {
    const TRAITS: [&str; 4] = ["Clock", "KeyExtractor", "Reject", "Store"];

    let src = concat!(env!("CARGO_MANIFEST_DIR"), "/../src");
    let files = ["lib", "key", "store"].map(|file| exported(&format!("{src}/{file}.rs")));
    let types: BTreeSet<_> = files.into_iter().flatten().collect();
    let table = program::table();
    let listed = table.lines().map(|line| {
        let end = line.find(['<', ':']).expect("a name");
        line[..end].to_owned()
    });
    let expected: BTreeSet<_> =
        types.into_iter().filter(|name| !TRAITS.contains(&&name[..])).collect();
    assert_eq!(listed.collect::<BTreeSet<_>>(), expected);
}
