"""What an actor does with its work, in this process, and how results and errors reach the caller as text."""

from __future__ import annotations

import json
from pathlib import Path

import cluster_programs
import pytest
from cluster_programs import Mood, Note
from scripted_scheduler import ScriptedBackend
from tool_examples import call_text

import plait
from plait.lang.cluster.actor import BatchActor, Work, encode_work, read_welcome
from plait.lang.cluster.batch import AbsentTokenizer, FinishedItemsClient
from plait.lang.cluster.item_results import ClusterCodec, decode_error, decode_result
from plait.lang.cluster.program_reference import FILE_MODULE, ProgramReference, check_not_importing
from plait.runtime.errors import Overloaded, RuntimeGone
from plait.runtime.messages import Generate
from plait.runtime.portable_error import LostCause


@pytest.fixture
def backend():
    yield ScriptedBackend()
    plait.set_default_backend(None)


def make_actor(backend, name="ask", module="cluster_programs", **work):
    reference = work.pop("program", None) or ProgramReference(name, module=module)
    return BatchActor(encode_work(Work(reference, **work)), lambda model, settings: backend)


def run_item(backend, item, program=cluster_programs.ask, index=0, **work):
    """The state that the caller gets for an item."""
    actor = make_actor(backend, program.name, **work)
    model = read_welcome(actor.start())
    result = actor.run_item(index, json.dumps(item))
    assert isinstance(result, str)
    client = FinishedItemsClient(model, backend.client.tokenizer)
    return decode_result(program.name, client, result, ClusterCodec(program._body))


def decode_ask(model, result):
    """The state for a caller that lacks the files of the model."""
    client = FinishedItemsClient(model, AbsentTokenizer())
    return decode_result("ask", client, result, ClusterCodec(cluster_programs.ask._body))


def test_an_item_comes_back_as_the_state_that_a_local_batch_gives(backend):
    state = run_item(backend, {"number": 4})
    local = cluster_programs.ask.run(4, backend=backend)
    assert state.error() is None and state.ret_value == local.ret_value == [4, " fine."]
    assert state["answer"] == " fine." and state["note"] == Note(4, Mood.CALM)
    assert state.text() == local.text() and state.usage.prompt_tokens == local.usage.prompt_tokens > 0


def test_sampling_budget_and_the_number_of_the_item_reach_the_program(backend):
    run_item(backend, {"number": 4}, index=3, sampling={"temperature": 0.5, "seed": 7, "logit_bias": {5: 1.0}})
    (sent,) = backend.scheduler.sent(Generate)
    states = cluster_programs.ask.run_batch(
        [{"number": 4}] * 4, backend=backend, temperature=0.5, seed=7, logit_bias={5: 1.0}, num_threads=1
    )
    assert sent.sampling == backend.scheduler.sent(Generate)[4].sampling and len(states) == 4
    assert run_item(backend, {"number": 4}, budget=plait.Budget(tokens=2))["answer"] == " f"


def test_async_programs_and_agents(backend):
    assert run_item(backend, {"number": 1}, cluster_programs.ask_async).ret_value == " fine."
    backend.scheduler.answer = lambda prompt, request: call_text("final_answer", answer="four")
    assert run_item(backend, {"task": "2 + 2"}, cluster_programs.helper)["answer"] == "four"


def test_errors_keep_their_class_their_place_and_their_cause(backend):
    error = run_item(backend, {"number": 4, "then": "raise"}).error()
    assert type(error) is plait.ProgramError and "LookupError" in str(error) and error.program == "ask"
    assert type(error.__cause__) is LookupError and error.__cause__.args == ("no document", 4)
    assert error.place.filename.endswith("cluster_programs.py") and "in ask" in error.traceback_text
    error = run_item(backend, {"number": 4, "then": "read"}).error()
    assert type(error) is plait.MissingVariable and error.variable == "answr"
    backend.scheduler.answer = lambda prompt, request: Overloaded("full")
    state = run_item(backend, {"number": 4})
    assert type(state.error().__cause__) is Overloaded and state.error().variable == "answer"
    for read in (state.text, lambda: state["answer"]):
        with pytest.raises(plait.ProgramError, match="Overloaded"):
            read()


