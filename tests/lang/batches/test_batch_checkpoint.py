"""run_batch with `resume=`: finished items are read from the file, the others run."""

from __future__ import annotations

import asyncio
import json
import resource
import signal

import msgspec
import pytest

import plait
from plait import assistant, gen, user
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Generate


@plait.function
def qa(s, question):
    s += user(question) + assistant(gen("answer"))
    s["length"] = len(s["answer"])
    return [question]


@plait.function
async def async_program(s, question):
    s += question + gen("answer")
    return await s["answer"]


def observable_results(states):
    return [(s.text(), s.messages(), s["answer"], s["length"], s.ret_value, "answer" in s, s.error()) for s in states]


def test_finished_items_are_read_from_the_file(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in ["a", "b", "a"]]
    first = observable_results(qa.run_batch(items, resume=file))
    assert len(backend.scheduler.sent(Generate)) == 3 and len(file.read_text().splitlines()) == 3
    assert observable_results(qa.run_batch(items, resume=str(file))) == first
    assert len(backend.scheduler.sent(Generate)) == 3, "nothing ran"
    extended = qa.run_batch([*items, {"question": "c"}], resume=file)
    assert observable_results(extended)[:3] == first and extended[3].messages()[0]["content"] == "c"
    assert len(backend.scheduler.sent(Generate)) == 4
    assert "".join(extended[0].text_iter()) == extended[0].text() and extended[0].usage.calls == 1


def test_failed_items_run_again(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    backend.scheduler.answer = lambda prompt, request: CallFailed("no") if "a<" in prompt else "fine"
    errors = [state.error() for state in qa.run_batch(items, resume=file)]
    assert errors[0] is not None and errors[1] is None
    backend.script(default="now")
    assert [state["answer"] for state in qa.run_batch(items, resume=file)] == ["now", "fine"]


def test_changed_options_or_program_run_again(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": "a"}]
    qa.run_batch(items, resume=file)
    qa.run_batch(items, resume=file, temperature=0.5)
    async_program.run_batch(items, resume=file)
    assert len(backend.scheduler.sent(Generate)) == 3


def test_another_model_runs_again(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": "a"}]
    qa.run_batch(items, resume=file)
    backend.client.model = msgspec.structs.replace(backend.client.model, model_path="/another/model")
    qa.run_batch(items, resume=file)
    assert len(backend.scheduler.sent(Generate)) == 2


def test_write_error_of_the_file_loses_no_result(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    for program in (qa, async_program):

        def answer(prompt, request):
            if file.is_file():
                file.unlink()
                file.mkdir()
            return "fine"

        backend.scheduler.answer = answer
        with pytest.warns(UserWarning, match="resume: item . is not saved and will run again: .*it is no regular file"):
            states = program.run_batch(items, resume=file, num_threads=1)
        assert [(state.error(), state["answer"]) for state in states] == [(None, "fine")] * 2
        file.rmdir()


def test_truncated_last_line_is_removed(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    qa.run_batch(items, resume=file)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:20])
    qa.run_batch(items, resume=file)
    runs = [json.loads(line)["run"] for line in file.read_text().splitlines()]
    assert sorted(run["ret_value"]["value"] for run in runs) == [["a"], ["b"]]
    assert len(backend.scheduler.sent(Generate)) == 3


def test_async_batch_resumes(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    for _ in range(2):
        assert [state.ret_value for state in async_program.run_batch(items, resume=file)] == [" fine."] * 2
    assert len(backend.scheduler.sent(Generate)) == 2
    assert asyncio.run(async_program.arun_batch(items))[0]["answer"] == " fine."


def test_item_with_a_value_that_cannot_be_saved_runs_again(backend, tmp_path):
    @plait.function
    def program(s, question):
        s += question + gen("n")
        s["now"] = lambda: 0

    file = tmp_path / "batch.jsonl"
    for _ in range(2):
        with pytest.warns(UserWarning, match="item 0 is not saved and will run again: now is a function"):
            state = program.run_batch([{"question": "a"}], resume=file)[0]
        assert state.error() is None and state["n"] == " fine." and file.read_text() == ""
    assert len(backend.scheduler.sent(Generate)) == 2


def test_invalid_files_and_arguments_are_errors(backend, tmp_path):
    file = tmp_path / "batch.jsonl"
    with pytest.raises(plait.InputError, match="item 0 of run_batch has arguments that are not JSON values"):
        qa.run_batch([{"question": {1, 2}}], resume=file)
    with pytest.raises(plait.InputError, match="cannot be combined"):
        qa.run_batch([{"question": "a"}], resume=file, generator_style=True)
    file.write_text("not a line\n")
    with pytest.raises(plait.InputError, match=r"batch.jsonl, line 1, is not a line .*; remove it"):
        qa.run_batch([{"question": "a"}], resume=file)


@pytest.mark.parametrize("content", ["a text", "{\n", '{"key": "mine"}\n', '{"key": "mine", "run": {}}', "\n"])
def test_a_file_of_others_is_left_as_it_is(backend, tmp_path, content):
    file = tmp_path / "batch.jsonl"
    file.write_text(content)
    with pytest.raises(plait.InputError, match=r"batch.jsonl, line 1, is not a line that"):
        qa.run_batch([{"question": "a"}], resume=file)
    assert file.read_text() == content and backend.scheduler.sent(Generate) == []


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(backend, tmp_path):
    for path in (tmp_path, tmp_path / "none" / "batch.jsonl"):
        with pytest.raises(plait.InputError, match="resume: the file cannot be written: "):
            qa.run_batch([{"question": "a"}], resume=path)
    assert backend.scheduler.sent(Generate) == []


def test_a_full_disk_loses_no_result_and_no_line(backend, tmp_path):
    """A limit on the file's size stands for the full disk: a write writes what fits and fails then."""
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "abc"]
    qa.run_batch(items[:1], resume=file)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 40, hard))
    try:
        with pytest.warns(UserWarning, match="resume: item . is not saved and will run again: .*File too large"):
            states = qa.run_batch(items, resume=file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert [state["length"] for state in states] == [len(state["answer"]) for state in states]
    assert len(file.read_bytes().splitlines()) == 1
    resumed = qa.run_batch(items, resume=file)  # each line can be read
    assert observable_results(resumed) == observable_results(states) and len(file.read_bytes().splitlines()) == 3
