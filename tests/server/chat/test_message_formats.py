"""Answers that are a sequence of messages, such as those of gpt-oss: each is reasoning, a text or a call."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from call_templates import describe
from matchers import compile_in_process

from plait.constrained.reasoning_matcher import ReasoningGrammar
from plait.constrained.specs import GrammarError, Reasoning, Regex, Structural
from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.chat.derivation.model_formats import find_formats
from plait.runtime.chat.formats.call_format import CONTROL
from plait.runtime.chat.formats.control_marks import ControlMarks, texts_around
from plait.runtime.chat.parser import OutputParser
from plait.runtime.server.chat.conversation import Conversation, ToolDefinition, Turn
from plait.runtime.server.chat.tool_constraint import tool_constraint, tool_params
from plait.runtime.server.errors import ToolParams
from plait.runtime.tokenizer.chat_template import ChatTemplate

HEAD = """{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}
{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{% else %}"""
TAIL = "{% endif %}{% endfor %}{% if add_generation_prompt %}@PROMPT@{% endif %}"
CHANNELS = (
    HEAD
    + "{% if m.thinking %}<|start|>assistant<|channel|>own<|message|>{{ m.thinking }}<|end|>{% endif %}"
    + "{% for c in m.tool_calls or [] %}<|start|>assistant to={{ c.function.name }}<|message|><call>"
    + "{{ c.function.arguments | tojson }}</call>{% if not loop.last %}<|end|>{% endif %}{% endfor %}"
    + "{% if m.content %}<|start|>assistant<|channel|>user<|message|>{{ m.content }}{% endif %}<|stop|>"
    + TAIL.replace("@PROMPT@", "<|start|>assistant")
)
RECIPIENTS = (
    HEAD
    + "<|assistant|>{{ '\\n' }}{% if m.content %}>>>all{{ '\\n' + m.content }}{% endif %}"
    + "{% for c in m.tool_calls or [] %}>>>{{ c.function.name + '\\n' }}{{ c.function.arguments | tojson }}"
    + "{% endfor %}<|stop|>"
    + TAIL.replace("@PROMPT@", "<|assistant|>\n>>>")
)
CONTROL_TEXTS = ("<|start|>", "<|message|>", "<|end|>", "<|channel|>", "<|stop|>", "<|assistant|>")
TOKENIZER = SimpleNamespace(control_texts={257 + i: text for i, text in enumerate(CONTROL_TEXTS)}, vocabulary=None)
VOCABULARY = Vocabulary(
    (*(bytes([byte]) for byte in range(256)), b"", *(b"" for _ in CONTROL_TEXTS)), (256,), lambda text: [*text.encode()]
)
FORMATS = {source: find_formats(ChatTemplate(source, "", "")) for source in (CHANNELS, RECIPIENTS)}
CALL = ' to=f<|message|><call>{"a": 1}</call>'


def parts_of(source, text, *, tools=True, in_message=True):
    formats = FORMATS[source]
    marks = ControlMarks(TOKENIZER, (*formats.calls.texts(), *texts_around(formats.reasoning, formats.messages)))
    schemas = {"f": {}, "f_2": {}} if tools else None
    found = []
    whole = marks.mark(text)  # a control token arrives as one piece
    for pieces in ([whole], re.findall(f"{CONTROL}<[^>]*>|.", whole, re.DOTALL)):
        parser = OutputParser(
            marks.mark_reasoning(formats.reasoning) if formats.reasoning else None,
            False,
            marks.mark_calls(formats.calls) if tools else None,
            schemas,
            False,
            marks.mark_messages(formats.messages),
            in_message,
        )
        parts = [*itertools.chain(*map(parser.push, pieces)), *parser.finish()]
        kinds = ("reasoning", "text", "call", "arguments")
        found.append(tuple("".join(part.text for part in parts if part.kind == kind) for kind in kinds))
    assert found[0] == found[1]
    return found[0]


def test_formats_are_derived() -> None:
    formats = FORMATS[CHANNELS]
    assert formats.messages.begin == "<|start|>assistant" and formats.messages.texts == ("<|channel|>user<|message|>",)
    assert (formats.reasoning.begin, formats.reasoning.end) == ("<|channel|>own<|message|>", "<|end|>")
    assert formats.reasoning.separator == "<|start|>assistant" and formats.reasoning.lead == ""
    assert describe(formats.calls) == "(to={name}<|message|><call>{json}</call>)*<|end|><|start|>assistant "
    assert FORMATS[RECIPIENTS].messages.begin == ">>>" and FORMATS[RECIPIENTS].messages.texts == ("all\n",)
    assert describe(FORMATS[RECIPIENTS].calls) == r">>>{name}\n{json}"


@pytest.mark.parametrize("tools", [False, True])
def test_messages_are_reasoning_and_text(tools) -> None:
    reasoning = "<|channel|>own<|message|>hm to=f<|end|><|start|>assistant"
    text = "<|channel|>user<|message|>Hi <|sta to=f"
    assert parts_of(CHANNELS, reasoning + text, tools=tools) == ("hm to=f", "Hi <|sta to=f", "", "")
    assert parts_of(CHANNELS, "Hi", tools=tools)[1] == "Hi"
    assert parts_of(CHANNELS, reasoning + "<|channel|>us", tools=tools) == ("hm to=f", "", "", "")
    for in_message in (True, False):
        answer = ("" if in_message else ">>>") + "all\nHi >>> you"
        assert parts_of(RECIPIENTS, answer, tools=tools, in_message=in_message)[1] == "Hi >>> you"


def test_messages_are_calls() -> None:
    reasoning = "<|channel|>own<|message|>hm<|end|><|start|>assistant"
    assert parts_of(CHANNELS, CALL) == ("", "", "f", '{"a": 1}')
    two = CALL + "<|end|><|start|>assistant" + CALL.replace("=f", "=f_2")
    assert parts_of(CHANNELS, reasoning + two) == ("hm", "", "ff_2", '{"a": 1}{"a": 1}')
    text = "<|channel|>user<|message|>I call.<|end|><|start|>assistant"
    assert parts_of(CHANNELS, text + CALL) == ("", "I call.", "f", '{"a": 1}')
    answer = '>>>all\nHi>>>f\n{"a": 1}>>>f_2\n{}'
    assert parts_of(RECIPIENTS, answer, in_message=False) == ("", "Hi", "ff_2", '{"a": 1}{}')


def test_free_text_has_the_control_tokens_of_messages_and_no_other_call() -> None:
    formats = FORMATS[CHANNELS]
    marks = ControlMarks(TOKENIZER, (*formats.calls.texts(), *texts_around(formats.reasoning, formats.messages)))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    conversation = Conversation((Turn("user", "go"),), (ToolDefinition("f", "", schema),))
    free = marks.within(*texts_around(formats.reasoning, formats.messages))
    grammar = compile_in_process(tool_constraint(formats.calls, conversation, marks.pairs, free), VOCABULARY)
    ids = dict(marks.pairs)

    def accepts(text):
        matcher, rest = grammar.matcher(), text
        while rest:
            mark = next((mark for mark in ids if rest.startswith(mark)), "")
            if not matcher.accept(ids[mark] if mark else rest.encode()[0]):
                return False
            rest = rest[len(mark) or 1 :]
        return matcher.is_accepting

    reasoning = "<|channel|>own<|message|>hm<|end|><|start|>assistant"
    assert accepts(reasoning + "<|channel|>user<|message|>Hi to=f") and accepts("Hi")
    assert accepts(CALL) and accepts(reasoning + CALL)
    assert not accepts(reasoning + CALL.replace("1", '"1"')) and not accepts(" to=f<|message|>hm")
    with pytest.raises(GrammarError, match="free_tokens"):
        Structural([("<c>", True, "</c>")], free_tokens=["<|x|>"])


@pytest.mark.parametrize("other_heads", [(), (" of={name}<|message|><call>",)])
def test_a_refused_tool_is_named_whatever_forms_its_calls_have(other_heads) -> None:
    calls = replace(FORMATS[CHANNELS].calls, other_heads=other_heads)
    schemas = ({}, {}, {"properties": {"a": {"pattern": r"(a)\1"}}})
    tools = [
        ToolDefinition(f"f{i}", "", {"type": "object", **schema}, f"tools[{i}]") for i, schema in enumerate(schemas)
    ]
    conversation = Conversation((Turn("user", "go"),), tuple(tools))
    constraint = tool_constraint(calls, conversation)
    with pytest.raises(GrammarError) as refused:
        compile_in_process(constraint, VOCABULARY)
    assert tool_params(constraint, conversation).at(refused.value.where) == "tools[2]"


@pytest.mark.parametrize("where", ["", None, "/triggers", "/triggers/9/content", "/triggers/x", "/begin"])
def test_an_error_of_no_tool_is_one_of_all(where) -> None:
    assert ToolParams(["tools[0]"]).at(where) == "tools"


@pytest.mark.parametrize("max_tokens", [0, 2, None])
def test_reasoning_ends_with_control_tokens(max_tokens) -> None:
    tokens = [("<|end|>", 259), ("<|start|>", 257)]
    spec = Reasoning(Regex("a"), "<|end|>x", "<|start|>y", "<|end|>z", max_tokens, "\n", tokens)
    matcher = ReasoningGrammar(spec, compile_in_process(Regex("a"), VOCABULARY), VOCABULARY).matcher()
    assert not matcher.accept(257) and matcher.forced_tokens() == [259, 120] and matcher.forced_bytes() == b""
    assert matcher.accept(259) and matcher.accept(120)
    if max_tokens is None:
        assert not matcher.accept(259)  # no mark of an end
        assert all(map(matcher.accept, b"q")) and not matcher.forced_tokens() and matcher.accept(257)
    else:
        assert all(map(matcher.accept, b"q" * max_tokens))
        assert matcher.forced_tokens() == [10, 257, 121, 259, 122] and not matcher.accept(257)
        assert matcher.forced_bytes() == b"\n" and matcher.accept(10) and matcher.forced_tokens()[0] == 257
        assert matcher.accept(257)
    rest = matcher.completion(9)
    assert rest[:4] == [121, 259, 122, 97] and all(map(matcher.accept, rest[:4])) and matcher.is_accepting
