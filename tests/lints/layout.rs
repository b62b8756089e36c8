//! What stands where in `src` and the companion's: the length of files, the crates that folders name,
//! and the names of types.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::{files, read};

/// The most lines of code in a file, without documentation, comments, blank lines and tests.
const MAX_LINES: usize = 600;

/// Crates that only these folders and files may name.
const CRATES: [(&str, &[&str]); 10] = [
    ("axum", &["key", "middleware"]),
    ("foldhash", &["limits", "queue", "store/sharded"]),
    ("hmac_sha256", &["key", "store/account"]),
    ("http", &["key", "limits", "middleware", "testing"]),
    ("ipnet", &["key"]),
    ("jiff", &["quota"]),
    ("metrics", &["observe"]),
    ("tokio", &["store", "sync"]),
    ("tower_layer", &["middleware", "testing"]),
    ("tracing", &["observe"]),
];

/// The store in Redis, a crate of its own.
const COMPANION: &str = "redis/src";

/// All files of a crate, by their paths in `src` without `.rs`.
pub(crate) fn sources(folder: &str) -> BTreeMap<String, String> {
    let name = |path: &str| path[folder.len() + 1..path.len() - 3].to_owned();
    let sources = files(folder, &[".rs"]).into_iter().map(|path| (name(&path), read(&path)));
    sources.filter(|(name, _)| name != "guide").collect()
}

/// Lines of code: without documentation, comments, blank lines and tests.
pub(crate) fn code(text: &str) -> impl Iterator<Item = &str> {
    let text = text.split("#[cfg(test)]\nmod tests").next().expect("a first part");
    let is_code = |line: &&str| !line.trim().is_empty() && !line.trim_start().starts_with("//");
    text.lines().filter(is_code)
}

#[test]
fn files_are_short_and_folders_name_few_crates() {
    let mut faults = Vec::new();
    for folder in ["src", COMPANION] {
        for (file, text) in sources(folder) {
            let lines = code(&text).count();
            if lines > MAX_LINES {
                faults.push(format!("{folder}/{file}.rs has {lines} lines of code"));
            }
        }
    }
    for (file, text) in sources("src") {
        for (name, folders) in CRATES {
            let of_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
            let is_path = |line: &str| {
                line.split(|c| !of_path(c)).any(|path| path.starts_with(&format!("{name}::")))
            };
            let is_inside = folders.iter().any(|folder| Path::new(&file).starts_with(folder));
            if !is_inside && code(&text).any(is_path) {
                faults.push(format!("src/{file}.rs names {name}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// With all features off: the basics of Tower and HTTP, and three small others.
#[test]
fn the_core_stands_on_tower_and_http_and_three_small_crates() {
    const BASICS: [&str; 6] =
        ["bytes", "http", "http-body", "pin-project-lite", "tower-layer", "tower-service"];
    // A hasher for the table in memory; SHA-256 for credentials; integers as text. None has a dependency
    // of its own.
    const OTHERS: [&str; 2] = ["foldhash", "hmac-sha256"];

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

/// The most types on the way to Redis: in `store/remote`, and in the companion.
const MAX_TYPES: usize = 40;

/// The structs, enums and traits of a file, without those of its tests.
fn types(text: &str) -> impl Iterator<Item = &str> {
    code(text).filter_map(|line| {
        // `pub(super)` and the like may stand before.
        let mut words = line
            .split_whitespace()
            .skip_while(|word| word.starts_with("pub") || word.ends_with(')'));
        let is_type = ["struct", "enum", "trait"].contains(&words.next()?);
        words.next()?.split(|c: char| !c.is_alphanumeric()).next().filter(|_| is_type)
    })
}

/// Types that are declared twice under opposite features, of which one compiles.
const ALTERNATIVES: [&str; 4] = ["Meters", "Rules", "Runtime", "Sleep"];

/// A name has one meaning, and a reader of the way to Redis meets few nouns.
#[test]
fn no_two_types_have_one_name_and_stores_elsewhere_have_few() {
    let text = "struct A<T>(T);\n    pub(in crate::b) enum B {\npub trait C: A {\n/// struct D\n";
    assert_eq!(types(text).collect::<Vec<_>>(), ["A", "B", "C"]);

    let (core, companion) = (sources("src"), sources(COMPANION));
    let of = |files: &BTreeMap<_, _>, folder| {
        let inside = files.iter().filter(|(file, _): &(&String, _)| file.starts_with(folder));
        inside.map(|(_, text): (_, &String)| types(text).count()).sum::<usize>()
    };
    let many = of(&core, "store/remote") + of(&companion, "");
    assert!(many > 20, "they were found");
    assert!(many <= MAX_TYPES, "{many} types, and not {MAX_TYPES}");

    for sources in [core, companion] {
        let mut names = BTreeMap::<&str, Vec<&str>>::new();
        for (file, text) in &sources {
            types(text).for_each(|name| names.entry(name).or_default().push(file));
        }
        names.retain(|name, files| files.len() > 1 && !ALTERNATIVES.contains(name));
        assert!(names.is_empty(), "names of two types: {names:#?}");
    }
}

/// Some proxies run only scripts whose commands and keys are literals. In the script for one
/// decision, `place` is replaced by 1.
#[test]
fn commands_and_keys_of_scripts_are_literals() {
    for file in ["window.lua", "many.lua"] {
        let code = read(Path::new(COMPANION).join("script").join(file));
        let code = code.replace("redis.pcall", "redis.call");
        let calls: Vec<_> = code.split("redis.call").skip(1).collect();
        assert!(calls.len() > 1, "{file}");
        for call in calls {
            let (command, rest) =
                call.strip_prefix("('").and_then(|call| call.split_once('\'')).expect(call);
            assert!(command.bytes().all(|byte| byte.is_ascii_uppercase()), "{call}");
            let rest = rest.strip_prefix(", ").unwrap_or(rest);
            let is_literal = rest.starts_with("KEYS[place]") || rest.starts_with("KEYS[1]");
            assert!(is_literal || command == "TIME" && rest.starts_with(')'), "{call}");
        }
    }
}
