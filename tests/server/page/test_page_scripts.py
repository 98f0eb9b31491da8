"""The scripts of the page at "/", run by node: Markdown, partial JSON, plans of programs; the examples on a server."""

from __future__ import annotations

import datetime
import json
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import httpx
import pytest

PAGE_FOLDER = resources.files("plait.runtime.server") / "page"
CHECKS = sorted(path.name for path in Path(__file__).parent.glob("*_checks.mjs"))
# 2026-11-29: node is not on PyPI, and nothing else of the project needs it
needs_node = pytest.mark.skipif(
    shutil.which("node") is None, reason=f"no node here ({datetime.date.today()}); the scripts are checked where it is"
)

PRINT_EXAMPLES = """
import { EXAMPLES } from "./program_examples.js";
import { planOf } from "./program_plan.js";
const callsOf = ({ program }) => [...planOf(program).calls.values()];
const paths = (body) => callsOf(body).flatMap(({ path, samples }) => samples.map(() => path));
console.log(JSON.stringify(EXAMPLES.map(([name, body]) => ({ name, body, paths: paths(body) }))));
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Path:
    """A folder with the page's scripts and their checks, which node reads as modules."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "package.json").write_text('{"type": "module"}')
    for file in [*PAGE_FOLDER.iterdir(), *Path(__file__).parent.glob("*.mjs")]:
        if file.name.endswith("js"):
            (folder / file.name).write_text(file.read_text())
    return folder


def _node(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["node", name], cwd=folder, capture_output=True, text=True, timeout=120)


@needs_node
@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_the_scripts_pass(scripts, name) -> None:
    result = _node(scripts, name)
    assert result.returncode == 0, result.stderr


@needs_node
def test_examples_run_and_their_plans_name_the_servers_calls(scripts, serve) -> None:
    address, _ = serve()
    (scripts / "print_examples.mjs").write_text(PRINT_EXAMPLES)
    examples = json.loads(_node(scripts, "print_examples.mjs").stdout)
    assert len(examples) >= 4
    for example in examples:
        body = {**example["body"], "stream": True}
        answer = httpx.post(f"{address}/v1/programs", json=body, timeout=60)
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1]["type"] == "program.completed", events[-1]
        calls = events[-1]["program"]["calls"]
        assert [call["path"] for call in calls] == example["paths"], example["name"]
        done = {(event["path"], event["sample"]): event for event in events if event["type"] == "variable.done"}
        for call in calls:  # what the page shows as they come is what the answer has in the end
            event = done[call["path"], call["sample"]]
            assert (event["value"], event["usage"]) == (call["value"], call["usage"])
