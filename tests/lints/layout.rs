//! The map in CONTRIBUTING.md is true: which file uses which, and which of them names what crate.

mod imports;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use imports::Crate;

/// The most lines of code in a file, without documentation, comments, blank lines and tests.
const MAX_LINES: usize = 600;

/// The current faults. A fault that has been repaired must leave the list.
const EXCEPTIONS: &[&str] = &[];

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn read(path: impl AsRef<Path>) -> String {
    let path = Path::new(ROOT).join(path);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The names in backquotes.
fn quoted(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// A row of the map: files that may use those of all rows above, and the crates that they name.
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

/// All files of `src/`, by their paths without `.rs`.
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
    found.iter().map(|path| (name(path), read(path))).filter(|(name, _)| name != "guide").collect()
}

/// The text after each `prefix` that is not the end of a longer name or path.
fn after<'a>(code: &'a str, prefix: &'a str) -> impl Iterator<Item = &'a str> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    code.match_indices(prefix)
        .filter(move |(at, _)| !code[..*at].ends_with(is_name))
        .map(move |(at, _)| &code[at + prefix.len()..])
}

/// The row of a file: its own, or that of the file it belongs to.
fn row_of(rows: &[Row], file: &str) -> Option<usize> {
    let own = rows.iter().position(|row| row.files.contains(file));
    own.or_else(|| row_of(rows, file.rsplit_once('/')?.0))
}

/// The violations of the map. [`EXCEPTIONS`] has the first line of a fault.
fn faults(rows: &[Row], sources: &BTreeMap<String, String>) -> Vec<String> {
    let of = Crate::new(sources.iter().map(|(path, text)| (&path[..], &text[..])));
    let mut faults = Vec::new();
    for (files, way) in of.circles() {
        // A parent and its children may use each other.
        let parent = files.iter().min_by_key(|file| file.len()).expect("a circle has files");
        if files.iter().all(|file| file == parent || file.starts_with(&format!("{parent}/"))) {
            continue;
        }
        faults.push(format!("circle of {}\n    {way}", Vec::from_iter(files).join(", ")));
    }
    for (file, uses) in of.uses() {
        match (row_of(rows, &file), of.lines()[&file]) {
            (None, _) => faults.push(format!("{file} is not on the map")),
            (_, lines) if lines > MAX_LINES => {
                faults.push(format!("{file} is too long\n    {lines} lines of code"));
            }
            _ => {}
        }
        for (used, path) in uses {
            let row = row_of(rows, &file);
            if row.is_some() && row < row_of(rows, &used) {
                let fault = "which is below it on the map";
                faults.push(format!("{file} uses {used}, {fault}\n    `{path}`"));
            }
        }
    }
    faults
}

#[test]
fn imports_follow_the_map_without_circles() {
    let rows = map();
    assert!(rows.len() > 10, "the map has been read");
    let mut faults = faults(&rows, &sources());
    for exception in EXCEPTIONS {
        let before = faults.len();
        faults.retain(|fault| fault.lines().next() != Some(exception));
        if faults.len() == before {
            faults.push(format!("take this out of EXCEPTIONS: {exception}"));
        }
    }
    assert!(faults.is_empty(), "otherwise than CONTRIBUTING.md says:\n{}", faults.join("\n"));
}

/// The map is of two rows: `above`, and below it `a` and `b`.
fn faults_of<const N: usize>(sources: [(&str, &str); N]) -> Vec<String> {
    let row = |files: &[&str]| Row {
        files: files.iter().map(|&file| file.to_owned()).collect(),
        crates: BTreeSet::new(),
    };
    let rows = [row(&["above"]), row(&["a", "b"])];
    let owned = sources.map(|(path, text)| (path.to_owned(), text.to_owned()));
    faults(&rows, &owned.into()).iter().map(|fault| fault.replace("\n   ", ":")).collect()
}

#[test]
fn a_file_that_uses_one_below_it_is_a_fault() {
    let a = ("a", "use crate::{above, b::B}; fn f() { above::g() }");
    assert_eq!(faults_of([("above", "pub fn g() {}"), a, ("b", "pub struct B;")]), [""; 0]);
    let above = ("above", "fn f() { crate::b::g() }");
    assert_eq!(
        faults_of([above, ("b", "pub fn g() {}")]),
        ["above uses b, which is below it on the map: `crate::b::g`"]
    );
}

#[test]
fn a_circle_within_a_row_is_a_fault() {
    assert_eq!(
        faults_of([("a", "use crate::b::B;"), ("b", "use crate::a::A;")]),
        ["circle of a, b: a uses b (`crate::b::B`), b uses a (`crate::a::A`)"]
    );
}

#[test]
fn a_circle_of_parent_and_child_is_no_fault() {
    let files = [("a", "mod c; fn f() { c::g() }"), ("a/c", "use super::f;")];
    assert_eq!(faults_of(files), [""; 0]);
}

