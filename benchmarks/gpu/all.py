"""Runs the tests and benchmarks of a GPU in one call, the most important figures first.

    python benchmarks/gpu/all.py [--call figures|why] [--only decode,json] [--minutes 9] [--out FOLDER] [--dry]

A preflight comes first: it imports what all chosen parts need, names everything that is missing, measures the limits of
the GPU, which all parts share, and tries one small kernel and one small engine with a pool that fills the memory. The
call `figures` has what tells most, `why` what explains it; each takes nine minutes at most. Each part has its own
process; if it fails, the others continue. Only the first parts of the engine share a process, because its start takes
longer than they do; those that do not finish there run again alone. The folder (--out, or $OUT) has two files: gpu.log,
to which every line is appended as it comes, and gpu.json, rewritten after every figure. --dry runs all of this code on
the CPU, at tiny sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import part_process  # noqa: E402
from common.signals import unwind_on_signal  # noqa: E402

WORKERS = 8  # processes of tests: they compile beside each other, and share the GPU
TESTS = ["tests/gpu/test_kernels.py", "tests/gpu/test_attention.py", "tests/gpu/test_engine.py"]
PLUGINS = {"pytest_timeout": ["--timeout=100"], "xdist": ["-n", str(WORKERS), "--dist", "load"]}
PYTEST = ["-P", "-m", "pytest", "-rfEs", "--tb=short"]
PYTEST += [option for name, options in PLUGINS.items() if importlib.util.find_spec(name) for option in options]
ENGINE, ATTENTION, KERNELS, PREFLIGHT = (
    str(HERE / f"{name}.py") for name in ("engine", "attention", "kernels", "preflight")
)
SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--print-limit", "20", "python"]
PROFILER = ["ncu", "--set", "full", "--clock-control", "none", "--launch-count", "1", "--kernel-name"]
ENGINE_START_S = 35
PREFLIGHT_S = 55  # it compiles the kernels of the engine that the cache does not have
# call: {name: (command behind python, the most seconds it may take)}, in the order of worth. With the preflight, the
# seconds of each call take nine minutes at most; the three profiles of `why` are of the first launch of a kernel.
CALLS: dict[str, dict[str, tuple[list[str], int]]] = {
    "figures": {
        "check": ([ATTENTION, "--check"], 20),
        "attention": ([ATTENTION], 35),
        "decode": ([ENGINE, "decode"], 55),
        "prefill": ([ENGINE, "prefill"], 15),
        "json": ([ENGINE, "json"], 20),
        "shared": ([ENGINE, "shared"], 20),
        "offline": ([ENGINE, "offline"], 40),
        "chats": ([ENGINE, "chats"], 60),
        "chats-fp8": ([ENGINE, "chats-fp8"], 60),
        "int4": ([ENGINE, "int4"], 45),
        "tests": ([*PYTEST, *TESTS], 75),
        "attention-sweep": ([ATTENTION, "--sweep"], 40),
    },
    "why": {
        "sanitizer": ([*SANITIZER, ATTENTION, "--check"], 60),
        "profile-prefill": ([*PROFILER, "_prefill_kernel", "python", ATTENTION, "--only", "prompts"], 25),
        "profile-decode": ([*PROFILER, "_decode_kernel", "python", ATTENTION, "--only", "128 x 1024"], 25),
        "profile-shared": ([*PROFILER, "_shared_prefix_kernel", "python", ATTENTION, "--only", "one prefix"], 25),
        "kernels": ([KERNELS], 70),
        "chats-more": ([ENGINE, "chats-more"], 80),
        "attention-more": ([ATTENTION, "--more"], 50),
        "fp8": ([ENGINE, "fp8"], 60),
    },
}
PARTS = {name: part for call in CALLS.values() for name, part in call.items()}
ONE_PROCESS_PARTS = ("decode", "prefill", "json", "shared", "offline")
NOT_DRY = ("tests", "sanitizer", "profile-prefill", "profile-decode", "profile-shared")
DRY_SLOWDOWN = 5  # a dry run may share its cores


class Report:
    """The record of a run, in `folder`/gpu.json, and the log of all processes, in `folder`/gpu.log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.parts = folder, {"preflight": part_process.new_part("running")}
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "gpu.log").open("a", encoding="utf-8")

    def write(self) -> None:
        """Replaces gpu.json; a reader finds the old file or the new one."""
        kept = {name: {**part, "output": part["output"][-200:]} for name, part in self.parts.items()}
        found = {name: self.parts["preflight"].get(name, {}) for name in ("machine", "limits")}
        temporary = self.folder / "gpu.json.new"
        temporary.write_text(json.dumps({**found, "parts": kept}, indent=1))
        temporary.replace(self.folder / "gpu.json")

    def run(self, title: str, command: list[str], seconds: float) -> dict[str, Any]:
        """Runs a part, and prints it when it is over."""
        part = self.parts[title] = part_process.new_part("running")
        self.log.write(f"\n== {title}: {' '.join(command)}\n")
        part_process.run(part, command, seconds, self.log, self.write)
        self.write()
        print_part(title, part)
        return part

    def skip(self, title: str, state: str) -> None:
        """Records a part that is not started."""
        self.parts[title] = part_process.new_part(state)
        self.write()
        print_part(title, self.parts[title])


