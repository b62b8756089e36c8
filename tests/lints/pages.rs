//! Pages: the length of lines and of pages, paths that exist, and limits of routes.

use std::path::Path;

use crate::{ROOT, files, read};

/// Markdown that users read, without what a program writes.
fn pages() -> Vec<(String, String)> {
    let others =
        ["README", "BENCHMARKS", "CHANGELOG", "CONTRIBUTING", "PROOF", "SECURITY"].into_iter();
    let others = others.chain(["benches/peers/README", "examples/README"]);
    let names: Vec<_> = others
        .map(|name| format!("{name}.md"))
        .chain(files("docs", &[".md"]))
        .filter(|name| !name.contains("/pictures/"))
        .collect();
    assert!(names.len() > 15, "the guide was found");
    names.into_iter().map(|name| (name.clone(), read(name))).collect()
}

/// The lines of a page without its code.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    page.split("```").step_by(2).flat_map(str::lines)
}

#[test]
fn lines_of_pages_have_at_most_100_characters() {
    let mut faults = Vec::new();
    for (name, page) in pages() {
        for line in prose(&page) {
            // What scripts/peers writes isn't wrapped.
            let is_exempt = line.starts_with('|')
                || line.contains("](")
                || line.contains("][")
                || name == "BENCHMARKS.md";
            if line.chars().count() > 100 && !is_exempt {
                faults.push(format!("{name}: {line}"));
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
    // Anchors are no words.
    let is_word = |word: &&str| *word != "<a" && !word.starts_with("id=\"s");
    let words = |page: &str| page.split_whitespace().filter(is_word).count();
    let pages = pages();
    for (name, most) in MOST_WORDS {
        let (_, page) = pages.iter().find(|(it, _)| it == name).expect(name);
        assert!(words(page) <= most, "{name} has {} words, and not {most}", words(page));
    }
    let others = ["semantics.md", "tutorial.md", "operations/README.md", "mechanisms/README.md"];
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
        let text = prose(&page).collect::<Vec<_>>().join("\n");
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

/// Calls of `.layer(..)` on a route that has methods: axum applies these to wrong methods, too.
fn layers_of_routes(text: &str) -> Vec<&str> {
    let layered = text.match_indices(".layer(").filter_map(|(at, _)| {
        let call = text[..at].trim_end_matches(|c: char| c.is_whitespace() || c == '/');
        let (mut depth, is_name) = (0, |c: char| c.is_alphanumeric() || c == '_' || c == '.');
        let opens = call.rfind(|c| {
            depth += i32::from(c == ')') - i32::from(c == '(');
            depth == 0
        })?;
        let (_, method) =
            call[..opens].rsplit_once(|c| !is_name(c)).unwrap_or(("", &call[..opens]));
        let is_route = ["get", "post", "put", "patch", "delete"].contains(&method);
        (is_route && call.ends_with(')')).then(|| &call[opens - method.len()..])
    });
    layered.collect()
}

#[test]
fn examples_limit_a_route_by_its_route_layer() {
    let example = "a.get(x).layer(l); get(f(\"a\"))\n/// .layer(l); post(b).route_layer(l)";
    assert_eq!(layers_of_routes(example), ["get(f(\"a\"))"]);

    let folders = ["src", "examples", "tests/stacks/tests"];
    let sources = folders.map(|folder| files(folder, &[".rs", ".html", ".js"])).concat();
    let texts = sources.into_iter().map(|name| (name.clone(), read(name)));
    let mut faults = Vec::new();
    for (name, text) in texts.chain(pages()) {
        // The page that explains the difference.
        let found = layers_of_routes(&text).into_iter().filter(|_| name != "docs/ordering.md");
        faults.extend(found.map(|route| format!("{name}: {route}.layer(..)")));
    }
    assert!(faults.is_empty(), "write .route_layer(..):\n{}", faults.join("\n"));
}

#[test]
fn the_pages_name_the_programs_that_are_run() {
    let pages = ["docs/other-stacks.md", "docs/responses.md"].map(read).concat();
    for name in files("tests/stacks/tests", &[".rs"]) {
        assert!(pages.contains(&name), "no page names {name}");
    }
}
