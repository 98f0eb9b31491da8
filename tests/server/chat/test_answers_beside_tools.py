"""Every form takes text, reasoning and calls beside optional tools: own templates, and published ones from a folder.

The folder is $PLAIT_CHAT_TEMPLATES, see test_published_templates.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from call_templates import CALL_TEMPLATES
from matchers import compile_in_process
from message_templates import CHANNELS, MESSAGES_WITH_IDS, RECIPIENTS

from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.chat.derivation.model_formats import find_formats
from plait.runtime.chat.formats.control_marks import ControlMarks, texts_around
from plait.runtime.chat.parser import OutputParser
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.tool_constraint import tool_constraint
from plait.runtime.tokenizer.chat_template import ChatTemplate

SOURCES = {kind: entry.source for kind, entry in CALL_TEMPLATES.items()}
SOURCES |= {"channels": CHANNELS, "recipients": RECIPIENTS, "messages with ids": MESSAGES_WITH_IDS}
SOURCES |= {path.stem: path.read_text() for path in Path(os.environ.get("PLAIT_CHAT_TEMPLATES", "/-")).glob("*.jinja")}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "s": {"type": ["string", "null"]}},
    "required": ["a"],
}
TOOLS = {"f_1": SCHEMA, "f_12": SCHEMA}
MARK = re.compile(r"<[^<>\s{}\"=]+>|\[/?[A-Z_]+\]")


@pytest.mark.parametrize("are_control", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_answers_beside_tools(kind, are_control) -> None:
    """With marks that are control tokens, and with marks that are text."""
    formats = find_formats(ChatTemplate(SOURCES[kind], "", ""))
    calls, reasoning, messages = formats.calls, formats.reasoning, formats.messages
    if calls is None:
        return
    around = texts_around(reasoning, messages)
    names = sorted(set(MARK.findall("\0".join((*calls.texts(), *around))))) if are_control else []
    controls = {257 + index: name for index, name in enumerate(names)}
    marks = ControlMarks(SimpleNamespace(control_texts=controls, vocabulary=None), (*calls.texts(), *around))
    plain = (*(bytes([byte]) for byte in range(256)), *(b"" for _ in range(1 + len(names))))
    tools = tuple(ToolDefinition(name, "", schema) for name, schema in TOOLS.items())
    spec = tool_constraint(calls, Conversation((Turn("user", "go"),), tools), marks.pairs, marks.within(*around))
    grammar = compile_in_process(spec, Vocabulary(plain, (256,), lambda text: [*text.encode()]))

    has_begin = messages is not None and calls.opener.startswith(messages.begin)  # the answer begins with it
    text = ((messages.begin if has_begin else "") + messages.texts[0] if messages else "") + "Hello there"
    thought = f"{reasoning.begin}hm{reasoning.lead}{reasoning.end}{reasoning.separator}" if reasoning else ""
    call_id = "abcdefghi" if calls.id_source == "client" else str(calls.first_number or 0)
    call = calls.render_calls([(call_id, "f_1", {"a": 5, "s": "x y"})])
    answers = [(text, ("", "Hello there", 0)), (calls.lead + call, ("", "", 1))]
    if thought:
        answers += [(thought + text, ("hm", "Hello there", 0)), (thought + call, ("hm", "", 1))]
    for answer, expected in answers:
        assert accepts(grammar, marks, answer), answer
        parser = OutputParser(
            marks.mark_reasoning(reasoning) if reasoning else None,
            False,
            marks.mark_calls(calls),
            TOOLS,
            messages=marks.mark_messages(messages) if messages else None,
            in_message=messages is not None and not has_begin,
        )
        parts = [*parser.push(marks.mark(answer)), *parser.finish()]
        found = ("".join(part.text for part in parts if part.kind == kind).strip() for kind in ("reasoning", "text"))
        assert (*found, parser.num_calls) == expected, answer


def accepts(grammar, marks, text) -> bool:
    ids, matcher = dict(marks.pairs), grammar.matcher()
    pieces = re.split(f"({'|'.join(map(re.escape, sorted(ids, key=len, reverse=True)))})", text) if ids else [text]
    tokens = [token for piece in pieces for token in ([ids[piece]] if piece in ids else piece.encode())]
    return all(map(matcher.accept, tokens)) and matcher.is_accepting
