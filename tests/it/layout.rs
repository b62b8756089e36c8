//! The map in CONTRIBUTING.md is true: which file knows which, and which of them knows what crate.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(ROOT).join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// What stands between backquotes.
fn quoted(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// A row of the map: files that may know each other and all rows above, and the crates they name.
struct Row {
    files: BTreeSet<String>,
    crates: BTreeSet<String>,
}

fn map() -> Vec<Row> {
    let text = read("CONTRIBUTING.md");
    let (_, map) = text.split_once("## The map").expect("a section");
    let (map, _) = map.split_once("\n## ").expect("another section after it");
    map.lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| {
            let cells: Vec<_> = line.trim_matches('|').split('|').collect();
            assert_eq!(cells.len(), 3, "a row has files, what they are, and crates: {line}");
            Row { files: quoted(cells[0]), crates: quoted(cells[2]) }
        })
        .collect()
}

/// All files of `src/`, by their paths without `.rs`, and their code without comments.
fn sources() -> BTreeMap<String, String> {
    fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("readable").path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let src = Path::new(ROOT).join("src");
    let mut found = Vec::new();
    walk(&src, &mut found);
    let name = |path: &PathBuf| {
        let path = path.strip_prefix(&src).expect("inside").with_extension("");
        path.components()
            .map(|part| part.as_os_str().to_string_lossy())
            .collect::<Vec<_>>()
            .join("/")
    };
    let code = |path: &PathBuf| {
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        read(path).lines().filter(is_code).collect::<Vec<_>>().join("\n")
    };
    found
        .iter()
        .map(|path| (name(path), code(path)))
        // What puts the others together, and the guide.
        .filter(|(name, _)| name != "lib" && name != "guide")
        .collect()
}

/// What follows each `prefix` that is not the end of a longer name or path.
fn after<'a>(code: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    code.match_indices(prefix)
        .filter(move |(at, _)| !code[..*at].ends_with(is_name))
        .map(move |(at, _)| &code[at + prefix.len()..])
}

/// The row of a file: its own, or that of the file it belongs to.
fn row_of<'a>(rows: &'a [Row], file: &str) -> (usize, &'a Row) {
    let mut name = file;
    loop {
        if let Some(found) = rows.iter().enumerate().find(|(_, row)| row.files.contains(name)) {
            return found;
        }
        (name, _) = name
            .rsplit_once('/')
            .unwrap_or_else(|| panic!("src/{file}.rs is not on the map in CONTRIBUTING.md"));
    }
}

#[test]
fn imports_follow_the_map_without_circles() {
    let rows = map();
    assert!(rows.len() > 10, "the map has been read");
    let mut faults = Vec::new();
    for (file, code) in sources() {
        let (row, _) = row_of(&rows, &file);
        for used in after(&code, "crate::") {
            let used: String =
                used.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if !used.starts_with(|c: char| c.is_lowercase()) {
                faults.push(format!(
                    "src/{file}.rs: write crate::file::{used}, for this test to see"
                ));
            } else if row_of(&rows, &used).0 > row {
                faults.push(format!("src/{file}.rs uses {used}, which is below it on the map"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn files_name_only_the_crates_that_the_map_gives_them() {
    let rows = map();
    let manifest: toml::Table = read("Cargo.toml").parse().expect("TOML");
    let mut dependencies: BTreeSet<_> =
        manifest["dependencies"].as_table().expect("a table").keys().cloned().collect();
    dependencies.insert("shuttle".into());

    let mut faults = Vec::new();
    let mut named: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    for (file, code) in sources() {
        let (at, row) = row_of(&rows, &file);
        for dependency in &dependencies {
            let name = dependency.replace('-', "_");
            // A file of this name inside of that one.
            if code.contains(&format!("mod {name};")) {
                continue;
            }
            if after(&code, &format!("{name}::")).next().is_some() {
                named.entry(at).or_default().insert(dependency.clone());
                if !row.crates.contains(dependency) {
                    faults.push(format!("src/{file}.rs names {dependency}"));
                }
            }
        }
    }
    for (at, row) in rows.iter().enumerate() {
        for stale in &row.crates - &named.remove(&at).unwrap_or_default() {
            faults.push(format!("{:?} does not name {stale}", row.files));
        }
        for file in &row.files {
            if !Path::new(ROOT).join("src").join(format!("{file}.rs")).exists() {
                faults.push(format!("src/{file}.rs is on the map, but not there"));
            }
        }
    }
    assert!(faults.is_empty(), "otherwise than on the map:\n{}", faults.join("\n"));
}

/// With all features off: the basics of Tower and HTTP, and three small others.
#[test]
fn the_core_stands_on_tower_and_http_and_three_small_crates() {
    const BASICS: [&str; 6] =
        ["bytes", "http", "http-body", "pin-project-lite", "tower-layer", "tower-service"];
    // A hasher for the table in memory; SHA-256 for credentials; integers as text. None has a dependency
    // of its own.
    const OTHERS: [&str; 3] = ["foldhash", "hmac-sha256", "itoa"];

    let manifest: toml::Table = read("Cargo.toml").parse().expect("TOML");
    let is_optional = |dependency: &toml::Value| {
        dependency.get("optional").and_then(toml::Value::as_bool).unwrap_or_default()
    };
    let core: BTreeSet<_> = manifest["dependencies"]
        .as_table()
        .expect("a table")
        .iter()
        .filter(|(_, dependency)| !is_optional(dependency))
        .map(|(name, _)| name.as_str())
        .collect();
    assert_eq!(core, BASICS.into_iter().chain(OTHERS).collect());
    let default = manifest["features"]["default"].as_array().expect("a list");
    assert!(default.is_empty(), "a default feature brings what nobody asked for: {default:?}");
}
