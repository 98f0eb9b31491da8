"""Checks and times everything on a GPU in one call, the figures that matter most first.

    python benchmarks/gpu/all.py [--only decode,json] [--minutes 9] [--out FOLDER] [--dry]

Every part runs in a process of its own, so that one which fails, or breaks the GPU's context, is reported and the
others go on. After each part the folder (--out, or $OUT) has its log and a new gpu.json; what there was no time for is
named, with the command that runs it. --dry runs all of this code on the CPU, at sizes that show nothing else.
Knows: the parts' commands. Must not know: what they do.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TESTS = ["tests/gpu", "tests/runtime/test_triton_engine.py", "tests/runtime/test_decode_graph.py"]
# name: (command behind python, the most seconds it may take), in the order of worth
PARTS: dict[str, tuple[list[str], int]] = {
    "decode": ([str(HERE / "engine.py"), "decode"], 120),
    "attention": ([str(HERE / "attention.py")], 120),
    "offline": ([str(HERE / "engine.py"), "offline"], 120),
    "transformers": ([str(HERE / "engine.py"), "transformers"], 180),
    "json": ([str(HERE / "engine.py"), "json"], 90),
    "prefill": ([str(HERE / "engine.py"), "prefill"], 90),
    "tests": (["-P", "-m", "pytest", "-x", "--timeout=100", *TESTS], 150),
    "kernels": ([str(HERE / "kernels.py")], 150),
}
LEAST_S = 15.0  # a part is not begun with less time left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas; all: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--shape", default="llama-3-8b", help="of the engine's model (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for logs and gpu.json (default: $OUT, else a new one)")
    parser.add_argument("--dry", action="store_true", help="tiny, on the CPU, without the tests")
    arguments = parser.parse_args()
    chosen = [name for name in arguments.only.split(",") if not (arguments.dry and name == "tests")]
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    out = arguments.out or Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="plait-gpu-"))
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {"machine": machine(), "parts": {}}
    for name in chosen:
        command, most_s = PARTS[name]
        engine = ["--shape", arguments.shape] if "engine.py" in command[0] else []
        more = ["--dry"] if arguments.dry else engine
        seconds = min(most_s, deadline - time.monotonic())
        report["parts"][name] = part = run(command + more, seconds, out / f"{name}.log")
        (out / "gpu.json").write_text(json.dumps(report, indent=1))
        tell(name, part)
    show(report)
    left = [name for name, part in report["parts"].items() if part["state"] == "no time left"]
    if left:
        print(f"\nno time was left for: {', '.join(left)}\n  python benchmarks/gpu/all.py --only {','.join(left)}")
    print(f"\nall of it is in {out}")
    return 0 if all(part["state"] == "done" for part in report["parts"].values()) else 1


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
    if seconds < LEAST_S:
        return {"state": "no time left", "seconds": 0.0, "figures": [], "output": []}
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
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            state = f"CUT OFF after {seconds:.0f} s"
    lines = log.read_text(errors="replace").splitlines()
    return {"state": state, "seconds": time.monotonic() - begun, "figures": figures(lines), "output": lines}


def figures(lines: list[str]) -> list[dict[str, Any]]:
    """Those lines that are JSON objects with a name and a value."""
    found = []
    for line in lines:
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return [each for each in found if "name" in each and "value" in each]


def tell(name: str, part: dict[str, Any]) -> None:
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
