//! The uses between the files of a crate, read from the text of its sources.
//!
//! A path (`crate::a::b`, `super::b`, `self::b`, `b::c` after `mod b;` or `use crate::b;`) leads to
//! the file that defines what it names, through all re-exports. `mod` declarations and re-exports are
//! no use by themselves; a file that also works with what it re-exports does use it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// `["store", "redis"]` for `store/redis.rs`.
type Module = Vec<String>;

#[derive(Clone, PartialEq, Debug)]
enum Token {
    Name(String),
    PathSeparator,
    Punctuation(char),
    /// A string, a character or a number: of what is in it nothing is read.
    Literal,
}

/// The tokens of a file, each with the lines that it stands on.
fn tokens(text: &str) -> Vec<(Token, usize, usize)> {
    let chars: Vec<char> = text.chars().collect();
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    let (mut found, mut i, mut line) = (Vec::new(), 0, 1);
    while i < chars.len() {
        let (start, first) = (i, line);
        let token = match (at(i), at(i + 1)) {
            ('\n', _) => {
                line += 1;
                i += 1;
                continue;
            }
            (c, _) if c.is_whitespace() => {
                i += 1;
                continue;
            }
            ('/', '/') => {
                while i < chars.len() && at(i) != '\n' {
                    i += 1;
                }
                continue;
            }
            ('/', '*') => {
                let mut depth = 0;
                while i < chars.len() {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (depth, i) = (depth + 1, i + 1),
                        ('*', '/') => (depth, i) = (depth - 1, i + 1),
                        ('\n', _) => line += 1,
                        _ => {}
                    }
                    i += 1;
                    if depth == 0 {
                        break;
                    }
                }
                continue;
            }
            (':', ':') => {
                i += 2;
                Token::PathSeparator
            }
            // A character, and no lifetime.
            ('\'', '\\') => {
                i += 3;
                while at(i) != '\'' {
                    i += 1;
                }
                i += 1;
                Token::Literal
            }
            ('\'', _) if at(i + 2) == '\'' => {
                i += 3;
                Token::Literal
            }
            ('"', _) => {
                i = end_of_string(&chars, i + 1);
                Token::Literal
            }
            (c, _) if is_name(c) => {
                while is_name(at(i)) {
                    i += 1;
                }
                let name: String = chars[start..i].iter().collect();
                let hashes = (i..).take_while(|&i| at(i) == '#').count();
                match &name[..] {
                    "r" | "br" | "cr" if at(i + hashes) == '"' => {
                        i = end_of_raw_string(&chars, i + hashes + 1, hashes);
                        Token::Literal
                    }
                    "b" | "c" if at(i) == '"' => {
                        i = end_of_string(&chars, i + 1);
                        Token::Literal
                    }
                    _ if c.is_numeric() => Token::Literal,
                    _ => Token::Name(name),
                }
            }
            (c, _) => {
                i += 1;
                Token::Punctuation(c)
            }
        };
        line += chars[start..i].iter().filter(|&&c| c == '\n').count();
        found.push((token, first, line));
    }
    found
}

