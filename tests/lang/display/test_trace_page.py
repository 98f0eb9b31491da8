"""The page of a trace: its rows, colours, time axis and policy, and what `show` and `plait run --trace` write."""

from __future__ import annotations

import hashlib
import math
import re
from base64 import b64encode

import pytest
from html_checks import EVIL, Display
from hypothesis import given, settings
from hypothesis import strategies as st
from span_samples import program

import plait
from plait import gen
from plait.cli import main
from plait.lang.html.filters import rows, shares, ticks
from plait.lang.html.render import page
from plait.lang.spans.call_spans import Span, Trace, trace_of


def span(**changed):
    fixed = {"branch_id": 0, "name": "x", "kind": "gen", "text": "", "error": None}
    return Span(**(fixed | {"start_s": 0.0, "end_s": 10.0, "queue_s": 0.0, "prefill_s": 0.0} | changed))


def calls_in(html):
    return len(re.findall(r'class="call (?:gen|select)', html))


def test_page_is_one_file_that_runs_and_loads_nothing(backend, tmp_path):
    backend.script(default=EVIL)
    path = program.run(text=EVIL).show(tmp_path / "out.html")
    display = Display(html := path.read_text())
    assert calls_in(html) == 7 and any(EVIL in text for text in display.texts["pre"])
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    digest = b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = (
        value for tag, name, value in display.attributes if (tag, name) == ("meta", "content") and "src" in value
    )
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}'") and "unsafe" not in policy
    assert not re.search(r"url\(|@import", style)
    assert "color-scheme: light dark" in style and "light-dark(#ffffff, #0d1117)" in style
    assert "@container (max-width: 620px)" in style


@pytest.mark.parametrize("suffix", [".html", ".json"])
def test_only_a_trace_is_replaced(backend, tmp_path, suffix):
    state, path = program.run(), tmp_path / f"out{suffix}"
    path.touch()
    assert state.show(path).stat().st_size > 1000 and state.show(path) == path
    (tmp_path / f"folder{suffix}").mkdir()
    for content in ("<title>mine</title>", "<title>plait: notes</title>", '{"traceEvents": []}'):
        path.write_text(content)
        for other in (path, tmp_path / f"folder{suffix}"):
            with pytest.raises(plait.InputError, match="is not a trace of plait; remove it or name another file"):
                state.show(other)
        assert path.read_text() == content


def test_a_page_has_no_fixed_width(backend):
    display = Display(page([trace_of(program.run()._run)]))
    widths = [value for tag, name, value in display.attributes if name in ("width", "x", "x1", "x2") and tag != "meta"]
    assert len(widths) > 20 and all(value.endswith("%") for value in widths)
    assert all(0 <= float(value[:-1]) <= 100.01 for value in widths)
    assert ("meta", "content", "width=device-width, initial-scale=1") in display.attributes


def test_rows_are_a_tree_with_tokens_by_cause(backend):
    html = page([trace_of(program.run()._run)])
    display = Display(html)
    assert display.texts["em"] == ["branch 1", "branch 2", "branch 3", "sample 2"]
    assert html.count("<i></i><i></i><em") == 1, "the branch of a branch is indented twice"
    for kind in ("cached", "computed", "sampled"):
        assert f'<i class="{kind}"></i><b>' in html and f'<rect class="{kind}"' in html
    assert html.count("<summary>") == 8, "each call can be opened with the keyboard"


def test_ended_branches_are_marked_with_the_reason(backend):
    @plait.function
    def pruned(s):
        s += "Q"
        forks = s.fork(3)
        forks += gen("x")
        inner = forks[0].fork(1)
        inner += gen("deep")
        inner.join()
        forks.adopt(1)

    trace = trace_of(pruned.run()._run)
    assert trace.ended_branches == dict.fromkeys((1, 3), "another branch was adopted")
    html = page([trace])
    assert [text for text in Display(html).texts["em"] if "✕" in text] == ["branch 1 ✕", "branch 3 ✕"]
    assert html.count('class="call gen ended"') == 2 and "(2 ended early ✕)" in html
    assert "another branch was adopted" in Display(html).body()


