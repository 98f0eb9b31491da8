"""Draws the pictures of the pages, each in light and dark, from data.json and from a table that a benchmark wrote.

    python docs/pictures/make_pictures.py

record.py makes data.json by running the programs of the pages. A test compares the files with what this script draws.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))

from drawing import THEMES, WIDTH, Drawing, fitted, text_width  # noqa: E402  (the folder is no package)

LEFT, RIGHT = 16, WIDTH - 16


def forks(data: dict[str, Any], theme: str) -> Drawing:
    """The branches of the README's program, over the prefix that they share."""
    summary, verdict, *details = data["review"]["spans"]
    messages = data["review"]["messages"]
    shared = max(min(span["cached_tokens"] for span in details), 1)
    d = Drawing(theme, 464, "Two branches of a program continue one prefix, which the cache holds once")
    d.text(LEFT, 24, f"One prefix of {shared} tokens, in the cache once", bold=True)
    d.line("M 26 38 V 248", "blue", 3)
    rows = [
        ("blue", messages[0]["content"], f"{summary['computed_tokens']} tokens computed"),
        ("green", summary["text"], f"summary: {summary['sampled_tokens']} generated"),
        ("blue", messages[2]["content"], f"{verdict['computed_tokens']} computed, {verdict['cached_tokens']} cached"),
        ("green", verdict["text"], "verdict: the likelier of yes and no"),
    ]
    for number, (colour, text, note) in enumerate(rows):
        _turn(d, 40, 38 + 53 * number, RIGHT - 40, colour, text, note)
    for number, span in enumerate(details):
        x, topic = 40 + 294 * number, ("price", "quality")[number]
        d.line(f"M 26 246 C 26 272 {x - 14} 248 {x - 14} 276 V 372 C {x - 14} 404 26 380 26 410", "blue", 3)
        note = f"{span['computed_tokens']} computed, {span['cached_tokens']} cached"
        _turn(d, x, 272, 250, "blue", f"What about the {topic}?", note)
        _turn(d, x, 325, 250, "green", span["text"], f"detail: {span['sampled_tokens']} generated")
    d.line("M 26 408 V 424", "blue", 3)
    d.text(40, 424, 's["detail"] is the list of both', mono=True)
    d.text(40, 450, data["review"]["usage"].splitlines()[0] + " (a token read twice counts twice)", "grey", 14)
    return d


def _turn(d: Drawing, x: float, y: float, width: float, colour: str, text: str, note: str) -> None:
    d.box(x, y, width, 46, colour)
    d.text(x + 10, y + 19, fitted(text, width - 18, 14), size=14)
    d.text(x + 10, y + 38, note, colour, 14)


def speed(data: dict[str, Any], theme: str) -> Drawing:
    """Programs and chats with shared prefixes beside vLLM: the table of the performance page."""
    page = (FOLDER.parent / "performance.md").read_text(encoding="utf-8")
    table = page.partition("<!-- figures")[2].partition("<!-- end")[0]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) s [^|]*\| ([\d.]+) s", table, re.MULTILINE)
    found = {name: (float(ours), float(theirs)) for name, ours, theirs in rows}
    date = re.search(r"^(\d{4}-\d\d-\d\d), (.*?), (\d+) threads", table, re.MULTILINE)
    assert date is not None
    labels = {
        "tree": "Tree of thought, 3 branches, depth 3",
        "shared_prefix": "32 requests behind one system prompt",
        "chats": "8 chats of 4 turns at once",
    }
    d = Drawing(theme, 262, "Seconds of three workloads with plait and vLLM")
    longest = max(theirs for _, theirs in (found[name] for name in labels))
    d.text(LEFT, 24, "Seconds, less is better", bold=True)
    for number, (name, label) in enumerate(labels.items()):
        y = 52 + 66 * number
        d.text(LEFT, y, label)
        for row, (who, colour, seconds) in enumerate(
            zip(("plait", "vLLM"), ("green", "grey"), found[name], strict=True)
        ):
            top = y + 8 + 19 * row
            d.box(LEFT, top, 440 * seconds / longest, 16, colour, strong=True, radius=2)
            d.text(LEFT + 440 * seconds / longest + 8, top + 13, f"{who} {seconds:.1f} s", colour, 14)
    d.text(LEFT, 250, f"SmolLM2-135M, {date[3]} threads of an {date[2]}, without a GPU, {date[1]}", "grey", 14)
    return d