fn end_of_string(chars: &[char], mut i: usize) -> usize {
    while i < chars.len() && chars[i] != '"' {
        i += if chars[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

fn end_of_raw_string(chars: &[char], mut i: usize, hashes: usize) -> usize {
    let is_end =
        |i: usize| chars[i] == '"' && chars[i + 1..].iter().take(hashes).all(|&c| c == '#');
    while i < chars.len() && !is_end(i) {
        i += 1;
    }
    i + 1 + hashes
}

/// Takes out modules of tests, which are no part of what a reader has to read first.
fn without_tests(mut tokens: Vec<(Token, usize, usize)>) -> Vec<(Token, usize, usize)> {
    let starts = |tokens: &[(Token, usize, usize)]| {
        let of = ["#", "[", "cfg", "(", "test", ")", "]", "mod"];
        tokens.len() > of.len() + 1
            && of.iter().zip(tokens).all(|(text, (token, ..))| match token {
                Token::Name(name) => name == text,
                Token::Punctuation(c) => text.chars().eq([*c]),
                _ => false,
            })
            && tokens[of.len() + 1].0 == Token::Punctuation('{')
    };
    while let Some(start) = (0..tokens.len()).find(|&i| starts(&tokens[i..])) {
        let mut depth = 0;
        let end = tokens[start..].iter().position(|(token, ..)| {
            depth += i32::from(*token == Token::Punctuation('{'));
            depth -= i32::from(*token == Token::Punctuation('}'));
            depth == 0 && *token == Token::Punctuation('}')
        });
        tokens.drain(start..=end.map_or(tokens.len() - 1, |end| start + end));
    }
    tokens
}

/// A path as it is written, in a file of this module, so many modules of its own deep.
#[derive(Clone, Debug)]
struct Path {
    segments: Vec<String>,
    depth: usize,
}

#[derive(Default)]
struct File {
    /// The paths that each name stands for, by any `use`; `*` for all names of a module.
    names: BTreeMap<String, Vec<Path>>,
    /// The names that are re-exported.
    exported: BTreeSet<String>,
    imported: Vec<Path>,
    /// Paths outside of `use`, and names that stand alone.
    used: Vec<Path>,
    defined: BTreeSet<String>,
    lines: usize,
}

fn read(text: &str) -> File {
    let tokens = without_tests(tokens(text));
    let lines: BTreeSet<_> = tokens.iter().flat_map(|(_, from, to)| *from..=*to).collect();
    let mut file = File { lines: lines.len(), ..File::default() };
    let tokens: Vec<Token> = tokens.into_iter().map(|(token, ..)| token).collect();
    // For each open brace: whether it belongs to a module.
    let mut braces = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        let depth = braces.iter().filter(|&&is_module| is_module).count();
        match &tokens[i] {
            Token::Punctuation('{') => {
                let is_module = i > 1 && tokens[i - 2] == Token::Name("mod".into());
                braces.push(is_module);
            }
            Token::Punctuation('}') => drop(braces.pop()),
            Token::Name(name) if name == "use" && !is_capture(&tokens, i) => {
                let exported = is_public(&tokens[..i]);
                let mut leaves = Vec::new();
                i = tree(&tokens, i + 1, &mut Vec::new(), &mut leaves);
                for (name, segments) in leaves {
                    let path = Path { segments, depth };
                    file.names.entry(name.clone()).or_default().push(path.clone());
                    if exported {
                        file.exported.insert(name);
                    } else {
                        file.imported.push(path);
                    }
                }
                continue;
            }
            Token::Name(name) => {
                const ITEMS: [&str; 8] =
                    ["struct", "enum", "trait", "fn", "const", "static", "type", "union"];
                let next = tokens.get(i + 1);
                if ITEMS.contains(&&name[..])
                    && let Some(Token::Name(item)) = next
                    // Not a `const fn`.
                    && !ITEMS.contains(&&item[..])
                {
                    if braces.iter().all(|&is_module| is_module) {
                        file.defined.insert(item.clone());
                    }
                    i += 2;
                    continue;
                }
                // A part of a path, or a method; not the end of a range.
                let is_member = match &tokens[..i] {
                    [.., before, Token::Punctuation('.')] => *before != Token::Punctuation('.'),
                    [.., before] => *before == Token::PathSeparator,
                    [] => false,
                };
                if is_member {
                    i += 1;
                    continue;
                }
                let mut segments = vec![name.clone()];
                while let [Token::PathSeparator, Token::Name(next), ..] = &tokens[i + 1..] {
                    segments.push(next.clone());
                    i += 2;
                }
                file.used.push(Path { segments, depth });
            }
            _ => {}
        }
        i += 1;
    }
    file
}

/// `impl Trait + use<'a>` imports nothing.
fn is_capture(tokens: &[Token], i: usize) -> bool {
    tokens.get(i + 1) == Some(&Token::Punctuation('<'))
}

/// Returns whether the tokens end with `pub` or `pub(..)`.
fn is_public(before: &[Token]) -> bool {
    let is_pub = |token: Option<&Token>| token == Some(&Token::Name("pub".into()));
    match before.last() {
        Some(Token::Punctuation(')')) => {
            let open = before.iter().rposition(|token| *token == Token::Punctuation('('));
            open.is_some_and(|open| is_pub(before[..open].last()))
        }
        last => is_pub(last),
    }
}

/// Reads a tree of `use` up to its `;`, `,` or `}`: each name with its path. Returns where it ends.
fn tree(
    tokens: &[Token],
    mut i: usize,
    prefix: &mut Vec<String>,
    leaves: &mut Vec<(String, Vec<String>)>,
) -> usize {
    let length = prefix.len();
    let mut name = None;
    loop {
        match &tokens[i] {
            Token::PathSeparator => {}
            Token::Punctuation('*') => {
                prefix.push("*".into());
                name = Some("*".to_owned());
            }
            Token::Punctuation('{') => {
                i += 1;
                while tokens[i] != Token::Punctuation('}') {
                    i = tree(tokens, i, prefix, leaves);
                    if tokens[i] == Token::Punctuation(',') {
                        i += 1;
                    }
                }
                name = None;
                prefix.truncate(length);
                i += 1;
                break;
            }
            Token::Name(word) if word == "as" => {
                if let Token::Name(alias) = &tokens[i + 1] {
                    name = Some(alias.clone());
                }
                i += 1;
            }
            // `a::{self}` is `a`.
            Token::Name(word) if word == "self" && !prefix.is_empty() => {}
            Token::Name(word) => {
                prefix.push(word.clone());
                name = Some(word.clone());
            }
            _ => break,
        }
        i += 1;
    }
    if name.is_some() || prefix.len() > length || tokens[i - 1] == Token::Name("self".into()) {
        let name = name.or_else(|| prefix.last().cloned());
        leaves.extend(name.map(|name| (name, prefix.clone())));
    }
    prefix.truncate(length);
    if tokens.get(i) == Some(&Token::Punctuation(';')) { i + 1 } else { i }
}

/// The files of a crate, by their paths without `.rs` (`store/redis`), and what they use.
pub(crate) struct Crate {
    files: BTreeMap<Module, File>,
}

impl Crate {
    /// The root is called `lib`.
    pub(crate) fn new<'a>(sources: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let module = |path: &str| match path {
            "lib" => Module::new(),
            path => path.split('/').map(str::to_owned).collect(),
        };
        Self { files: sources.into_iter().map(|(path, text)| (module(path), read(text))).collect() }
    }

    /// Lines of code: without documentation, comments, blank lines and tests.
    pub(crate) fn lines(&self) -> BTreeMap<String, usize> {
        self.files.iter().map(|(module, file)| (module.join("/"), file.lines)).collect()
    }

    /// By file, the files that it uses, each with the path that says so.
    pub(crate) fn uses(&self) -> BTreeMap<String, BTreeMap<String, String>> {
        let mut uses = BTreeMap::new();
        for (module, file) in &self.files {
            let mut of: BTreeMap<String, String> = BTreeMap::new();
            let exported =
                file.used.iter().filter(|path| file.exported.contains(&path.segments[0]));
            let leading = file.used.iter().filter(|path| path.segments.len() > 1);
            for path in file.imported.iter().chain(leading).chain(exported) {
                for target in self.files_of(module, path, &mut BTreeSet::new()) {
                    // The root declares and re-exports.
                    if target != *module && !target.is_empty() {
                        of.entry(target.join("/")).or_insert_with(|| path.segments.join("::"));
                    }
                }
            }
            if !module.is_empty() {
                uses.insert(module.join("/"), of);
            }
        }
        uses
    }

    /// The files that define what a path names. None: another crate does, or it names a module only.
    fn files_of(
        &self,
        module: &Module,
        path: &Path,
        seen: &mut BTreeSet<(Module, Vec<String>)>,
    ) -> BTreeSet<Module> {
        // Each name once, whatever circle of re-exports it is in.
        if !seen.insert((module.clone(), path.segments.clone())) {
            return BTreeSet::new();
        }
        let supers = path.segments.iter().take_while(|segment| *segment == "super").count();
        let mut from = module.clone();
        let rest = match &path.segments[0][..] {
            "crate" => {
                from.clear();
                &path.segments[1..]
            }
            "self" => &path.segments[1..],
            "super" => {
                from.truncate(module.len().saturating_sub(supers.saturating_sub(path.depth)));
                &path.segments[supers..]
            }
            first => {
                let is_child =
                    self.files.contains_key(&[&module[..], &[first.to_owned()]].concat());
                let alias = self.files[module].names.get(first);
                match alias {
                    _ if is_child => &path.segments[..],
                    Some(alias) => return self.through(module, alias, &path.segments[1..], seen),
                    None => return BTreeSet::new(),
                }
            }
        };
        let mut rest = rest;
        while let [first, others @ ..] = rest {
            let child = [&from[..], std::slice::from_ref(first)].concat();
            if !self.files.contains_key(&child) {
                break;
            }
            (from, rest) = (child, others);
        }
        let [item, tail @ ..] = rest else { return BTreeSet::new() };
        let Some(file) = self.files.get(&from) else { return BTreeSet::new() };
        if file.defined.contains(item) || item == "*" {
            return BTreeSet::from([from]);
        }
        if let Some(alias) = file.names.get(item) {
            let found = self.through(&from, alias, tail, seen);
            // Another crate's, under this file's name.
            return if found.is_empty() { BTreeSet::from([from]) } else { found };
        }
        let globs = file.names.get("*").into_iter().flatten();
        for glob in globs {
            let mut segments = glob.segments.clone();
            *segments.last_mut().expect("a star") = item.clone();
            let found = self.files_of(&from, &Path { segments, depth: glob.depth }, seen);
            let defines = |module: &Module| self.files[module].defined.contains(item);
            if found.iter().any(defines) {
                return found;
            }
        }
        BTreeSet::from([from])
    }

    fn through(
        &self,
        module: &Module,
        alias: &[Path],
        tail: &[String],
        seen: &mut BTreeSet<(Module, Vec<String>)>,
    ) -> BTreeSet<Module> {
        let targets = alias
            .iter()
            .map(|path| Path { segments: [&path.segments[..], tail].concat(), depth: path.depth });
        targets.flat_map(|path| self.files_of(module, &path, seen)).collect()
    }

    /// Files that use each other in a circle, and the shortest way around.
    pub(crate) fn circles(&self) -> Vec<(BTreeSet<String>, String)> {
        let uses = self.uses();
        let mut circles: Vec<(BTreeSet<String>, String)> = Vec::new();
        for file in uses.keys() {
            if circles.iter().any(|(files, _)| files.contains(file)) {
                continue;
            }
            let below = reached(&uses, file);
            if !below.contains_key(file) {
                continue;
            }
            let files = below.keys().filter(|other| reached(&uses, other).contains_key(file));
            let files = files.cloned().collect();
            let mut way = vec![file.clone()];
            while way.len() == 1 || way.last() != Some(file) {
                way.push(below[way.last().expect("the start")].clone());
            }
            way.reverse();
            let step = |pair: &[String]| {
                format!("{} uses {} (`{}`)", pair[0], pair[1], uses[&pair[0]][&pair[1]])
            };
            let way: Vec<_> = way.windows(2).map(step).collect();
            circles.push((files, way.join(", ")));
        }
        circles
    }
}

