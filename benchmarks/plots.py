"""Plots a report of cpu.py with `--curves`, and writes its table into docs/performance.md.

The plots are tokens per second by the number of streams, and TTFT by the length of the prefix that clients share.

    python benchmarks/plots.py REPORT.json [--out docs/performance]

They are SVG, written here: two line charts need no plotting library. All axes are logarithmic except for the prefix
lengths, which begin at 0.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from server_comparison.table import markdown

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 420, 70, 160, 36, 52
COLOURS = ("#1f6feb", "#d1570a", "#2da44e", "#8250df", "#bf3989", "#57606a")
DARK = (
    '<style>@media (prefers-color-scheme: dark) { [fill="white"] { fill: #161b22 } [fill="#24292f"] { fill: #d1d7e0 } '
    '[stroke="#e3e6ea"] { stroke: #30363d } }</style>'
)
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- figures of a report: benchmarks/plots.py -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels from `low` to `high`, logarithmically or linearly. `ticks`: the labelled values."""

    name: str
    ticks: list[float]
    low: float
    high: float
    is_log: bool

    def pixel(self, value: float) -> float:
        first, last, scaled = (self._scaled(number) for number in (self.ticks[0], self.ticks[-1], value))
        return self.low + (self.high - self.low) * (scaled - first) / ((last - first) or 1.0)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.is_log else value


Lines = dict[str, list[tuple[float, float]]]


def points(report: dict[str, Any], prefix: str, figure: str) -> Lines:
    """Returns, per server, the points (x, figure) of the workloads whose name is `prefix` and the number x."""
    lines: Lines = {}
    for server, result in report["servers"].items():
        values = {
            int(match[1]): row[figure]
            for name, row in result.get("workloads", {}).items()
            if (match := re.fullmatch(prefix + r"(\d+)", name)) and "error" not in row
        }
        if len(values) > 1:
            lines[server] = sorted(values.items())
    return lines


def chart(title: str, x_name: str, y_name: str, lines: Lines, log_x: bool) -> str:
    """Returns a line chart as SVG."""
    xs = sorted({x for line in lines.values() for x, _ in line})
    ys = [y for line in lines.values() for _, y in line]
    across = Axis(x_name, xs, LEFT, WIDTH - RIGHT, log_x)
    up = Axis(y_name, _round_numbers(min(ys), max(ys)), HEIGHT - BOTTOM, TOP, True)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             DARK,
             _text(LEFT, 20, title, size=14)]  # fmt: skip
    parts += _grid(across, up)
    names = sorted(lines, key=lambda name: -lines[name][-1][1])
    heights = _spread([up.pixel(lines[name][-1][1]) for name in names])
    for name, height in zip(names, heights, strict=True):
        colour = COLOURS[list(lines).index(name) % len(COLOURS)]
        places = [(across.pixel(x), up.pixel(y)) for x, y in lines[name]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across.pixel(x):.1f}" cy="{up.pixel(y):.1f}" r="3" fill="{colour}"/>' for x, y in lines[name]
        ]
        parts.append(_text(across.pixel(lines[name][-1][0]) + 9, height + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>\n"])


def _grid(across: Axis, up: Axis) -> list[str]:
    parts = []
    for value in up.ticks:
        y = up.pixel(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e3e6ea"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for value in across.ticks:
        parts.append(_text(across.pixel(value), HEIGHT - BOTTOM + 18, f"{value:g}", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 12, across.name, anchor="middle"))
    parts.append(f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, up.name, anchor="middle")}</g>')
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#24292f", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{escape(text)}</text>'
    )


def _round_numbers(low: float, high: float) -> list[float]:
    """Returns 1, 2 and 5 times powers of ten, from at or below `low` to at or above `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = [base * 10.0**power for power in powers for base in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low)
    last = min((i for i, step in enumerate(steps) if step >= high), default=len(steps) - 1)
    return steps[first : last + 1] if last > first else steps[first : first + 2]


def _spread(heights: list[float]) -> list[float]:
    """Moves labels, sorted from the top down, such that none is closer than a line to the next."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + 14) if placed else height)
    return placed


def write_page(report: dict[str, Any]) -> None:
    """Writes the report's machine and table between the markers of docs/performance.md."""
    machine, text = report["machine"], PAGE.read_text()
    before, rest = text.split(BEGIN)
    figures = (
        f"{report['when']}, {machine['cpu']}, {machine['threads']} threads, "
        f"{machine['read_b_s'] / 1e9:.0f} GB/s read, {machine['bf16_flop_s'] / 1e9:.0f} GFLOP/s bf16; in brackets the "
        f"share of the machine's limit.\n\n{markdown(report)}\n"
    )
    PAGE.write_text(f"{before}{BEGIN}\n{figures}{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("report", type=Path)
    parser.add_argument("--out", type=Path, default=PAGE.parent / "performance", help="the folder of the pictures")
    parser.add_argument("--page", action="store_true", help="also write the table into docs/performance.md")
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    streams = points(report, "decode_", "out_tok_s")
    prefixes = {
        name: [(x * 1.0, 1e3 * y) for x, y in line] for name, line in points(report, "prefix_", "ttft_s").items()
    }
    if streams:
        picture = chart("Decoding", "streams", "tokens per second", streams, log_x=True)
        (options.out / "streams.svg").write_text(picture)
    if prefixes:
        picture = chart("Time to the first token, cold", "words shared", "milliseconds", prefixes, log_x=False)
        (options.out / "prefix.svg").write_text(picture)
    if options.page and report["small"]:
        parser.error("this report was made with --small; its figures are meaningless")
    if options.page:
        write_page(report)


if __name__ == "__main__":
    main()