def test_a_cause_of_another_class_becomes_its_text(backend, monkeypatch):
    class Strange(Exception):
        pass

    def fail(*arguments):
        raise Strange("odd")

    monkeypatch.setattr(cluster_programs, "Note", fail)
    cause = run_item(backend, {"number": 4}).error().__cause__
    assert type(cause) is LostCause and str(cause) == "Strange: odd"


def test_what_cannot_be_returned_is_named(backend, monkeypatch):
    error = run_item(backend, {"number": 4, "then": "unsavable"}).error()
    assert "function is a function, which an actor cannot return" in str(error)
    actor = make_actor(backend)
    model = read_welcome(actor.start())
    result = actor.run_item(0, '{"number": 1}').replace('"Note"', '"Gone"')
    state = decode_result(
        "ask", FinishedItemsClient(model, AbsentTokenizer()), result, ClusterCodec(cluster_programs.ask._body)
    )
    assert "Gone of cluster_programs, which is not there any more" in str(state.error())


def test_an_engine_that_ended_is_not_an_error_of_the_item(backend):
    actor = make_actor(backend)
    actor.start()
    backend.scheduler.die("killed by signal 9")
    with pytest.raises(RuntimeGone, match="killed by signal 9"):
        actor.run_item(0, '{"number": 1}')


def test_a_file_is_imported_and_its_classes_are_found_by_the_caller(backend, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(Path(cluster_programs.__file__).read_text())
    actor = make_actor(backend, program=ProgramReference("ask", file=str(path)))
    model = read_welcome(actor.start())
    result = actor.run_item(0, '{"number": 1}')
    assert json.dumps(FILE_MODULE) in result
    state = decode_result(
        "ask", FinishedItemsClient(model, AbsentTokenizer()), result, ClusterCodec(cluster_programs.ask._body)
    )
    assert state["note"] == Note(1, Mood.CALM), "the caller's class, not that of the actor"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file .*program.py on the machine of the actor; copy it to the same path"),
        ("x = 1", "there is no program .*program.py:ask on this machine; its file may differ"),
        ("import nosuchmodule", "cannot be imported on the machine of the actor: No module named 'nosuchmodule'"),
        ("1 / 0", "program.py:ask: ZeroDivisionError: division by zero"),
        (
            "import plait.lang.cluster.program_reference as r\nr.check_not_importing()",
            "runs a batch when the actors import it: put run_batch under if __name__ == '__main__':",
        ),
    ],
)
def test_a_program_that_cannot_be_imported_is_an_error_at_the_start(backend, tmp_path, text, message):
    path = tmp_path / "program.py"
    if text is not None:
        path.write_text(text)
    name, error = read_welcome(make_actor(backend, program=ProgramReference("ask", file=str(path))).start())
    assert name == "InputError"
    with pytest.raises(plait.InputError, match=message):
        raise plait.InputError(error)
    check_not_importing()


def test_other_errors_at_the_start(backend):
    name, error = read_welcome(make_actor(backend, module="nosuchmodule").start())
    assert name == "InputError" and "give Cluster(working_dir=...) its folder" in error
    actor = BatchActor(encode_work(Work(ProgramReference("ask", module="cluster_programs"), model="/no/model")))
    name, error = read_welcome(actor.start())
    assert name == "ModelNotFound" and "/no/model" in error
    with pytest.raises(plait.InputError, match="are plain data"):
        encode_work(Work(ProgramReference("ask"), sampling={"stop": object()}))


def test_the_error_of_an_item_names_exceptions_only(tmp_path):
    """A function of Python would otherwise be called with arguments that an actor has chosen."""
    made = tmp_path / "made"
    data = {"kind": "ProgramError", "text": "t", "program": "p", "variable": None, "place": None, "traceback": ""}
    for name, arguments in (("exec", [f"open({str(made)!r}, 'w')"]), ("open", [str(made), "w"]), ("nothing", [])):
        error = decode_error(data | {"cause": {"builtin": name, "arguments": arguments}})
        assert isinstance(error.__cause__, LostCause) and name in str(error.__cause__)
    assert not made.exists()
    assert isinstance(decode_error(data | {"cause": {"builtin": "KeyError", "arguments": ["x"]}}).__cause__, KeyError)
