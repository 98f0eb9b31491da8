"""Checks and times everything on a GPU in one call: tests, kernels, attention, the engine, transformers beside it.

    python benchmarks/gpu/all.py [--only decode,json] [--minutes 9] [--shape llama-3-8b] [--device cuda]

Every part runs in a process of its own, so that one which fails, or breaks the GPU's context, is reported and the
others go on; what there is no time for is named. Prints one table, and writes gpu.json into $OUT if that is set.
Knows: the parts' commands. Must not know: what they do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TESTS = ["tests/gpu", "tests/runtime/test_triton_engine.py", "tests/runtime/test_decode_graph.py"]
# name: (command behind python, the most seconds it may take)
PARTS: dict[str, tuple[list[str], int]] = {
    "tests": (["-P", "-m", "pytest", "-x", "--timeout=100", *TESTS], 150),
    "decode": ([str(HERE / "engine.py"), "decode"], 120),
    "prefill": ([str(HERE / "engine.py"), "prefill"], 90),
    "json": ([str(HERE / "engine.py"), "json"], 90),
    "offline": ([str(HERE / "engine.py"), "offline"], 120),
    "attention": ([str(HERE / "attention.py")], 120),
    "kernels": ([str(HERE / "kernels.py")], 120),
    "transformers": ([str(HERE / "engine.py"), "transformers"], 150),
}
ENGINE_PARTS = {"decode", "prefill", "json", "offline", "transformers"}
LEAST_S = 15.0  # a part is not begun with less time left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas; all: %(default)s")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all parts together (default %(default)s)")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    deadline = time.monotonic() + 60 * arguments.minutes
    report: dict[str, Any] = {"machine": machine(), "parts": {}}
    for name in chosen:
        more = ["--shape", arguments.shape, "--device", arguments.device] if name in ENGINE_PARTS else []
        report["parts"][name] = part = run(name, more, deadline - time.monotonic())
        print(f"-- {name}: {part['state']}, {part['seconds']:.0f} s", flush=True)
        if part["state"] != "done":
            print("   " + "\n   ".join(part["output"][-25:]), flush=True)
    show(report)
    if out := os.environ.get("OUT"):
        Path(out, "gpu.json").write_text(json.dumps(report, indent=1))
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


def run(name: str, more: list[str], left_s: float) -> dict[str, Any]:
    """One part's state, its figures (lines that are JSON objects) and all its lines."""
    command, most_s = PARTS[name]
    if left_s < LEAST_S:
        return {"state": "no time left", "seconds": 0.0, "figures": [], "output": []}
    path = os.pathsep.join(filter(None, [str(ROOT / ".types"), os.environ.get("PYTHONPATH")]))
    begun = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command, *more],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=min(most_s, left_s),
            check=False,
        )
        text, state = done.stdout, "done" if done.returncode == 0 else f"FAILED with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        state = f"CUT OFF after {min(most_s, left_s):.0f} s"
    lines = text.splitlines()
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


def show(report: dict[str, Any]) -> None:
    print("\n" + ", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    for name, part in report["parts"].items():
        print(f"\n{name}: {part['state']}")
        for each in part["figures"]:
            goal = "" if each.get("goal") is None else f"goal {each['goal']:g}"
            known = {"name", "value", "unit", "goal"}
            rest = ", ".join(f"{k} {v:.4g}" for k, v in each.items() if k not in known and isinstance(v, (int, float)))
            print(f"  {each['name']:58} {each['value']:12.4g} {each['unit']:6} {goal:12} {rest}")
        if name in ("attention", "kernels", "tests"):
            print("\n".join(f"  {line}" for line in part["output"] if not line.startswith("{")))


if __name__ == "__main__":
    sys.exit(main())
