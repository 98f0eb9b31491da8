"""Formats the results of cpu.py as a Markdown table.

A cell is a server's figure and its share of the machine's limit. The last columns are the ratio of the first server to
a peer, and the goal for it.
"""

from __future__ import annotations

from typing import Any

# workload: (key of the figure, unit, whether more is better, goal as (prefix of the peer's name, ratio))
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


def table(servers: dict[str, Any]) -> str:
    """Returns a Markdown table of the results of each server."""
    header = ["", *servers, "ratio", "goal"]
    lines = [header, ["---"] * len(header), *rows(servers)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows(servers: dict[str, Any]) -> list[list[str]]:
    """Returns the rows of the table without its header."""
    rows = []
    for name, (key, unit, more_is_better, goal) in ROWS.items():
        cells = [_cell(server.get("workloads", {}).get(name), key, unit) for server in servers.values()]
        if any(cells):
            comparison = _ratio_and_goal(servers, name, key, more_is_better, goal)
            rows.append([name, *(cell or "-" for cell in cells), *comparison])
    start_times = [_seconds(server.get("start_s")) for server in servers.values()]
    rows.append(["start to first token", *start_times, "", "<= 5 s"])
    rows.append(["memory beyond weights and KV", *map(_memory, servers.values()), "", "<= 300 MB"])
    return rows


def _cell(row: dict[str, Any] | None, key: str, unit: str) -> str:
    if row is None:
        return ""
    if "error" in row:
        return "refused"
    return f"{row[key]:,.4g} {unit} ({row['limit_share']:.0%})"


def _seconds(value: float | None) -> str:
    return f"{value:.1f} s" if value else "-"


def _memory(server: dict[str, Any]) -> str:
    if "beyond_weights_and_kv" in server:
        return f"{server['beyond_weights_and_kv'] / 2**20:.0f} MB"
    return f"{server['resident'] / 2**20:.0f} MB in all" if "resident" in server else "-"


def _ratio_and_goal(
    servers: dict[str, Any], workload: str, key: str, more_is_better: bool, goal: tuple[str, float] | None
) -> tuple[str, str]:
    """Returns the ratio of the first server's figure to that of the goal's peer, and the goal."""
    if goal is None:
        return "", ""
    peer, ratio = goal
    goal_text = f"{'>=' if more_is_better else '<='} {ratio:g} x {peer}"
    figures = {name: server.get("workloads", {}).get(workload, {}).get(key) for name, server in servers.items()}
    first = next(iter(figures.values()))
    peers = [figure for name, figure in figures.items() if name.startswith(peer)]
    if first is None or not peers or peers[0] is None:
        return "-", goal_text
    return f"{first / peers[0]:.2f}", goal_text
