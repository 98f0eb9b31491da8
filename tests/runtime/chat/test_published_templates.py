"""The formats of published chat templates, whose files are read from a folder: $PLAIT_CHAT_TEMPLATES.

The templates belong to others and are not part of this repository. `published_formats.tsv` names them, their hashes and
what is derived from them. The folder is `models/templates` of github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from call_templates import describe

from plait.runtime.chat.derivation.format_table import exception_of
from plait.runtime.chat.derivation.model_formats import PROBE_ARGUMENTS, find_formats, reproduces_calls
from plait.runtime.chat.derivation.template_probe import TemplateProbe
from plait.runtime.chat.formats.call_format import CallFormat
from plait.runtime.tokenizer.chat_template import ChatTemplate

FOLDER = os.environ.get("PLAIT_CHAT_TEMPLATES", "")
TABLE = [
    line.split("\t")
    for line in (Path(__file__).parent / "published_formats.tsv").read_text().splitlines()
    if not line.startswith("#")
]


def described(calls: CallFormat | None) -> str:
    if calls is None:
        return "generic"
    return describe(calls) + ("" if calls.writes_calls else " (as text)")


@pytest.mark.skipif(not FOLDER, reason="PLAIT_CHAT_TEMPLATES names no folder of published templates (2026-11-27)")
@pytest.mark.parametrize(("name", "sha256", "calls", "reasoning"), TABLE, ids=[row[0] for row in TABLE])
def test_format_of_a_published_template(name, sha256, calls, reasoning) -> None:
    path = Path(FOLDER) / f"{name}.jinja"
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        pytest.skip("the template is another version than that of the table (2026-11-27)")
    template = ChatTemplate(data.decode(), "", "")
    formats = find_formats(template)
    assert described(formats.calls) == calls
    marks = formats.reasoning
    shown = repr(f"{marks.begin}...{marks.end}")[1:-1] if marks is not None else "none"
    assert shown + ("" if formats.takes_system else " (no system turn)") == reasoning
    if formats.calls is not None and formats.calls.writes_calls and not exception_of(template.source):
        assert all(reproduces_calls(TemplateProbe(template), formats.calls, [case]) for case in PROBE_ARGUMENTS)


def test_most_published_templates_have_a_format_of_their_own() -> None:
    assert len(TABLE) == 70 and sum(row[2] != "generic" for row in TABLE) >= 65
