"""The tables of BENCHMARKS.md and of benches/results/peers.md, and the plots, from what scripts/peers has measured."""
import math
import re
import sys
from statistics import median

from plots import Plot

OURS, GOVERNOR, TOWER_GOVERNOR, HAND, BARE = "tower-fixed-window", "governor", "tower_governor", "by hand", "bare service"
LAYERS = [BARE, HAND, OURS, f"{OURS}, no headers", TOWER_GOVERNOR, "tower-rate-limiter", "axum-governor"]
STORES = [OURS, GOVERNOR, "governor, one lock", "tower-rate-limiter", "limitador", "axum-limit"]
MORE = [f"{OURS}, {what}" for what in ("two quotas", "two limits", "three limits")]
# These are in a build of their own.
OTHERS = {"tower-rate-limiter", "axum-governor", "limitador", "axum-limit"}
SERVERS = [BARE, "a layer that does nothing", HAND, OURS, TOWER_GOVERNOR]
ALLOWED, USUAL, REFUSED, FIRST = VERDICTS = "allowed", "allowed of 5,000", "refused", "first"
BOTH = ALLOWED, REFUSED
PEER = {"layer": TOWER_GOVERNOR, "store": GOVERNOR}
UNITS = {"release": "instructions", "lto": "instructions with link-time optimization", "counter": "instructions by the processor's counter", "time": "ns", "time-lto": "ns with link-time optimization"}
MARKS = [f"<!-- {which}what scripts/peers writes -->\n" for which in ("", "end of ")]


def known(numbers):
    """Without the rounds in which a thread waited for a core."""
    return [n for n in numbers or [] if n == n]


def cell(numbers, digits=0):
    return f"{median(known(numbers)):,.{digits}f}" if known(numbers) else "-"


def interval(numbers, digits=2):
    """The median and, where there are rounds, the interval that has it with 95%."""
    ranks = sorted(known(numbers))
    n = len(ranks)
    skip = int((n - 1.96 * math.sqrt(n)) / 2)
    return cell(numbers, digits) + (f" ({ranks[skip]:.{digits}f} to {ranks[-1 - skip]:.{digits}f})" if skip > 0 else "")


def ratios(mine, peers, base=None):
    """Round by round; with a base, of what comes on top of it."""
    return mine and peers and known((a - z) / (b - z) for a, b, z in zip(mine, peers, base or [0] * len(mine)))


def title(keys):
    shape, count, *threads = keys.split(":")
    count = "one hot key" if count == "1" else f"{int(count):,} keys" + {"zipf": " by Zipf", "new": ", a third of the requests new"}.get(shape, "")
    return count + "".join(f", {n} thread{'s' * (n != '1')}" for n in threads)


