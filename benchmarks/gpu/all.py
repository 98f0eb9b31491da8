"""Runs the tests and benchmarks of a GPU in one call, the most important figures first.

    python benchmarks/gpu/all.py [--only decode,json] [--minutes 9] [--out FOLDER] [--dry]

Parts with a goal come first and fit into one call of ten minutes; refinements follow. Each part runs in its own
process, so that a part which fails, or breaks the GPU's context, is reported and the others continue. Only the first
parts of the engine share a process, because its start takes longer than they do; those that do not finish there are
run again alone. After each process the folder (--out, or $OUT) has its log and a new gpu.json. Parts that there was no
time for are listed with the command that runs them. --dry runs all of this code on the CPU, at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from server_comparison.signals import unwind_on_signal

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TESTS = [
    "tests/gpu",
    "tests/runtime/executor/test_prefix_sharing.py",
    "tests/runtime/executor/test_torch_runner_on_triton.py",
]
TESTS += ["tests/runtime/executor/gpu/test_cuda_graphs.py", "tests/runtime/models/test_quantized_gpu_weights.py"]
ENGINE, ATTENTION = str(HERE / "engine.py"), str(HERE / "attention.py")
# name: (command behind python, the most seconds it may take), in the order of worth
PARTS: dict[str, tuple[list[str], int]] = {
    "attention": ([ATTENTION], 80),
    "decode": ([ENGINE, "decode"], 80),
    "json": ([ENGINE, "json"], 60),
    "offline": ([ENGINE, "offline"], 80),
    "prefill": ([ENGINE, "prefill"], 60),
    "shared": ([ENGINE, "shared"], 60),
    "transformers": ([ENGINE, "transformers"], 180),
    "tests": (["-P", "-m", "pytest", "-x", "--timeout=100", *TESTS], 150),
    "kernels": ([str(HERE / "kernels.py")], 150),
    "attention-more": ([ATTENTION, "--more"], 150),
    "int4": ([ENGINE, "int4"], 150),
}
ONE_PROCESS_PARTS = ("decode", "json", "offline", "prefill", "shared")
MIN_PART_S = 15.0  # a part is not begun with less time left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas; all: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--shape", default="llama-3-8b", help="of the engine's model (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for logs and gpu.json (default: $OUT, else a new one)")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU, without the tests")
    arguments = parser.parse_args()
    unwind_on_signal()
    chosen = [name for name in arguments.only.split(",") if not (arguments.dry and name == "tests")]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    if find_spec("torch") is None:
        parser.error("every part needs torch. It is not installed: pip install 'plait[gpu]'")
    out = arguments.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="plait-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {"machine": machine(), "parts": {}}
    todo = processes(chosen)
    while todo:
        names = todo.pop(0)
        command = [ENGINE, *names] if len(names) > 1 else list(PARTS[names[0]][0])
        command += ["--dry"] if arguments.dry else ["--shape", arguments.shape] if command[0] == ENGINE else []
        seconds = min(sum(PARTS[name][1] for name in names), deadline - time.monotonic())
        title = "+".join(names)
        report["parts"][title] = part = run(command, seconds, out / f"{title}.log")
        (out / "gpu.json").write_text(json.dumps(report, indent=1))
        print_part(title, part)
        if len(names) > 1 and part["state"] != "no time left":
            todo[:0] = [[name] for name in names if name not in part["done"]]
    show(report)
    skipped = [title for title, part in report["parts"].items() if part["state"] == "no time left"]
    left = [name for title in skipped for name in title.split("+")]
    if left:
        print(f"\nno time was left for: {', '.join(left)}\n  python benchmarks/gpu/all.py --only {','.join(left)}")
    print(f"\nall of it is in {out}")
    done = {name for title, part in report["parts"].items() for name in (*part["done"], *finished_parts(title, part))}
    return 0 if done.issuperset(chosen) else 1


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


def finished_parts(title: str, part: dict[str, Any]) -> list[str]:
    """The parts of a process that came to its end."""
    return title.split("+") if part["state"] == "done" else []


def machine() -> dict[str, str]:
    """What the figures belong to."""
    code = (
        "import json, platform, torch\n"
        "found = {'python': platform.python_version(), 'torch': torch.__version__}\n"
        "found['gpu'] = torch.cuda.get_device_name() if torch.cuda.is_available() else 'none'\n"
        "try:\n    import triton\n    found['triton'] = triton.__version__\n"
        "except ImportError as error:\n    found['triton'] = str(error)\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    found: dict[str, str] = json.loads(lines[-1]) if done.returncode == 0 and lines else {"error": done.stderr[-500:]}
    return found | {"date": time.strftime("%Y-%m-%d")}


def run(command: list[str], seconds: float, log: Path) -> dict[str, Any]:
    """One part's state, its figures (lines that are JSON objects) and all its lines, which go to `log` as they come."""
    if seconds < MIN_PART_S:
        return {"state": "no time left", "seconds": 0.0, "figures": [], "done": [], "output": []}
    path = os.pathsep.join(filter(None, [str(ROOT / ".types"), os.environ.get("PYTHONPATH")]))
    begun = time.monotonic()
    with log.open("wb") as file:
        child = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its own children go with it
        )
        try:
            code = child.wait(timeout=seconds)
            state = "done" if code == 0 else f"FAILED with {code}"
        except subprocess.TimeoutExpired:
            state = f"CUT OFF after {seconds:.0f} s"
        finally:
            if child.returncode is None:  # its time is over, or ours: we were told to end
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    lines = log.read_text(errors="replace").splitlines()
    found = objects(lines)
    figures = [each for each in found if "name" in each and "value" in each]
    done = [each["done"] for each in found if "done" in each]
    return {"state": state, "seconds": time.monotonic() - begun, "figures": figures, "done": done, "output": lines}


def objects(lines: list[str]) -> list[dict[str, Any]]:
    """Those lines that are JSON objects."""
    found = []
    for line in lines:
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def print_part(name: str, part: dict[str, Any]) -> None:
    """One part, as soon as it is over."""
    print(f"\n-- {name}: {part['state']}, {part['seconds']:.0f} s", flush=True)
    for each in part["figures"]:
        goal = "" if each.get("goal") is None else f"goal {each['goal']:g}"
        known = {"name", "value", "unit", "goal"}
        rest = ", ".join(f"{k} {v:.4g}" for k, v in each.items() if k not in known and isinstance(v, (int, float)))
        print(f"  {each['name']:66} {each['value']:12.4g} {each['unit']:6} {goal:12} {rest}", flush=True)
    if part["state"] != "done":
        print("   " + "\n   ".join(part["output"][-25:]), flush=True)


def show(report: dict[str, Any]) -> None:
    """The machine, and every figure that has a goal, in one table."""
    print("\n" + ", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    for each in (each for part in report["parts"].values() for each in part["figures"]):
        if each.get("goal") is not None:
            met = each["value"] <= each["goal"] if each["unit"] == "ms" else each["value"] >= each["goal"]
            print(f"  {'met   ' if met else 'MISSED'} {each['name']:66} {each['value']:12.4g} of {each['goal']:g}")


if __name__ == "__main__":
    sys.exit(main())
