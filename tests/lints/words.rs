//! The style in CONTRIBUTING.md: words that we avoid, length of lines and pages, paths that exist,
//! and examples that are shown whole.

use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// Words that we avoid.
const AVOIDED: [&str; 40] = [
    "anybody",
    "are asked",
    "are told",
    "as ever",
    "by the way",
    "clothing",
    "everybody",
    "given back",
    "gives back",
    "header fields",
    "in company",
    "in hand",
    "in silence",
    "is asked",
    "is told",
    "its fields",
    "left alone",
    "limit's fields",
    "nobody",
    "of no use",
    "pays",
    "rate-limit fields",
    "response's fields",
    "so many",
    "so much",
    "somebody",
    "speaks",
    "stand behind",
    "stands behind",
    "tells",
    "under way",
    "what lies",
    "who are refused",
    "who asks",
    "who is refused",
    "who pays",
    "who waits",
    "whoever",
    "whom",
    "whose fate",
];

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
    let text = |name: &str| {
        let text = fs::read_to_string(Path::new(ROOT).join(name)).expect(name);
        let without = |text: String, start: &str, end: &str| match text.split_once(start) {
            Some((before, rest)) => {
                format!("{before}{}", rest.split_once(end).expect("the end of a section").1)
            }
            None => text,
        };
        let text = without(text, "\n## Style", "\n## ");
        without(
            text,
            "<!-- what scripts/peers writes -->",
            "<!-- end of what scripts/peers writes -->",
        )
    };
    names.into_iter().map(|name| (text(&name), name)).map(|(text, name)| (name, text)).collect()
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

/// A page's text without its code.
fn text_of(page: &str) -> String {
    let lines: Vec<_> = prose(page).into_iter().map(|(_, line)| line).collect();
    lines.join("\n").split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// The avoided words in a text, also across the ends of lines.
fn avoided(text: &str) -> Vec<&'static str> {
    let text = text.to_lowercase().split_whitespace().collect::<Vec<_>>().join(" ");
    let is_end = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
    let count = |word: &str| {
        let found = text.match_indices(word).filter(|(at, _)| {
            is_end(text[..*at].chars().next_back())
                && is_end(text[at + word.len()..].chars().next())
        });
        found.count()
    };
    AVOIDED.into_iter().flat_map(|word| vec![word; count(word)]).collect()
}

#[test]
fn pages_avoid_the_words_that_the_style_names() {
    let mut faults = Vec::new();
    for (name, page) in pages() {
        for word in avoided(&text_of(&page)) {
            faults.push(format!("{name}: \"{word}\""));
        }
    }
    assert!(faults.is_empty(), "see \"Style\" in CONTRIBUTING.md:\n{}", faults.join("\n"));
}

