//! The programs of docs/other-stacks.md and docs/responses.md are those that `scripts/stacks` runs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// The pages that show them, one after the other.
fn pages() -> String {
    let read = |page| fs::read_to_string(Path::new(ROOT).join(page)).expect("a page");
    ["docs/other-stacks.md", "docs/responses.md"].map(read).concat()
}

/// Without the comment that begins the file, and without the test that ends it.
fn program(file: &str) -> String {
    let is_comment = |line: &&str| line.starts_with("//!");
    let lines = file.lines().skip_while(is_comment).take_while(|line| *line != "#[tokio::test]");
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

#[test]
fn the_pages_show_or_name_the_programs_that_are_run_and_show_no_others() {
    let page = pages();
    let blocks = page.split("```rust,ignore\n").skip(1);
    let mut shown: Vec<_> = blocks.filter_map(|block| block.split("\n```").next()).collect();
    let files = fs::read_dir(Path::new(ROOT).join("tests/stacks/tests")).expect("a folder");
    for file in files {
        let path = file.expect("readable").path();
        let program = program(&fs::read_to_string(&path).expect("UTF-8"));
        let before = shown.len();
        shown.retain(|shown| *shown != program);
        let name = path.strip_prefix(ROOT).expect("inside").display().to_string();
        assert!(shown.len() < before || page.contains(&name), "no page shows or names {name}");
    }
    assert!(shown.is_empty(), "shown, but not run:\n{}", shown.join("\n\n"));
}

/// The crates that a program uses, as Cargo names them.
fn crates(program: &str) -> BTreeSet<String> {
    let uses = program.lines().filter_map(|line| line.strip_prefix("use "));
    let names = uses.filter_map(|path| path.split("::").next());
    let everywhere = ["std", "tokio", "tower_fixed_window"];
    let names = names.filter(|name| !everywhere.contains(name));
    names.map(|name| name.replace('_', "-")).collect()
}

#[test]
fn a_line_before_each_program_adds_the_crates_that_it_uses() {
    let page = pages();
    let manifest = Path::new(ROOT).join("tests/stacks/Cargo.toml");
    let manifest = fs::read_to_string(manifest).expect("a manifest");
    let mut blocks = page.split("```rust,ignore\n");
    let mut before = blocks.next().expect("an introduction");
    for block in blocks {
        let (program, after) = block.split_once("\n```").expect("the end of a program");
        let (_, line) = before.rsplit_once("cargo add ").expect("a command");
        let line = line.trim_end_matches("\n```\n\n");
        let (added, features) = line.split_once(" --features ").unwrap_or((line, ""));
        let added: BTreeSet<_> = added.split(' ').map(|name| name.replace('_', "-")).collect();
        let used = crates(program);
        assert!(used.is_subset(&added), "{line} is not {used:?}");
        for feature in features.split(',').filter_map(|feature| feature.split('/').nth(1)) {
            let is_known = feature == "full" || manifest.contains(feature);
            assert!(is_known, "no program is compiled with {feature}");
        }
        before = after;
    }
}
