"""A sitting as text: every server's figures with their share of the machine's limit, and the first server's ratio to
the peer that its goal names. Also Markdown, for the documentation.

Knows: the JSON of a sitting. Must not know: how it came about.
"""

from __future__ import annotations

from typing import Any

# row: (key of the figure, unit, whether more is better, goal against which peer: (name's beginning, ratio))
ROWS: dict[str, tuple[str, str, bool, tuple[str, float] | None]] = {
    "decode_1": ("out_tok_s", "tok/s", True, ("llama.cpp", 1.5)),
    "decode_4": ("out_tok_s", "tok/s", True, ("vLLM", 2.4)),
    "decode_16": ("out_tok_s", "tok/s", True, ("vLLM", 2.0)),
    "decode_64": ("out_tok_s", "tok/s", True, ("vLLM", 1.8)),
    "long_prompts": ("prompt_tok_s", "prompt tok/s", True, ("vLLM", 1.0)),
    "shared_prefix": ("wall_s", "s", False, ("vLLM", 0.5)),
    "chats": ("wall_s", "s", False, ("vLLM", 0.65)),
    "tree": ("wall_s", "s", False, ("vLLM", 0.5)),
}


def table(sitting: dict[str, Any]) -> str:
    """The rows, aligned, the sitting's first server compared."""
    lines = [["", *sitting["servers"], "ratio", "goal"], *rows(sitting)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def markdown(sitting: dict[str, Any]) -> str:
    """The same as a table of a documentation page."""
    head = ["", *sitting["servers"], "ratio", "goal"]
    lines = [head, ["---"] * len(head), *rows(sitting)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows(sitting: dict[str, Any]) -> list[list[str]]:
    servers = sitting["servers"]
    found = []
    for name, (key, unit, more, goal) in ROWS.items():
        cells = [_cell(server.get("workloads", {}).get(name), key, unit) for server in servers.values()]
        if any(cells):
            found.append([name, *(cell or "-" for cell in cells), *_against(servers, name, key, more, goal)])
    found.append(
        ["start to first token", *(_seconds(server.get("start_s")) for server in servers.values()), "", "<= 5 s"]
    )
    held = [server.get("beyond_weights_and_kv", server.get("resident")) for server in servers.values()]
    marks = ["" if "beyond_weights_and_kv" in server else " in all" for server in servers.values()]
    cells = ["-" if each is None else f"{each / 2**20:.0f} MB{mark}" for each, mark in zip(held, marks, strict=True)]
    found.append(["memory beyond weights and KV", *cells, "", "<= 300 MB"])
    return found


def _cell(row: dict[str, Any] | None, key: str, unit: str) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "refused"
    return f"{row[key]:,.4g} {unit} ({row['limit_share']:.0%})"


def _seconds(value: float | None) -> str:
    return f"{value:.1f} s" if value else "-"


def _against(
    servers: dict[str, Any], name: str, key: str, more: bool, goal: tuple[str, float] | None
) -> tuple[str, str]:
    """The first server's figure through the goal's peer's, and the goal."""
    if goal is None:
        return "", ""
    peer, ratio = goal
    wanted = f"{'>=' if more else '<='} {ratio:g} x {peer}"
    first = next(iter(servers.values())).get("workloads", {}).get(name, {}).get(key)
    theirs = [s.get("workloads", {}).get(name, {}).get(key) for n, s in servers.items() if n.startswith(peer)]
    if first is None or not theirs or theirs[0] is None:
        return "-", wanted
    return f"{first / theirs[0]:.2f}", wanted
