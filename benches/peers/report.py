"""The tables of BENCHMARKS.md and the plots, from what scripts/peers has measured."""
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
    count = "one hot key" if count == "1" else f"{int(count):,} keys" + " by Zipf" * (shape == "zipf")
    return count + "".join(f", {n} thread{'s' * (n != '1')}" for n in threads)


class Report:
    def __init__(self, results):
        self.R, self.lines = results, []
        self.hot, self.many, self.zipf, self.all = (results[name] for name in ("hot", "many", "zipf", "all"))

    def of(self, name, column=0):
        """What the rounds have measured, or None."""
        rounds = self.R.get(name)
        return rounds and (rounds[0] if name.startswith("time ") else [row[column] for row in rounds])

    def ratio(self, kind, subject, name, verdict, keys, peer=None):
        """To a peer: of a layer, what it adds to the bare service."""
        mine, peers = (self.of(f"{kind} {subject}:{who}:{verdict}:{keys}") for who in (name, peer or PEER[subject]))
        return ratios(mine, peers, subject == "layer" and self.of(f"{kind} layer:{BARE}:{ALLOWED}:{keys}"))

    def table(self, title, text, header, rows):
        sides = "|".join("---" if name == "" or i == 0 else "---:" for i, name in enumerate(header))
        self.lines += [f"\n### {title}\n", f"{text}\n"] if title else []
        self.lines += [f"| {' | '.join(header)} |", f"|{sides}|", *(f"| {' | '.join(row)} |" for row in rows)]

    def targets(self):
        """Those of the issues that asked for them."""
        rows, hot, many, zipf, all = [], self.hot, self.many, self.zipf, self.all

        def target(what, most, hoped, numbers, digits=3):
            middle = median(known(numbers)) if known(numbers) else math.nan
            met = "as hoped" if middle <= (hoped or 0) else "met" if middle <= most else "**missed**" if middle > most else "not measured"
            rows.append([what, f"{most:g}", f"{hoped:g}" if hoped else "-", interval(numbers, digits), met])

        def compared(what, kind, subject, verdict, keys, most, hoped=None, peer=None):
            noun = "instructions" if kind != "time" else "added time" if subject == "layer" else "time"
            target(f"{subject}, {verdict}, {title(keys)}: {noun}{what}{', fat LTO' * (kind == 'lto')}", most, hoped, self.ratio(kind, subject, OURS, verdict, keys, peer))

        # Of instructions without link-time optimization and with it.
        for subject, verdict, keys, *bounds in (
                ("layer", ALLOWED, hot, (.69, .62), (.80, .73)), ("layer", USUAL, many, (.63, .53), (.75, .64)),
                ("layer", REFUSED, hot, (.31, .27), (.30, .25)), ("store", ALLOWED, hot, (.57, .45), (.63, .50)),
                ("store", REFUSED, hot, (.58, .45), (.65, .52)), ("store", ALLOWED, many, (.77, .60), (.86, .66))):
            for kind, bound in zip(("release", "lto"), bounds):
                compared("", kind, subject, verdict, keys, *bound)
        for kind, most in ("release", 1.12), ("lto", 1):
            compared(" of by hand", kind, "layer", REFUSED, hot, most, peer=HAND)
        compared("", "release", "store", FIRST, many, 1.5, 1)
        for path, most, hoped in ("a decision on a calendar", 410, 350), ("a decision of two quotas", 741, 600):
            target(f"{path}: instructions, in a bench of its own", most, hoped, self.of(f"own {path}"), 0)
        for subject, verdict, keys, *bound in (
                ("store", ALLOWED, f"{hot}:1", 1.1, .90), ("store", REFUSED, f"{hot}:1", 1.05, .85),
                ("store", ALLOWED, f"{zipf}:1", .76), ("store", ALLOWED, f"{all}:1", .85, .75),
                ("store", ALLOWED, f"{hot}:2", .6, .45), ("store", REFUSED, f"{hot}:2", .6, .45),
                ("layer", ALLOWED, f"{hot}:1", .85, .75), ("layer", ALLOWED, f"{many}:1", .85, .70),
                ("layer", ALLOWED, f"{hot}:2", .82, .70), ("layer", ALLOWED, f"{many}:2", .82, .65),
                ("layer", ALLOWED, f"{zipf}:2", .94), ("layer", REFUSED, f"{hot}:1", .95), ("layer", REFUSED, f"{many}:1", .80)):
            compared("", "time", subject, verdict, keys, *bound)
        for verdict in BOTH:
            time = lambda threads: self.of(f"time layer:{OURS}:{verdict}:{many}:{threads}")
            target(f"layer, {verdict}, {title(many)}: time with two threads, of one's", 1.10, None, ratios(time(2), time(1)))
        for keys, most, hoped in zip(self.R["sizes"], (60, 38, 38), (36, None, None)):
            target(f"memory, {keys:,} keys: bytes of a key", most, hoped, self.memory(OURS, keys), 1)
        kind, noun = ("axum-counter", "instructions") if f"axum-counter {OURS}:{ALLOWED}" in self.R else ("axum", "CPU time")
        for verdict, peer, *bound in (ALLOWED, HAND, 1.10, 1.03), (ALLOWED, TOWER_GOVERNOR, 1, None), (REFUSED, TOWER_GOVERNOR, .76, None):
            target(f"axum, {verdict}: {noun}{' of four headers by hand' * (peer == HAND)}", *bound,
                   ratios(*(self.of(f"{kind} {who}:{verdict}") for who in (OURS, peer))))
        longest = lambda moment: self.of(f"edge {moment}", -1)
        noise, edge, growth = map(longest, ("a loop that does nothing:", f"{OURS}:at the edge", f"{OURS}:growing"))
        target("edge: the pause in every round, of the longest of a loop that does nothing", 1, None, edge and [min(edge) / median(noise)])
        target("growth: the pause in every round, in ms", .1003, .1, growth and [min(growth) / 1e6], 4)
        rounds = [n for name in self.R if name.startswith("time ") for n in self.of(name)]
        left_out = f" In {len(rounds) - len(known(rounds)):,} of {len(rounds):,} rounds, a thread waited for a core: these are left out." if rounds else ""
        self.lines.append("Layers are compared with tower_governor, and stores with governor, unless a row says otherwise. *At most* is what "
                          f"was asked for, and *hoped for* is a goal beyond. A thousand million is the limit unless a row has another.{left_out}\n")
        self.table("", "", ["target", "at most", "hoped for", "measured", ""], rows)

    def memory(self, name, keys, column=0):
        return self.of(f"memory store:{name}:{ALLOWED}:uniform:{keys}", column)

    def compared(self, heading, kind, subject, columns):
        """A number for each limiter, and its ratio to the peer's."""
        adds = subject == "layer" and kind != "time"
        text = ("Added to the bare service's; in" if adds else "With those of the bare service; in" if subject == "layer"
                else "With reading the clock; in")
        rows = []
        for name, verdict in ((name, verdict) for name in (LAYERS if subject == "layer" else STORES + MORE) for verdict in VERDICTS):
            row = []
            for keys in columns:
                numbers, ratio = self.of(f"{kind} {subject}:{name}:{verdict}:{keys}"), self.ratio(kind, subject, name, verdict, keys)
                if adds and numbers and name != BARE:
                    numbers = [numbers[0] - self.of(f"{kind} layer:{BARE}:{ALLOWED}:{keys}")[0]]
                row.append(cell(numbers) + (f" ({cell(ratio, 2)})" if ratio and name != BARE else ""))
            if set(row) != {"-"}:
                rows.append([name, "" if name == BARE else verdict, *row])
        share = "what the layer adds, of what tower_governor adds" if subject == "layer" else "of governor's"
        self.table(heading, f"{text} brackets, {share}.", ["", "", *map(title, columns)], rows)

    def tables(self):
        for kind, how in ("release", ""), ("lto", ", with link-time optimization"), ("counter", ", by the processor's counter"):
            for subject, noun in ("layer", "request"), ("store", "decision"):
                if any(name.startswith(f"{kind} ") for name in self.R):
                    self.compared(f"{subject.title()}: instructions of a {noun}{how}", kind, subject, [self.hot, self.many])
        threads = lambda *all: [f"{keys}:{n}" for keys in all for n in sorted({1, 2, self.R["threads"][-1]})]
        self.compared("Layer: nanoseconds of a request", "time", "layer", threads(self.hot, self.many, self.zipf))
        self.compared("Store: nanoseconds of a decision", "time", "store", threads(self.hot, self.many, self.zipf, self.all))
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
        for row, (kind, noun, one) in enumerate((("release", "instructions", ""), ("time", "nanoseconds", ":1"))):
            for column, verdict in enumerate(BOTH):
                added = lambda name: middle(f"{kind} layer:{name}:{verdict}:{many}{one}") - middle(f"{kind} layer:{BARE}:{ALLOWED}:{many}{one}")
                plot.bars(20 + column * 350, 32 + row * 150, f"{noun} added, {verdict}", [(name, added(name)) for name in LAYERS[1:] if "," not in name])
        self.show(plot, folder / "peers.svg", f"What a layer adds to a request over {title(many)}, beside peers", 316)

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


def write(results, plots, page, rewrites):
    """The text, which replaces what is between the marks of the page."""
    report = Report(results)
    report.targets()
    try:
        report.draw(plots)
    except ValueError:
        print("some numbers are missing: not all plots are drawn", file=sys.stderr)
    report.tables()
    report.draw_redis(page.read_text(), plots)
    quick = "**Made with `--quick`: too few requests and keys to judge by.**\n\n" if results["quick"] else ""
    text = "\n".join([f"{quick}{results['machine']}\n", *report.lines]) + "\n"
    if rewrites:
        before, rest = page.read_text().split(MARKS[0])
        page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")
    return text
