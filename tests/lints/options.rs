//! The table of options in docs/configuration.md has those of the public types, and no others.

use std::collections::BTreeSet;

use crate::{files, read};

/// Rows of the table, and the types that have their options.
const ROWS: [(&str, &str); 6] = [
    ("the quota", "Quota"),
    ("the limit", "Limit"),
    ("the layer", "FixedWindowLayer"),
    ("`RedisStore`", "RedisStore"),
    ("`Remote`", "Remote"),
    ("`MemoryStore`", "MemoryStore"),
];

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
    let sources = ["src", "redis/src"].map(|folder| files(folder, &[".rs"])).concat();
    let sources: String = sources.into_iter().map(read).collect();
    let page = read("docs/configuration.md");
    let (_, table) = page.split_once("| on | options |").expect("a table");
    let limits = options(&sources, "Limit");
    for (row, of) in ROWS {
        let line = table.lines().find(|line| line.starts_with(&format!("| {row}"))).expect(row);
        let named = line.split('|').nth(2).expect("a cell").split('`').skip(1).step_by(2);
        let named: BTreeSet<_> = named.collect();
        let mut there = options(&sources, of);
        there.retain(|name| of == "Limit" || !limits.contains(name));
        assert_eq!(named, there, "{of}");
    }
}