class Report:
    def __init__(self, results):
        self.R, self.lines = results, []
        self.hot, self.many, self.zipf, self.all, self.new = (results[name] for name in ("hot", "many", "zipf", "all", "new"))

    def of(self, name, column=0):
        """What the rounds have measured, or None."""
        rounds = self.R.get(name)
        return rounds and (rounds[0] if name.startswith("time") else [row[column] for row in rounds])

    def ratio(self, kind, subject, name, verdict, keys, peer=None):
        """To a peer: of a layer, what it adds to the bare service."""
        mine, peers = (self.of(f"{kind} {subject}:{who}:{verdict}:{keys}") for who in (name, peer or PEER[subject]))
        return ratios(mine, peers, subject == "layer" and self.of(f"{kind} layer:{BARE}:{ALLOWED}:{keys}"))

    def table(self, title, text, header, rows):
        sides = "|".join("---" if name == "" or i == 0 else "---:" for i, name in enumerate(header))
        self.lines += [f"\n## {title}\n", f"{text}\n"] if title else []
        self.lines += [f"| {' | '.join(header)} |", f"|{sides}|", *(f"| {' | '.join(row)} |" for row in rows)]

    def memory(self, name, keys, column=0):
        return self.of(f"memory store:{name}:{ALLOWED}:uniform:{keys}", column)

    def compared(self, subject, who, columns):
        """A number for each limiter and column, a kind with its keys, and its ratio to the peer's. Returns where the peer is ahead."""
        middle = lambda name: median(known(self.of(name)) or [math.nan])
        rows, ahead = [], []
        header = [f"{UNITS[kind]}, {title(keys)}" for kind, keys in columns]
        for name, verdict in who:
            row = []
            for what, (kind, keys) in zip(header, columns):
                numbers, ratio = self.of(f"{kind} {subject}:{name}:{verdict}:{keys}"), self.ratio(kind, subject, name, verdict, keys)
                if subject == "layer" and name != BARE and known(numbers):
                    numbers = [middle(f"{kind} {subject}:{name}:{verdict}:{keys}") - middle(f"{kind} layer:{BARE}:{ALLOWED}:{keys}")]
                row.append(cell(numbers) + (f" ({cell(ratio, 2)})" if ratio and name != BARE else ""))
                if name == OURS and ratio and median(ratio) > 1.005:
                    ahead.append(f"- {PEER[subject]}, {verdict}, {what}: {cell(ratio, 2)}")
            if set(row) != {"-"}:
                rows.append([name, "" if name == BARE else verdict, *row])
        self.table("", "", ["", "", *header], rows)
        return ahead

    def summary(self):
        """The tables of BENCHMARKS.md."""
        rounds = [n for name in self.R if name.startswith("time ") for n in self.of(name)]
        if rounds:
            left_out = len(rounds) - len(known(rounds))
            self.lines.append(f"In {left_out:,} of {len(rounds):,} rounds, a thread waited for a core: these are left out.")
        threads = lambda keys: [("time", f"{keys}:1"), ("time", f"{keys}:2")]
        self.lines.append("\n### A layer\n\nWhat a layer adds to a request. In brackets is the ratio to what tower_governor adds.\n")
        who = [(name, verdict) for name in LAYERS[1:] for verdict in BOTH]
        ahead = self.compared("layer", who, [("release", self.hot), ("release", self.many), *threads(self.hot), *threads(self.many)])
        self.lines.append("\n### A decision of a store\n\nEach decision reads the clock. In brackets is the ratio to governor's.\n")
        who = [(name, verdict) for name in STORES[:2] for verdict in (ALLOWED, REFUSED, FIRST)]
        who += [(name, ALLOWED) for name in STORES[3:] + MORE[:2]]
        ahead += self.compared("store", who, [("release", self.hot), ("release", self.many), *threads(self.hot), *threads(self.all)])
        self.lines.append(f"\n### Memory and pauses\n\nBytes of a key by the number of keys. Then, while a store grows to {title(self.all)}, the "
                          "nanoseconds within which 99.9% of the decisions end, and those of the longest one.\n")
        rows = [[name, *(cell(self.memory(name, keys), 1) for keys in self.R["sizes"]),
                 *(cell(self.of(f"edge {name}:growing", i)) for i in (3, 5))] for name in STORES if "lock" not in name]
        self.table("", "", ["", *(f"{keys:,}" for keys in self.R["sizes"]), "99.9% within", "longest"], rows)
        self.lines += ["\nIn the first two tables, a peer is ahead of this crate in:\n" if ahead else "", *ahead]

    def tables(self):
        """Those of benches/results/peers.md."""
        for subject, noun in ("layer", "request"), ("store", "decision"):
            who = [(name, verdict) for name in (LAYERS if subject == "layer" else STORES + MORE) for verdict in VERDICTS]
            share = "What a layer adds to a request. In brackets is the ratio to what tower_governor adds." if subject == "layer" else "Each decision reads the clock. In brackets is the ratio to governor's."
            for kind in "release", "lto", "counter":
                if any(name.startswith(f"{kind} ") for name in self.R):
                    self.lines.append(f"\n## {subject.title()}, a {noun}: {UNITS[kind]}\n\n{share}\n")
                    self.compared(subject, who, [(kind, self.hot), (kind, self.many)])
            self.lines.append(f"\n## {subject.title()}, a {noun}: nanoseconds\n\n{share}\n")
            keys = (self.hot, self.many, self.zipf) + (self.all, self.new) * (subject == "store")
            self.compared(subject, who, [("time", f"{keys}:{n}") for keys in keys for n in sorted({1, 2, self.R["threads"][-1]})])
            if any(name.startswith("time-lto ") for name in self.R):
                self.lines.append(f"\n## {subject.title()}, a {noun}: {UNITS['time-lto']}\n\n{share}\n")
                self.compared(subject, who, [("time-lto", f"{keys}:{n}") for keys in (self.hot, self.many) for n in (1, 2)])
        rows = []
        for name in (f"{name}:{verdict}" for name in SERVERS for verdict in BOTH):
            cpu, callgrind, counter = (self.of(f"{kind} {name}") for kind in ("axum", "axum-callgrind", "axum-counter"))
            if cpu:
                ratio = interval(ratios(cpu, self.of(f"axum {HAND}:{ALLOWED}")), 3)
                rows.append([*name.split(":"), cell(cpu, 2), ratio, cell(callgrind), cell(counter)])
        self.table("axum over loopback: what the server needs for a request", "Microseconds of CPU under `wrk`, their ratio to those "
            "with four headers by hand (the median, and the interval that has it with 95%), and instructions: by callgrind without "
            "the kernel's, and by the processor's counter with them.", ["", "", "us", "ratio", "callgrind", "counter"], rows)
        rows = [[name, f"{keys:,}", *(cell(self.memory(name, keys, column), 1) for column in range(3))]
                for keys in self.R["sizes"] for name in STORES if self.memory(name, keys)]
        self.table("Memory: bytes of a key", "What the store has requested from the allocator and still holds, the most it held while "
            "it grew, and what the system gave. Peers with more than 300 bytes at a million keys are not tried with ten.",
            ["", "keys", "held", "at most", "resident"], rows)
        rows = [[*name[5:].split(":"), *(cell(self.of(name, i)) for i in (0, 3, 5)), f"{min(self.of(name, 5)):,.0f}"]
                for name in self.R if name.startswith("edge ")]
        self.table(f"Single decisions over {title(self.all)}: growth, and the edge of a window", "In nanoseconds. A pause that the "
            "program makes is in every round, one that the machine makes is not: see the least of the rounds' longest decisions.",
            ["", "", "median", "99.9% within", "longest (median of rounds)", "longest (least of rounds)"], rows)

    def show(self, plot, path, title, height):
        plot.save(path, title, height)
        self.lines += ["", f"![{title}](docs/plots/{path.name})"]

    def draw(self, folder):
        many, threads, sizes = self.many, self.R["threads"], self.R["sizes"]
        middle = lambda name, column=0: median(known(self.of(name, column)) or [math.nan])
        plot = Plot("")
        for column, verdict in enumerate(BOTH):
            added = lambda name: middle(f"time layer:{name}:{verdict}:{many}:1") - middle(f"time layer:{BARE}:{ALLOWED}:{many}:1")
            plot.bars(20 + column * 350, 32, f"nanoseconds added, {verdict}", [(name, added(name)) for name in LAYERS[1:] if "," not in name])
        self.show(plot, folder / "peers.svg", f"What a layer adds to a request over {title(many)}, beside peers", 166)

        plot = Plot("millions a second, of all threads", OURS, "governor, or tower_governor")
        for i, (subject, keys, verdict) in enumerate((s, k, v) for s, k in (("store", self.hot), ("layer", many)) for v in BOTH):
            rate = lambda name, n: n * 1e3 / middle(f"time {subject}:{name}:{verdict}:{keys}:{n}")
            plot.lines(i, f"{subject}, {verdict}, {title(keys)}", [f"{n} thread{'s' * (n > 1)}" for n in threads],
                       [[rate(name, n) for n in threads] for name in (OURS, PEER[subject])])
        self.show(plot, folder / "threads.svg", "Requests a second of all threads together", 470)

        plot = Plot("bytes of a key", *(names := [name for name in STORES if "lock" not in name]))
        plot.lines(0, "A store with one quota", [f"{keys:,} keys" for keys in sizes],
                   [[median(self.memory(name, keys) or [math.nan]) for keys in sizes] for name in names], log=True, width=680)
        self.show(plot, folder / "memory.svg", "Bytes of a key by the number of keys", 254)

        names = [f"{OURS}:calm", f"{OURS}:at the edge", f"{OURS}:growing", "governor:growing", "governor:during retain_recent", "a loop that does nothing:"]
        plot = Plot("", "calm", "at the edge", "growing", "governor, growing", "governor, retain_recent", "doing nothing")
        plot.lines(0, f"Nanoseconds of single decisions over {title(self.all)}", ["50%", "90%", "99%", "99.9%", "99.99%", "longest"],
                   [[middle(f"edge {name}", i) for i in range(6)] for name in names], log=True, width=680)
        self.show(plot, folder / "edge.svg", "Latency while all windows end, and while a store grows", 254)

    def draw_redis(self, page, folder):
        """What `cargo bench -p benches --bench redis -- far` has measured."""
        plot, far = Plot("decisions a second", "decisions that share calls", "one by one"), {}
        for distance, *numbers in re.findall(r"^\| (\d+ ms) \| (\d+) \| (\d+) \| (\d+) \|", page, re.M):
            far.setdefault(distance, []).append([int(number) for number in numbers])
        for i, (distance, rows) in enumerate(far.items()):
            at_once, *rates = zip(*rows)
            plot.lines(i, f"Redis {distance} away, by concurrent requests", [f"{n:,}" for n in at_once], rates, log=True)
        plot.save(folder / "redis.svg", "Decisions a second in Redis, by distance and concurrent requests", 470)


def write(results, plots, root, rewrites):
    """The text, which replaces what is between the marks of the page, and the file with all tables."""
    page, file, far = root / "BENCHMARKS.md", root / "benches/results/peers.md", root / "benches/results/redis.md"
    report, all = Report(results), Report(results)
    report.summary()
    try:
        report.draw(plots)
    except ValueError:
        print("some numbers are missing: not all plots are drawn", file=sys.stderr)
    report.draw_redis(far.read_text(), plots)
    all.tables()
    quick = "**Made with `--quick`: too few requests and keys to judge by.**\n\n" if results["quick"] else ""
    text, tables = (f"{quick}{results['machine']}\n" + "\n".join(lines) + "\n" for lines in (report.lines, all.lines))
    if rewrites:
        before, rest = page.read_text().split(MARKS[0])
        page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
        file.write_text(f"# This crate and others, by `scripts/peers`\n\n{tables}")
    return text + tables