def main() -> int:
    arguments = parsed_arguments()
    unwind_on_signal()
    chosen = [name for name in arguments.only.split(",") if not (arguments.dry and name in NOT_DRY)]
    deadline = time.monotonic() + 60 * arguments.minutes
    report = Report(arguments.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="plait-gpu-")))
    kinds = ",".join(dict.fromkeys(kind_of(name) for name in chosen))
    command = [PREFLIGHT, "--parts", kinds, *(["--dry"] if arguments.dry else [])]
    slowdown = DRY_SLOWDOWN if arguments.dry else 1
    preflight = report.run("preflight", command, min(slowdown * PREFLIGHT_S, deadline - time.monotonic()))
    missing = preflight.get("missing", {})
    for name in [name for name in chosen if missing.get(kind_of(name))]:
        report.skip(name, f"NOT STARTED, missing: {', '.join(missing[kind_of(name)])}")
    todo = processes([name for name in chosen if not missing.get(kind_of(name))])
    while todo:
        names = todo.pop(0)
        command = [ENGINE, *names] if len(names) > 1 else list(PARTS[names[0]][0])
        command += ["--dry"] if arguments.dry else ["--shape", arguments.shape] if command[0] == ENGINE else []
        command += limits_option(preflight) if kind_of(names[0]) in ("engine", "kernels") else []
        seconds = min(slowdown * most_seconds(names), deadline - time.monotonic())
        part = report.run(", ".join(names), command, seconds)
        if len(names) > 1 and part["state"] != "no time left":
            todo[:0] = [[name] for name in names if name not in part["done"]]
    return conclude(report, chosen)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--call", default="figures", choices=CALLS, help="which parts (default %(default)s)")
    parser.add_argument("--only", default="", help=f"parts of any call instead, with commas: {','.join(PARTS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--shape", default="llama-3-8b", help="of the engine's model (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for gpu.log and gpu.json (default: $OUT, else a new one)")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU, without the tests")
    arguments = parser.parse_args()
    arguments.only = arguments.only or ",".join(CALLS[arguments.call])
    unknown = [name for name in arguments.only.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    return arguments


def most_seconds(names: list[str]) -> int:
    """The budget of a process. A part that is to share the engine of `decode`, but runs alone, also starts one."""
    starts = len(names) == 1 and names[0] in ONE_PROCESS_PARTS[1:]
    return sum(PARTS[name][1] for name in names) + (ENGINE_START_S if starts else 0)


def kind_of(name: str) -> str:
    """The key of a part in `preflight.MODULES`."""
    if name == "tests":
        return name
    first = PARTS[name][0][0]
    return "engine" if first == ENGINE else first if first in part_process.TOOLS else "kernels"


def limits_option(preflight: dict[str, Any]) -> list[str]:
    """What hands down the limits that the preflight measured; nothing if it failed before."""
    limits = preflight.get("limits", {})
    return ["--limits", ",".join(map(str, limits.values()))] if limits else []


def processes(chosen: list[str]) -> list[list[str]]:
    """The parts by the processes that they run in first."""
    together = [name for name in chosen if name in ONE_PROCESS_PARTS]
    found: list[list[str]] = []
    for name in chosen:
        if name not in together:
            found.append([name])
        elif name == together[0]:
            found.append(together)
    return found


def conclude(report: Report, chosen: list[str]) -> int:
    """Prints the machine, the figures that have a goal, and what was left out. Returns the exit code: 0 if every chosen
    part ended well and no check failed."""
    parts = report.parts
    print("\n" + ", ".join(f"{key} {value}" for key, value in parts["preflight"].get("machine", {}).items()))
    for each in (each for part in parts.values() for each in part["figures"] if each.get("goal") is not None):
        met = each["value"] <= each["goal"] if each["unit"] in ("ms", "times") else each["value"] >= each["goal"]
        print(f"  {'met   ' if met else 'MISSED'} {each['name']:66} {each['value']:12.4g} of {each['goal']:g}")
    skipped = ", ".join(title for title, part in parts.items() if part["state"] == "no time left").split(", ")
    if left := ",".join(name for name in skipped if name in PARTS):
        print(f"\nno time was left for: {left}\n  python benchmarks/gpu/all.py --only {left}")
    print(f"\nall of it is in {report.folder}")
    done = {name for part in parts.values() for name in part["done"]}
    done |= {name for title, part in parts.items() if part["state"] == "done" for name in title.split(", ")}
    return 0 if done.issuperset([*chosen, "preflight"]) and not any(part["failures"] for part in parts.values()) else 1


def print_part(name: str, part: dict[str, Any]) -> None:
    """One part, as soon as it is over."""
    print(f"\n-- {name}: {part['state']}, {part['seconds']:.0f} s", flush=True)
    for each in part["figures"]:
        goal = "" if each.get("goal") is None else f"goal {each['goal']:g}"
        known = {"name", "value", "unit", "goal"}
        rest = ", ".join(f"{k} {v:.4g}" for k, v in each.items() if k not in known and isinstance(v, (int, float)))
        print(f"  {each['name']:66} {each['value']:12.4g} {each['unit']:6} {goal:12} {rest}", flush=True)
    for failure in part["failures"]:
        print(f"  WRONG {failure}", flush=True)
    if part["state"] != "done" or any(part.get("missing", {}).values()):
        print("   " + "\n   ".join(part["output"][-25:]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
