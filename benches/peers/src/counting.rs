//! Instructions, where the machine has valgrind: this program runs itself under callgrind, which
//! counts from the moment it enters [`counted_batch`], and until it leaves it.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::batch::{Batch, Verdict, check, prepared};
use crate::keys::Keys;
use crate::{layers, stores};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Subject {
    Layer,
    Store,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Case {
    pub subject: Subject,
    pub who: &'static str,
    pub verdict: Verdict,
    pub keys: Keys,
}

/// As many are counted and divided by.
const REQUESTS: usize = 10_000;

/// Whether there is a valgrind.
pub fn possible() -> bool {
    Command::new("valgrind").arg("--version").output().is_ok()
}

/// This program, as compiled by another profile, if it has been.
pub fn program(profile: &str) -> Option<PathBuf> {
    let target = env::current_exe().ok()?.parent()?.parent()?.join(profile).join("peers");
    target.exists().then_some(target)
}

/// Instructions of one request in each of these cases, as the program counts them.
pub fn count(program: &Path, cases: &[Case]) -> Vec<u64> {
    let counted = Mutex::new(vec![0; cases.len()]);
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            let Some(case) = cases.get(i) else { return };
            let each = run_under_valgrind(program, case) / REQUESTS as u64;
            counted.lock().expect("no panic")[i] = each;
        }
    };
    // Others on the machine make this slower, not different: as many at once as there are cores.
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    counted.into_inner().expect("no panic")
}

fn run_under_valgrind(program: &Path, case: &Case) -> u64 {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null", "--collect-atstart=no"])
        .arg("--toggle-collect=*counted_batch*")
        .arg(program)
        .arg("count")
        .arg(if case.subject == Subject::Layer { "layer" } else { "store" })
        .args([case.who, case.verdict.id(), &case.keys.id()])
        .output()
        .expect("valgrind runs");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case:?}: {text}");
    let line = text.lines().find(|line| line.contains("Collected :")).expect("it counts");
    let (_, digits) = line.split_once("Collected :").expect("it does");
    digits.trim().parse().expect("a number")
}

/// The other side of it: what is run under valgrind.
pub fn be_counted(mut args: impl Iterator<Item = String>) {
    let mut next = || args.next().expect("count layer|store WHO allowed|refused KEYS");
    let (subject, who) = (next(), next());
    let (verdict, keys) = (Verdict::parse(&next()), Keys::parse(&next()));
    let batch = match subject.as_str() {
        "layer" => layers::contestant(&who, verdict),
        _ => stores::contestant(&who, verdict, keys.count()),
    };
    let mut batch = prepared(batch, verdict, &keys.all());
    let clients = keys.requests(REQUESTS);
    let refused = counted_batch(&mut *batch, &clients);
    check(verdict, &clients, refused);
}

#[inline(never)]
fn counted_batch(batch: &mut dyn Batch, clients: &[u32]) -> usize {
    batch.run(clients)
}
