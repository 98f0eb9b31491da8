"""Batches on a real Ray on this machine, with real engines in its actors. One Ray serves all tests of this file.

An actor takes seconds to start, so a test has as few as its faults need; tests/lang/cluster asks when items repeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import cluster_programs
import pyarrow
import pyarrow.parquet
import pytest
from cluster_programs import Mood, Note

import plait
import plait.ray
from plait import Cluster
from plait.cli import main
from plait.runtime.cluster.ray_package import import_ray, on_loopback

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:an actor of the cluster ended")]
SUPPORT = Path(cluster_programs.__file__).parent


@pytest.fixture(scope="module")
def ray():
    """Its workers import from the folder in which it starts."""
    module = import_ray("the tests")
    with on_loopback(module), contextlib.chdir(SUPPORT):
        module.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
            object_store_memory=80 << 20,
        )  # fmt: skip
    yield module
    module.shutdown()


@pytest.fixture(scope="module")
def local(small_model):
    """A runtime of this process with the model and settings of `cluster`."""
    with plait.Runtime(str(small_model), deterministic=True, progress=False) as runtime:
        yield runtime


@pytest.fixture
def cluster(ray, small_model):
    """Two actors with a small model, whose results do not depend on what runs beside an item."""
    return Cluster(model=small_model, actors=2, cpus_per_actor=1, deterministic=True)


def seen(state):
    if state.error() is not None:
        return str(state.error()).partition(" (at ")[0], type(state.error().__cause__)
    return state.text(), state["answer"], state.ret_value, state["note"]


def test_results_are_those_of_a_local_batch(cluster, local, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("plait.lang.execution.threads.shows_bars", lambda: True)
    items = [{"number": number} for number in range(8)]
    items[3] |= {"then": "raise"}
    how = {"seed": 11, "temperature": 1.0, "return_logprob": True, "top_logprobs_num": 2}
    here = cluster_programs.ask.run_batch(items, backend=local, resume=tmp_path / "local", **how)
    states = cluster_programs.ask.run_batch(items, backend=cluster, resume=tmp_path / "done", progress_bar=True, **how)
    assert "8/8" in capsys.readouterr().err
    assert [seen(state) for state in states] == [seen(state) for state in here]
    assert states[0]["note"] == Note(0, Mood.CALM) and type(states[3].error().__cause__) is LookupError
    assert states[1].get_meta_info("answer")["output_token_logprobs"][0][2]
    assert len({state["answer"] for state in here if state.error() is None}) > 1, "a seed for each item"
    again = cluster_programs.ask.run_batch(items, backend=local, resume=tmp_path / "done", **how)
    assert [seen(state) for state in again] == [seen(state) for state in here]
    lines = [sorted((tmp_path / name).read_text().count('"key"') for name in ("local", "done"))]
    assert lines == [[7, 7]]


def test_items_whose_actor_ends_run_elsewhere(cluster, tmp_path):
    items = [{"number": number, "folder": str(tmp_path)} for number in range(10)]
    items[5] |= {"then": "end engine"}
    items[8] |= {"then": "end once"}
    cluster.actors, cluster.max_attempts = 1, 2
    states = list(cluster_programs.ask.run_batch(items, backend=cluster, generator_style=True))
    errors = {number: str(state.error()) for number, state in enumerate(states) if state.error() is not None}
    assert set(errors) == {5}
    assert "RuntimeGone: its actor ended 2 times while it ran" in errors[5] and "killed by signal 9" in errors[5]
    started = (tmp_path / "started").read_text().split()
    assert max(map(started.count, started)) == 2


def test_a_prefix_is_computed_by_one_actor(cluster):
    documents = [f"{number}. " + "A short text about ships and the sea. " * 12 for number in range(4)]
    items = [{"document": document, "question": f"{number}?"} for number in range(4) for document in documents]
    states = cluster_programs.about.run_batch(items, backend=cluster)
    computed = sum(state.usage.prompt_tokens - state.usage.cached_tokens for state in states)
    alone = states[0].usage.prompt_tokens
    assert all(state.error() is None for state in states)
    assert computed < 5.5 * alone, (computed, alone)  # four documents, and what the questions add


JOB = """
import os, signal, sys, time
sys.path.insert(0, {support!r})
import plait
import cluster_programs
from plait.lang.batches.checkpoint import BatchCheckpoint

