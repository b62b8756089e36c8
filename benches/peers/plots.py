"""Plots as SVG that follow the reader's light or dark, in the style of docs/pictures."""
import math
import re
from html import escape
from pathlib import Path

STYLE = re.search("<style>.*</style>", (Path(__file__).parents[2] / "docs/pictures/boundary.svg").read_text())[0]
# A class to fill and one to stroke with, and a marker, so that color is not all that tells series apart.
SERIES = [("b", "p", "●"), ("i", "k", "■"), ("f2", "s2", "▲"), ("v", "r", "◆"), ("s", "s4", "▼"), ("f5", "s5", "★")]
SHADES = {"f0": ("fill", "#c3cecb", "#42504d"), "f2": ("fill", "#9a5b00", "#e8a84c"), "s2": ("stroke", "#9a5b00", "#e8a84c"),
          "v": ("fill", "#b3321f", "#ff927d"), "s4": ("stroke", "#55625f", "#9fb0ac"), "f5": ("fill", "#5b4bb5", "#b3a7ff"),
          "s5": ("stroke", "#5b4bb5", "#b3a7ff")}


def tick(n):
    return f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1e3:g}k" if n >= 1e3 else f"{n:g}"


class Plot:
    def __init__(self, unit, *names):
        """With a legend of the series that have these names."""
        self.shapes, x = [], 20
        if unit:
            self.text("s t e", 700, 28, unit)
        for name, (fill, _, mark) in zip(names, SERIES):
            self.text(f"{fill} t", x, 28, mark)
            self.text("i t", x + 14, 28, name)
            x += 30 + 6.2 * len(name)

    def text(self, css, x, y, text):
        self.shapes.append(f'<text class="{css}" x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>')

    def bars(self, x, y, title, rows):
        """A bar from zero for each name and number."""
        self.text("i h", x, y, title)
        most = max(n for _, n in rows)
        for top, (name, n) in enumerate(rows):
            top, length = y + 12 + top * 22, max(2, n / most * 150)
            css = "b" if name == "tower-fixed-window" else "f0"
            self.text("i t", x, top + 13, name)
            self.shapes.append(f'<rect class="{css}" x="{x + 122}" y="{top}" width="{length:.0f}" height="17" rx="3"/>')
            self.text("s t", x + 128 + length, top + 13, f"{n:,.0f}")

    def lines(self, panel, title, labels, series, log=False, width=335):
        """A line over the labels for each list of numbers; NaN is where there is none."""
        x, y, height = 20 + panel % 2 * 345, 62 + panel // 2 * 208, 140
        self.text("i h", x, y, title)
        left, right, bottom = x + 42, x + width, y + 16 + height
        known = [n for line in series for n in line if n > 0]
        if log:
            low, high = (edge(math.log10(pick(known))) for edge, pick in ((math.floor, min), (math.ceil, max)))
            ticks, scale = [10.0**e for e in range(low, max(high, low + 1) + 1)], math.log10
        else:
            step = next(step for e in range(-9, 15) for step in (10.0**e, 2 * 10.0**e, 5 * 10.0**e) if max(known) / step <= 5)
            ticks, scale = [step * i for i in range(math.ceil(max(known) / step) + 1)], float
        to_y = lambda n: bottom - (scale(n) - scale(ticks[0])) / (scale(ticks[-1]) - scale(ticks[0])) * height
        to_x = lambda i: left + 16 + i * (right - left - 56) / max(1, len(labels) - 1)
        self.shapes.append(f'<path class="l" d="{"".join(f"M{left} {to_y(n):.0f}H{right}" for n in ticks)}"/>')
        for n in ticks:
            self.text("s t e", left - 6, to_y(n) + 4, tick(n))
        for i, label in enumerate(labels):
            self.text("s t m", to_x(i), bottom + 18, label)
        for line, (fill, stroke, mark) in zip(series, SERIES):
            points = [(to_x(i), to_y(n)) for i, n in enumerate(line) if n > 0]
            self.shapes.append(f'<path class="{stroke}" stroke-width="2" d="M{"L".join(f"{x:.0f} {y:.0f}" for x, y in points)}"/>')
            for x, y in points:
                self.text(f"{fill} t m", x, y + 4, mark)

    def save(self, path, title, height):
        path.parent.mkdir(parents=True, exist_ok=True)
        used = {name for shape in self.shapes for css in re.findall('class="([^"]*)"', shape) for name in css.split()}
        rules = lambda which: "".join(f".{name}{{{what}:{colors[which]}}}" for name, (what, *colors) in SHADES.items() if name in used)
        shades = f"<style>{rules(0)}@media(prefers-color-scheme:dark){{{rules(1)}}}</style>"
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" role="img" aria-labelledby="t">\n'
            f'<title id="t">{escape(title)}</title>\n{STYLE}{shades}\n<rect class="g" x=".5" y=".5" width="719" '
            f'height="{height - 1}" rx="12"/>\n' + "\n".join(self.shapes) + "\n</svg>\n")
