"""Compares plait with its peers on a CPU, on the same workloads and against the machine's limits.

    python benchmarks/cpu.py [--peers FILE.toml] [--weights as-stored,bf16] [--only decode_1,tree] [--repeat 3]
                             [--small]

Servers run one after the other; each is ended before the next starts. A figure is the median of `--repeat` runs, with
its share of the machine's limit (see `server_comparison/roofline.py`). `--weights`: a server of plait for each format.
`--small` only tests the script. Run it with
nothing else on the machine. `server_comparison/servers.py` describes the file of peers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from common.options import parsed
from common.signals import unwind_on_signal
from server_comparison.client import ServerError
from server_comparison.roofline import Machine, Model, describe, measure, processor_name
from server_comparison.servers import Server, Started, own_server, read_servers, started
from server_comparison.table import table
from server_comparison.workloads import FULL, SMALL, WORKLOADS, Done, Size, Work, run

from plait.runtime.model_files.locate import locate_model

WEIGHT_BITS = {"bf16": 16.0, "int8": 9.0, "int4": 5.0}  # a block of 32 has 4 bytes of scale and minimum


def main() -> int:
    options = parsed(__doc__, peers=None, weights="as-stored,bf16", only=None, repeat=3, small=False)
    unwind_on_signal()
    size = SMALL if options.small else FULL
    works = {name: WORKLOADS[name] for name in options.only.split(",")} if options.only else WORKLOADS
    model = describe(locate_model(None))
    machine = measure()
    print(f"limits: {machine.read_b_s / 1e9:.1f} GB/s read, {machine.bf16_flop_s / 1e9:.0f} GFLOP/s bf16", flush=True)
    servers = [own_server(form) for form in filter(None, options.weights.split(","))]
    servers += read_servers(Path(options.peers)) if options.peers else []
    comparison = Comparison(works, size, options.repeat, machine, model)
    results = {server.name: asyncio.run(comparison.measure(server)) for server in servers}
    when = time.strftime("%Y-%m-%d")
    print(f"{when}, {processor_name()}, {machine.threads} threads; in brackets the share of the limits\n")
    print(table(results))
    return int(any("error" in result for result in results.values()))


@dataclass
class Comparison:
    """Measures servers on the same workloads.

    `uncached_by_workload`: the uncached prompt tokens of each workload, from the first server that reports usage.
    """

    works: dict[str, Work]
    size: Size
    repeat: int
    machine: Machine
    model: Model
    uncached_by_workload: dict[str, int] = field(default_factory=dict)

    async def measure(self, server: Server) -> dict[str, Any]:
        """Returns the results of one server, with an `error` if it did not start or failed."""
        result: dict[str, Any] = {"most": server.most, "workloads": {}}
        try:
            with started(server) as running:
                result["start_s"] = round(running.start_s, 2)
                for name, work in self.works.items():
                    if name.startswith("decode_") and int(name.removeprefix("decode_")) > server.most:
                        continue
                    result["workloads"][name] = row = await self.measure_workload(running, name, work)
                    print(f"{server.name:18} {name:14} {json.dumps(row)}", flush=True)
                result |= memory(server, running, self.model)
        except ServerError as error:
            result["error"] = str(error)
            print(f"{server.name}: {error}", file=sys.stderr, flush=True)
        return result

    async def measure_workload(self, server: Started, name: str, work: Work) -> dict[str, float | str]:
        """Returns the median of some runs, or an `error` if the server refused."""
        runs: list[Done] = []
        try:
            for _ in range(self.repeat):
                runs.append(await run(work, server.chat, self.size, time.time_ns()))
        except ServerError as error:
            return {"error": str(error)}
        done = sorted(runs, key=lambda run: run.wall)[len(runs) // 2]
        if done.prompt_tokens:
            self.uncached_by_workload.setdefault(name, done.uncached_prompt_tokens)
        else:  # the server reports no usage: take another server's count for texts of the same distribution
            done = replace(done, uncached_prompt_tokens=self.uncached_by_workload.get(name, 0))
        return {
            "wall_s": round(done.wall, 3),
            "out_tok_s": round(done.out_tokens / done.wall, 1),
            "prompt_tok_s": round(done.uncached_prompt_tokens / done.wall, 1),
            "ttft_s": round(statistics.median(run.ttft for run in runs), 4),
            "spread": round(max(run.wall for run in runs) / min(run.wall for run in runs), 2),
            "limit_share": round(self.model.lower_bound_s(self.machine, done) / done.wall, 3),
        }


def memory(server: Server, running: Started, model: Model) -> dict[str, int]:
    """Returns the resident bytes, and for plait's own servers those beyond weights and KV cache."""
    weight_format = server.name.split()[1] if server.name.startswith("plait ") else ""
    resident = running.resident_bytes()
    if not weight_format or not resident:
        return {"resident": resident} if resident else {}
    bits = WEIGHT_BITS.get(weight_format, 0.0)
    weights = model.weight_bytes if weight_format == "as-stored" else int(model.parameters * bits / 8)
    return {"resident": resident, "beyond_weights_and_kv": resident - running.kv_bytes() - weights}


if __name__ == "__main__":
    sys.exit(main())
