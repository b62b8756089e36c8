//! The way of a request in CONTRIBUTING.md exists, and can be read in one sitting.

use std::collections::BTreeSet;

use crate::layout::code;
use crate::read;

const MAX_FILES: usize = 18;
const MAX_LINES: usize = 300;

/// Returns the number of lines of code of the functions with this name.
fn lines_of(text: &str, function: &str) -> usize {
    let lines: Vec<_> = code(text).collect();
    let starts = |line: &str| {
        let after = line.split_once("fn ").and_then(|(_, rest)| rest.strip_prefix(function));
        after.is_some_and(|rest| rest.starts_with(['(', '<']))
    };
    let begins = lines.iter().enumerate().filter(|(_, line)| starts(line));
    let length = |(begin, line): (usize, &&str)| {
        let end = format!("{}}}", " ".repeat(line.len() - line.trim_start().len()));
        lines[begin..].iter().position(|line| *line == end).expect("an end") + 1
    };
    begins.map(length).sum()
}

#[test]
fn the_way_of_a_request_is_short() {
    let page = read("CONTRIBUTING.md");
    let (_, way) = page.split_once("## The way of a request").expect("a section");
    let (way, _) = way.split_once("\n## ").expect("another section after it");
    let (mut files, mut missing, mut lines) = (BTreeSet::new(), Vec::new(), 0);
    for row in way.lines().filter(|line| line.starts_with("| `")) {
        let mut names = row.split('`').skip(1).step_by(2);
        let file = names.next().expect("a file");
        let text = read(format!("src/{file}.rs"));
        files.insert(file);
        for function in names {
            match lines_of(&text, function) {
                0 => missing.push(format!("{file} has no fn {function}")),
                number => lines += number,
            }
        }
    }
    // Where other requests branch off.
    for row in read("docs/mechanisms/README.md").lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<_> = row.split('|').collect();
        let file = cells[1].trim().trim_matches('`');
        let text = read(format!("src/{file}.rs"));
        let functions = cells[2].split('`').skip(1).step_by(2);
        missing.extend(
            functions
                .filter(|of| lines_of(&text, of) == 0)
                .map(|of| format!("{file} has no fn {of}")),
        );
    }
    assert!(missing.is_empty(), "{missing:#?}");
    println!("{} files, {lines} lines", files.len());
    assert!(files.len() > 10 && files.len() <= MAX_FILES, "{} files", files.len());
    assert!(lines <= MAX_LINES, "{lines} lines");
}
