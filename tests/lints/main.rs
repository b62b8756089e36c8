//! The repository's own rules, for sources and pages: they read files and run nothing.

mod direction;
mod layout;
mod options;
mod pages;
mod tour;
mod tutorial;

use std::fs;
use std::path::Path;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(ROOT).join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The paths of all files of a folder that end in one of these ways, from the repository's root on.
/// A workspace's `target` has sources that build scripts have written.
fn files(folder: &str, endings: &[&str]) -> Vec<String> {
    let entries = fs::read_dir(Path::new(ROOT).join(folder)).expect("a directory");
    let mut found = Vec::new();
    for entry in entries.map(|entry| entry.expect("readable")) {
        let path = format!("{folder}/{}", entry.file_name().to_str().expect("UTF-8"));
        if entry.path().is_dir() && !path.ends_with("/target") {
            found.extend(files(&path, endings));
        } else if endings.iter().any(|ending| path.ends_with(ending)) {
            found.push(path);
        }
    }
    found
}
