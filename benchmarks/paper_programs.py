"""The SGLang paper's programs run by plait, compared with the same programs as stateless requests to an OpenAI server.

    python benchmarks/paper_programs.py --peers peers.toml [--named vLLM]   # see server_comparison/servers.py
    python benchmarks/paper_programs.py --peer http://127.0.0.1:8000        # a server that already runs
    python benchmarks/paper_programs.py                                     # plait's own `plait serve`

Each program of examples/ runs for a few users at once, from an empty cache. Reported are wall time, prompt tokens
computed, and cache hits relative to an ideal cache (paper/ideal_cache.py). On the peer, each call posts its whole
text, and calls of branches and batches run concurrently (paper/stateless_client.py), as with a client of that server.
plait runs first, and has ended before the peer starts. Decoding is greedy, but the weights, and the tokens at the
boundary between two calls, differ, so answers and their lengths may differ.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common.signals import unwind_on_signal
from paper.stateless_client import StatelessClient
from paper.timing import FailedRun, Measurement, measure_peer, measure_plait
from paper.workloads import UNSHARED, Work, workloads
from server_comparison.client import ServerError
from server_comparison.servers import Server, own_server, read_servers, started

import plait
from plait.runtime.errors import PlaitError
from plait.runtime.tokenizer.tokenizer import Tokenizer

Side = dict[str, Measurement | FailedRun]
GOAL_OF_BEST, GOAL_WALL = 0.96, 0.5


def main() -> int:
    options = _options()
    unwind_on_signal()
    works = {name: work for name, work in workloads(options.size).items() if not options.only or name in options.only}
    server = _peer(options)
    weight_formats = options.weights.split(",")
    results: dict[str, Side] = {}
    for weight_format in weight_formats:
        with plait.Runtime(options.model, weights=weight_format, progress=False) as runtime:
            tokenizer = runtime.client.tokenizer
            results[f"plait {weight_format}"] = _side(
                f"plait {weight_format}", works, measure_plait, runtime.client, options.rounds
            )
    if server is not None:
        results[server.name] = _peers_side(server, works, tokenizer, options.rounds)
    print(table(results, list(works)))
    print(f"Load when it ended: {os.getloadavg()[0]:.1f}; a run is the median of {options.rounds}.")
    return int(any(isinstance(row, FailedRun) for rows in results.values() for row in rows.values()))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--peers", type=Path, metavar="FILE", help="servers; see server_comparison/servers.py")
    where.add_argument("--peer", metavar="URL", help="an OpenAI server that runs already; without /v1")
    where.add_argument("--alone", action="store_true", help="no peer")
    parser.add_argument("--named", default="vLLM", help="the server to take of --peers")
    parser.add_argument("--weights", default="as-stored", help="plait's forms of the weights, each a side of its own")
    parser.add_argument("--model", help="what plait runs; the peer must serve the same. Default: the embedded model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=4, help="scales the number of users and items")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="programs of the table")
    return parser.parse_args()


def _peer(options: argparse.Namespace) -> Server | None:
    if options.alone:
        return None
    if options.peer:
        return Server("peer", options.peer, "")
    if options.peers is None:
        return replace(own_server("as-stored"), name="plait serve")
    named = {server.name: server for server in read_servers(options.peers)}
    if options.named not in named:
        raise SystemExit(f"{options.peers} has no server {options.named!r}, but {', '.join(named)}")
    return named[options.named]


def _peers_side(server: Server, works: dict[str, Work], tokenizer: Tokenizer, rounds: int) -> Side:
    """Returns the peer's rows. If it does not start or answer, each row says why, so that plait's rows are not lost."""
    try:
        with started(server), contextlib.closing(StatelessClient(server.url, tokenizer)) as peer:
            return _side(server.name, works, measure_peer, peer, rounds)
    except (ServerError, PlaitError) as error:
        return dict.fromkeys(works, FailedRun(f"it did not start: {error}"))


def _side(name: str, works: dict[str, Work], measure: Any, backend: Any, rounds: int) -> Side:
    """Returns a row for each program. The row of a program that fails is its error."""
    rows: Side = {}
    for work_name, work in works.items():
        try:
            took = measure(work, backend, rounds)
        except PlaitError as error:
            took = FailedRun(f"{type(error).__name__}: {error}")
        rows[work_name] = took
        print(f"{name:18} {work_name:18} {json.dumps(took._asdict())}", file=sys.stderr, flush=True)
    return rows


def table(found: dict[str, Side], names: list[str]) -> str:
    """Returns a Markdown table with a row for each program. The ratio is the first side's wall time to the last one's.
    A program that a side did not finish is marked in its row and left out of the sums, with the reason below."""
    first, last = next(iter(found)), list(found)[-1]
    sides = " | ".join(found)
    lines = [
        f"| program | {sides} | ratio | output | computed | cached | of the best |",
        "|---|" + "---|" * (len(found) + 5),
    ]
    finished_by_all = [name for name in names if not any(isinstance(rows[name], FailedRun) for rows in found.values())]
    for name in names:
        walls = " | ".join(_wall(rows[name]) for rows in found.values())
        lines.append(f"| {name} | {walls} | {_compared(found[first][name], found[last][name])} |")
    sharing = [name for name in finished_by_all if name not in UNSHARED]
    sums = {side: [took for name in sharing if isinstance(took := rows[name], Measurement)]
            for side, rows in found.items()}  # fmt: skip
    if sums[first]:
        walls_s = [sum(took.seconds for took in measurements) for measurements in sums.values()]
        ratio = f"{walls_s[0] / walls_s[-1]:.2f} (goal {GOAL_WALL})"
        best = f"{_least(sums[first])} (goal {GOAL_OF_BEST:.0%})"
        walls = " | ".join(f"{wall:.2f} s" for wall in walls_s)
        lines.append(f"| **those that share** | {walls} | {ratio} | | | | {best} |")
    broken = [
        (side, name, row) for side, rows in found.items() for name, row in rows.items() if isinstance(row, FailedRun)
    ]
    return "\n".join([*lines, *(f"\n{side} did not finish {name}: {row.why}" for side, name, row in broken)])


def _wall(row: Measurement | FailedRun) -> str:
    return "failed" if isinstance(row, FailedRun) else f"{row.seconds:.2f} s"


def _compared(mine: Measurement | FailedRun, other: Measurement | FailedRun) -> str:
    """Returns the columns from the ratio on."""
    if isinstance(mine, FailedRun) or isinstance(other, FailedRun):
        return "- | - | - | - | -"
    of_best = "-" if mine.of_best is None else f"{mine.of_best:.1%}"
    counts = f"{mine.output_tokens:,} / {other.output_tokens:,} | {mine.computed:,} / {other.computed:,}"
    return f"{mine.seconds / other.seconds:.2f} | {counts} | {mine.cached:.1%} / {other.cached:.1%} | {of_best}"


def _least(rows: list[Measurement]) -> str:
    shares = [share for row in rows if (share := row.of_best) is not None]
    return f"at least {min(shares):.1%}" if shares else "-"


if __name__ == "__main__":
    sys.exit(main())
