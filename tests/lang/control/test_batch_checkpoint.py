"""A batch that stopped goes on where it stopped: what is done is not run again, and reads the same."""

from __future__ import annotations

import asyncio
import json

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
async def later(s, question):
    s += question + gen("answer")
    return await s["answer"]


def everything(states):
    return [(s.text(), s.messages(), s["answer"], s["length"], s.ret_value, "answer" in s, s.error()) for s in states]


def test_what_is_done_is_not_run_again_and_reads_the_same(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in ["a", "b", "a"]]
    first = everything(qa.run_batch(items, resume=file))
    assert len(backend.scheduler.sent(Generate)) == 3 and len(file.read_text().splitlines()) == 3
    assert everything(qa.run_batch(items, resume=str(file))) == first
    assert len(backend.scheduler.sent(Generate)) == 3, "nothing ran"
    more = qa.run_batch([*items, {"question": "c"}], resume=file)
    assert everything(more)[:3] == first and more[3].messages()[0]["content"] == "c"
    assert len(backend.scheduler.sent(Generate)) == 4
    assert "".join(more[0].text_iter()) == more[0].text() and more[0].usage.calls == 0


def test_items_that_failed_run_again(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    backend.scheduler.answer = lambda prompt, request: CallFailed("no") if "a<" in prompt else "fine"
    errors = [state.error() for state in qa.run_batch(items, resume=file)]
    assert errors[0] is not None and errors[1] is None
    backend.script(default="now")
    assert [state["answer"] for state in qa.run_batch(items, resume=file)] == ["now", "fine"]


def test_what_was_changed_runs_anew(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": "a"}]
    qa.run_batch(items, resume=file)
    qa.run_batch(items, resume=file, temperature=0.5)
    later.run_batch(items, resume=file)
    assert len(backend.scheduler.sent(Generate)) == 3


def test_another_model_answers_anew(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": "a"}]
    qa.run_batch(items, resume=file)
    backend.client.model = msgspec.structs.replace(backend.client.model, model_path="/another/model")
    qa.run_batch(items, resume=file)
    assert len(backend.scheduler.sent(Generate)) == 2


def test_a_file_that_fails_fails_the_item_not_the_batch(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    for program in (qa, later):

        def answer(prompt, request):
            file.unlink(missing_ok=True)
            file.mkdir(exist_ok=True)
            return "fine"

        backend.scheduler.answer = answer
        assert [type(s.error().__cause__) for s in program.run_batch(items, resume=file)] == [IsADirectoryError] * 2
        file.rmdir()


def test_a_line_that_was_cut_off_is_taken_out(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    qa.run_batch(items, resume=file)
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1][:20])
    qa.run_batch(items, resume=file)
    assert sorted(json.loads(line)["messages"][0]["content"] for line in file.read_text().splitlines()) == ["a", "b"]
    assert len(backend.scheduler.sent(Generate)) == 3


def test_an_async_batch_resumes_too(backend, tmp_path):
    file, items = tmp_path / "batch.jsonl", [{"question": q} for q in "ab"]
    for _ in range(2):
        assert [state.ret_value for state in later.run_batch(items, resume=file)] == [" fine."] * 2
    assert len(backend.scheduler.sent(Generate)) == 2
    assert asyncio.run(later.arun_batch(items))[0]["answer"] == " fine."


def test_what_json_cannot_keep_is_an_error_not_another_value(backend, tmp_path):
    @plait.function
    def typed(s, question):
        s += question + gen("n", type=int)
        s["pair"] = (1, 2)

    file = tmp_path / "batch.jsonl"
    state = typed.run_batch([{"question": "a"}], resume=file)[0]
    assert "resume saves JSON values only: pair is a tuple" in str(state.error()) and file.read_text() == ""
    with pytest.raises(plait.InputError, match="item 0 of run_batch has arguments that are not JSON values"):
        qa.run_batch([{"question": {1, 2}}], resume=file)
    with pytest.raises(plait.InputError, match="cannot be combined"):
        qa.run_batch([{"question": "a"}], resume=file, generator_style=True)
    file.write_text("not a line\n")
    with pytest.raises(plait.InputError, match=r"batch.jsonl, line 1, is not a line"):
        qa.run_batch([{"question": "a"}], resume=file)
    with pytest.raises(FileNotFoundError):
        qa.run_batch([{"question": "a"}], resume=tmp_path / "no" / "folder")
