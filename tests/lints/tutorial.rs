//! docs/tutorial.md shows what each of its steps adds to the one before.

use crate::{files, read};

/// Lines of code, without empty ones.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter(|line| !line.trim().is_empty())
}

#[test]
fn each_step_shows_what_it_adds() {
    let page = read("docs/tutorial.md");
    let sections: Vec<_> = page.split("\n## ").skip(1).collect();
    let mut before = String::new();
    for step in 1..=8 {
        let after = read(format!("examples/tutorial/step{step}.rs"));
        let section = sections.iter().find(|section| section.starts_with(&format!("{step}. ")));
        let blocks = section.expect("a section for each step").split("```rust,ignore\n").skip(1);
        let shown: Vec<_> = blocks.filter_map(|block| block.split("\n```").next()).collect();
        let shown = shown.join("\n");

        let mut left: Vec<_> = lines(&after).collect();
        // A line without an indentation says where the others belong.
        for line in lines(&shown).filter(|line| !line.starts_with("// ")) {
            let found = left.iter().position(|other| *other == line);
            left.remove(found.unwrap_or_else(|| panic!("step {step} has no line {line:?}")));
        }
        let mut kept: Vec<_> = lines(&before).collect();
        for line in left {
            let found = kept.iter().position(|other| *other == line);
            kept.remove(found.unwrap_or_else(|| panic!("step {step} does not show {line:?}")));
        }
        before = after;
    }
    let steps = files("examples/tutorial", &[".rs"]);
    let steps = steps.iter().filter(|path| path.starts_with("examples/tutorial/step"));
    assert_eq!(steps.count(), 8, "each program is a step");
}
