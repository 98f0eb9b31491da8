"""Limits on chat templates: harmful templates and long messages raise quickly."""

from __future__ import annotations

import tracemalloc

import pytest
from chat_templates import CHATML, messages, template
from hostile_templates import HARMFUL

from plait.runtime.errors import InputError, PlaitError, UnsupportedModel
from plait.runtime.tokenizer import chat_template
from plait.runtime.tokenizer.template_work import TEXT_PER_UNIT, TooMuchWork, charge, limited_work


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_WORK", 1_000_000)  # some templates run until the limit
    with pytest.raises(PlaitError) as caught:
        template(HARMFUL[name]).render(messages(["user"], ["hi"]))
    assert isinstance(caught.value, InputError | UnsupportedModel)


TEXT = "ab" * 50_000
LONG_STEPS = {
    "comparison": "{% set x = m == n %}",
    "comparison of what is inside": "{% set x = [m, 1] == [n, 1] %}",
    "test": "{% set x = m is eq n %}",
    "in": "{% set x = 'c' in m %}",
    "in a list": "{% set x = 'c' in (m, m) %}",
    "slice": "{% set x = m[1:] %}",
    "filter": "{% set x = m | upper %}",
    "mapped filter": "{% set x = [m] | map('upper') | list %}",
    "method": "{% set x = m.find('c') %}",
    "argument of a method": "{% set x = 'c'.join([m]) %}",
    "sum": "{% set x = m + 'c' %}",
    "concatenation": "{% set x = m ~ 'c' %}",
    "repetition": "{% set x = m * 1 %}",
    "format": "{% set x = '%s' % m %}",
    "block": "{% set x %}{{ m }}{% endset %}",
    "macro": "{% macro f() %}{{ m }}{% endmacro %}{% set x = f() %}",
    "JSON": "{% set x = m | tojson %}",
    "replacement": "{% set x = m | replace('c', 'd') %}",
    "sorting": "{% set x = l | sort %}",
    "least": "{% set x = l | min %}",
    "count in a list": "{% set x = l.count(n) %}",
    "change": "{% set x = loop.changed(m) %}",
}


@pytest.mark.parametrize("name", LONG_STEPS)
def test_the_work_grows_with_the_repetitions_and_with_what_they_read(name: str) -> None:
    def work(times: int, text: str) -> int:
        values = "{% set m = messages[0].content %}{% set n = 'c' ~ m[1:] %}{% set l = [m, n] %}"
        compiled = template(values + f"{{% for i in range({times}) %}}" + LONG_STEPS[name] + "{% endfor %}")
        with limited_work(10**9) as work:
            compiled.render([{"role": "user", "content": text}])
        return work.done

    per_step = len(TEXT) // TEXT_PER_UNIT
    assert work(30, TEXT) - work(10, TEXT) >= 20 * per_step
    assert work(30, "ab") - work(10, "ab") < per_step


def test_values_that_a_loop_leaves_out_are_work() -> None:
    compiled = template("{% for i in range(1000) if false %}{% endfor %}")
    with limited_work(10**9) as work:
        compiled.render(messages(["user"], ["hi"]))
    assert work.done >= 1000


@pytest.mark.parametrize("last", ["list", "sort", "min"])
def test_each_filter_of_a_chain_is_work(last: str) -> None:
    def work(length: int) -> int:
        compiled = template("{% set x = range(1000)" + " | map(attribute='a', default=1)" * length + f" | {last} %}}")
        with limited_work(10**9) as work:
            compiled.render([])
        return work.done

    assert work(20) - work(10) >= 10 * 1000


@pytest.mark.parametrize(
    "written",
    ["(l * 10000).format(t)", "(l * 10000).format_map([t])", "l * 10000 % {'a': t}", "l * 10000 | format(a=t)"],
)
def test_values_that_are_written_often_are_refused_before(written: str) -> None:
    layout = "%(a)s" if "%" in written or "|" in written else "{0}"
    source = f"{{% set l, t = '{layout}', 'x' * 40000 %}}{{% set x = ({written}) %}}"
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedModel, match="too large"):
            template(source).render([])
        assert tracemalloc.get_traced_memory()[1] < 20 << 20  # all of it would be 400 MB
    finally:
        tracemalloc.stop()


def test_braces_of_json_in_a_percent_layout_are_no_places() -> None:
    layout = '{"a": "%s", "b": 100%%}' + "{}" * 200
    written = template("{{ messages[0].layout % messages[0].text }}").render([{"layout": layout, "text": "x" * 99_999}])
    assert written == layout % ("x" * 99_999)


def test_work_inside_counts_outside() -> None:
    with limited_work(100) as outer:
        with limited_work(1000) as inner:
            charge(60)
        assert (inner.done, outer.left) == (60, 40)
        with pytest.raises(TooMuchWork), limited_work(1000):
            charge(41)


def test_an_error_names_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_WORK", 3000)
    many = messages(["user", "assistant"] * 150, ["hi"] * 300)
    assert template(CHATML).render(many[:20])
    with pytest.raises(InputError, match=r"for the 300 turns of this conversation; leave out earlier turns"):
        template(CHATML).render(many)


def test_large_numbers_may_be_arguments_of_macros() -> None:
    source = "{% macro show(value) %}{{ value }}{% endmacro %}{{ show(messages[0].content) }}"
    assert template(source).render([{"role": "user", "content": 12345678901234567}]) == "12345678901234567"
    with pytest.raises(UnsupportedModel, match="too large"):
        template("{{ '%s'.ljust(messages[0].content) }}").render([{"role": "user", "content": 12345678901234567}])


def test_messages_that_are_too_long_raise_input_error() -> None:
    with pytest.raises(InputError, match="too long"):
        template(CHATML).render(messages(["user"], ["x" * 5_000_000]))


QUEUE = """{% set q = namespace(ids=[]) %}{% macro add(x) %}{% set _ = q.ids.append(x) %}{{ _ }}{% endmacro %}
{%- for m in messages %}{{ add(m.content) }};{% endfor %}{{ q.ids | length }}
{%- for m in messages[1:] %}{% set first = q.ids.pop(0) %} {{ first }}{% endfor %} {{ q.ids }}"""


def test_lists_of_a_namespace_are_queues() -> None:
    """As Kimi K2's template has the ids of calls."""
    rendered = template(QUEUE).render(messages(["user", "assistant", "user"], ["a", "b", "c"]))
    assert rendered == "None;None;None;3 a b ['c']"


@pytest.mark.parametrize(
    "source",
    [
        "{% set q = namespace(a=[], b=[]) %}{% set _ = q.b.append([q.a]) %}{% set _ = q.a.append(7) %}{{ q.b }}",
        "{% set a = [] %}{% set q = namespace(b=a) %}{% set _ = q.b.append(7) %}{{ a }}",
    ],
)
def test_values_that_contain_a_queue_do_not_grow(source: str) -> None:
    assert "7" not in template(source).render(messages(["user"], ["a"]))


@pytest.mark.parametrize("call", ["q.a.insert(0, 1)", "q.a.pop()", "q['a'].append(1)", "messages.append(1)"])
def test_other_changes_of_lists_are_refused(call: str) -> None:
    source = f"{{% set q = namespace(a=[3]) %}}{{% set _ = {call} %}}"
    with pytest.raises(UnsupportedModel, match="unsafe"):
        template(source).render(messages(["user"], ["a"]))