/// All that a file uses, directly or not, each with the one before it on a shortest way.
fn reached(
    uses: &BTreeMap<String, BTreeMap<String, String>>,
    file: &str,
) -> BTreeMap<String, String> {
    let mut before = BTreeMap::new();
    let mut next = VecDeque::from([file.to_owned()]);
    while let Some(from) = next.pop_front() {
        for to in uses.get(&from).into_iter().flat_map(BTreeMap::keys) {
            if !before.contains_key(to) {
                before.insert(to.clone(), from.clone());
                next.push_back(to.clone());
            }
        }
    }
    before
}

fn circles_of<const N: usize>(sources: [(&str, &str); N]) -> Vec<String> {
    let circles = Crate::new(sources).circles().into_iter();
    circles.map(|(files, _)| Vec::from_iter(files).join(" ")).collect()
}

fn uses_of<const N: usize>(sources: [(&str, &str); N]) -> Vec<String> {
    let uses = Crate::new(sources).uses().into_iter();
    uses.flat_map(|(from, to)| to.into_keys().map(move |to| format!("{from} {to}"))).collect()
}

#[test]
fn a_circle_of_two_files_is_found() {
    let a = ("a", "use crate::b::B; pub struct A(B);");
    let b = ("b", "pub struct B(Option<Box<crate::a::A>>);");
    assert_eq!(circles_of([("lib", "mod a; mod b;"), a, b]), ["a b"]);
    let circles = Crate::new([a, b]).circles();
    assert_eq!(circles[0].1, "a uses b (`crate::b::B`), b uses a (`crate::a::A`)");
    assert_eq!(circles_of([a, ("b", "pub struct B;")]), [""; 0]);
}