#[test]
fn lines_of_pages_have_at_most_100_characters() {
    let mut faults = Vec::new();
    for (name, page) in pages() {
        for (number, line) in prose(&page) {
            let is_exempt = line.starts_with('|') || line.contains("](") || line.contains("][");
            if line.chars().count() > 100 && !is_exempt {
                faults.push(format!("{name}:{number}: {line}"));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The most words that a page may have, as `wc -w` counts them.
const MOST_WORDS: [(&str, usize); 5] = [
    ("BENCHMARKS.md", 2_000),
    ("CHANGELOG.md", 500),
    ("CONTRIBUTING.md", 1_600),
    ("PROOF.md", 2_500),
    ("README.md", 1_250),
];

#[test]
fn pages_that_stand_in_front_are_short() {
    for (name, most) in MOST_WORDS {
        let page = fs::read_to_string(Path::new(ROOT).join(name)).expect(name);
        let words = page.split_whitespace().count();
        assert!(words <= most, "{name} has {words} words, and not {most}");
    }
}

#[test]
fn files_that_pages_name_exist() {
    let is_path = |word: &str| {
        let folders = [
            "src/",
            "docs/",
            "examples/",
            "tests/",
            "benches/",
            "proof/",
            "scripts/",
            "./scripts/",
        ];
        folders.iter().any(|folder| word.starts_with(folder)) && !word.contains(['*', '{', ' '])
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

/// The lines of comments, without the code of examples.
fn comments(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let line = line.trim_start();
        let is_comment = line.starts_with("//");
        let is_fence = line.trim_start_matches(['/', '!']).trim_start().starts_with("```");
        is_code = is_comment && is_code ^ is_fence;
        is_comment && !is_code
    })
}

#[test]
fn sources_avoid_these_words_and_their_comments_are_short() {
    let mut files = Vec::new();
    for folder in ["src", "examples"] {
        sources(&Path::new(ROOT).join(folder), &mut files);
    }
    assert!(files.len() > 100, "the sources were found");
    let mut faults = Vec::new();
    for file in files {
        let name = file.strip_prefix(ROOT).expect("inside").display();
        let text = fs::read_to_string(&file).expect("UTF-8");
        // Without the slashes, so that words are found across the ends of lines.
        let lines = text.lines().map(|line| line.trim_start().trim_start_matches(['/', '!']));
        for word in avoided(&lines.collect::<Vec<_>>().join("\n")) {
            faults.push(format!("{name}: \"{word}\""));
        }
        for line in comments(&text).filter(|line| line.chars().count() > 100) {
            faults.push(format!("{name}: {line}"));
        }
    }
    assert!(faults.is_empty(), "see \"Style\" in CONTRIBUTING.md:\n{}", faults.join("\n"));
}

/// Openers of sentences whose subject is missing, or named elsewhere.
const OPENERS: [&str; 11] =
    ["And", "It", "Of", "One", "That", "They", "Those", "What", "Whether", "Which", "Who"];

/// The first words of the paragraphs in comments, without the code of examples.
fn openers(text: &str) -> Vec<&str> {
    let (mut found, mut is_code, mut is_inside) = (Vec::new(), false, false);
    for line in text.lines().map(str::trim_start) {
        let words = line.trim_start_matches(['/', '!']).trim_start();
        if !line.starts_with("//") || words.is_empty() {
            (is_inside, is_code) = (false, is_code && line.starts_with("//"));
        } else if words.starts_with("```") {
            (is_inside, is_code) = (false, !is_code);
        } else if !is_code && !is_inside {
            is_inside = true;
            found.push(words.split(|c: char| !c.is_alphabetic()).next().unwrap_or_default());
        }
    }
    found
}

/// Folders whose comments begin with their subject, and parts of them that don't comply yet.
const FOLDERS: [&str; 5] = ["src", "tests", "examples", "benches", "proof"];
const NOT_YET: [&str; 1] = ["benches/peers"];

#[test]
fn comments_of_sources_begin_with_their_subject() {
    let comments = "//! It ..\n//! One ..\n\n/// Of ..\n///\n/// ```\n/// Who ..\n/// ```\n// And";
    assert_eq!(openers(comments), ["It", "Of", "And"]);

    let mut faults = Vec::new();
    for folder in FOLDERS {
        let mut files = Vec::new();
        sources(&Path::new(ROOT).join(folder), &mut files);
        let is_exempt = |file: &PathBuf| {
            NOT_YET.iter().any(|part| file.starts_with(Path::new(ROOT).join(part)))
        };
        files.retain(|file| !is_exempt(file));
        let (mut paragraphs, mut wrong) = (0, Vec::new());
        for file in files {
            let text = fs::read_to_string(&file).expect("UTF-8");
            let openers = openers(&text);
            paragraphs += openers.len();
            let name = file.strip_prefix(ROOT).expect("inside").display();
            let found = openers.into_iter().filter(|opener| OPENERS.contains(opener));
            wrong.extend(found.map(|opener| format!("{name}: {opener} ..")));
        }
        assert!(paragraphs > 50, "the comments of {folder} were found");
        if wrong.len() * 100 >= paragraphs * 4 {
            faults.push(format!("{folder}: {} of {paragraphs}\n{}", wrong.len(), wrong.join("\n")));
        }
    }
    let most = "4% of a folder's paragraphs or more: see \"Style\" in CONTRIBUTING.md";
    assert!(faults.is_empty(), "{most}\n{}", faults.join("\n"));
}

/// Lines of examples that are hidden from readers and go on in a line that is not, each with its
/// rest.
fn torn(text: &str) -> Vec<String> {
    let lines = text.lines().map(|line| {
        let line = line.trim_start();
        line.strip_prefix("///").or(line.strip_prefix("//!")).unwrap_or(line).trim()
    });
    let (mut is_code, mut before, mut torn) = (false, None, Vec::new());
    for line in lines {
        is_code ^= line.starts_with("```");
        let hidden = line.strip_prefix("# ").filter(|_| is_code);
        let ends = line.is_empty() || line == "#" || line.starts_with(['}', '`']);
        if let Some(before) = before.filter(|_| hidden.is_none() && !ends) {
            torn.push(format!("{before} | {line}"));
        }
        before = hidden.filter(|line| !line.ends_with([';', '{', '}', ']']));
    }
    torn
}

#[test]
fn examples_show_no_rest_of_a_line_that_they_hide() {
    let example =
        "/// ```\n/// # fn main() -> Result<(), Box<dyn\n/// Error>> { f()\n/// # }\n/// ```";
    assert_eq!(torn(example), ["fn main() -> Result<(), Box<dyn | Error>> { f()"]);

    let mut files = Vec::new();
    for folder in ["src", "examples"] {
        sources(&Path::new(ROOT).join(folder), &mut files);
    }
    let texts = files.into_iter().map(|file| {
        let name = file.strip_prefix(ROOT).expect("inside").display().to_string();
        (name, fs::read_to_string(&file).expect("UTF-8"))
    });
    let mut faults = Vec::new();
    for (name, text) in texts.chain(pages()) {
        faults.extend(torn(&text).into_iter().map(|torn| format!("{name}: {torn}")));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
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

#[test]
fn search_finds_the_words_of_other_limiters() {
    let mut files = Vec::new();
    sources(&Path::new(ROOT).join("src"), &mut files);
    let text: String = files.iter().map(|file| fs::read_to_string(file).expect("UTF-8")).collect();
    let words = [
        "allowlist",
        "ban",
        "burst",
        "bypass",
        "exempt",
        "quota exceeded",
        "throttle",
        "unlimited",
        "whitelist",
    ];
    for word in words {
        assert!(text.contains(&format!("#[doc(alias = \"{word}\")]")), "no alias {word}");
    }
}
