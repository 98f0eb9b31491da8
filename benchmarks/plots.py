"""Draws what a sitting with `--curves` measured: tokens per second against streams, and the time to the first token
against the length of the prefix that clients share; and writes the table of docs/performance.md.

    python benchmarks/plots.py SITTING.json [--out docs/performance]

The pictures are SVG, written here: two charts of lines need no plotting library. Both axes are logarithmic but for the
prefix lengths, which begin at 0. Knows: the JSON of a sitting, SVG. Must not know: how it was measured.
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
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
BEGIN, END = "<!-- figures of a sitting: benchmarks/plots.py -->", "<!-- end of figures -->"


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels from `low` to `high`, by logarithm or evenly; `ticks` are the values that are named."""

    name: str
    ticks: list[float]
    low: float
    high: float
    is_log: bool

    def at(self, value: float) -> float:
        first, last, own = (self._scaled(each) for each in (self.ticks[0], self.ticks[-1], value))
        return self.low + (self.high - self.low) * (own - first) / ((last - first) or 1.0)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.is_log else value


Lines = dict[str, list[tuple[float, float]]]


def points(sitting: dict[str, Any], beginning: str, figure: str) -> Lines:
    """For each server (x, figure) of the workloads called `beginning` and a number."""
    lines: Lines = {}
    for server, found in sitting["servers"].items():
        numbered = {
            int(match[1]): row[figure]
            for name, row in found.get("workloads", {}).items()
            if (match := re.fullmatch(beginning + r"(\d+)", name)) and "error" not in row
        }
        if len(numbered) > 1:
            lines[server] = sorted(numbered.items())
    return lines


def chart(title: str, x_name: str, y_name: str, lines: Lines, log_x: bool) -> str:
    """One SVG picture."""
    xs = sorted({x for line in lines.values() for x, _ in line})
    ys = [y for line in lines.values() for _, y in line]
    across = Axis(x_name, xs, LEFT, WIDTH - RIGHT, log_x)
    up = Axis(y_name, _round_numbers(min(ys), max(ys)), HEIGHT - BOTTOM, TOP, True)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
             _text(LEFT, 20, title, size=14)]  # fmt: skip
    parts += _grid(across, up)
    names = sorted(lines, key=lambda name: -lines[name][-1][1])
    heights = _apart([up.at(lines[name][-1][1]) for name in names])
    for name, height in zip(names, heights, strict=True):
        colour = COLOURS[list(lines).index(name) % len(COLOURS)]
        places = [(across.at(x), up.at(y)) for x, y in lines[name]]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across.at(x):.1f}" cy="{up.at(y):.1f}" r="3" fill="{colour}"/>' for x, y in lines[name]
        ]
        parts.append(_text(across.at(lines[name][-1][0]) + 9, height + 4, name, colour=colour))
    return "\n".join([*parts, "</svg>\n"])


def _grid(across: Axis, up: Axis) -> list[str]:
    parts = []
    for value in up.ticks:
        y = up.at(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#e3e6ea"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
    for value in across.ticks:
        parts.append(_text(across.at(value), HEIGHT - BOTTOM + 18, f"{value:g}", anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 12, across.name, anchor="middle"))
    parts.append(f'<g transform="translate(16 {HEIGHT / 2}) rotate(-90)">{_text(0, 0, up.name, anchor="middle")}</g>')
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#24292f", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{escape(text)}</text>'
    )


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from one at or below `low` to one at or above `high`."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = [base * 10.0**power for power in powers for base in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= low)
    last = min((i for i, step in enumerate(steps) if step >= high), default=len(steps) - 1)
    return steps[first : last + 1] if last > first else steps[first : first + 2]


def _apart(heights: list[float]) -> list[float]:
    """The labels' heights, from the top down, none nearer than a line to the next."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + 14) if placed else height)
    return placed


def write_page(sitting: dict[str, Any]) -> None:
    """Puts the sitting's table and machine between the marks of the page."""
    machine, text = sitting["machine"], PAGE.read_text()
    before, rest = text.split(BEGIN)
    figures = (
        f"{sitting['when']}, {machine['cpu']}, {machine['threads']} threads, "
        f"{machine['read_b_s'] / 1e9:.0f} GB/s read, {machine['bf16_flop_s'] / 1e9:.0f} GFLOP/s bf16; in brackets the "
        f"share of the machine's limit.\n\n{markdown(sitting)}\n"
    )
    PAGE.write_text(f"{before}{BEGIN}\n{figures}{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sitting", type=Path)
    parser.add_argument("--out", type=Path, default=PAGE.parent / "performance", help="the folder of the pictures")
    parser.add_argument("--page", action="store_true", help="also write the table into docs/performance.md")
    options = parser.parse_args()
    sitting = json.loads(options.sitting.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    streams = points(sitting, "decode_", "out_tok_s")
    prefixes = {
        name: [(x * 1.0, 1e3 * y) for x, y in line] for name, line in points(sitting, "prefix_", "ttft_s").items()
    }
    if streams:
        picture = chart("Decoding", "streams", "tokens per second", streams, log_x=True)
        (options.out / "streams.svg").write_text(picture)
    if prefixes:
        picture = chart("Time to the first token, cold", "words shared", "milliseconds", prefixes, log_x=False)
        (options.out / "prefix.svg").write_text(picture)
    if options.page and sitting["small"]:
        parser.error("this sitting only tried the script; its figures say nothing")
    if options.page:
        write_page(sitting)


if __name__ == "__main__":
    main()
