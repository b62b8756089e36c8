//! Folders of `src` use each other in one direction, from the bottom of CONTRIBUTING.md's tree to
//! its top.

use std::collections::BTreeMap;

use crate::layout::{code, sources};
use crate::read;

/// A module or an item, from the root of the crate on.
type Place = Vec<String>;

/// The folders of `src` in the tree, from the top on, and files that stand for one.
fn tree(page: &str) -> Vec<Place> {
    let (_, lines) = page.split_once("\nsrc/").expect("a tree");
    let (mut found, mut above) = (Vec::new(), Vec::new());
    for line in lines.lines().skip(1).take_while(|line| line.starts_with("  ")) {
        let name = line.trim_start();
        let depth = (line.len() - name.len()) / 2 - 1;
        let Some(name) = name.split_whitespace().next() else { break };
        // Others continue the line before.
        if depth <= 3 {
            above.truncate(depth);
            above.push(name.trim_end_matches('/').to_owned());
            found.push(above.clone());
        }
    }
    found
}

/// Reads one path, and finds those in its braces: `a::{b, c::d}` is `a::b` and `a::c::d`. Returns
/// what is behind it.
fn path<'a>(text: &'a str, before: &[String], found: &mut Vec<Place>) -> &'a str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    let (name, rest) = text.split_at(end);
    let place = [before, &[name.to_owned()]].concat();
    let Some(rest) = rest.strip_prefix("::") else {
        found.push(place);
        return rest;
    };
    let Some(mut rest) = rest.strip_prefix('{') else { return path(rest, &place, found) };
    while !rest.starts_with('}') && !rest.is_empty() {
        rest = path(rest.trim_start(), &place, found);
        // A star or another name may follow.
        rest = rest[rest.find([',', '}']).unwrap_or(rest.len())..]
            .trim_start_matches(',')
            .trim_start();
    }
    rest.get(1..).unwrap_or_default()
}

/// The same place from the root on, if it is in this crate.
fn from_root(module: &[String], place: &[String]) -> Option<Place> {
    let supers = place.iter().take_while(|name| *name == "super").count();
    match &place[0][..] {
        "crate" => Some(place[1..].to_vec()),
        "self" => Some([module, &place[1..]].concat()),
        "super" => Some([&module[..module.len().checked_sub(supers)?], &place[supers..]].concat()),
        _ => None,
    }
}

/// What a file uses of this crate, and what it exports of others: a name here, and its place there.
fn uses(module: &[String], text: &str) -> (Vec<Place>, Vec<(Place, Place)>) {
    let lines = code(text).map(|line| line.split("//").next().unwrap_or_default());
    let code: String = lines.flat_map(|line| [line, "\n"]).collect();
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let (mut used, mut exported) = (Vec::new(), Vec::new());
    for root in ["crate::", "self::", "super::"] {
        // Not in `pub(super)`, nor within a longer path.
        let begins = code.match_indices(root).filter(|(at, _)| !code[..*at].ends_with(is_name));
        begins.for_each(|(at, _)| _ = path(&code[at..], &[], &mut used));
    }
    for statement in code.split(';').filter_map(|text| Some(text.rsplit_once("pub")?.1)) {
        let Some((_, text)) = statement.split_once("use ") else { continue };
        let mut places = Vec::new();
        path(text.trim_start(), &[], &mut places);
        for place in places {
            let name = place.last().cloned().unwrap_or_default();
            let there = from_root(module, &place).unwrap_or_else(|| [module, &place[..]].concat());
            exported.push(([module, &[name]].concat(), there));
        }
    }
    (used.iter().filter_map(|place| from_root(module, place)).collect(), exported)
}

/// Uses of a folder that is further below, and files that are in no folder of the tree.
fn faults(tree: &[Place], sources: &BTreeMap<String, String>) -> Vec<String> {
    let names = |name: &str| name.split('/').map(str::to_owned).collect::<Place>();
    let module = |name| if name == "lib" { Place::new() } else { names(name) };
    let of = sources.iter().map(|(name, text)| (module(name), text));
    let of: Vec<_> = of.map(|(module, text)| (uses(&module, text), module)).collect();
    let exports: BTreeMap<_, _> = of.iter().flat_map(|((_, all), _)| all.iter().cloned()).collect();
    let folder = |place: &[String]| {
        let inside = tree.iter().enumerate().filter(|(_, folder)| place.starts_with(folder));
        inside.max_by_key(|(_, folder)| folder.len())
    };
    let mut faults = Vec::new();
    for ((used, _), module) in of.iter().filter(|(_, module)| !module.is_empty()) {
        let Some((at, own)) = folder(module) else {
            faults.push(format!("{} is not in the tree", module.join("/")));
            continue;
        };
        for place in used {
            let mut target = place.clone();
            // Through re-exports: more than a few are a circle, of traits that have one name.
            for _ in 0..9 {
                let exported = |n: &usize| exports.contains_key(&target[..*n]);
                let Some(n) = (1..=target.len()).find(exported) else { break };
                target = [&exports[&target[..n]][..], &target[n..]].concat();
            }
            let Some((below, other)) = folder(&target) else { continue };
            if below > at && !own.starts_with(other) && !other.starts_with(own) {
                let (file, other, place) = (module.join("/"), other.join("/"), place.join("::"));
                faults.push(format!("{file} uses {other}: {place}"));
            }
        }
    }
    faults
}

#[test]
fn a_use_of_a_folder_further_below_is_a_fault() {
    let tree = tree("\nsrc/\n  a/  x\n              y\n  b/\n    c/\nz/\n");
    let faults = |a: &str, c: &str| {
        let files = [("lib", "pub use b::D;"), ("a", a), ("b", "pub(crate) use c::D;"), ("b/c", c)];
        faults(&tree, &files.map(|(name, text)| (name.to_owned(), text.to_owned())).into())
    };
    assert_eq!(faults("use super::b::{self};", "")[0], "a uses b: b::self");
    assert_eq!(faults("use crate::{\n    a::{A, B},\n    D,\n};", ""), ["a uses b/c: D"]);
    assert_eq!(faults("// crate::b\nuse crate::a::A;", "use super::{super::a, b::C};"), [""; 0]);
    let other = [("d".to_owned(), String::new())].into();
    assert_eq!(super::direction::faults(&tree, &other), ["d is not in the tree"]);
}

#[test]
fn folders_use_those_above_them() {
    let (tree, sources) = (tree(&read("CONTRIBUTING.md")), sources("src"));
    assert!(tree.len() > 10, "the tree was read");
    for folder in tree.iter().map(|folder| folder.join("/")) {
        assert!(sources.contains_key(&folder), "no src/{folder}.rs");
    }
    let faults = faults(&tree, &sources);
    assert!(faults.is_empty(), "otherwise than CONTRIBUTING.md says:\n{}", faults.join("\n"));
}
