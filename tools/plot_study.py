#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws docs/img/study_*.svg from docs/data/study_*.json and writes the table of docs/math.md from the same data.

With --program PATH the data are made first, by `PATH study NAME --json`. No package beyond Python's own is needed, and the
same data give the same bytes.
"""

import argparse
import json
import math
import pathlib
import subprocess

STUDIES = ("inverse", "paths", "decay")
# a palette that colour-blind readers can tell apart (Okabe and Ito)
BLUE, ORANGE, GREEN, RED, PURPLE, GREY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#777777"
WAYS = [
    ("substitution", "forward substitution", BLUE, "", 3.2),
    ("block_merge", "blocks merged upward", GREEN, "7 3", 2.0),
    ("block_rows", "block rows", PURPLE, "2 3", 1.6),
    ("neumann", "Neumann series", ORANGE, "", 1.8),
    ("doubling", "Neumann doubling", RED, "6 2 1 2", 1.8),
    ("exact_stored", "exact, stored once", GREY, "1 2", 1.4),
]


class Svg:
    def __init__(self, width, height):
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
        ]

    def text(self, x, y, text, anchor="middle", size=12, extra=""):
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{extra}>{text}</text>')

    def line(self, x1, y1, x2, y2, color="#dddddd", width=1.0, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"{dashes}/>')

    def curve(self, points, color, width=1.8, dash=""):
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dashes}/>')

    def cross(self, x, y, color):
        self.line(x - 3, y - 3, x + 3, y + 3, color, 1.6)
        self.line(x - 3, y + 3, x + 3, y - 3, color, 1.6)

    def done(self):
        return "\n".join(self.parts + ["</svg>", ""])


class Panel:
    """A frame with a logarithmic y axis (powers of ten low .. high) and x from 0 to 1."""

    def __init__(self, svg, left, top, width, height, low, high, step):
        self.svg, self.left, self.top, self.width, self.height, self.low, self.high = svg, left, top, width, height, low, high
        for power in range(low, high + 1, step):
            y = self.y(10.0**power)
            svg.line(left, y, left + width, y)
            svg.text(left - 6, y + 4, f"1e{power}", "end", 10)
        svg.line(left, top, left, top + height, "#000000")
        svg.line(left, top + height, left + width, top + height, "#000000")

    def x(self, share):
        return self.left + share * self.width

    def y(self, value):
        power = self.low if value <= 0 else min(max(math.log10(value), self.low), self.high)
        return self.top + self.height * (self.high - power) / (self.high - self.low)

    def tick(self, share, label):
        self.svg.text(self.x(share), self.top + self.height + 14, label, size=10)


def legend(svg, entries, x, y, columns, pitch):
    for i, (label, color, dash, width) in enumerate(entries):
        left, top = x + (i % columns) * pitch, y + (i // columns) * 18
        svg.line(left, top, left + 28, top, color, width, dash)
        svg.text(left + 34, top + 4, label, "start", 11)


def draw_inverse(data):
    arithmetics = ["fp32", "bf16", "fp16"]
    sizes = sorted({row["size"] for row in data["rows"]})
    cosines = sorted({row["cosine"] for row in data["rows"]})
    errors = {(r["arithmetic"], r["size"], r["cosine"], r["way"]): r["max_error"] for r in data["rows"]}
    svg = Svg(760, 770)
    svg.text(380, 22, "Largest error of the inverse of I + L over the cosine of two keys (no true entry exceeds 1)", size=14)
    for row, arithmetic in enumerate(arithmetics):
        for column, size in enumerate(sizes):
            panel = Panel(svg, 60 + column * 360, 50 + row * 222, 310, 170, -9, 15, 4)
            svg.text(panel.left + 8, panel.top + 14, f"{arithmetic}, {size} x {size}", "start", 12, ' font-weight="bold"')
            for i, cosine in enumerate(cosines):
                panel.tick(i / (len(cosines) - 1), f"{cosine:g}")
            for way, _, color, dash, width in WAYS:
                points, stopped = [], None
                for i, cosine in enumerate(cosines):
                    error = errors[arithmetic, size, cosine, way]
                    if error is None and stopped is None:
                        stopped = panel.x(i / (len(cosines) - 1))
                    elif error is not None:
                        points.append((panel.x(i / (len(cosines) - 1)), panel.y(error)))
                svg.curve(points, color, width, dash)
                if stopped is not None:
                    height = panel.top + (30 if way == "neumann" else 46)
                    svg.cross(stopped, height, color)
                    svg.text(stopped + 8, height + 4, "overflow from here on", "start", 10)
    legend(svg, [(label, color, dash, width) for _, label, color, dash, width in WAYS], 90, 728, 3, 220)
    return svg.done()


def draw_paths(data):
    svg = Svg(760, 400)
    n = data["size"]
    svg.text(380, 22, f"Largest entry of the term of each hop count, {n} tokens (dots: the sum of all terms)", size=14)
    panel = Panel(svg, 60, 44, 640, 280, -8, 20, 4)
    colors = [BLUE, GREEN, ORANGE, RED]
    entries = []
    for row, color in zip(data["rows"], colors):
        points = [(panel.x(m / n), panel.y(term)) for m, term in enumerate(row["terms"]) if term >= 10.0**panel.low]
        svg.curve(points, color)
        svg.parts.append(f'<circle cx="{panel.x(1):.1f}" cy="{panel.y(row["sum"]):.1f}" r="4" fill="{color}"/>')
        entries.append((f"cosine {row['cosine']:g}", color, "", 1.8))
    for m in range(0, n, 8):
        panel.tick(m / n, str(m))
    panel.tick(1, "sum")
    svg.text(380, 356, "edges of a path", size=11)
    legend(svg, entries, 120, 382, 4, 150)
    return svg.done()


def draw_decay(data):
    svg = Svg(760, 400)
    n, first = data["tokens"], data["first_overflow"]
    svg.text(380, 22, f"One anchor for a chunk of {n} tokens with g = {data['gate']:g}, fp32", size=14)
    panel = Panel(svg, 60, 44, 640, 280, -48, 40, 8)
    for name, color in (("near", BLUE), ("far", RED), ("rest", GREEN)):
        points = [(panel.x(t / n), panel.y(v)) for t, v in enumerate(data[name]) if v is not None and v > 0]
        svg.curve(points, color)
    if first is not None:
        svg.line(panel.x(first / n), panel.top, panel.x(first / n), panel.top + panel.height, RED, 1.2, "4 3")
        svg.text(panel.x(first / n) + 6, panel.top + 14, f"far is infinite from row {first} on", "start", 11)
    for t in range(0, n + 1, 16):
        panel.tick(t / n, str(t))
    svg.text(380, 356, "row of the chunk", size=11)
    legend(svg, [("near = exp(G_i - G_s)", BLUE, "", 1.8), ("far = exp(G_s - G_j)", RED, "", 1.8), ("rest = exp(G_e - G_j)", GREEN, "", 1.8)],
           100, 382, 3, 220)
    return svg.done()


def inverse_table(data):
    """Rows of docs/math.md: errors at a few cosines, 64 rows."""
    errors = {(r["arithmetic"], r["size"], r["cosine"], r["way"]): r["max_error"] for r in data["rows"]}
    lines = ["| arithmetic, rows | cosine | " + " | ".join(label for _, label, *_ in WAYS) + " |", "|---|---|" + "---|" * len(WAYS)]
    for arithmetic, size in (("fp32", 16), ("fp32", 64), ("bf16", 16), ("bf16", 64), ("fp16", 16), ("fp16", 64)):
        for cosine in (0, 0.5, 0.9, 0.99):
            cells = [errors[arithmetic, size, cosine, way] for way, *_ in WAYS]
            text = ["overflow" if cell is None else f"{cell:.1e}" for cell in cells]
            lines.append(f"| {arithmetic}, {size} | {cosine:g} | " + " | ".join(text) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- table of docs/data/study_inverse.json -->\n", "\n<!-- end of the table -->"


def with_table(text, data):
    head, rest = text.split(BEGIN)
    return head + BEGIN + inverse_table(data) + END + rest.split(END)[1]


def made(root):
    """path -> text of every file that this program writes."""
    data = {name: json.loads((root / f"docs/data/study_{name}.json").read_text()) for name in STUDIES}
    draw = {"inverse": draw_inverse, "paths": draw_paths, "decay": draw_decay}
    files = {f"docs/img/study_{name}.svg": draw[name](data[name]) for name in STUDIES}
    files["docs/math.md"] = with_table((root / "docs/math.md").read_text(), data["inverse"])
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent, help="the source tree")
    parser.add_argument("--program", help="the program `fastweight`: makes docs/data first")
    options = parser.parse_args()
    if options.program:
        for name in STUDIES:
            answer = subprocess.run([options.program, "study", name, "--json"], capture_output=True, check=True)
            (options.root / f"docs/data/study_{name}.json").write_bytes(answer.stdout)
    for path, text in made(options.root).items():
        (options.root / path).parent.mkdir(parents=True, exist_ok=True)
        (options.root / path).write_text(text)


if __name__ == "__main__":
    main()
