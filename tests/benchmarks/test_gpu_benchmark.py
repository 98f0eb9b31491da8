"""benchmarks/gpu/all.py without a GPU: a dry run, its processes, and its report."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
MISSING = ["msgspec", "llguidance", "outlines_core", "jsonschema_rs", "interegular", "zmq", "gguf", "hypothesis"]


def load(name: str) -> ModuleType:
    """A module of the benchmarks that imports nothing but Python's own modules."""
    spec = importlib.util.spec_from_file_location(f"gpu_{name}", ROOT / f"benchmarks/gpu/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def all_py(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "OUT"}
    command = [sys.executable, "benchmarks/gpu/all.py", "--dry", *arguments]
    return subprocess.run(command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, check=False)


def test_a_dry_run_reports_every_figure(tmp_path: Path) -> None:
    result = all_py("--only", "decode", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {name: part["state"] for name, part in parts.items()} == {"preflight": "done", "decode": "done"}
    assert [figure["name"] for figure in parts["preflight"]["figures"]] == [
        "preflight: a small kernel",
        "preflight: a small engine",
    ]
    figures = {figure["name"].split(":")[1].strip(): figure["value"] for figure in parts["decode"]["figures"]}
    assert figures.keys() >= {"share of the memory roofline", "output", "between graphs"}
    assert figures["output"] > 0 and math.isfinite(figures["between graphs"])
    limits = json.loads((tmp_path / "gpu.json").read_text())["limits"]
    assert limits.keys() == {"copy", "bf16", "fp8"} and all(value > 0 for value in limits.values())
    assert parts["preflight"]["figures"][1]["pages"] * 2 * 2 * 32 * 4 == 64 << 20, "the pool does not fill the memory"
    log = (tmp_path / "gpu.log").read_text().splitlines()
    assert [line for line in log if line in parts["decode"]["output"]] == parts["decode"]["output"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log"]


def test_chats_with_weights_in_fp8() -> None:
    """At each number of rows, beside the ceiling of the bytes that fp8 weights have."""
    command = [sys.executable, "benchmarks/gpu/engine.py", "chats-fp8", "--dry"]
    path = os.pathsep.join(filter(None, [str(ROOT / ".path"), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    figures = {line["name"]: line["value"] for line in lines if "name" in line}
    weights = 2 * (64 * (128 + 64 + 192) + 96 * 64)  # of two layers: q, k and v; output; gate and up; down
    scales, norms, head = 2 * 4 * (128 + 64 + 192 + 64), 2 * 2 * 2 * 64, 2 * 1024 * 64
    for rows in (2, 3):
        assert figures[f"fp8, {rows} rows: weights read by a step"] == (weights + scales + norms + head) / 1e9
        assert figures[f"fp8, {rows} rows: 3 chats: output"] > 0
        assert f"fp8, {rows} rows: 3 chats: share of the ceiling of {rows} rows" in figures
    assert [line["done"] for line in lines if "done" in line] == ["chats-fp8"]


def test_missing_modules_are_named_together_before_a_part_starts(tmp_path: Path) -> None:
    """As on a machine with torch, Triton and numpy alone: what needs no other module runs."""
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for name in MISSING:
        (blocked / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    result = all_py("--only", "json,decode", "--out", str(tmp_path / "out"), PYTHONPATH=str(blocked))
    assert result.returncode == 1
    parts = json.loads((tmp_path / "out" / "gpu.json").read_text())["parts"]
    assert parts["preflight"]["missing"] == {"engine": MISSING[:5]}
    assert [figure["name"] for figure in parts["preflight"]["figures"]] == ["preflight: a small kernel"]
    assert parts["json"]["state"] == parts["decode"]["state"] == f"NOT STARTED, missing: {', '.join(MISSING[:5])}"
    assert "bring the wheels of: " in result.stdout and "'llguidance>=1.7,<2'" in result.stdout


def test_the_budgets_of_a_call_are_nine_minutes_and_end_with_refinements() -> None:
    code = (
        "import runpy; names = runpy.run_path('benchmarks/gpu/all.py')\n"
        "for call in ('figures', 'why'):\n"
        "    seconds = [seconds for _, seconds in names['CALLS'][call].values()]\n"
        "    assert names['PREFLIGHT_S'] + sum(seconds) <= 540, call\n"
        "assert sum(map(len, names['CALLS'].values())) == len(names['PARTS']), 'a name is in two calls'\n"
        "figures = list(names['CALLS']['figures'])\n"
        "assert figures[:7] == ['check', 'attention', 'decode', 'prefill', 'json', 'shared', 'offline'], figures\n"
        "assert figures[7:] == ['chats', 'chats-fp8', 'int4', 'tests', 'attention-sweep'], figures\n"
        "assert tuple(figures[2:7]) == names['ONE_PROCESS_PARTS']\n"
        "assert names['most_seconds'](['json']) > names['most_seconds'](['decode', 'json']) - 55\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_dry_runs_loop_to_numbers_that_kernels_load() -> None:
    """Triton 3.6's interpreter converts an array [1] to an int, which numpy refuses from 2.4 on."""
    code = (
        "import os, sys, warnings; sys.argv = ['x', '--dry']; sys.path.insert(0, 'benchmarks/gpu')\n"
        "os.environ['TRITON_INTERPRET'] = '1'\n"
        "from triton.runtime import interpreter\n"
        "plain = interpreter._patch_lang_tensor\n"
        "def as_in_3_6(tensor, *more):\n"
        "    plain(tensor, *more)\n"
        "    tensor.__index__ = lambda self: int(self.handle.data)\n"
        "interpreter._patch_lang_tensor = as_in_3_6\n"
        "import attention\n"
        "warnings.simplefilter('error', DeprecationWarning)\n"
        "assert attention.compare(attention.dry_run_case(attention.CASES[0]))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


def test_a_tool_starts_python_in_its_place() -> None:
    process = load("part_process")
    assert process.full_command(["a.py", "x"]) == [sys.executable, "a.py", "x"]
    assert process.full_command(["ncu", "--set", "full", "python", "a.py"]) == [
        "ncu", "--set", "full", sys.executable, "a.py"
    ]  # fmt: skip


def test_requirements_have_the_packages_names_and_versions() -> None:
    preflight = load("preflight")
    assert preflight.requirement("zmq") == "pyzmq>=26,<28"
    assert preflight.requirement("outlines_core").startswith("outlines-core>=")
    assert preflight.requirement("torch").startswith("torch>=") and preflight.requirement("unknown") == "unknown"


def test_figures_are_read_while_a_part_runs_and_kept_when_it_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    process = load("part_process")
    part, log, seen = process.new_part("running"), io.StringIO(), []
    clock = SimpleNamespace(monotonic=lambda: 1000.0 if len(seen) >= 4 else 0.0, sleep=time.sleep)
    monkeypatch.setattr(process, "time", clock)  # the time is over once the results are read
    script = (
        'import json, time; print("a line"); print(json.dumps({"name": "x", "value": 1, "ok": False}));'
        'print("FAILED tests/a.py::b - no"); print(json.dumps({"failed": "case", "error": "E"}));'
        'print(json.dumps({"done": "x"})); time.sleep(600)'
    )
    process.run(part, ["-c", script], 600.0, log, lambda: seen.append((part["state"], len(part["figures"]))))
    assert part["state"].startswith("CUT OFF") and part["done"] == ["x"]
    assert seen[0] == ("running", 1) and len(seen) == 5, "a report after every result"
    assert [failure.split(":")[0] for failure in part["failures"]] == ["x", "FAILED tests/a.py", "case"]
    assert log.getvalue().splitlines() == part["output"] and len(part["output"]) == 5


def test_the_ceiling_of_a_load_counts_weights_kv_and_products() -> None:
    roofline = load("roofline")
    memory = roofline.Machine(bandwidth=10.0, rate=1e9, weight_bytes=100, kv_bytes=1, token_flop=1.0)
    # A prompt of 3 tokens in one step, which samples the first of 3 tokens; two steps read 3 and 4 tokens of KV.
    assert roofline.ceiling([(3, 3)], 1, 8, memory) == pytest.approx(3 / ((100 + 103 + 104) / 10))
    # Two such calls: one after the other, or together.
    assert roofline.ceiling([(3, 3)] * 2, 1, 8, memory) == pytest.approx(3 / ((100 + 103 + 104) / 10))
    assert roofline.ceiling([(3, 3)] * 2, 2, 8, memory) == pytest.approx(6 / ((100 + 106 + 108) / 10))
    # Prompts in chunks of 2 tokens, bound by products: 4 steps of 1 second, the last one with one token.
    products = roofline.Machine(bandwidth=1e9, rate=2.0, weight_bytes=1, kv_bytes=0, token_flop=2.0)
    assert roofline.ceiling([(5, 1)], 4, 2, products) == pytest.approx(1 / 5)


def test_the_chats_have_the_published_means_and_limits() -> None:
    import numpy as np

    table = load("chat_lengths")
    lengths = np.array(table.chat_lengths(1000))
    assert lengths.mean(0) == pytest.approx(table.PUBLISHED_MEANS, rel=0.02)
    assert lengths.min() >= 4 and lengths[:, 0].max() <= 1024 and lengths.sum(1).max() <= 2048
    for percentile, expected in table.PERCENTILES.items():
        assert tuple(np.percentile(lengths, percentile, axis=0).astype(int)) == expected


def test_the_exit_code_of_a_part_is_its_state() -> None:
    process = load("part_process")
    for code, state in ((0, "done"), (3, "FAILED with 3")):
        part = process.new_part("running")
        process.run(part, ["-c", f"raise SystemExit({code})"], 60.0, io.StringIO(), lambda: None)
        assert part["state"] == state


def test_parts_that_use_an_engine_share_a_process_and_are_retried_after_a_failure(tmp_path: Path) -> None:
    """The first process fails after `json`, so `decode` runs again in another process."""
    code = (
        "import sys, runpy; sys.argv = ['all.py', '--dry', '--only', 'decode,kernels,json', '--out', sys.argv[1]]\n"
        "names = runpy.run_path('benchmarks/gpu/all.py')\n"
        "assert names['processes'](['attention', 'decode', 'kernels', 'json']) == "
        "[['attention'], ['decode', 'json'], ['kernels']]\n"
        "commands, process = [], names['part_process']\n"
        "def run(part, command, seconds, log, on_result):\n"
        "    commands.append([word for word in command if not word.endswith('.py')])\n"
        "    fails = len(commands) == 2\n"
        "    part |= {'state': 'FAILED' if fails else 'done', 'done': ['json'] if fails else []}\n"
        "    if len(commands) == 1: part |= {'limits': {'copy': 3.0, 'bf16': 5.0, 'fp8': 7.0}}\n"
        "process.run = run\n"
        "assert names['main']() == 0\n"
        "limits = ['--limits', '3.0,5.0,7.0']\n"
        "assert commands == [['--parts', 'engine,kernels', '--dry'], ['decode', 'json', '--dry', *limits], "
        "['decode', '--dry', *limits], ['--dry', *limits]], commands\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


def test_parts_beyond_the_time_limit_are_listed(tmp_path: Path) -> None:
    result = all_py("--minutes", "0", "--only", "json,kernels", "--out", str(tmp_path))
    assert result.returncode == 1
    assert "all.py --only json,kernels" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log"]


def test_a_failed_case_or_part_does_not_stop_the_others_and_given_limits_are_not_measured() -> None:
    """A failed part's engine is freed before the next one starts; a failed attention case is reported."""
    code = (
        "import sys, weakref; sys.argv = ['x', '--check', '--dry', '--limits', '2.0,3.0,4e12']\n"
        "sys.path.insert(0, 'benchmarks/gpu')\n"
        "import attention, engine, machine\n"
        "machine.copy_bandwidth = machine.matrix_rate = machine.float8_rate = None\n"
        "assert machine.limits() == (2.0, 3.0, 4e12)\n"
        "attention.CASES, attention.MORE = attention.CASES[:2], attention.MORE[:1]\n"
        "compare, seen = attention.compare, []\n"
        "def compared(case):\n"
        "    seen.append(case)\n"
        "    if len(seen) == 1: raise RuntimeError('does not compile')\n"
        "    return len(seen) != 2\n"
        "attention.compare = compared\n"
        "try: attention.main(); raise AssertionError\n"
        "except SystemExit as error: assert str(error).startswith('2 cases'), error\n"
        "assert len(seen) == 3\n"
        "class Bench:\n"
        "    def close(self): pass\n"
        "made = []\n"
        "def workbench(shape, device, **settings):\n"
        "    assert all(reference() is None for reference in made), 'a failed engine is still held'\n"
        "    bench = Bench(); made.append(weakref.ref(bench)); return bench\n"
        "def fails(bench, device):\n"
        "    kept = bench\n"
        "    yield {'name': 'a'}\n"
        "    raise RuntimeError('no memory')\n"
        "def works(bench, device): yield {'name': 'b'}\n"
        "engine.workbench, engine.PARTS = workbench, {'fails': fails, 'works': works}\n"
        "found = list(engine.figures(['fails', 'works'], 'tiny', 'cpu'))\n"
        "assert found == [{'name': 'a'}, {'name': 'b'}, {'done': 'works'}] and len(made) == 2, found\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-2000:]
    assert '"failed": "prompts 4 x 4096' in result.stdout and "does not compile" in result.stdout
