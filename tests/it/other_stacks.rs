//! The programs of docs/other-stacks.md are those that `scripts/stacks` runs.

use std::fs;
use std::path::Path;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Without the comment that begins the file, and without the test that ends it.
fn program(file: &str) -> String {
    let is_comment = |line: &&str| line.starts_with("//!");
    let lines = file.lines().skip_while(is_comment).take_while(|line| *line != "#[tokio::test]");
    lines.collect::<Vec<_>>().join("\n").trim().to_owned()
}

#[test]
fn the_page_shows_the_programs_that_are_run() {
    let root = Path::new(ROOT);
    let page = fs::read_to_string(root.join("docs/other-stacks.md")).expect("a page");
    let blocks = page.split("```rust,ignore\n").skip(1);
    let shown: Vec<_> = blocks.filter_map(|block| block.split("\n```").next()).collect();
    let files = fs::read_dir(root.join("tests/stacks/tests")).expect("a folder");
    let mut run = 0;
    for file in files {
        let path = file.expect("readable").path();
        let program = program(&fs::read_to_string(&path).expect("UTF-8"));
        assert!(shown.contains(&&*program), "docs/other-stacks.md lacks {}", path.display());
        run += 1;
    }
    assert_eq!(shown.len(), run, "every program on the page is run");
}