#[test]
fn a_file_that_is_not_on_the_map_is_a_fault() {
    assert_eq!(faults_of([("other", "")]), ["other is not on the map"]);
    assert_eq!(faults_of([("a", "mod c;"), ("a/c", "")]), [""; 0]);
}

#[test]
fn a_file_of_more_than_600_lines_is_a_fault() {
    let lines = |n: usize| "fn f() {} // f\n\n/// g\n".repeat(n);
    assert_eq!(faults_of([("a", &lines(600))]), [""; 0]);
    assert_eq!(faults_of([("a", &lines(601))]), ["a is too long: 601 lines of code"]);
}

#[test]
fn files_name_only_the_crates_that_the_map_gives_them() {
    let rows = map();
    let manifest: toml::Table = read("Cargo.toml").parse().expect("TOML");
    let mut dependencies: BTreeSet<_> =
        manifest["dependencies"].as_table().expect("a table").keys().cloned().collect();
    dependencies.extend(["rustix".into(), "shuttle".into()]);

    let mut faults = Vec::new();
    let mut named: BTreeMap<usize, BTreeSet<String>> = BTreeMap::new();
    for (file, text) in sources() {
        let is_code = |line: &&str| !line.trim_start().starts_with("//");
        let code = text.lines().filter(is_code).collect::<Vec<_>>().join("\n");
        let Some(at) = row_of(&rows, &file) else { continue };
        for dependency in &dependencies {
            let name = dependency.replace('-', "_");
            // A file of this name inside of that one.
            if code.contains(&format!("mod {name};")) {
                continue;
            }
            if after(&code, &format!("{name}::")).next().is_some() {
                named.entry(at).or_default().insert(dependency.clone());
                if !rows[at].crates.contains(dependency) {
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
    // Each of another target, too, is in the lock file of every app.
    let targets = manifest["target"].as_table().expect("a table");
    let [linux, others] = ["target_os = \"linux\"", "all(unix, not(target_os = \"linux\"))"]
        .map(|target| format!("cfg({target})"));
    assert_eq!(BTreeSet::from_iter(targets.keys()), BTreeSet::from([&linux, &others]));
    let of = |target| targets[target]["dependencies"].as_table().expect("a table");
    // The kernel's coarse clock, which `std` does not read; elsewhere only the locks of files.
    assert!(of(&*linux).keys().eq(["rustix"]) && of(&*others).keys().eq(["rustix"]));
    assert!(is_optional(&of(&*others)["rustix"]));
    let default = manifest["features"]["default"].as_array().expect("a list");
    assert!(default.is_empty(), "a default feature brings what nobody asked for: {default:?}");
}

/// Types that are declared under the stores elsewhere, and the largest number of them.
const STORES_ELSEWHERE: [&str; 2] = ["store/remote", "store/redis"];
const MAX_TYPES: usize = 40;

/// The structs, enums and traits of a file, without those of its tests.
fn types(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split("#[cfg(test)]\nmod tests").next().expect("a first part");
    code.lines().filter_map(|line| {
        let line = line.trim_start();
        // Also `pub(super)` and the like.
        let line = match line.strip_prefix("pub(") {
            Some(rest) => rest.split_once(") ")?.1,
            None => line.strip_prefix("pub ").unwrap_or(line),
        };
        let name =
            ["struct ", "enum ", "trait "].iter().find_map(|kind| line.strip_prefix(kind))?;
        name.split(|c: char| !c.is_alphanumeric()).next()
    })
}

/// Types that are declared twice under opposite features, of which one compiles.
const ALTERNATIVES: [&str; 7] =
    ["Meters", "Rules", "Runtime", "Saves", "Sleep", "Timing", "UnderWay"];

/// A name has one meaning, and a reader of the way to Redis meets few nouns.
#[test]
fn no_two_types_have_one_name_and_stores_elsewhere_have_few() {
    let text = "struct A<T>(T);\n    pub(in crate::b) enum B {\npub trait C: A {\n/// struct D\n";
    assert_eq!(types(text).collect::<Vec<_>>(), ["A", "B", "C"]);

    let sources = sources();
    let mut names = BTreeMap::<&str, Vec<&str>>::new();
    for (file, text) in &sources {
        types(text).for_each(|name| names.entry(name).or_default().push(file));
    }
    let is_elsewhere = |file: &&&str| STORES_ELSEWHERE.iter().any(|store| file.starts_with(store));
    let many = names.values().flatten().filter(is_elsewhere).count();
    assert!(many > 20, "they were found");
    assert!(many <= MAX_TYPES, "{many} types, and not {MAX_TYPES}");

    names.retain(|name, files| files.len() > 1 && !ALTERNATIVES.contains(name));
    assert!(names.is_empty(), "names of two types: {names:#?}");
}