def batch(data: dict[str, Any], theme: str) -> Drawing:
    """The prompt tokens of the items of a batch."""
    items = data["batch"]
    computed, total = sum(item[1] for item in items), sum(map(sum, items))
    d = Drawing(theme, 236, "Of the prompts of a batch only what differs is computed")
    d.text(LEFT, 24, f"{len(items)} prompts of {sum(items[0])} tokens that differ in their last words", bold=True)
    step, height = (RIGHT - LEFT) / len(items), 130
    for number, (cached, new) in enumerate(items):
        top = max(4.0, height * new / (new + cached))
        x = LEFT + step * number
        if cached:
            d.box(x, 44 + top, step - 4, height - top, "blue", radius=2)
        d.box(x, 44, step - 4, top, "blue", strong=True, radius=2)
    d.key(
        200, ("blue", True, f"computed: {computed:,} tokens"), ("blue", False, f"from the cache: {total - computed:,}")
    )
    d.text(LEFT, 224, "The first item computes the common text; the others reuse it in the same step.", "grey", 14)
    return d


def agent(data: dict[str, Any], theme: str) -> Drawing:
    """The calls of the tutorial's agent, by where their tokens come from."""
    spans = data["agent"]["spans"]
    kinds = (("cached_tokens", "blue", False), ("computed_tokens", "blue", True))
    kinds += (("forced_tokens", "yellow", False), ("sampled_tokens", "green", True))
    longest = max(sum(span[kind] for kind, _, _ in kinds) for span in spans)
    d = Drawing(theme, 54 * len(spans) + 92, "What each call of an agent computes")
    d.text(LEFT, 24, "The tokens of each call of the agent", bold=True)
    for number, span in enumerate(spans):
        y, x = 48 + 54 * number, float(LEFT)
        call = re.search(r'"name": "(\w+)", "arguments": \{(.*?)\}', span["text"])
        label = span["name"] if call is None else f"{span['name']}: {call[1]}({call[2]})"
        d.text(LEFT, y, fitted(label.replace('"', ""), RIGHT - LEFT))
        for kind, colour, strong in kinds:
            width = (RIGHT - LEFT) * span[kind] / longest
            if span[kind]:
                d.box(x, y + 8, max(width - 2, 2), 20, colour, strong=strong, radius=2)
                if not strong and width > 110:
                    d.text(x + 8, y + 23, f"{span[kind]} tokens", colour, 14)
            x += width
    y = 54 * len(spans) + 60
    d.key(y, ("blue", False, "prompt from the cache"), ("blue", True, "prompt computed"))
    d.key(y + 22, ("yellow", False, "forced by the tool's schema"), ("green", True, "chosen by the model"))
    return d


def trace(data: dict[str, Any], theme: str) -> Drawing:
    """The trace of the README's program: a lane for each branch over time."""
    spans, parents = data["review"]["spans"], data["review"]["parents"]
    seconds = max(span["end_s"] for span in spans)
    left, scale = 96, (RIGHT - 96) / seconds
    d = Drawing(theme, 222, "A trace: the calls of a program over time, a lane for each branch")
    for number in range(int(seconds / 0.5) + 1):
        x = left + 0.5 * number * scale
        d.line(f"M {x:.1f} 34 V 158", "grey", 0.5)
        d.text(x, 24, f"{0.5 * number:g} s", "grey", 14, "middle")
    for branch in range(len(parents)):
        d.text(LEFT, 62 + 42 * branch, "main" if branch == 0 else f"branch {branch}")
    for span in spans:
        x, y = left + span["start_s"] * scale, 42 + 42 * span["branch_id"]
        prompt, width = span["prefill_s"] * scale, (span["end_s"] - span["start_s"]) * scale
        tokens = span["cached_tokens"] + span["computed_tokens"]
        cached = prompt * span["cached_tokens"] / tokens
        answer = span["sampled_tokens"] > 0
        d.box(x, y, max(cached, 1), 30, "blue", radius=2)
        d.box(x + cached, y, max((prompt if answer else width) - cached, 2), 30, "blue", strong=True, radius=2)
        if answer:
            d.box(x + prompt, y, max(width - prompt - 1, 2), 30, "green", radius=2)
            d.text(x + prompt + 8, y + 20, span["name"])
        else:
            d.text(x + width / 2, y - 4, span["name"], size=14, anchor="middle")
    d.key(186, ("blue", False, "prompt from the cache"), ("blue", True, "computed"), ("green", False, "generated"))
    d.text(LEFT, 212, "Both branches start when the verdict is known, and run side by side.", "grey", 14)
    return d


