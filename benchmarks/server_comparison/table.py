"""Formats the results of cpu.py as a Markdown table.

A cell is a server's figure and its share of the machine's limit. The last columns are the ratio of the first server to
a peer, and the goal for it.
"""

from __future__ import annotations

from typing import Any

# workload: (key of the figure, unit, the goal's peer, the goal for the ratio); less is better of seconds
ROWS: dict[str, tuple[str, str, str, float]] = {
    "decode_1": ("out_tok_s", "tok/s", "llama.cpp", 1.5),
    "decode_4": ("out_tok_s", "tok/s", "vLLM", 2.4),
    "decode_16": ("out_tok_s", "tok/s", "vLLM", 2.0),
    "decode_64": ("out_tok_s", "tok/s", "vLLM", 1.8),
    "long_prompts": ("prompt_tok_s", "prompt tok/s", "vLLM", 1.0),
    "shared_prefix": ("wall_s", "s", "vLLM", 0.5),
    "chats": ("wall_s", "s", "vLLM", 0.65),
    "tree": ("wall_s", "s", "vLLM", 0.5),
}


def table(servers: dict[str, Any]) -> str:
    """Returns a Markdown table of the results of each server."""
    rows = [["", *servers, "ratio", "goal"], ["---"] * (len(servers) + 3)]
    for name, (key, unit, peer, goal) in ROWS.items():
        found = {server: result.get("workloads", {}).get(name) for server, result in servers.items()}
        if any(found.values()):
            cells = [_cell(row, key, unit) for row in found.values()]
            first, *_ = (row and row.get(key) for row in found.values())
            peers = [row[key] for server, row in found.items() if server.startswith(peer) and row and key in row]
            ratio = f"{first / peers[0]:.2f}" if first and peers else "-"
            rows.append([name, *cells, ratio, f"{'<=' if unit == 's' else '>='} {goal:g} x {peer}"])
    starts = [f"{result['start_s']:.1f} s" if result.get("start_s") else "-" for result in servers.values()]
    rows.append(["start to first token", *starts, "", "<= 5 s"])
    rows.append(["memory beyond weights and KV", *map(_memory, servers.values()), "", "<= 300 MB"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cell(row: dict[str, Any] | None, key: str, unit: str) -> str:
    if row is None or "error" in row:
        return "refused" if row else "-"
    return f"{row[key]:,.4g} {unit} ({row['limit_share']:.0%})"


def _memory(server: dict[str, Any]) -> str:
    if "beyond_weights_and_kv" in server:
        return f"{server['beyond_weights_and_kv'] / 2**20:.0f} MB"
    return f"{server['resident'] / 2**20:.0f} MB in all" if "resident" in server else "-"
