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
    let branches = read("docs/mechanisms/README.md");
    let rows = |page| str::lines(page).filter(|line| line.starts_with("| `"));
    for (row, counts) in rows(way).map(|row| (row, 1)).chain(rows(&branches).map(|row| (row, 0))) {
        let [_, file, functions, ..] = row.split('|').collect::<Vec<_>>()[..] else { continue };
        let file = file.trim().trim_matches('`');
        let text = read(format!("src/{file}.rs"));
        for function in functions.split('`').skip(1).step_by(2) {
            match lines_of(&text, function) {
                0 => missing.push(format!("{file} has no fn {function}")),
                number => lines += number * counts,
            }
        }
        files.extend((counts > 0).then(|| file.to_owned()));
    }
    assert!(missing.is_empty(), "{missing:#?}");
    println!("{} files, {lines} lines", files.len());
    assert!(files.len() > 10 && files.len() <= MAX_FILES, "{} files", files.len());
    assert!(lines <= MAX_LINES, "{lines} lines");
}
