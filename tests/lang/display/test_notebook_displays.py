"""`show()` and `live()` in a notebook, which a double of IPython plays, and outside one."""

from __future__ import annotations

import sys
import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest
from fake_notebook import open_notebook
from html_checks import Display
from scripted_scheduler import Gate
from span_samples import program

import plait
from plait import gen
from plait.lang.core.run import run_listeners
from plait.lang.display import notebook


@pytest.fixture
def outputs(monkeypatch):
    """The outputs of a cell of a notebook."""
    return open_notebook(monkeypatch)


def test_show_is_inline_in_a_notebook(backend, outputs, tmp_path, monkeypatch):
    monkeypatch.setattr("webbrowser.open", lambda url: pytest.fail("no browser"))
    assert program.run().show() is None
    display = Display(outputs[0].updates[0])
    assert display.html.count('class="call gen"') == 6
    assert program.run().show(tmp_path / "a.html") == tmp_path / "a.html" and len(outputs) == 1


def test_ipython_in_a_terminal_is_no_notebook(backend, outputs, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())
    path = program.run().show()
    assert len(opened) == 1 and outputs == []
    path.unlink()


def test_live_shows_a_program_while_it_runs(backend, outputs):
    gate = Gate("the end", early="the ")
    backend.script(("Q", gate), default="x")

    @plait.function
    def slow(s):
        s += "Q" + gen("x")

    with plait.live(0.05):
        state = slow.run(stream=True)
        outputs[0].wait_for('<span class="peek">the</span>')
        assert 'class="state running"' in outputs[0].updates[-1]
    gate.open()
    state.sync()
    outputs[0].wait_for('class="state done"')  # after the block, until the program has ended
    assert len(outputs) == 1, "one output, updated in place"
    htmls = [Display(update).html for update in outputs[0].updates]
    assert "waiting for a program" in htmls[0] and all(a != b for a, b in pairwise(htmls))


def test_live_ends_with_the_whole_trace_of_all_programs(backend, outputs):
    with plait.live():
        program.run_batch([{}] * 3)
    last = outputs[0].updates[-1]
    assert last.count('class="call gen"') == 18 and last.count('class="state done"') == 3
    with plait.live():
        program.run_batch([{}] * (notebook.MAX_LIVE_RUNS + 2))
    assert "2 earlier programs are not shown" in outputs[1].updates[-1]


def test_updates_keep_their_distance(backend, outputs, monkeypatch):
    """It rests for the interval, and longer where an update takes long."""
    now, pauses, shown = [0.0], [], []

    class Clock(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return len(pauses) > 3 and (self.set() or True)

    def slow_html(display):
        now[0] += 0.5 * (len(pauses) == 2)
        return str(len(pauses))

    monkeypatch.setattr(notebook.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(notebook._LiveDisplay, "html", slow_html)
    display = notebook._LiveDisplay([], 0.25, shown.append)
    display.is_over = Clock()
    display.keep_up_to_date("")
    assert pauses == [0.25, 0.25, 2.0, 0.25] and len(shown) == 5


def test_live_outside_a_notebook_shows_nothing(backend, capsys):
    assert "IPython" not in sys.modules
    with plait.live():
        assert program.run()["kind"] == "yes"
        assert not run_listeners, "nothing keeps the programs of a long block"
    assert capsys.readouterr() == ("", "") and "IPython" not in sys.modules


@pytest.mark.parametrize("interval", [0, -1, "1", True, 61])
def test_live_refuses_a_wrong_interval(interval):
    with pytest.raises(plait.InputError, match="interval_s must be from"), plait.live(interval):
        pass
