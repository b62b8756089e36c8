//! Measures everything and writes it down, in markdown: the targets first, then what they are judged
//! by, and the rest.

use std::fmt::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::batch::{Verdict, prepared};
use crate::counting::{self, Case, Subject};
use crate::edge::{self, Moment, Spread};
use crate::keys::{Keys, thousands};
use crate::layers::{self, BY_HAND, OURS, TOWER_GOVERNOR};
use crate::stores::{self, GOVERNOR};
use crate::timing::{Contestant, Rounds, median, time};
use crate::{http, memory};

const BARE: &str = "bare service";
const VERDICTS: [Verdict; 2] = [Verdict::Allowed, Verdict::Refused];

/// How much is measured.
struct Scale {
    rounds: usize,
    span: Duration,
    many: u32,
    million: u32,
    ten_million: u32,
}

impl Scale {
    fn full() -> Self {
        Self {
            rounds: 15,
            span: Duration::from_millis(8),
            many: 100_000,
            million: 1_000_000,
            ten_million: 10_000_000,
        }
    }

    fn quick() -> Self {
        Self {
            rounds: 2,
            span: Duration::from_millis(1),
            many: 1_000,
            million: 10_000,
            ten_million: 100_000,
        }
    }

    fn judged(&self) -> [Keys; 2] {
        [Keys::Hot, Keys::Uniform(self.many)]
    }
}

/// The report, as it grows.
struct Report {
    scale: Scale,
    sections: String,
    targets: String,
    started: Instant,
}

