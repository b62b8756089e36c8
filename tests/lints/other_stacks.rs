//! docs/other-stacks.md and docs/responses.md name the programs that `scripts/stacks` runs.

use std::fs;
use std::path::Path;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

#[test]
fn the_pages_name_the_programs_that_are_run() {
    let read = |page| fs::read_to_string(Path::new(ROOT).join(page)).expect("a page");
    let pages = ["docs/other-stacks.md", "docs/responses.md"].map(read).concat();
    let files = fs::read_dir(Path::new(ROOT).join("tests/stacks/tests")).expect("a folder");
    for file in files {
        let path = file.expect("readable").path();
        let name = path.strip_prefix(ROOT).expect("inside").display().to_string();
        assert!(pages.contains(&name), "no page names {name}");
    }
}
