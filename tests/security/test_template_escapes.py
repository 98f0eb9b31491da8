"""Sandbox escapes that Jinja, vLLM and SGLang had: a model's chat template reads nothing but its messages."""

from __future__ import annotations

import pytest
from chat_templates import messages, template
from hostile_templates import ESCAPES, LEAKS

from plait.runtime.errors import PlaitError


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_reads_no_attribute_of_python(name: str) -> None:
    try:
        text = template(ESCAPES[name]).render(messages(["user"], ["hi"]))
    except PlaitError:
        return
    assert not any(leak in text for leak in LEAKS), text
