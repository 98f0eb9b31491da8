"""Batches on a real Ray on this machine, with real engines in its actors. One Ray serves all tests of this file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import cluster_programs
import pytest
from cluster_programs import Mood, Note

import plait
from plait import Cluster
from plait.lang.cluster.ray_actors import _on_loopback, import_ray

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:an actor of the cluster ended")]
SUPPORT = Path(cluster_programs.__file__).parent


@pytest.fixture(scope="module")
def ray():
    """Its workers import from the folder in which it starts."""
    module = import_ray("the tests")
    with _on_loopback(module), contextlib.chdir(SUPPORT):
        module.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
            object_store_memory=80 << 20,
        )  # fmt: skip
    yield module
    module.shutdown()


@pytest.fixture
def cluster(ray, small_model):
    """Two actors with a small model, whose results do not depend on what runs beside an item."""
    return Cluster(model=small_model, actors=2, cpus_per_actor=1, deterministic=True)


def seen(state):
    if state.error() is not None:
        return str(state.error()).partition(" (at ")[0], type(state.error().__cause__)
    return state.text(), state["answer"], state.ret_value, state["note"]


def test_results_are_those_of_a_local_batch(cluster, small_model, tmp_path, capsys):
    items = [{"number": number} for number in range(8)]
    items[3] |= {"then": "raise"}
    how = {"seed": 11, "temperature": 1.0, "return_logprob": True, "top_logprobs_num": 2}
    with plait.Runtime(str(small_model), deterministic=True, progress=False) as runtime:
        local = cluster_programs.ask.run_batch(items, backend=runtime, resume=tmp_path / "local", **how)
        states = cluster_programs.ask.run_batch(
            items, backend=cluster, resume=tmp_path / "done", progress_bar=True, **how
        )
        assert "8/8" in capsys.readouterr().err
        assert [seen(state) for state in states] == [seen(state) for state in local]
        assert states[0]["note"] == Note(0, Mood.CALM) and type(states[3].error().__cause__) is LookupError
        assert states[1].get_meta_info("answer")["output_token_logprobs"][0][2]
        assert len({state["answer"] for state in local if state.error() is None}) > 1, "a seed for each item"
        again = cluster_programs.ask.run_batch(items, backend=runtime, resume=tmp_path / "done", **how)
    assert [seen(state) for state in again] == [seen(state) for state in local]
    lines = [sorted((tmp_path / name).read_text().count('"key"') for name in ("local", "done"))]
    assert lines == [[7, 7]]


def test_items_whose_actor_ends_run_elsewhere(cluster, tmp_path):
    items = [{"number": number, "folder": str(tmp_path)} for number in range(10)]
    items[2] |= {"then": "end"}
    items[5] |= {"then": "end engine"}
    items[8] |= {"then": "end once"}
    cluster.max_attempts = 2
    states = list(cluster_programs.ask.run_batch(items, backend=cluster, generator_style=True))
    errors = {number: str(state.error()) for number, state in enumerate(states) if state.error() is not None}
    assert set(errors) == {2, 5}
    assert "RuntimeGone: its actor ended 2 times while it ran: its worker process has died" in errors[2]
    assert "(pid " in errors[2] and "killed by signal 9" in errors[5]
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


def test_wrong_addresses_and_sizes(ray, cluster, small_model, monkeypatch):
    items = [{"number": 1}]
    with pytest.raises(plait.InputError, match="connected to Ray already, so 'local' is not used"):
        cluster_programs.ask.run_batch(items, backend=Cluster("local"))
    with pytest.raises(plait.InputError, match="gpus_per_actor is 1, but no machine of the cluster has as many GPUs"):
        cluster_programs.ask.run_batch(items, backend=Cluster(gpus_per_actor=1))
    with pytest.raises(plait.RuntimeGone, match="an actor did not start within 3 s"):
        cluster_programs.ask.run_batch(items, backend=Cluster(actors=1, gpus_per_actor=1, start_timeout_s=3))
    with pytest.raises(plait.ModelNotFound, match="/no/model"):
        cluster_programs.ask.run_batch(items, backend=Cluster(model="/no/model", cpus_per_actor=1))