/// All of it, or only these sections.
pub fn report(quick: bool, only: &[String]) -> String {
    let scale = if quick { Scale::quick() } else { Scale::full() };
    let mut report = Report {
        scale,
        sections: String::new(),
        targets: String::from("| target | at most | measured | |\n|---|---:|---:|---|\n"),
        started: Instant::now(),
    };
    type Section = (&'static str, fn(&mut Report));
    let sections: [Section; 6] = [
        ("instructions", |report| {
            report.instructions("release");
            report.instructions("lto");
        }),
        ("layers", Report::layer_times),
        ("stores", Report::store_times),
        ("axum", Report::axum),
        ("memory", Report::memory),
        ("edge", Report::edge),
    ];
    for (name, measure) in sections {
        if only.is_empty() || only.iter().any(|wanted| wanted == name) {
            measure(&mut report);
        }
    }
    let minutes = report.started.elapsed().as_secs_f64() / 60.0;
    format!(
        "{}It took {minutes:.1} minutes.\n\n{}{}",
        machine(quick),
        report.targets,
        report.sections
    )
}

/// A cell of a table; `None` was not measured.
fn cell(number: Option<f64>, digits: usize) -> String {
    number.map_or_else(|| "-".to_owned(), |number| format!("{number:.digits$}"))
}

impl Report {
    fn say(&self, what: &str) {
        eprintln!("{:>4.0} s: {what}", self.started.elapsed().as_secs_f64());
    }

    fn target(&mut self, what: &str, at_most: f64, measured: Option<f64>, digits: usize) {
        let met = match measured {
            None => "not measured here",
            Some(measured) if measured <= at_most => "met",
            Some(_) => "**missed**",
        };
        let measured = cell(measured, digits);
        writeln!(self.targets, "| {what} | {at_most:.digits$} | {measured} | {met} |")
            .expect("writing to a string");
    }

    fn line(&mut self, line: impl AsRef<str>) {
        self.sections.push_str(line.as_ref());
        self.sections.push('\n');
    }

    fn heading(&mut self, title: &str, text: &str) {
        self.line(format!("\n### {title}\n\n{text}\n"));
    }

    fn instructions(&mut self, profile: &str) {
        let Some(program) = counting::program(profile) else {
            self.say(&format!("not compiled with the profile {profile}: not counted"));
            return;
        };
        // Only what is judged is counted twice.
        let with = if profile == "lto" { ", with link-time optimization" } else { "" };
        let judged = |who: &str| {
            with.is_empty() || [BARE, BY_HAND, OURS, TOWER_GOVERNOR, GOVERNOR].contains(&who)
        };
        let mut cases = vec![];
        for keys in self.scale.judged() {
            for (who, verdicts) in layers::CONTESTANTS.into_iter().filter(|(who, _)| judged(who)) {
                let case = |&verdict| Case { subject: Subject::Layer, who, verdict, keys };
                cases.extend(verdicts.iter().map(case));
            }
            // To fill the heavy ones with keys takes minutes under callgrind.
            let counted =
                |who: &&str| judged(who) && (keys == Keys::Hot || [OURS, GOVERNOR].contains(who));
            for who in stores::CONTESTANTS.into_iter().filter(counted) {
                cases.extend(VERDICTS.map(|verdict| Case {
                    subject: Subject::Store,
                    who,
                    verdict,
                    keys,
                }));
            }
        }
        let counts = if counting::possible() {
            self.say(&format!("counting instructions{with}"));
            counting::count(&program, &cases)
        } else {
            self.say("there is no valgrind: instructions are not counted");
            vec![]
        };
        let of = |subject, who, verdict, keys| {
            let case = Case { subject, who, verdict, keys };
            let at = cases.iter().position(|other| *other == case)?;
            counts.get(at).map(|&count| count as f64)
        };
        let added = |who, verdict, keys| {
            let bare = of(Subject::Layer, BARE, Verdict::Allowed, keys)?;
            Some(of(Subject::Layer, who, verdict, keys)? - bare)
        };

        for keys in self.scale.judged() {
            let peer = |verdict| added(TOWER_GOVERNOR, verdict, keys);
            let ratio = |verdict| Some(added(OURS, verdict, keys)? / peer(verdict)?);
            let by_hand =
                added(OURS, Verdict::Refused, keys).zip(added(BY_HAND, Verdict::Refused, keys));
            let title = keys.title();
            self.target(
                &format!("layer, allowed, {title}: instructions of tower_governor's{with}"),
                0.8,
                ratio(Verdict::Allowed),
                3,
            );
            self.target(
                &format!("layer, refused, {title}: instructions of tower_governor's{with}"),
                0.35,
                ratio(Verdict::Refused),
                3,
            );
            self.target(
                &format!("layer, refused, {title}: instructions of those by hand{with}"),
                1.0,
                by_hand.map(|(ours, hand)| ours / hand),
                3,
            );
        }
        for keys in self.scale.judged() {
            let count = |who| of(Subject::Store, who, Verdict::Allowed, keys);
            self.target(
                &format!("store, {}: instructions of governor's{with}", keys.title()),
                0.7,
                count(OURS).zip(count(GOVERNOR)).map(|(ours, peer)| ours / peer),
                3,
            );
        }

        self.heading(
            &format!("Layer: instructions of a request{with}"),
            "Added to the bare service's. \"Fields by hand\" are fixed ones, and nothing is counted: four, \
             or seven and a body.",
        );
        let keys = self.scale.judged();
        let titles = keys.map(Keys::title);
        self.line(format!(
            "| | | {} | of tower_governor's | {} | of tower_governor's |\n|---|---|---:|---:|---:|---:|",
            titles[0], titles[1]
        ));
        for (who, verdicts) in layers::CONTESTANTS.into_iter().filter(|(who, _)| judged(who)) {
            for &verdict in verdicts {
                if who == BARE {
                    let count = |keys| cell(of(Subject::Layer, BARE, verdict, keys), 0);
                    let [a, b] = keys.map(count);
                    self.line(format!("| {who} | | {a} in all | | {b} in all | |"));
                    continue;
                }
                let cells = keys.map(|keys| {
                    let mine = added(who, verdict, keys);
                    let peer = added(TOWER_GOVERNOR, verdict, keys);
                    let ratio = mine.zip(peer).map(|(mine, peer)| mine / peer);
                    format!("+{} | {}", cell(mine, 0), cell(ratio, 2))
                });
                self.line(format!("| {who} | {} | {} |", verdict.id(), cells.join(" | ")));
            }
        }
        self.heading(&format!("Store: instructions of a decision{with}"), "With its clock.");
        self.line(format!(
            "| | | {} | of governor's | {} | of governor's |\n|---|---|---:|---:|---:|---:|",
            titles[0], titles[1]
        ));
        for who in stores::CONTESTANTS.into_iter().filter(|who| judged(who)) {
            for verdict in VERDICTS {
                let cells = keys.map(|keys| {
                    let mine = of(Subject::Store, who, verdict, keys);
                    let peer = of(Subject::Store, GOVERNOR, verdict, keys);
                    let ratio = mine.zip(peer).map(|(mine, peer)| mine / peer);
                    format!("{} | {}", cell(mine, 0), cell(ratio, 2))
                });
                self.line(format!("| {who} | {} | {} |", verdict.id(), cells.join(" | ")));
            }
        }
    }

    fn layer_times(&mut self) {
        self.heading(
            "Layer: nanoseconds of a request",
            "All of it, with the service; in brackets, what the layer adds, as a multiple of what \
             tower_governor adds (the median of the rounds' ratios). Two threads: what each of them needs.",
        );
        let columns = [Keys::Hot, Keys::Uniform(self.scale.many), Keys::Zipf(self.scale.million)];
        let mut rows: Vec<String> = vec![];
        for (who, verdicts) in layers::CONTESTANTS {
            rows.extend(verdicts.iter().map(|verdict| {
                let verdict = if who == BARE { "" } else { verdict.id() };
                format!("| {who} | {verdict} |")
            }));
        }
        let mut header = String::from("| | |");
        for keys in columns {
            self.say(&format!("timing layers: {}", keys.title()));
            let mut contestants = vec![];
            for (who, verdicts) in layers::CONTESTANTS {
                for &verdict in verdicts {
                    let batch = layers::contestant(who, verdict);
                    let batch = prepared(batch, verdict, &keys.all());
                    contestants.push(Contestant { who, verdict, batch });
                }
            }
            for threads in [1, 2] {
                let (rounds, span) = (self.scale.rounds, self.scale.span);
                let times = time(&mut contestants, keys, threads, rounds, span);
                let find = |who, verdict| {
                    contestants.iter().position(|c| c.who == who && c.verdict == verdict)
                };
                let bare = find(BARE, Verdict::Allowed).expect("it takes part");
                let ratio = |mine: usize| {
                    let peer = find(TOWER_GOVERNOR, contestants[mine].verdict);
                    added_ratio(&times, bare, mine, peer.expect("it takes part"))
                };
                for (i, row) in rows.iter_mut().enumerate() {
                    let all = median(&times[i]);
                    let cell = if i == bare {
                        format!(" {all:.0} |")
                    } else {
                        format!(" {all:.0} (x {:.2}) |", ratio(i))
                    };
                    row.push_str(&cell);
                }
                let noun = if threads == 1 { "1 thread" } else { "2 threads" };
                write!(header, " {}, {noun} |", keys.title()).expect("writing to a string");
                if threads == 1 && self.scale.judged().contains(&keys) {
                    let ours = find(OURS, Verdict::Refused).expect("it takes part");
                    self.target(
                        &format!(
                            "layer, refused, {}: added time of tower_governor's (1/15)",
                            keys.title()
                        ),
                        1.0 / 15.0,
                        Some(ratio(ours)),
                        3,
                    );
                }
            }
        }
        self.line(format!("{header}\n|---|---|{}", "---:|".repeat(columns.len() * 2)));
        self.line(rows.join("\n"));
    }

    fn store_times(&mut self) {
        self.heading(
            "Store: nanoseconds of a decision",
            "With its clock, all of them allowed; in brackets, of governor's.",
        );
        let (many, million) = (self.scale.many, self.scale.million);
        let columns = [Keys::Hot, Keys::Uniform(many), Keys::Zipf(million), Keys::Uniform(million)];
        let mut rows: Vec<String> =
            stores::CONTESTANTS.iter().map(|who| format!("| {who} |")).collect();
        let mut header = String::from("| |");
        let verdict = Verdict::Allowed;
        for keys in columns {
            self.say(&format!("timing stores: {}", keys.title()));
            let mut contestants: Vec<Contestant> = stores::CONTESTANTS
                .iter()
                .map(|who| {
                    let batch = stores::contestant(who, verdict, keys.count());
                    Contestant { who, verdict, batch: prepared(batch, verdict, &keys.all()) }
                })
                .collect();
            for threads in [1, 2] {
                let (rounds, span) = (self.scale.rounds, self.scale.span);
                let times = time(&mut contestants, keys, threads, rounds, span);
                let at = |who| stores::CONTESTANTS.iter().position(|other| *other == who);
                let peer = at(GOVERNOR).expect("it takes part");
                let ratio = |mine: usize| {
                    let rounds = times[mine].iter().zip(&times[peer]);
                    median(&rounds.map(|(mine, peer)| mine / peer).collect::<Vec<_>>())
                };
                for (i, row) in rows.iter_mut().enumerate() {
                    write!(row, " {:.0} (x {:.2}) |", median(&times[i]), ratio(i))
                        .expect("writing to a string");
                }
                let noun = if threads == 1 { "1 thread" } else { "2 threads" };
                write!(header, " {}, {noun} |", keys.title()).expect("writing to a string");
                if threads == 1 && keys != Keys::Hot {
                    let ours = at(OURS).expect("it takes part");
                    self.target(
                        &format!("store, {}: time of governor's", keys.title()),
                        0.9,
                        Some(ratio(ours)),
                        2,
                    );
                }
            }
        }
        self.line(format!("{header}\n|---|{}", "---:|".repeat(columns.len() * 2)));
        self.line(rows.join("\n"));
    }

    fn axum(&mut self) {
        self.heading(
            "axum over loopback: the server's CPU for a request",
            "Asked by `wrk` over 16 connections from one address, each server on one core. In \
             microseconds, and of the bare server's (the median of the rounds' ratios).",
        );
        let ours = VERDICTS
            .map(|verdict| (verdict, format!("axum, {}: CPU of the bare server's", verdict.id())));
        if let Some(obstacle) = http::obstacle() {
            self.say(obstacle);
            self.line(format!("Not measured: {obstacle}."));
            for (_, target) in ours {
                self.target(&target, 1.06, None, 3);
            }
            return;
        }
        self.say("axum under wrk");
        let rounds = if self.scale.rounds > 5 { 11 } else { 1 };
        let measured = http::measure(rounds, Duration::from_secs(1));
        self.line("| | | us | of the bare server's | rounds between |\n|---|---|---:|---:|---:|");
        for ((who, verdict), times) in http::CONTESTANTS.into_iter().zip(&measured) {
            let mut ratios: Vec<f64> =
                times.iter().zip(&measured[0]).map(|(mine, bare)| mine / bare).collect();
            ratios.sort_by(f64::total_cmp);
            let ratio = median(&ratios);
            self.line(format!(
                "| {who} | {} | {:.2} | {ratio:.3} | {:.3} and {:.3} |",
                if matches!(who, http::BARE | http::NOTHING | BY_HAND) { "" } else { verdict.id() },
                median(times),
                ratios[0],
                ratios[ratios.len() - 1],
            ));
            if let Some((_, target)) = ours.iter().find(|(v, _)| who == OURS && *v == verdict) {
                self.target(target, 1.06, Some(ratio), 3);
            }
        }
    }

    fn memory(&mut self) {
        self.heading(
            "Memory: bytes for a key",
            "What the store has asked the allocator for and still holds; the most it held while it \
             grew; and what the system had to give. Addresses as keys, one quota. Peers that need more \
             than 300 bytes at a million keys are not tried with ten. This crate's table grows up to \
             `max_keys`, a million unless set, and not beyond.",
        );
        self.line("| | keys | held | at most | resident |\n|---|---:|---:|---:|---:|");
        let (million, ten_million) = (self.scale.million, self.scale.ten_million);
        // With one lock, it is the same table.
        let mut contestants = stores::CONTESTANTS.to_vec();
        contestants.retain(|who| *who != "governor, one lock");
        for keys in [million / 100, million, ten_million] {
            for who in contestants.clone() {
                self.say(&format!("memory of {who}, {} keys", thousands(keys)));
                let memory = memory::measure(who, keys);
                self.line(format!(
                    "| {who} | {} | {:.1} | {:.1} | {:.1} |",
                    thousands(keys),
                    memory.held,
                    memory.most,
                    memory.resident
                ));
                if keys == million && memory.held > 300.0 {
                    contestants.retain(|other| *other != who);
                }
                if who == OURS && keys == ten_million {
                    let title = format!("memory, {} keys: bytes for a key", thousands(keys));
                    self.target(&title, 40.0, Some(memory.held), 1);
                }
            }
        }
    }

    fn edge(&mut self) {
        let keys = self.scale.million;
        let rounds = self.scale.rounds.min(7);
        self.heading(
            &format!("The edge of a window, with {} expired keys", thousands(keys)),
            "Nanoseconds of single decisions. A pause that the program makes is in every round, one \
             that the machine makes is not: so beside the median of the rounds' longest decisions, the \
             shortest of them.",
        );
        self.say("the edge of a window");
        let ours = edge::ours(keys, rounds);
        let governor = edge::governor(keys, rounds);
        let heavy = edge::tower_rate_limiter(keys, rounds.min(2));
        self.line(
            "| | | median | 99.9% within | longest (median of rounds) | longest (least of rounds) |\n\
             |---|---|---:|---:|---:|---:|",
        );
        let of = |moment: &Moment, what: fn(&Spread) -> f64| -> Vec<f64> {
            moment.rounds.iter().map(what).collect()
        };
        let least = |of: &[f64]| of.iter().copied().fold(f64::INFINITY, f64::min);
        for moment in ours.iter().chain(&governor).chain(&heavy) {
            let longest = of(moment, |spread| spread.longest);
            self.line(format!(
                "| {} | {} | {:.0} | {:.0} | {:.0} | {:.0} |",
                moment.who,
                moment.when,
                median(&of(moment, |spread| spread.median)),
                median(&of(moment, |spread| spread.p999)),
                median(&longest),
                least(&longest),
            ));
        }
        let [nothing, _, edge] = &ours;
        let noise = median(&of(nothing, |spread| spread.longest));
        let pause = least(&of(edge, |spread| spread.longest));
        self.target(
            "edge: the pause in every round, of the longest that doing nothing sees",
            1.0,
            Some(pause / noise),
            2,
        );
    }
}

/// What `mine` adds to the bare service, of what the peer adds: the median of the rounds.
fn added_ratio(times: &Rounds, bare: usize, mine: usize, peer: usize) -> f64 {
    let rounds = times[mine].iter().zip(&times[peer]).zip(&times[bare]);
    median(&rounds.map(|((mine, peer), bare)| (mine - bare) / (peer - bare)).collect::<Vec<_>>())
}

/// What it was measured on, and what.
fn machine(quick: bool) -> String {
    let output = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
        text.filter(|text| !text.is_empty()).unwrap_or_else(|| "unknown".to_owned())
    };
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpu.lines().find(|line| line.starts_with(name))?;
        line.split_once(": ").map(|(_, value)| value.to_owned())
    };
    let hypervisor = cpu.contains(" hypervisor ");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("unknown");
    let lock = include_str!("../Cargo.lock");
    let version = |name: &str| {
        let (_, rest) = lock.split_once(&format!("name = \"{name}\"\nversion = \""))?;
        rest.split_once('"').map(|(version, _)| format!("{name} {version}"))
    };
    let peers = [
        "tower_governor",
        "governor",
        "tower-rate-limiter",
        "axum-governor",
        "limitador",
        "axum-limit",
        "axum",
    ];
    let peers: Vec<String> = peers.into_iter().filter_map(version).collect();
    let quick = if quick {
        "**Made with `--quick`: too few requests and keys to judge by.**\n\n"
    } else {
        ""
    };
    format!(
        "{quick}{}, {} ({cores} cores{}; load {load} at the end), {}, {}; {}. ",
        output("date", &["-u", "+%Y-%m-%d"]),
        field("model name").unwrap_or_else(|| "an unknown processor".to_owned()),
        if hypervisor { ", virtual" } else { "" },
        output("uname", &["-sr"]),
        output("rustc", &["--version"]),
        peers.join(", "),
    )
}
