"""Limits on chat templates: harmful templates and long messages raise quickly."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import pytest
from chat_templates import CHATML, messages, template
from hostile_templates import HARMFUL

from plait.runtime.errors import InputError, PlaitError, UnsupportedModel
from plait.runtime.tokenizer import chat_template
from plait.runtime.tokenizer.template_sandbox import execution_limits


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_templates_are_stopped_quickly(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Some templates run until the time limit.
    monkeypatch.setattr(chat_template, "execution_limits", partial(execution_limits, 0.2))
    start = time.process_time()
    with pytest.raises(PlaitError) as caught:
        template(HARMFUL[name]).render(messages(["user"], ["hi"]))
    assert isinstance(caught.value, InputError | UnsupportedModel)
    assert time.process_time() - start < 8


def test_large_numbers_may_be_arguments_of_macros() -> None:
    source = "{% macro show(value) %}{{ value }}{% endmacro %}{{ show(messages[0].content) }}"
    assert template(source).render([{"role": "user", "content": 12345678901234567}]) == "12345678901234567"
    with pytest.raises(UnsupportedModel, match="too large"):
        template("{{ '%s'.ljust(messages[0].content) }}").render([{"role": "user", "content": 12345678901234567}])


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
