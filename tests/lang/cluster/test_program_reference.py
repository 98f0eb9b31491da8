"""How programs are named for actors, and what `run_batch` refuses to send, without a cluster."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import cluster_programs
import pytest

import plait
from plait import Cluster
from plait.lang.cluster.program_reference import ProgramReference, reference_of

FILE = Path(cluster_programs.__file__)


def test_programs_of_modules_have_their_names():
    for name in ("ask", "ask_async", "helper"):
        assert reference_of(getattr(cluster_programs, name), None) == ProgramReference(name, module="cluster_programs")
    assert reference_of(cluster_programs.renamed, None).qualname == "ask", "bound arguments are part of the items"
    assert str(reference_of(cluster_programs.ask, None)) == "cluster_programs:ask"


def test_programs_of_scripts_have_the_path_of_their_file(monkeypatch, tmp_path):
    main = types.ModuleType("__main__")
    main.ask, main.__file__ = cluster_programs.ask, str(FILE)
    monkeypatch.setattr(cluster_programs.ask._body, "__module__", "__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert reference_of(cluster_programs.ask, None) == ProgramReference("ask", file=str(FILE))
    assert reference_of(cluster_programs.ask, FILE.parent) == ProgramReference("ask", file=FILE.name)
    with pytest.raises(plait.InputError, match=r"cluster_programs.py, which is not in the working_dir"):
        reference_of(cluster_programs.ask, tmp_path)
    main.__spec__ = types.SimpleNamespace(name="package.job")
    assert reference_of(cluster_programs.ask, None) == ProgramReference("ask", module="package.job")
    del main.__spec__, main.__file__
    with pytest.raises(plait.InputError, match="is defined in an interactive session; save it in a file"):
        reference_of(cluster_programs.ask, None)


def test_programs_without_a_name_are_refused():
    @plait.function
    def inner(s):
        s += "x"

    with pytest.raises(plait.InputError, match="'inner' cannot run on a cluster: it has no name in a module"):
        inner.run_batch([{}], backend=Cluster())
    with pytest.raises(plait.InputError, match="'method' cannot run on a cluster: it is a method of an object"):
        cluster_programs.Holder().method.run_batch([{"number": 1}], backend=Cluster())


@pytest.mark.parametrize("value", [{1, 2}, (1,), Path("x"), float("nan"), {"a": object()}])
def test_arguments_that_are_not_json_are_refused(value):
    with pytest.raises(plait.InputError, match=r"item 1: subject is a \w+ that cannot be sent to an actor"):
        cluster_programs.ask.run_batch([{"number": 1}, {"number": 2, "subject": value}], backend=Cluster())


def test_a_cluster_is_a_backend_of_batches_only():
    for call in (cluster_programs.ask.run, cluster_programs.ask.compile):
        with pytest.raises(plait.InputError, match=r"a Cluster runs batches: program.run_batch\(items, backend=...\)"):
            call(number=1, backend=Cluster())
    with pytest.raises(plait.InputError, match="cannot be combined with generator_style"):
        cluster_programs.ask.run_batch([{"number": 1}], backend=Cluster(), generator_style=True, resume="x")
    assert cluster_programs.ask.run_batch([], backend=Cluster()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "10.0.0.1:6379"}, 'address must be "auto", "local" or "ray://HOST:PORT"'),
        ({"actors": 0}, "actors must be an integer from 1"),
        ({"gpus_per_actor": -1}, "gpus_per_actor must be a number, 0 or more"),
        ({"cpus_per_actor": 0}, "cpus_per_actor must be a number, above 0"),
        ({"max_attempts": True}, "max_attempts must be an integer"),
        ({"start_timeout_s": float("inf")}, "start_timeout_s must be a number"),
        ({"start_timeout_s": 1e6}, "at most 86400 seconds"),
        ({"working_dir": "/no/folder"}, "working_dir must be a folder on this machine"),
        ({"model": 3}, "model must be a path"),
        ({"weights": "int3"}, "weights"),
        ({"nosuch": 1}, "nosuch"),
        ({"model_path": "x"}, "write model=..."),
        ({"num_threads": 3}, "num_threads belongs to run_batch"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(plait.InputError) as caught:
        Cluster(**settings)
    assert message in str(caught.value)


def test_settings_of_the_runtime_are_kept(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    cluster = Cluster("ray://head:10001", model=tmp_path, weights="int8", chat_template=template, device=None)
    assert cluster.settings == {"weights": "int8", "chat_template": "{{ messages }}"}
    assert cluster.model == str(tmp_path) and repr(cluster) == "<plait cluster 'ray://head:10001'>"


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(plait.InputError, match=r"Cluster needs the package ray .*pip install 'plait\[ray\]'"):
        cluster_programs.ask.run_batch([{"number": 1}], backend=Cluster())
