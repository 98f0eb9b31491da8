"""One sitting on a CPU: plait and its peers over the same work, each beside what the machine would allow.

    python benchmarks/cpu.py [--peers FILE.toml] [--weights as-stored,bf16] [--only decode_1,tree] [--repeat 3]
                             [--curves] [--small] [--json OUT]

Servers run one after the other and are ended before the next starts. A figure is the median of `--repeat` runs, with
the share of the machine's limit behind it (see `sitting/limits.py`); a ratio is against the best peer. `--curves` adds
the widths and prefix lengths of the plots (`benchmarks/plots.py` draws them); `--small` only tries the script.
Run it with nothing else on the machine. Peers' files: see `sitting/servers.py`.

Knows: the order of a sitting. Must not know: the wire, texts, processes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from server_comparison.client import ServerError
from server_comparison.roofline import Machine, Model, describe, measure
from server_comparison.servers import Server, Started, own_server, read_servers, started
from server_comparison.signals import unwind_on_signal
from server_comparison.table import table
from server_comparison.workloads import CURVES, FULL, SMALL, WORKLOADS, Done, Size, Work, prefix_curve, run

from plait.runtime.executor.host_machine import host_kv_cache_budget
from plait.runtime.model_files.locate import locate_model

FORM_BITS = {"bf16": 16.0, "int8": 9.0, "int4": 5.0}  # a block of 32 has 4 bytes of scale and minimum


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", type=Path, help="a TOML file of servers")
    parser.add_argument("--weights", default="as-stored,bf16", help="plait's forms, each a server; empty: none")
    parser.add_argument("--only", help="workloads, by name")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    unwind_on_signal()
    size = SMALL if options.small else FULL
    works = {**WORKLOADS, **(CURVES | prefix_curve(size) if options.curves else {})}
    if options.only:
        works = {name: works[name] for name in options.only.split(",")}
    model = describe(locate_model(None))
    machine = measure()
    print(f"limits: {machine.read_b_s / 1e9:.1f} GB/s read, {machine.bf16_flop_s / 1e9:.0f} GFLOP/s bf16", flush=True)
    servers = [own_server(form) for form in filter(None, options.weights.split(","))]
    servers += read_servers(options.peers) if options.peers else []
    sitting = Sitting(works, size, options.repeat, machine, model)
    found = {server.name: asyncio.run(sitting.sit(server)) for server in servers}
    result = {
        "when": time.strftime("%Y-%m-%d"),
        "machine": {"cpu": _processor(), **machine.as_json()},
        "small": options.small,
        "servers": found,
    }
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return int(any("error" in server for server in found.values()))


@dataclass
class Sitting:
    """The work, and what is known so far: `uncached_by_workload` are the tokens that a workload's prompts made a server compute."""

    works: dict[str, Work]
    size: Size
    repeat: int
    machine: Machine
    model: Model
    uncached_by_workload: dict[str, int] = field(default_factory=dict)

    async def sit(self, server: Server) -> dict[str, Any]:
        """Everything one server gave; an `error` instead where it did not start or broke."""
        found: dict[str, Any] = {"most": server.most, "workloads": {}}
        try:
            async with started(server) as one:
                found["start_s"] = round(one.start_s, 2)
                for name, work in self.works.items():
                    if name.startswith("decode_") and int(name.removeprefix("decode_")) > server.most:
                        continue
                    found["workloads"][name] = row = await self.measured(one, name, work)
                    print(f"{server.name:18} {name:14} {json.dumps(row)}", flush=True)
                found |= memory(server, one, self.model)
        except ServerError as error:
            found["error"] = str(error)
            print(f"{server.name}: {error}", file=sys.stderr, flush=True)
        return found

    async def measured(self, one: Started, name: str, work: Work) -> dict[str, float | str]:
        """The median of some runs; an `error` where the server refused."""
        runs: list[Done] = []
        try:
            for _ in range(self.repeat):
                runs.append(await run(work, one.chat, self.size, time.time_ns()))
        except ServerError as error:
            return {"error": str(error)}
        done = sorted(runs, key=lambda each: each.wall)[len(runs) // 2]
        if done.prompt_tokens:
            self.uncached_by_workload.setdefault(name, done.uncached_prompt_tokens)
        else:  # a server that does not tell: another's count, for texts drawn in the same way
            done = replace(done, uncached_prompt_tokens=self.uncached_by_workload.get(name, 0))
        return {
            "wall_s": round(done.wall, 3),
            "out_tok_s": round(done.out_tokens / done.wall, 1),
            "prompt_tok_s": round(done.uncached_prompt_tokens / done.wall, 1),
            "ttft_s": round(statistics.median(each.ttft for each in runs), 4),
            "spread": round(max(each.wall for each in runs) / min(each.wall for each in runs), 2),
            "limit_share": round(self.model.lower_bound_s(self.machine, done) / done.wall, 3),
        }


def memory(server: Server, one: Started, model: Model) -> dict[str, int]:
    """Bytes resident, and of our own servers those beyond weights and KV cache."""
    form = server.name.split()[1] if server.name.startswith("plait ") else ""
    budget = host_kv_cache_budget() if form else 0
    held = one.memory(budget)
    if held is None:
        return {}
    weights = model.weight_bytes if form == "as-stored" else int(model.parameters * FORM_BITS.get(form, 0.0) / 8)
    beyond = {"beyond_weights_and_kv": held.resident - held.kv - weights} if form else {}
    return {"resident": held.resident, "kv_resident": held.kv, **beyond}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
