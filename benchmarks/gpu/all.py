"""Runs the tests and benchmarks of a GPU in one call, the most important figures first.

    python benchmarks/gpu/all.py [--only decode,json] [--minutes 9] [--out FOLDER] [--dry]

A preflight comes first: it imports what all chosen parts need, names everything that is missing, and tries one small
kernel and one small engine. Parts whose modules are missing are not started. Then come short checks, the parts with a
goal, the tests, and refinements. Each part has its own process; if it fails, the others continue. Only the first parts
of the engine share a process, because its start takes longer than they do; those that do not finish there run again
alone. The folder (--out, or $OUT) has two files: gpu.log, to which every line is appended as it comes, and gpu.json,
rewritten after every figure. --dry runs all of this code on the CPU, at tiny sizes.
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
from server_comparison.signals import unwind_on_signal  # noqa: E402

TESTS = ["tests/gpu"]
MORE_TESTS = ["tests/runtime/executor/test_prefix_sharing.py", "tests/runtime/executor/test_torch_runner_on_triton.py"]
MORE_TESTS += ["tests/runtime/executor/gpu/test_cuda_graphs.py", "tests/runtime/models/test_quantized_gpu_weights.py"]
HAS_TIMEOUT = importlib.util.find_spec("pytest_timeout") is not None
PYTEST = ["-P", "-m", "pytest", "-rfE", "--tb=short", *(["--timeout=100"] if HAS_TIMEOUT else [])]
ENGINE, ATTENTION, KERNELS, FLOAT8, PREFLIGHT = (
    str(HERE / name) for name in ("engine.py", "attention.py", "kernels.py", "float8_sweep.py", "preflight.py")
)
# name: (command behind python, the most seconds it may take), in the order of worth
PARTS: dict[str, tuple[list[str], int]] = {
    "check": ([ATTENTION, "--check"], 60),
    "attention": ([ATTENTION], 80),
    "decode": ([ENGINE, "decode"], 80),
    "json": ([ENGINE, "json"], 60),
    "offline": ([ENGINE, "offline"], 80),
    "prefill": ([ENGINE, "prefill"], 60),
    "shared": ([ENGINE, "shared"], 60),
    "transformers": ([ENGINE, "transformers"], 180),
    "tests": ([*PYTEST, *TESTS], 150),
    "kernels": ([KERNELS], 150),
    "tests-more": ([*PYTEST, *MORE_TESTS], 120),
    "chats": ([ENGINE, "chats"], 300),
    "chats-fp8": ([ENGINE, "chats-fp8"], 300),
    "attention-more": ([ATTENTION, "--more"], 150),
    "int4": ([ENGINE, "int4"], 150),
    "fp8": ([ENGINE, "fp8"], 150),
    "fp8-sweep": ([FLOAT8], 150),
    "attention-sweep": ([ATTENTION, "--sweep"], 240),
}
ONE_PROCESS_PARTS = ("decode", "json", "offline", "prefill", "shared")
PREFLIGHT_S = 180.0  # it compiles the kernels of the engine
DRY_SLOWDOWN = 5  # a dry run may share its cores


class Report:
    """The record of a run, in `folder`/gpu.json, and the log of all processes, in `folder`/gpu.log."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.parts = folder, {"preflight": part_process.new_part("running")}
        folder.mkdir(parents=True, exist_ok=True)
        self.log = (folder / "gpu.log").open("a", encoding="utf-8")

    @property
    def machine(self) -> dict[str, str]:
        """As the preflight found it."""
        found: dict[str, str] = self.parts["preflight"].get("machine", {})
        return found

    def write(self) -> None:
        """Replaces gpu.json; a reader finds the old file or the new one."""
        kept = {name: {**part, "output": part["output"][-200:]} for name, part in self.parts.items()}
        temporary = self.folder / "gpu.json.new"
        temporary.write_text(json.dumps({"machine": self.machine, "parts": kept}, indent=1))
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
    chosen = [name for name in arguments.only.split(",") if not (arguments.dry and "tests" in name)]
    deadline = time.monotonic() + 60 * arguments.minutes
    report = Report(arguments.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="plait-gpu-")))
    kinds = ",".join(dict.fromkeys(kind_of(name) for name in chosen))
    command = [PREFLIGHT, "--parts", kinds, *(["--dry"] if arguments.dry else [])]
    preflight = report.run("preflight", command, min(PREFLIGHT_S, deadline - time.monotonic()))
    missing = preflight.get("missing", {})
    for name in [name for name in chosen if missing.get(kind_of(name))]:
        report.skip(name, f"NOT STARTED, missing: {', '.join(missing[kind_of(name)])}")
    todo = processes([name for name in chosen if not missing.get(kind_of(name))])
    while todo:
        names = todo.pop(0)
        command = [ENGINE, *names] if len(names) > 1 else list(PARTS[names[0]][0])
        command += ["--dry"] if arguments.dry else ["--shape", arguments.shape] if command[0] == ENGINE else []
        most = sum(PARTS[name][1] for name in names) * (DRY_SLOWDOWN if arguments.dry else 1)
        seconds = min(most, deadline - time.monotonic())
        part = report.run(", ".join(names), command, seconds)
        if len(names) > 1 and part["state"] != "no time left":
            todo[:0] = [[name] for name in names if name not in part["done"]]
    return conclude(report, chosen)


def parsed_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas; all: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--shape", default="llama-3-8b", help="of the engine's model (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for gpu.log and gpu.json (default: $OUT, else a new one)")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU, without the tests")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.only.split(",") if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    return arguments


def kind_of(name: str) -> str:
    """The key of a part in `preflight.MODULES`."""
    if name in ("tests", "tests-more", "transformers"):
        return name
    return "engine" if PARTS[name][0][0] == ENGINE else "kernels"


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
    """Prints the end of the report. Returns the exit code: 0 if every chosen part ended well and no check failed."""
    show(report)
    skipped = [title for title, part in report.parts.items() if part["state"] == "no time left"]
    left = [name for title in skipped for name in title.split(", ") if name in PARTS]
    if left:
        print(f"\nno time was left for: {', '.join(left)}\n  python benchmarks/gpu/all.py --only {','.join(left)}")
    print(f"\nall of it is in {report.folder}")
    parts = report.parts
    done = {name for title, part in parts.items() for name in (*part["done"], *finished_parts(title, part))}
    failures = sum(len(part["failures"]) for part in parts.values())
    return 0 if done.issuperset([*chosen, "preflight"]) and not failures else 1


def finished_parts(title: str, part: dict[str, Any]) -> list[str]:
    """The parts of a process that came to its end."""
    return title.split(", ") if part["state"] == "done" else []


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


def show(report: Report) -> None:
    """The machine, and every figure that has a goal, in one table."""
    print("\n" + ", ".join(f"{key} {value}" for key, value in report.machine.items()))
    for each in (each for part in report.parts.values() for each in part["figures"]):
        if each.get("goal") is not None:
            met = each["value"] <= each["goal"] if each["unit"] in ("ms", "times") else each["value"] >= each["goal"]
            print(f"  {'met   ' if met else 'MISSED'} {each['name']:66} {each['value']:12.4g} of {each['goal']:g}")


if __name__ == "__main__":
    sys.exit(main())
