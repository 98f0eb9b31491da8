"""What a notebook shows of states, forks, lists, usage, graphs and beams: whole, escaped, and without waiting."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from html_checks import EVIL, Display
from scripted_scheduler import Gate, byte_tokenizer
from span_samples import program

import plait
from plait import gen, select, user
from plait.lang.control.beam import BeamHypothesis, BeamSearch, _table
from plait.lang.display.texts import states_html
from plait.lang.html.render import STYLE, ShownList
from plait.lang.spans.call_progress import progress_of
from plait.runtime.errors import CallFailed
from plait.runtime.sampling_params import sampling_params


@plait.function
def evil(s, text):
    s += user(text) + gen(text)
    forks = s.fork(2)
    forks += user(text) + gen("branch")
    shown.append(forks)
    forks.join()
    s += select("kind", [text, "no"])


shown: list = []


def displays_of(state, graph):
    yield "state", state
    yield "forks", shown[-1]
    yield "list", evil.run_batch([{"text": EVIL}, {"text": EVIL}])
    yield "usage", state.usage
    yield "graph", graph
    yield "beams", ShownList(_table, [BeamHypothesis(EVIL, -1.0, -0.5, 2, "stop")])


def test_every_display_is_escaped_and_has_its_own_style(backend):
    backend.script(default=EVIL)
    graph = evil.compile(EVIL)
    for what, shown_value in displays_of(evil.run(EVIL), graph):
        display = Display(shown_value._repr_html_())
        assert display.html.startswith(f'<style>{STYLE}</style><div class="plait '), what
        assert {"mathjax_ignore", "tex2jax_ignore"} <= set(display.classes()[0].split()), f"$ is a sign: {what}"
        assert "<script>" in display.body(), f"the text is shown: {what}"


def test_half_of_a_surrogate_pair_in_an_error_is_shown_as_a_sign(tmp_path):
    @plait.function
    def missing(s):
        raise FileNotFoundError("no file \udcff")

    states = missing.run_batch([{}])
    for html in (states._repr_html_(), states[0]._repr_html_(), states[0].show(tmp_path / "a.html").read_text()):
        assert "no file ?" in html and html.encode()


def test_style_is_for_light_and_dark_and_for_nothing_else():
    dark = STYLE.index('[data-jp-theme-light="false"] .plait, :is(.vscode-dark, .vscode-high-contrast) .plait')
    light = STYLE.index('[data-jp-theme-light="true"] .plait, :is(.vscode-light, .vscode-high-contrast-light) .plait')
    assert dark < light, "VS Code's light theme of high contrast has both of its classes; the last rule is applied"
    for ground in ("[data-jp-theme-light] .plait { --ground: var(--jp-", ".plait { --ground: var(--vscode-editor-"):
        assert ground in STYLE, "no box of another colour"
    assert ".plait.plait :is(.head, .step) code {" in STYLE, "of JupyterLab's rules one has two classes, two elements"
    without_comments = STYLE[STYLE.index("*/") + 2 :].replace("/*", "\n/*")
    selectors = [
        line.partition("{")[0].strip() for line in without_comments.splitlines() if line.rstrip().endswith("}")
    ]
    selectors = [selector for selector in selectors if selector and not selector.startswith(("/*", "}"))]
    assert len(selectors) > 60 and all(".plait" in part for text in selectors for part in split_selector(text))


def split_selector(text):
    """The alternatives of a selector; commas within parentheses do not count."""
    depth, parts = 0, [""]
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def test_state_is_shown_in_turns_with_generated_text_marked(backend):
    display = Display(program.run(text="\nfirst line")._repr_html_())
    roles = [value for tag, name, value in display.attributes if name == "title" and "<|im_start|>" in value]
    assert roles == ["<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"] * 2 or len(roles) == 4
    assert "<pre>\n\nfirst line</pre>" in display.html, "a parser removes one line break after <pre>"
    assert display.texts["mark"] == [" fine.", "yes", " fine."]
    assert 'title="first: done, 6 tokens"' in display.html and "(sample 1 of 2)" in display.body()


def test_nothing_is_awaited_and_what_is_pending_is_marked(backend):
    gate = Gate("the end", early="the ")
    backend.script(("Q", gate), default=" fine.")

    @plait.function
    def slow(s):
        s += "Q" + gen("x")
        forks = s.fork(2)
        forks += " more" + gen("y")
        forks.join()
        held.append(forks)

    held: list = []
    state = slow.run(stream=True)
    assert gate.reached.wait(60)
    call = wait_for(lambda: [part.call for part in state._run.call_segments()])[0]
    wait_for(lambda: call.text_so_far() == "the ")
    wait_for(lambda: held)
    for value in (state, held[0], ShownList(states_html, [state])):
        html = Display(value._repr_html_()).html
        assert "running" in html and "pending" in html
    assert "pending …" in Display(held[0]._repr_html_()).body(), "a call that has no text yet"
    assert '<mark class="running" title="x: running, 4 tokens">the </mark>' in state._repr_html_()
    gate.open()
    state.sync()
    assert "pending" not in Display(state._repr_html_()).body() and "done" in Display(state._repr_html_()).classes()[3]


def wait_for(ready):
    import time

    for _ in range(60_000):
        if found := ready():
            return found
        time.sleep(0.001)
    raise AssertionError("it never happened")


def test_async_states_have_the_same_display(backend, tmp_path):
    @plait.function
    async def ask(s):
        s += "Q" + gen("x")
        await s["x"]
        inside.append(s._repr_html_())

    inside: list = []

    async def run():
        state = await ask.arun(stream=True)
        await state.sync()
        return state._repr_html_(), await state.show(tmp_path / "a.html"), await ask.arun_batch([{}, {}])

    outside, path, states = asyncio.run(run())
    assert path == tmp_path / "a.html" and path.read_text().count('class="call gen"') == 1
    assert " fine." in Display(inside[0]).texts["mark"] == Display(outside).texts["mark"]
    assert len(Display(states._repr_html_()).texts["tr"]) == 3


def test_lists_and_their_parts_are_tables(backend):
    full = CallFailed("no <b>room</b>", "overloaded")
    backend.scheduler.answer = lambda prompt, request: full if "bad" in prompt else " fine."
    states = program.run_batch([{"text": "bad"}, {"text": "good"}, {"text": "good"}])
    display = Display(states._repr_html_())
    assert display.texts["th"] == ["", "state", "first", "tip", "deep", "kind", "two", "tokens", "cached", "time"]
    assert [value for value in display.classes() if value.startswith("state ")] == ["state failed"] + ["state done"] * 2
    assert "no <b>room</b>" in "".join(value for _, name, value in display.attributes if name == "title")
    assert display.html.count("<ol><li><pre>\n<mark") == 3 * 3, "tip, deep and two of three states"
    assert len(Display(states[:2]._repr_html_()).texts["tr"]) == 3 and isinstance(states, list)
    many = Display(ShownList(states_html, [states[1]] * 203)._repr_html_())
    assert len(many.texts["tr"]) == 201 and "and 3 more" in many.body()


def test_values_that_a_program_set_are_shown_without_waiting(backend):
    class Slow:
        """As a state that still runs: its text is not there, its repr is."""

        def __str__(self):
            pytest.fail("this would wait")

        def __repr__(self):
            return "<slow>"

    @plait.function
    def keep(s):
        s["text"], s["number"], s["slow"] = "a 'b'", 2, Slow()

    assert Display(keep.run_batch([{}])._repr_html_()).texts["pre"] == ["\na 'b'", "\n2", "\n<slow>"]


def test_long_values_of_a_table_are_cut(backend):
    @plait.function
    def write(s):
        s += "Q" + gen("generated", max_tokens=3000)
        s["given"] = "long" * 700

    backend.scheduler.answer = lambda prompt, request: "long" * 600
    text = Display(write.run_batch([{}])._repr_html_()).body()
    assert text.count("long" * 500) == 2 and "long" * 501 not in text
    assert "… (2,400 characters)" in text and "… (2,800 characters)" in text


def test_ended_branches_are_marked_in_their_group(backend):
    @plait.function
    def race(s):
        s += "Q"
        forks = s.fork(2)
        forks += gen("x")
        forks[1].cancel()
        shown.append((repr(forks), forks._repr_html_()))
        shown.append(forks[:1]._repr_html_())

    race.run()
    (text, html), part = shown[-2:]
    assert text.startswith("<ProgramStateGroup of 2 branches") and "this text was cancelled" in Display(html).body()
    assert Display(html).classes().count("branch cancelled") == 1 and len(Display(part).texts["tr"]) == 2


def test_usage_has_a_row_for_each_variable(backend):
    usage = program.run().usage
    display = Display(usage._repr_html_())
    assert len(display.texts["tr"]) == 2 + len(usage.by_variable) and f"{usage.cached_tokens:,}" in display.body()


def test_graph_shows_the_branches_of_a_fork_side_by_side():
    display = Display(program.compile()._repr_html_())
    assert display.classes().count("branch") == 3 and display.classes().count("branches") == 2
    assert [label for label in display.texts["code"] if label.startswith("gen tip")] == ["gen tip"] * 2


def test_beams_are_a_list_with_a_table(backend):
    search = BeamSearch(1, sampling_params(max_tokens=1), 1.0, byte_tokenizer())
    assert isinstance(search.hypotheses(), ShownList)


def test_a_compiled_state_has_nothing_to_show():
    @plait.function
    def body(s):
        s += "Q" + gen("x")
        s._repr_html_()

    with pytest.raises(plait.CompileError, match="nothing has run yet"):
        body.compile()


@pytest.mark.parametrize(("answer", "stop"), [("plain", None), ("déjà vu€", None), ("one. two", "."), ("", None)])
def test_tokens_with_probabilities_are_the_whole_text(backend, answer, stop):
    backend.script(default=answer)

    @plait.function
    def probable(s):
        s += "Q" + gen("x", return_logprob=True, top_logprobs_num=2, stop=stop)

    state = probable.run()
    now = progress_of(state._run.call_segments()[0])
    assert "".join(token.text for token in now.tokens) == now.text == state["x"]
    if answer == "plain":
        assert [token.text for token in now.tokens] == list("plain") and len(now.tokens[0].others) == 2
    if "€" in answer:
        by_text = {token.text: token.logprob for token in now.tokens}
        assert by_text["€"] == pytest.approx(3 * by_text["d"]), "a character of three tokens"
    html = state._repr_html_()
    assert ('<u class="p' in html) == bool(answer) and ("60.7%" in html) == bool(answer)


def test_logprobs_of_a_server_colour_the_text_too():
    result = SimpleNamespace(
        token_ids=[],
        logprobs=None,
        extra_meta={"output_token_logprobs": [(-0.1, 5, " so"), (-2.0, 6, " it"), (0.0, 7, "?")]},
    )
    call = SimpleNamespace(done=lambda: True, result=lambda: result)
    now = progress_of(SimpleNamespace(call=call, text=lambda: "so it is"))
    assert now.tokens == [("so", -0.1, ()), (" it", -2.0, ()), (" is", None, ())]


def test_gens_without_logprobs_are_not_coloured(backend):
    assert '<u class="p' not in program.run()._repr_html_()