def mask(data: dict[str, Any], theme: str) -> Drawing:
    """The tokens of a value under a schema: which were forced, and how many were allowed at the others."""
    tokens = data["mask"]
    sampled = [token for token in tokens if not token["is_forced"]]
    d = Drawing(theme, 126 + 40 * len(sampled), "The tokens that a JSON schema allows while a value is written")
    d.text(LEFT, 24, f"{len(tokens)} tokens: the model chooses {len(sampled)}, the schema forces the others", bold=True)
    x, y, number = float(LEFT), 40.0, 0
    for token in tokens:
        width = text_width(token["text"], 15, mono=True) + 10
        if x + width > RIGHT:
            x, y = LEFT, y + 36
        colour = "grey" if token["is_forced"] else "green"
        d.box(x, y, width, 28, colour)
        d.text(x + 5, y + 19, token["text"], "text" if colour == "green" else "grey", mono=True)
        x += width + 3
    y += 62
    for number, token in enumerate(sampled):
        top = y + 40 * number
        width = text_width(token["text"], 15, mono=True) + 10
        d.box(LEFT, top - 20, width, 28, "green")
        d.text(LEFT + 5, top - 1, token["text"], mono=True)
        others = [text for text in token["examples"] if text != token["text"]] if token["allowed"] < 20 else []
        more = f": also {'  '.join(others)}" if others else ""
        d.text(LEFT + 84, top, f"{token['allowed']:,} of 49,152 tokens allowed{more}", "grey", 14)
    return d


def cache(data: dict[str, Any], theme: str) -> Drawing:
    """The radix tree of a small cache, before and after a second program needed room."""
    before, after = (list(_rooted(tree)) for tree in data["cache"])
    kept = {path[: len(path)] for path, _, _ in after}
    d = Drawing(theme, 704, "The radix tree before and after another program needed room")
    d.text(LEFT, 24, "After a program with three branches", bold=True)
    _tree(d, 40, [(path, tokens, depth, False) for path, tokens, depth in before])
    d.text(LEFT, 258, "After the same program for another city, in a cache that is full", bold=True)
    gone = [entry for entry in before if not any(other.startswith(entry[0]) for other in kept)]
    rows = [(path, tokens, depth, False) for path, tokens, depth in after]
    for path, tokens, _ in gone:
        parent = max((i for i, row in enumerate(rows) if path.startswith(row[0])), key=lambda i: len(rows[i][0]))
        place = parent + 1
        while place < len(rows) and rows[place][3] and rows[place][0].startswith(rows[parent][0]):
            place += 1
        rows.insert(place, (path, tokens, rows[parent][2] + 1, True))
    _tree(d, 274, rows)
    d.key(690, ("blue", False, "in the cache, once"), ("red", None, "evicted: least recently used first"))
    return d


def _rooted(tree: list[dict[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Yields (whole text from the root, tokens of the node, depth) of each node."""
    path: list[str] = []
    for node in tree:
        path[node["depth"] :] = [node["text"]]
        yield "".join(path), node["tokens"], node["depth"]


def _tree(d: Drawing, top: float, rows: list[tuple[str, int, int, bool]]) -> None:
    """Draws a node per row, indented by its depth."""
    tops: dict[int, float] = {}
    paths: dict[int, str] = {}
    for number, (path, tokens, depth, is_gone) in enumerate(rows):
        y, x = top + 26 * number, LEFT + 26 * depth
        own = path[len(paths.get(depth - 1, "")) :]
        if depth:
            d.line(
                f"M {x - 16} {tops[depth - 1] + 22} V {y + 11} H {x}", "red" if is_gone else "blue", 1.5, dashed=is_gone
            )
        width = RIGHT - x - 84
        d.box(x, y, width, 22, "red" if is_gone else "blue", dashed=is_gone, radius=4)
        d.text(x + 8, y + 16, fitted(own.replace("\n", " "), width - 14, 14), "grey" if is_gone else "text", 14)
        d.text(RIGHT, y + 16, f"{tokens} tokens", "red" if is_gone else "blue", 14, "end")
        tops[depth], paths[depth] = y, path


PICTURES: dict[str, Callable[[dict[str, Any], str], Drawing]] = {
    picture.__name__: picture for picture in (forks, speed, batch, agent, trace, mask, cache)
}


def drawn() -> dict[Path, str]:
    """Returns the text of each file."""
    data = json.loads((FOLDER / "data.json").read_text(encoding="utf-8"))
    return {
        FOLDER / f"{name}-{theme}.svg": picture(data, theme).svg()
        for name, picture in PICTURES.items()
        for theme in THEMES
    }


if __name__ == "__main__":
    for path, text in drawn().items():
        path.write_text(text, encoding="utf-8")
