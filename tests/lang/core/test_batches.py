"""run_batch: order of the results, errors of single items, concurrency, progress bar."""

from __future__ import annotations

import io
import sys
import threading

import pytest
from sample_programs import qa

import plait
from plait import gen
from plait.runtime.messages import Generate
from plait.runtime.process import runtime as process

pytestmark = pytest.mark.timeout(120)


def test_results_keep_the_order_and_items_have_their_own_errors(backend):
    backend.scheduler.answer = lambda prompt, request: plait.Overloaded("full") if prompt == "q3" else prompt.upper()

    @plait.function
    def item(s, question):
        s += question + gen("answer")
        if question == "q5":
            raise LookupError("no such document")

    states = item.run_batch([{"question": f"q{i}"} for i in range(100)], temperature=0)
    assert all(request.sampling.temperature == 0 for request in backend.scheduler.sent(Generate))
    for i, state in enumerate(states):
        if i == 3:
            assert "variable 'answer': Overloaded" in str(state.error())
            for read in (state.text, lambda state=state: state["answer"]):
                with pytest.raises(plait.ProgramError, match="Overloaded"):
                    read()
        elif i == 5:
            assert isinstance(state.error().__cause__, LookupError)
            with pytest.raises(plait.ProgramError, match="no such document"):
                state["answer"]
        else:
            assert state.error() is None and state["answer"] == f"Q{i}"
    assert backend.scheduler.open_sessions() == 0
    assert item.run_batch([]) == []


@pytest.mark.parametrize(("threads", "concurrency"), [(1, 1), (3, 3), ("auto", 9)])
def test_at_most_num_threads_items_run_at_once(backend, threads, concurrency):
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(concurrency)

    @plait.function
    def item(s, i):
        nonlocal running, most
        with lock:
            running, most = running + 1, max(most, running + 1)
        together.wait(60)
        with lock:
            running -= 1

    states = item.run_batch([{"i": i} for i in range(9)], num_threads=threads)
    assert [state.error() for state in states] == [None] * 9
    assert most <= concurrency


def test_progress_bar_counts_items(backend, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    qa.run_batch([{"question": "q"}] * 4)
    assert terminal.getvalue() == ""
    qa.run_batch([{"question": "q"}] * 4, progress_bar=True)
    assert "4/4" in terminal.getvalue()


def test_a_log_has_a_line_now_and_then_and_no_bar(backend, monkeypatch, capsys):
    qa.run_batch([{"question": "q"}] * 4, progress_bar=True)
    assert capsys.readouterr().err == "", "a short batch says nothing"
    for name in ("LINES_DELAY_S", "LINE_INTERVAL_S"):
        monkeypatch.setattr(process, name, -1)
    qa.run_batch([{"question": "q"}] * 2, progress_bar=True)
    assert capsys.readouterr().err == "plait: 1 of 2 items, after 0 s [50%]\nplait: 2 of 2 items, after 0 s [100%]\n"


def test_system_exit_is_the_error_of_its_item(backend):
    @plait.function
    def item(s, i):
        raise SystemExit(3)

    assert isinstance(item.run_batch([{"i": 1}])[0].error().__cause__, SystemExit)
    with pytest.raises(SystemExit):
        item.run(1)
    assert isinstance(item.run(1, stream=True).error().__cause__, SystemExit)
