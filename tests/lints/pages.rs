//! Pages: the length of lines and of pages, paths that exist, and limits of routes.

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Markdown that users read, without what a program writes.
fn pages() -> Vec<(String, String)> {
    let mut names: Vec<_> =
        ["README", "BENCHMARKS", "CHANGELOG", "CONTRIBUTING", "PROOF", "SECURITY"]
            .into_iter()
            .chain(["benches/peers/README", "docs/operations/README", "examples/README"])
            .map(|name| format!("{name}.md"))
            .collect();
    let docs = fs::read_dir(Path::new(ROOT).join("docs")).expect("a directory");
    for entry in docs {
        let name = entry.expect("readable").file_name().into_string().expect("UTF-8");
        if name.ends_with(".md") {
            names.push(format!("docs/{name}"));
        }
    }
    assert!(names.len() > 15, "the guide was found");
    let text = |name: &str| fs::read_to_string(Path::new(ROOT).join(name)).expect(name);
    names.into_iter().map(|name| (name.clone(), text(&name))).collect()
}

/// A page without its code, line by line, each with its number.
fn prose(page: &str) -> Vec<(usize, &str)> {
    let mut is_code = false;
    let mut lines = Vec::new();
    for (number, line) in (1..).zip(page.lines()) {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if !is_code && !is_fence {
            lines.push((number, line));
        }
    }
    lines
}

#[test]
fn lines_of_pages_have_at_most_100_characters() {
    let mut faults = Vec::new();
    for (name, page) in pages() {
        for (number, line) in prose(&page) {
            // What scripts/peers writes isn't wrapped.
            let is_exempt = line.starts_with('|')
                || line.contains("](")
                || line.contains("][")
                || name == "BENCHMARKS.md";
            if line.chars().count() > 100 && !is_exempt {
                faults.push(format!("{name}:{number}: {line}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The most words that pages may have, as `wc -w` counts them.
const MOST_WORDS: [(&str, usize); 6] = [
    ("BENCHMARKS.md", 2_000),
    ("CHANGELOG.md", 500),
    ("CONTRIBUTING.md", 1_600),
    ("PROOF.md", 2_500),
    ("README.md", 1_250),
    ("docs/semantics.md", 6_500),
];
/// The guide, without its reference and its tutorial.
const GUIDE: (usize, usize) = (18, 18_500);

#[test]
fn pages_are_short() {
    let words = |page: &str| page.split_whitespace().count();
    let pages = pages();
    for (name, most) in MOST_WORDS {
        let (_, page) = pages.iter().find(|(it, _)| it == name).expect(name);
        assert!(words(page) <= most, "{name} has {} words, and not {most}", words(page));
    }
    let others = ["semantics.md", "tutorial.md", "operations/README.md"];
    let is_guide =
        |name: &str| name.starts_with("docs/") && !others.iter().any(|it| name.ends_with(it));
    let guide: Vec<_> = pages.iter().filter(|(name, _)| is_guide(name)).collect();
    let all = guide.iter().map(|(_, page)| words(page)).sum::<usize>();
    assert!(guide.len() <= GUIDE.0 && all <= GUIDE.1, "{all} words in {} pages", guide.len());
}

#[test]
fn files_that_pages_name_exist() {
    let is_path = |word: &str| {
        let folders =
            ["src", "docs", "examples", "tests", "benches", "proof", "scripts", "./scripts"];
        folders.iter().any(|it| word.starts_with(&format!("{it}/")))
            && !word.contains(['*', '{', ' '])
    };
    let mut faults = Vec::new();
    let mut checked = 0;
    for (name, page) in pages() {
        let text = prose(&page).into_iter().map(|(_, line)| line).collect::<Vec<_>>().join("\n");
        for code in text.split('`').skip(1).step_by(2).filter(|code| is_path(code)) {
            checked += 1;
            let beside = Path::new(ROOT).join(&name).with_file_name(code);
            if !Path::new(ROOT).join(code).exists() && !beside.exists() {
                faults.push(format!("{name}: {code}"));
            }
        }
    }
    assert!(checked > 30, "paths were found");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a directory") {
        let path = entry.expect("readable").path();
        if path.is_dir() {
            // A workspace's `target` may have sources that build scripts have written.
            if !path.ends_with("target") {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|of| ["rs", "html", "js"].iter().any(|it| of == *it))
        {
            found.push(path);
        }
    }
}

/// Calls of `.layer(..)` on a route that has methods: axum applies these to wrong methods, too.
fn layers_of_routes(text: &str) -> Vec<&str> {
    let of_method = |&(at, _): &(usize, &str)| {
        let before = text[..at].chars().next_back();
        before.is_none_or(|c| !c.is_alphanumeric() && c != '_' && c != '.')
    };
    let methods = ["get(", "post(", "put(", "patch(", "delete("];
    let calls = methods.iter().flat_map(|method| text.match_indices(method).filter(of_method));
    let layered = calls.filter_map(|(at, method)| {
        let mut depth = 1;
        let arguments = &text[at + method.len()..];
        let end = arguments.find(|c| {
            depth += i32::from(c == '(') - i32::from(c == ')');
            depth == 0
        })?;
        let rest = arguments[end + 1..].trim_start_matches(|c: char| c.is_whitespace() || c == '/');
        rest.starts_with(".layer(").then(|| &text[at..at + method.len() + end + 1])
    });
    layered.collect()
}

#[test]
fn examples_limit_a_route_by_its_route_layer() {
    let example = "a.get(x).layer(l); get(f(\"a\"))\n/// .layer(l); post(b).route_layer(l)";
    assert_eq!(layers_of_routes(example), ["get(f(\"a\"))"]);

    let mut files = Vec::new();
    for folder in ["src", "examples", "tests/stacks/tests"] {
        sources(&Path::new(ROOT).join(folder), &mut files);
    }
    let texts = files.into_iter().map(|file| {
        let name = file.strip_prefix(ROOT).expect("inside").display().to_string();
        (name, fs::read_to_string(&file).expect("UTF-8"))
    });
    let mut faults = Vec::new();
    for (name, text) in texts.chain(pages()) {
        // The page that explains the difference.
        let found = layers_of_routes(&text).into_iter().filter(|_| name != "docs/ordering.md");
        faults.extend(found.map(|route| format!("{name}: {route}.layer(..)")));
    }
    assert!(faults.is_empty(), "write .route_layer(..):\n{}", faults.join("\n"));
}