#[test]
fn a_circle_of_parent_and_child_is_found() {
    let parent = ("a", "mod b; pub struct A; fn f() -> usize { b::LEN }");
    let child = ("a/b", "use super::A; pub(super) const LEN: usize = size_of::<A>();");
    assert_eq!(circles_of([parent, child]), ["a a/b"]);
    // By a path within the text, or in a macro.
    let child = ("a/b", "pub const LEN: usize = 1; fn g() { log!(\"{}\", super::A::NAME) }");
    assert_eq!(circles_of([parent, child]), ["a a/b"]);
    // By a re-export that the parent works with.
    let parent = ("a", "mod b; pub use self::b::B; pub struct A; fn f(b: B) {}");
    let child = ("a/b", "use super::A; pub struct B(A);");
    assert_eq!(circles_of([parent, child]), ["a a/b"]);
}

#[test]
fn a_circle_through_super_is_found() {
    let files = [
        ("a", "mod b; mod c;"),
        ("a/b", "use super::c::{self, C}; pub struct B(C, c::D);"),
        ("a/c", "mod with { use super::super::b::B; } pub struct C; pub struct D;"),
    ];
    assert_eq!(circles_of(files), ["a/b a/c"]);
}

#[test]
fn a_circle_of_three_files_is_found_through_re_exports_and_nested_braces() {
    let files = [
        ("lib", "mod a; mod b; mod c; pub use c::inner::{D as Renamed, *};"),
        ("a", "use crate::{b::{B}, Renamed}; pub struct A(B, Renamed);"),
        ("b", "pub(crate) struct B;"),
        ("c", "pub(crate) mod inner;"),
        ("c/inner", "use {std::fmt, crate::{a::{self, A}}}; pub struct D(A, a::E); pub struct F;"),
    ];
    assert_eq!(circles_of(files), ["a c/inner"]);
    assert_eq!(uses_of(files), ["a b", "a c/inner", "c/inner a"]);
}

#[test]
fn declarations_re_exports_comments_and_strings_are_no_use() {
    let files = [
        ("lib", "mod a; pub use a::B;"),
        ("a", "mod b;\npub use b::B;\npub(crate) use self::b::C;\npub struct A;"),
        (
            "a/b",
            "// crate::c::X\n/* super::x /* */ */\nuse super::A; const T: &str = r#\"crate::a::\"#;
                 pub struct B(A); pub struct C<'a>(&'a str, char); const Q: char = '\\'';",
        ),
    ];
    assert_eq!(circles_of(files), [""; 0]);
    assert_eq!(uses_of(files), ["a/b a"]);
}

#[test]
fn lines_of_code_exclude_docs_comments_blank_lines_and_tests() {
    let text = "//! A\n\n/// B\nfn a() {\n    /* c\n    d */\n    let text = \"e\n\n\";\n}\n\
                #[cfg(test)]\nmod tests {\n    use super::*;\n    fn b() {}\n}\nfn c() {}\n";
    assert_eq!(Crate::new([("a", text)]).lines()["a"], 6);
}