kill_at, record = int(sys.argv[1]), BatchCheckpoint.record
num_recorded = 0

def record_and_kill(self, index, state):
    global num_recorded
    record(self, index, state)
    num_recorded += 1
    if num_recorded == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

BatchCheckpoint.record = record_and_kill
items = [{{"number": number, "folder": {folder!r}}} for number in range(12)]
cluster = plait.Cluster(model={model!r}, actors=1, cpus_per_actor=1, deterministic=True)
cluster_programs.ask.run_batch(items, backend=cluster, resume={done!r}, seed=3, temperature=1.0, num_threads=2)
"""


def test_a_job_that_is_killed_loses_nothing_and_repeats_nothing(ray, cluster, local, small_model, tmp_path):
    done, script = tmp_path / "done.jsonl", tmp_path / "job.py"
    script.write_text(JOB.format(support=str(SUPPORT), folder=str(tmp_path), model=str(small_model), done=str(done)))
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    environment["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # as in on_loopback

    command = [sys.executable, "-P", str(script), "5"]
    killed = subprocess.run(command, env=environment, cwd=SUPPORT, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL and len(done.read_text().splitlines()) == 5
    before = done.read_text()
    items = [{"number": number, "folder": str(tmp_path)} for number in range(12)]
    cluster.actors, how = 1, {"seed": 3, "temperature": 1.0}
    last = cluster_programs.ask.run_batch(items, backend=cluster, resume=done, **how)
    assert done.read_text().startswith(before) and len(done.read_text().splitlines()) == 12
    here = cluster_programs.ask.run_batch(items, backend=local, **how)
    assert [seen(state) for state in last] == [seen(state) for state in here]
    keys = [json.loads(line)["key"] for line in done.read_text().splitlines()]
    assert len(set(keys)) == 12
    started = (tmp_path / "started").read_text().split()
    assert len(started) <= 12 + 2 + 12, "what ran at the kill, two items at most, runs again"  # 12: the local batch


def test_the_command_runs_the_rows_of_a_table(ray, small_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    pyarrow.parquet.write_table(pyarrow.table({"number": [1, 2], "then": [None, "raise"]}), tmp_path / "in.parquet")
    command = ["batch", f"{SUPPORT / 'cluster_programs.py'}:ask", "--seed=1", f"--model={small_model}"]
    command += [f"--input={tmp_path / 'in.parquet'}", f"--output={tmp_path / 'out.parquet'}"]
    assert main([*command, "--cluster=auto", "--actors=1", "--cpus-per-actor=1"]) == 1
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
    good, bad = table.to_pylist()
    assert good["answer"] and good["note"] == {"number": 1, "mood": "calm"} and good["return"] and not good["error"]
    assert "LookupError" in bad["error"] and bad["answer"] is None
    assert "plait: 2 lines in" in capsys.readouterr().err


@pytest.fixture
def rows(ray):
    """Twelve rows in four blocks. All rows of the third block fail."""
    failing = {1: "raise", 6: "raise", 7: "raise", 8: "end"}
    rows = [{"id": f"r{at}", "number": at, "then": failing.get(at), "note": "mine"} for at in range(12)]
    rows[4]["number"] = rows[3]["number"]
    return ray.data.from_arrow([pyarrow.Table.from_pylist(rows[at : at + 3]) for at in range(0, 12, 3)])


def test_rows_of_a_dataset_get_the_variables_or_an_error(rows, cluster, tmp_path):
    cluster.actors, cluster.max_attempts = 1, 1
    mapped = plait.ray.map(cluster_programs.renamed, rows, cluster=cluster, batch_size=3, seed=5, temperature=1.0)
    mapped.write_parquet(str(tmp_path / "out"))
    table = pyarrow.parquet.read_table(tmp_path / "out").sort_by("id")
    result = {row["id"]: row for row in table.to_pylist()}
    assert set(result) == {f"r{at}" for at in range(12)}
    failed = {name: row["error"] for name, row in result.items() if row["error"] is not None}
    assert set(failed) == {"r1", "r6", "r7", "r8"}
    assert "LookupError" in failed["r1"] and "its actor ended once" in failed["r8"]
    assert "while it ran: its worker process has died" in failed["r8"] and "(pid " in failed["r8"]
    good = result["r0"]
    assert good["answer"] and json.loads(good["return"]) == [0, good["answer"]] and good["prompt_tokens"] > 0
    assert good["note"] == "mine" and json.loads(good["note_output"]) == {"number": 0, "mood": "calm"}
    assert result["r3"]["answer"] == result["r4"]["answer"] != good["answer"], "seeds depend on the arguments"


def test_a_schema_gives_the_variables_their_types(rows, cluster):
    cluster.actors = 1
    schema = pyarrow.schema({"note": pyarrow.struct({"number": pyarrow.int64()}), "value": pyarrow.int64()})
    mapped = plait.ray.map(cluster_programs.typed, rows.limit(2), cluster=cluster, schema=schema)
    good, broken = sorted(mapped.take_all(), key=lambda row: row["id"])
    assert good["value"] == 0 and good["note_output"] == {"number": 0} and good["error"] is None
    assert broken["error"] == "value is 'one', which is not int64, its type in the schema"
    assert broken["value"] is None and "more" not in good


def test_wrong_arguments_of_map(rows, cluster):
    for arguments, message in [
        ({"cluster": Cluster("local")}, "cluster takes a Cluster() without address and working_dir"),
        ({"batch_size": 0}, "batch_size must be from 1"),
        ({"schema": {"a": int}}, "schema takes a pyarrow.Schema"),
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"temperature": -1}, "temperature"),
    ]:
        with pytest.raises(plait.InputError) as caught:
            plait.ray.map(cluster_programs.ask, rows, **arguments)
        assert message in str(caught.value)
    with pytest.raises(plait.InputError, match="bound argument 'subject' is not a JSON value"):
        plait.ray.map(cluster_programs.ask.bind(subject={1}), rows)


def test_the_page_runs_as_printed_and_its_ray_listens_on_loopback(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "ray.md").read_text()
    (tmp_path / "notes.py").write_text(re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[0])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "notes.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 and "program 'note'" not in done.stdout
    assert len((tmp_path / "notes.jsonl").read_text().splitlines()) == 2
    assert "listens on all network interfaces" not in done.stderr


def test_an_address_where_nothing_answers():
    code = "import plait, cluster_programs as p; p.ask.run_batch([{'number': 1}], backend=plait.Cluster('auto'))"
    environment = os.environ | {"RAY_ADDRESS": "127.0.0.1:1", "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], cwd=SUPPORT, env=environment, capture_output=True, timeout=120)
    assert b"RuntimeGone: there is no Ray cluster at 'auto'; `ray start --head` starts one on this" in done.stderr


def test_wrong_addresses_and_sizes(ray, cluster, small_model, monkeypatch):
    items = [{"number": 1}]
    with pytest.raises(plait.InputError, match="connected to Ray already, so 'local' is not used"):
        cluster_programs.ask.run_batch(items, backend=Cluster("local"))
    with pytest.raises(plait.InputError, match="gpus_per_actor is 1, but no machine of the cluster has as many GPUs"):
        cluster_programs.ask.run_batch(items, backend=Cluster(gpus_per_actor=1))
    with pytest.raises(plait.RuntimeGone, match=r"an actor did not start within 0\.5 s"):
        cluster_programs.ask.run_batch(items, backend=Cluster(actors=1, gpus_per_actor=1, start_timeout_s=0.5))
    with pytest.raises(plait.ModelNotFound, match="/no/model"):
        cluster_programs.ask.run_batch(items, backend=Cluster(model="/no/model", cpus_per_actor=1))
