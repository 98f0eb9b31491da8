"""Limits on chat templates: harmful templates and long messages raise quickly."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import pytest
from chat_templates import CHATML, messages, template

from plait.runtime.errors import InputError, PlaitError, UnsupportedModel
from plait.runtime.tokenizer import chat_template
from plait.runtime.tokenizer.chat_template import MAX_SOURCE
from plait.runtime.tokenizer.template_sandbox import execution_limits


def repeat_doubling(step: str) -> str:
    start = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
    return start + step + "{% endfor %}{{ ns.s | string | length }}"


HARMFUL = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "repeat": "{{ 'a' * 1000000000 }}",
    "repeat list": "{{ [1] * 1000000000 }}",
    "repeat from the right": "{{ 1000000000 * 'a' }}",
    "tilde": repeat_doubling("{% set ns.s = ns.s ~ ns.s %}"),
    "plus": repeat_doubling("{% set ns.s = ns.s + ns.s %}"),
    "join filter": repeat_doubling("{% set ns.s = [ns.s, ns.s] | join %}"),
    "join method": repeat_doubling("{% set ns.s = ''.join([ns.s, ns.s]) %}"),
    "join separator": repeat_doubling("{% set ns.s = range(100) | join(ns.s) %}"),
    "block": repeat_doubling("{% set x %}{{ ns.s }}{{ ns.s }}{% endset %}{% set ns.s = x %}"),
    "macro": repeat_doubling("{% macro f(a) %}{{ a }}{{ a }}{% endmacro %}{% set ns.s = f(ns.s) %}"),
    "replace filter": repeat_doubling("{% set ns.s = ns.s | replace('a', ns.s) %}"),
    "replace method": repeat_doubling("{% set ns.s = ns.s.replace('', ns.s) %}"),
    "format": repeat_doubling("{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    "percent": repeat_doubling("{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    "format filter": repeat_doubling("{% set ns.s = '%s%s' | format(ns.s, ns.s) %}"),
    "nested lists": repeat_doubling("{% set ns.s = [ns.s, ns.s] %}"),
    "nested tuples": repeat_doubling("{% set ns.s = (ns.s, ns.s) %}"),
    "nested dicts": repeat_doubling("{% set ns.s = {'a': ns.s, 'b': ns.s} %}"),
    "nested calls": repeat_doubling("{% set ns.s = dict(a=ns.s, b=ns.s) %}"),
    "numbers": "{% set ns = namespace(n=99) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "power": "{{ 9 ** 9 ** 9 }}",
    "wide format": "{{ '{:999999999}'.format(1) }}",
    "wide percent": "{{ '%999999999d' % 1 }}",
    "starred percent": "{{ '%*d' % (999999999, 1) }}",
    "center": "{{ 'a'.center(999999999) }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "zfill": "{{ 'a'.zfill(width=999999999) }}",
    "indent": "{{ 'a\n' | indent(999999999) }}",
    "tojson": "{{ [[1]] | tojson(indent=999999999) }}",
    "round": "{{ 1.5 | round(999999999, 'ceil') }}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "two recursions": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "much text": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "slow steps": "{% set s = 'ab' * 999999 %}{% for i in range(99999) %}{% set x = s | upper %}{% endfor %}",
    "lazy filters": "{% set s = range(99999) %}{% for i in s %}{{ s | map('string') | join | length }}{% endfor %}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'] }}",
    "mutation": "{{ messages.append(1) }}",
    "include": "{% include '/etc/passwd' %}",
    "unknown filter": "{{ 'a' | center(10) }}",
    "syntax": "{% for %}",
    "deep source": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "deep loops": "{% for i in [1] %}" * 40 + "{% endfor %}" * 40,
    "long source": "a" * (MAX_SOURCE + 1),
    "long date": "{{ strftime_now('%999999999d') }}",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_templates_are_stopped_quickly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some templates run until the time limit.
    monkeypatch.setattr(chat_template, "execution_limits", partial(execution_limits, 0.2))
    start = time.process_time()
    with pytest.raises(PlaitError) as caught:
        template(HARMFUL[name]).render(messages(["user"], ["hi"]))
    assert isinstance(caught.value, InputError | UnsupportedModel)
    assert time.process_time() - start < 8


def test_messages_that_are_too_long_raise_input_error() -> None:
    with pytest.raises(InputError, match="too long"):
        template(CHATML).render(messages(["user"], ["x" * 5_000_000]))


def test_rendering_restores_the_trace_hook_of_a_debugger() -> None:
    def hook(*_: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(hook)
    try:
        template(CHATML).render(messages(["user"], ["hi"]))
        assert sys.gettrace() is hook
    finally:
        sys.settrace(before)
