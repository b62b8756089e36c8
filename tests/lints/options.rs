//! The table of options in docs/configuration.md has those of the public types, and no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Rows of the table, and the types that have their options.
const ROWS: [(&str, &str); 6] = [
    ("the quota", "Quota"),
    ("the limit", "Limit"),
    ("the layer", "FixedWindowLayer"),
    ("`RedisStore`", "RedisStore"),
    ("`Remote`", "Remote"),
    ("`MemoryStore`", "MemoryStore"),
];

/// The sources of a folder, one after the other.
fn sources(folder: &Path) -> String {
    let entries =
        fs::read_dir(folder).expect("a directory").map(|entry| entry.expect("one").path());
    let texts = entries.map(|path| match path.extension() {
        _ if path.is_dir() => sources(&path),
        Some(of) if of == "rs" => fs::read_to_string(&path).expect("UTF-8"),
        _ => String::new(),
    });
    texts.collect()
}

/// The public methods of a type that take it by value, as builders do.
fn options<'a>(sources: &'a str, of: &str) -> BTreeSet<&'a str> {
    let blocks = sources.split("\nimpl").skip(1).filter(|block| {
        let header = block.split(" {\n").next().unwrap_or_default();
        let header = header.rsplit_once("> ").map_or(header, |(_, of)| of).trim();
        // `impl<J> Of<J>`, but no `impl Trait for Of`.
        header.split('<').next() == Some(of)
    });
    let blocks = blocks.filter_map(|block| block.split("\n}\n").next());
    let methods = blocks.flat_map(|block| block.split("\n    pub ").skip(1)).filter_map(|method| {
        let method = method.strip_prefix("const ").unwrap_or(method).strip_prefix("fn ")?;
        let (name, arguments) = method.split_once('(')?;
        let arguments = arguments.trim_start();
        let arguments = arguments.strip_prefix("mut ").unwrap_or(arguments);
        let by_value = arguments.strip_prefix("self")?.starts_with([',', ')']);
        by_value.then(|| name.split('<').next().unwrap_or(name))
    });
    methods.collect()
}

#[test]
fn the_guide_says_where_each_option_is() {
    let sources: String =
        ["src", "redis/src"].map(|folder| sources(&Path::new(ROOT).join(folder))).concat();
    let page = fs::read_to_string(Path::new(ROOT).join("docs/configuration.md")).expect("a page");
    let (_, table) = page.split_once("| on | options |").expect("a table");
    let limits = options(&sources, "Limit");
    for (row, of) in ROWS {
        let line = table.lines().find(|line| line.starts_with(&format!("| {row}"))).expect(row);
        let named = line.split('|').nth(2).expect("a cell").split('`').skip(1).step_by(2);
        let named: BTreeSet<_> = named.collect();
        let mut there = options(&sources, of);
        // For text, and of a limit.
        there.retain(|name| !name.starts_with("try_"));
        there.retain(|name| of == "Limit" || !limits.contains(name));
        assert_eq!(named, there, "{of}");
    }
}
