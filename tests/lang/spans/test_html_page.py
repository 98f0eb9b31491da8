"""The HTML page of a run, its notebook cell, and what `show` and `plait run --trace` write."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from scripted_scheduler import Gate
from span_samples import program

import plait
from plait.cli import main
from plait.lang.spans.call_spans import Span, Trace
from plait.lang.spans.export import _shares, render_page


class BalancedHtmlParser(HTMLParser):
    """Asserts that tags are closed in order; collects titles and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.attributes += [value or "" for _, value in attrs]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [value or "" for _, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def test_page_is_self_contained_escaped_and_has_token_tooltips(backend, tmp_path):
    backend.script(default=' <script>alert("x")</script>')
    path = program.run(text="</title><script>").show(tmp_path / "out.html")
    html = path.read_text()
    parser = BalancedHtmlParser()
    parser.feed(html)
    assert parser.open == [] and "<script" not in html and "http" not in html.replace("http-equiv", "")
    details = "".join(parser.titles)
    assert '<script>alert("x")</script>' in details and "sampled" in details and "cached" in details
    assert "branch 3 of 2" in html and html.count('class="span"') == 7
    assert html.count("#6aa84f") > 1 and html.count("#9fc5e8") > 1, "sampled and cached tokens have different colours"


def test_shares_of_a_bar_follow_time_and_tokens():
    def span(**changed):
        fixed = {"branch_id": 0, "name": "x", "kind": "gen", "text": "", "error": None}
        return Span(**(fixed | {"start_s": 0.0, "end_s": 10.0, "queue_s": 0.0, "prefill_s": 0.0} | changed))

    all_parts = span(queue_s=1.0, prefill_s=3.0, cached_tokens=1, computed_tokens=2, sampled_tokens=1, forced_tokens=1)
    assert dict(_shares(all_parts)) == pytest.approx(
        {"queue": 0.1, "cached": 0.1, "computed": 0.2, "sampled": 0.3, "forced": 0.3}
    )
    assert dict(_shares(span(kind="select", computed_tokens=4))) == {"computed": 1.0}
    assert dict(_shares(span(error="no"))) == {"failed": 1.0}
    assert render_page([]).count("No program ran") == 1
    assert "<svg" in render_page([Trace("empty", (None,), (), 0.0, None)])


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


def test_notebook_cell_marks_generated_text(backend):
    backend.script(default="<b>bold</b>")
    html = program.run(text="a < b")._repr_html_()
    parser = BalancedHtmlParser()
    parser.feed(html)
    assert parser.open == [] and "<b>" not in html and "a &lt; b" in html
    assert 'title="first">&lt;b&gt;bold' in html and 'title="kind">yes' in html and "&lt;|im_start|&gt;" in html
    gate = Gate("late")
    backend.script(default=gate)
    state = program.run(stream=True)
    assert gate.reached.wait(60)
    assert "is still running" in state._repr_html_()
    state.cancel()
    state.error()


def test_plait_run_trace_writes_the_spans_of_all_programs(backend, tmp_path, capsys):
    file = tmp_path / "programs.py"
    file.write_text(
        "import plait\n@plait.function\ndef one(s):\n    s += 'Q' + plait.gen('x')\n"
        "one.run()\none.run_batch([{}, {}])\n"
    )
    for suffix, count in (("html", 'class="span"'), ("json", '"ph": "X"')):
        out = tmp_path / f"out.{suffix}"
        assert main(["run", "--trace", str(out), str(file)]) == 0
        assert out.read_text().count(count) == 3
        assert f"the trace of 3 programs is in {out}" in capsys.readouterr().err
    assert main(["run", "--trace", "out.txt", str(file)]) == 1
    file.write_text(file.read_text() + "raise SystemError('late')\n")
    assert main(["run", "--trace", str(tmp_path / "b.html"), str(file)]) == 1
    assert (tmp_path / "b.html").read_text().count('class="span"') == 3, "the trace is written when the file fails"