def test_shares_of_a_bar_follow_time_and_tokens():
    all_parts = span(
        queue_s=1.0,
        prefill_s=3.0,
        cached_tokens=1,
        computed_tokens=2,
        sampled_tokens=2,
        drafted_tokens=1,
        forced_tokens=1,
    )
    assert dict(shares(all_parts)) == pytest.approx(
        {"queue": 0.1, "cached": 0.1, "computed": 0.2, "sampled": 0.2, "drafted": 0.2, "forced": 0.2}
    )
    assert dict(shares(span(kind="select", computed_tokens=4))) == {"computed": 1.0}
    assert dict(shares(span(error="no", state="failed"))) == {"failed": 1.0}
    assert dict(shares(span(state="running", queue_s=4.0))) == pytest.approx({"queue": 0.4, "running": 0.6})
    assert page([]).count("No program ran") == 1
    assert "no calls" in page([Trace("empty", (None,), (), 0.0, None)])


PARENTS = st.lists(st.integers(0, 99), max_size=6).map(
    lambda numbers: (None, *(number % (at + 1) for at, number in enumerate(numbers)))
)


def slow_rows(trace, branch_id, depth):
    """The rows of a branch and those below it: what is not placed yet and has the lowest number is next."""

    def below(branch):
        return {branch}.union(*(below(child) for child, parent in enumerate(trace.branch_parents) if parent == branch))

    def first(branch):
        return min((at for at, call in enumerate(trace.spans) if call.branch_id in below(branch)), default=math.inf)

    own = [(at, -1, call) for at, call in enumerate(trace.spans) if call.branch_id == branch_id]
    branches = [(first(child), child, None) for child, parent in enumerate(trace.branch_parents) if parent == branch_id]
    found = [] if own else [(branch_id, depth, None)]
    for _, child, call in sorted(own + branches, key=lambda entry: entry[:2]):
        found += [(branch_id, depth, call)] if call is not None else slow_rows(trace, child, depth + 1)
    return found


@settings(max_examples=200, deadline=None)
@given(PARENTS, st.lists(st.integers(0, 99), max_size=8))
def test_rows_are_those_of_a_walk_through_the_tree(parents, branches):
    spans = tuple(span(branch_id=branch % len(parents), name=str(at)) for at, branch in enumerate(branches))
    trace = Trace("p", parents, spans, 1.0, None)
    found = rows(trace)
    assert [(row.branch_id, row.depth, row.span) for row in found] == slow_rows(trace, 0, 0)
    assert sorted(row.branch_id for row in found if row.is_first) == list(range(len(parents)))


@given(st.floats(1e-6, 1e6))
def test_ticks_are_round_and_few(length):
    found = ticks(length)
    assert found[0] == 0 and 2 <= len(found) <= 6 and found[-1] <= length * (1 + 1e-6)
    step = found[1]
    digit = step / 10 ** math.floor(math.log10(step) + 1e-6)
    assert round(digit, 2) in (1, 2, 5)
    assert found == pytest.approx([step * at for at in range(len(found))]) and length - found[-1] < step * 1.001


def test_many_programs_are_closed_sections(backend):
    traces = [trace_of(state._run) for state in program.run_batch([{}] * 6)]
    assert page(traces).count('<details class="run">') == 6
    assert page(traces[:5]).count('<details class="run" open>') == 5


def test_show_opens_a_browser_only_without_a_path(backend, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    path = program.run().show()
    assert opened == [path.as_uri()] and path.read_text().startswith("<!doctype html>")
    path.unlink()
    program.run().show(tmp_path / "a.html")
    assert len(opened) == 1
    with pytest.raises(plait.InputError, match=r".html \(page\) or .json \(Perfetto\)"):
        program.run().show(tmp_path / "a.txt")


def test_plait_run_trace_writes_the_spans_of_all_programs(backend, tmp_path, capsys):
    file = tmp_path / "programs.py"
    file.write_text(
        "import plait\n@plait.function\ndef one(s):\n    s += 'Q' + plait.gen('x')\n"
        "one.run()\none.run_batch([{}, {}])\n"
    )
    for suffix, count in (("html", calls_in), ("json", lambda text: text.count('"ph": "X"'))):
        out = tmp_path / f"out.{suffix}"
        assert main(["run", "--trace", str(out), str(file)]) == 0
        assert count(out.read_text()) == 3
        assert f"the trace of 3 programs is in {out}" in capsys.readouterr().err
    assert main(["run", "--trace", "out.txt", str(file)]) == 1
    file.write_text(file.read_text() + "raise SystemError('late')\n")
    assert main(["run", "--trace", str(tmp_path / "b.html"), str(file)]) == 1
    assert calls_in((tmp_path / "b.html").read_text()) == 3, "the trace is written when the file fails"
