"""Formats of calls derived from chat templates: what is rendered is parsed, and what is parsed is rendered alike."""

from __future__ import annotations

import itertools
import json
import re
from types import SimpleNamespace

import pytest
from call_templates import CALL_TEMPLATES, CONTROL_TEMPLATE, describe, formats_of
from hostile_templates import HARMFUL
from hypothesis import given
from hypothesis import strategies as st
from matchers import compile_in_process
from schema_strategies import BYTE_VOCABULARY

from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT
from plait.runtime.chat.derivation.model_formats import PLAIN_FORMATS, ModelFormats, find_formats, fitted_calls
from plait.runtime.chat.formats.call_format import (
    CallFormat,
    ElementArguments,
    KeywordArguments,
    NotationArguments,
    json_type,
)
from plait.runtime.chat.formats.control_marks import control_marks
from plait.runtime.chat.formats.reasoning_format import ReasoningFormat
from plait.runtime.chat.parser import OutputParser
from plait.runtime.model_files.locate import locate_model
from plait.runtime.server.chat.conversation import Conversation, ToolCall, ToolDefinition, Turn
from plait.runtime.server.chat.prompt import render_chat
from plait.runtime.server.chat.template_messages import tool_instructions
from plait.runtime.server.chat.tool_constraint import tool_constraint
from plait.runtime.server.errors import ApiError
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.tokenizer import load_tokenizer

KINDS = list(CALL_TEMPLATES)
FORMATS = {kind: formats_of(kind) for kind in CALL_TEMPLATES}
KEYWORDS = CallFormat("{name}(", ")", KeywordArguments(), "<|calls|>[", ", ", "]<|end|>")
NO_SYSTEM = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}{% endfor %}"""

SCALARS = st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.sampled_from([0.5, -2.25])
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
VALUES = st.recursive(
    SCALARS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "city", "n_1", "x-y"]), VALUES, max_size=4)
CALLS = st.lists(st.tuples(st.sampled_from(["get", "get_more", "f"]), ARGUMENTS), min_size=1, max_size=3)


def is_writable(call_format, arguments):
    """Whether no mark stands in a value, and no name that has quotes elsewhere must stand bare."""
    form = call_format.arguments
    if isinstance(form, NotationArguments):
        return form.quote not in str(arguments) and all(re.fullmatch(r"[\w.-]+", name) for name in names_in(arguments))
    if not isinstance(form, ElementArguments):
        return True
    return not any(form.close.strip() in str(value) or "<" in str(value) for value in arguments.values())


def names_in(value):
    """The names of all members in a value."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [*(value if isinstance(value, dict) else ()), *(name for one in inner for name in names_in(one))]


def schema_of(calls):
    """A schema that tells the types of all arguments, for each name."""
    return {
        name: {
            "properties": {
                key: {"type": sorted({json_type(a[key]) for n, a in calls if n == name and key in a})}
                for key in {key for n, a in calls if n == name for key in a}
            }
        }
        for name in ("get", "get_more", "f")
    }


def parse(pieces, call_format, schemas):
    parser = OutputParser(None, False, call_format, schemas)
    parts = [part for piece in pieces for part in parser.push(piece)]
    parts += parser.finish()
    names = [part.text for part in parts if part.kind == "call"]
    texts = ["".join(p.text for p in parts if p.kind == "arguments" and p.number == i) for i in range(len(names))]
    assert not parser.is_within_arguments
    return [part.text for part in parts if part.kind == "text"], list(zip(names, map(json.loads, texts), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_format_is_derived_from_the_template(kind) -> None:
    formats = FORMATS[kind]
    assert formats.calls is not None and describe(formats.calls) == CALL_TEMPLATES[kind].described
    assert formats.calls.is_native and formats.takes_system and formats.reasoning is None


@pytest.mark.parametrize("kind", [*KINDS, "keywords"])
@given(calls=CALLS, cuts=st.lists(st.integers(0, 400), max_size=8), has_text=st.booleans())
def test_calls_are_read_from_their_text(kind, calls, cuts, has_text) -> None:
    """However the text is split."""
    call_format = KEYWORDS if kind == "keywords" else FORMATS[kind].calls
    calls = calls[:1] if call_format.is_single else calls
    if kind.startswith("keywords"):
        calls = [(name, {key: value for key, value in a.items() if key.isidentifier()}) for name, a in calls]
    if not all(is_writable(call_format, arguments) for _, arguments in calls):
        return
    schemas = schema_of(calls)
    strings = {name: {k for k, v in s["properties"].items() if v["type"] != ["string"]} for name, s in schemas.items()}
    if any(isinstance(v, str) and k in strings[n] for n, a in calls for k, v in a.items()):
        return  # a text beside other types; the constraint does not write such a one that is JSON
    ids = [f"id{index:07}" if call_format.id_source == "client" else str(index) for index in range(len(calls))]
    written = call_format.render_calls([(i, *call) for i, call in zip(ids, calls, strict=True)])
    has_text = has_text and not call_format.is_whole_answer
    text = ("Let me see.\n" if has_text else "") + written
    edges = [0, *sorted(cut % len(text) for cut in cuts), len(text)]
    for pieces in ([text], [text[a:b] for a, b in itertools.pairwise(edges)], list(text)):
        texts, read = parse(pieces, call_format, schemas)
        assert read == calls
        assert "".join(texts) == ("Let me see." if has_text else "")


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if not kind.startswith("keywords")]
)  # Python has quotes of its own
@given(calls=CALLS)
def test_parsed_calls_are_rendered_as_they_were_written(kind, calls) -> None:
    """So the next turn's prompt begins with the tokens that were generated."""
    formats = FORMATS[kind]
    call_format = formats.calls
    calls = calls[:1] if call_format.is_single else calls
    if not all(is_writable(call_format, arguments) for _, arguments in calls):
        return
    template = ChatTemplate(CALL_TEMPLATES[kind].source, "", "")
    ids = [f"id{index:07}" if call_format.id_source == "client" else str(index) for index in range(len(calls))]
    written = call_format.render_calls([(i, *call) for i, call in zip(ids, calls, strict=True)])
    tools = tuple(ToolDefinition(name, "") for name in ("get", "get_more", "f"))
    turns = (Turn("user", "hi"),)
    before = "".join(text for text, _ in render_chat(template, frozenset(), Conversation(turns, tools), call_format))
    made = tuple(
        ToolCall(f"call_0123{call_id}", name, json.dumps(arguments, ensure_ascii=False))
        for call_id, (name, arguments) in zip(ids, calls, strict=True)
    )
    turns = (*turns, Turn("assistant", "", made), *(Turn("tool", "7", call_id=call.id) for call in made))
    after = "".join(text for text, _ in render_chat(template, frozenset(), Conversation(turns, tools), call_format))
    assert after.startswith(before + call_format.lead + written)


def test_what_stands_in_strings_is_no_mark() -> None:
    call_format = FORMATS["list"].calls
    arguments = {"a": 'x]"}, {"name": "get", "arguments": {}}]', "b": "<|calls|>["}
    written = call_format.render_calls([("", "get", arguments), ("", "f", {})])
    assert parse(list(written), call_format, {"get": {}, "f": {}}) == ([], [("get", arguments), ("f", {})])


def test_ids_that_the_model_wrote_are_in_the_parts_and_in_the_next_prompt() -> None:
    for kind in ("list with ids", "id before the arguments"):
        call_format = FORMATS[kind].calls
        parser = OutputParser(None, False, call_format, {"f": {}})
        parts = parser.push(call_format.render_calls([("abcdef123", "f", {"a": 1})]))
        assert [part.call_id for part in parts if part.kind == "call"] == ["abcdef123"]


def test_strings_of_elements_arrive_piece_by_piece() -> None:
    call_format = FORMATS["keys and values"].calls
    parser = OutputParser(None, False, call_format, {"f": {"properties": {"a": {"type": "string"}}}})
    assert [part.text for part in parser.push("<tool_call>f\n<key>a</key>\n<value>one ")] == ["f", '{"a": "one ']
    assert [part.text for part in parser.push('"two"</val')] == ['\\"two\\"']
    assert [part.text for part in parser.push("ue>\n</tool_call>")] == ['"}']


@pytest.mark.parametrize("arguments", ["", "null", " "])
def test_missing_arguments_of_earlier_calls_are_an_empty_object(arguments) -> None:
    for kind in ("json in tags", "json as given", "elements", "keys and values"):
        conversation = Conversation((Turn("assistant", "", (ToolCall("c", "f", arguments),)),))
        template = ChatTemplate(CALL_TEMPLATES[kind].source, "", "")
        text = "".join(part for part, _ in render_chat(template, frozenset(), conversation, FORMATS[kind].calls))
        assert FORMATS[kind].calls.render_calls([("", "f", {})]) in text


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", '"a"', "no JSON"])
def test_broken_arguments_of_earlier_calls_are_rendered_or_named(arguments) -> None:
    conversation = Conversation((Turn("assistant", "", (ToolCall("c", "f", arguments, "messages[0].x"),)),))
    for kind in ("elements", "json in tags"):
        template = ChatTemplate(CALL_TEMPLATES[kind].source, "", "")
        with pytest.raises(ApiError, match=r"messages\[0\]\.x") as caught:
            render_chat(template, frozenset(), conversation, FORMATS[kind].calls)
        assert caught.value.status == 400
    template = ChatTemplate(CALL_TEMPLATES["json as given"].source, "", "")
    text = "".join(p for p, _ in render_chat(template, frozenset(), conversation, FORMATS["json as given"].calls))
    assert f"<call>f {arguments}</call>" in text


def test_template_without_a_system_turn_gets_the_tools_in_the_first_user_turn() -> None:
    template, tools = ChatTemplate(NO_SYSTEM, "", ""), (ToolDefinition("f", "adds"),)
    formats = find_formats(template)
    assert formats == ModelFormats(None, None, takes_system=False)
    conversation = Conversation((Turn("user", "hi"), Turn("assistant", "yes"), Turn("user", "and")), tools)
    parts = render_chat(template, frozenset(), conversation, GENERIC_FORMAT, formats)
    instructions = tool_instructions(tools, GENERIC_FORMAT)
    assert "".join(text for text, _ in parts) == f"<user>{instructions}\n\nhi<assistant>yes<user>and"


def test_template_that_reads_the_tools_as_text() -> None:
    """In the variable `functions`, beside `datetime`."""
    source = "{% set shown = functions + datetime %}{{ shown }}" + CALL_TEMPLATES["list"].source
    template = ChatTemplate(source, "", "")
    formats = find_formats(template)
    assert formats.calls is not None and describe(formats.calls) == CALL_TEMPLATES["list"].described
    conversation = Conversation((Turn("user", "hi"),), (ToolDefinition("f", "adds"),))
    text = "".join(text for text, _ in render_chat(template, frozenset(), conversation, formats.calls))
    assert text.startswith('[{"name": "f", "description": "adds", "parameters": {')


@pytest.mark.parametrize("lists_tools", [False, True])
def test_an_exception_gets_instructions_in_its_own_form_where_the_template_lists_no_tools(lists_tools) -> None:
    tools = "{{ tools | map(attribute='function') | tojson }}" if lists_tools else ""
    source = f"{{# named SmolLM Reasoning Mode: #}}{tools}{{% for m in messages %}}<{{{{ m.content }}}}>{{% endfor %}}"
    template = ChatTemplate(source, "", "")
    formats = find_formats(template)
    assert formats.calls is not None and formats.calls.is_native == lists_tools
    conversation = Conversation((Turn("user", "hi"),), (ToolDefinition("f", "adds"),))
    parts = render_chat(template, frozenset(), conversation, formats.calls, formats)
    text = "".join(text for text, _ in parts)
    assert '"name": "f"' in text and ('<tool_call>\n{"name": "NAME", ' in text) != lists_tools


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.there.at.all }}",
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ raise_exception('never') }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% if tools %}{% for m in messages %}{{ m.tool_calls }}{% endfor %}{% endif %}",
        "{% for m in messages %}{% for c in m.tool_calls or [] %}<f>{{ c.function.arguments }}</f>{% endfor %}"
        "{% endfor %}",
        "{{ messages",
    ],
)
def test_template_that_shows_no_calls_has_the_generic_format(source) -> None:
    formats = find_formats(ChatTemplate(source, "", ""))
    assert formats.calls is None and formats.calls_beside(with_json_answer=False) is GENERIC_FORMAT


def test_tokens_that_end_the_text_are_no_part_of_a_call() -> None:
    tokenizer = SimpleNamespace(eos_ids=(1, 2), control_texts={1: "<|end|>", 2: "<|sep|>"})
    call_format = CallFormat("<call>{name} ", "</call><|end|>")
    fitted = fitted_calls(ModelFormats(call_format, None), tokenizer, with_json_answer=False)
    assert fitted.tail == "</call>"
    opened = CallFormat("<|sep|>call {name} ", "")
    assert fitted_calls(ModelFormats(opened, None), tokenizer, with_json_answer=False) is GENERIC_FORMAT


@pytest.mark.parametrize(
    ("source", "begin", "end"),
    [
        ("<think>{{ m.reasoning_content }}</think>{{ m.content }}", "<think>", "</think>"),
        ("[THINK]{{ m.thinking }}[/THINK]{{ m.content }}", "[THINK]", "[/THINK]"),
        ("{{ m.content.split('</think>') | last }}", "<think>", "</think>"),
    ],
)
def test_reasoning_marks_are_found_where_the_template_writes_or_removes_them(source, begin, end) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}@{% else %}{{ m.content }}{% endif %}"
    )
    reasoning = find_formats(ChatTemplate(template.replace("@", source) + "{% endfor %}", "", "")).reasoning
    assert reasoning is not None and (reasoning.begin, reasoning.end) == (begin, end)


def test_reasoning_marks_are_found_in_the_generation_prompt() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% if enable_thinking is defined and not enable_thinking %}<mm:think></mm:think>{% endif %}{% endif %}"
    )
    reasoning = find_formats(ChatTemplate(template, "", "")).reasoning
    assert reasoning is not None and (reasoning.begin, reasoning.end) == ("<mm:think>", "</mm:think>")
    assert find_formats(ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", "", "")).reasoning is None


def test_a_control_token_between_elements_is_a_mark() -> None:
    tokenizer = load_tokenizer(locate_model())
    form = ElementArguments("<p={name}>", "</p>", "<file_sep>")
    call_format = CallFormat("<repo_name>{name}:", "<jupyter_text>", form)
    marks = control_marks(tokenizer, call_format, None)
    parser = OutputParser(None, False, marks.mark_calls(call_format), {"f": {}})
    written = call_format.render_calls([("", "f", {"a": "x", "b": [1]})])
    parts = parser.push(marks.detokenizer().push(tokenizer.encode([(written, True)]))) + parser.finish()
    assert "".join(part.text for part in parts if part.kind == "arguments") == '{"a": "x", "b": [1]}'


def test_control_tokens_are_marks_and_text_that_spells_them_is_not() -> None:
    tokenizer = load_tokenizer(locate_model())
    call_format = find_formats(ChatTemplate(CONTROL_TEMPLATE.source, "", "")).calls
    marks = control_marks(tokenizer, call_format, ReasoningFormat("<jupyter_start>", "<jupyter_text>"))
    assert dict(marks.pairs) == {text: tokenizer.encode([(text, True)])[0] for text, _ in marks.pairs}
    assert len(marks.pairs) == 7
    written = call_format.render_calls([("", "f", {"a": "<repo_name>"})])
    spelled = "<repo_name><reponame>f<file_sep>{} " + "".join(f"\ufdd0{text}" for text, _ in marks.pairs)
    spelled += "\ufdd0<repo_name>\ufdd0<reponame>f\ufdd0<file_sep>{}"
    parts = [("hm<jupyter_text>", True), (f"{spelled} ", False), ("<jupyter_start>", True), ("so ", False)]
    head, _, tail = written.partition('"<repo_name>"')
    parts += [(head, True), ('"<repo_name>"', False), (tail, True)]
    detokenizer = marks.detokenizer()
    parser = OutputParser(
        marks.mark_reasoning(ReasoningFormat("<jupyter_start>", "<jupyter_text>")),
        True,
        marks.mark_calls(call_format),
        {"f": {}},
    )
    read = [part for token in tokenizer.encode(parts) for part in parser.push(detokenizer.push([token]))]
    read += parser.finish()

    def joined(kind):
        return "".join(part.text for part in read if part.kind == kind)

    assert (joined("reasoning"), joined("text"), joined("call")) == ("hm", f"{spelled} so", "f")
    assert json.loads(joined("arguments")) == {"a": "<repo_name>"}


@pytest.mark.parametrize("name", ["nested loops", "range", "tilde"])
def test_a_template_that_runs_into_its_limit_is_rendered_once(monkeypatch, name) -> None:
    renderings, render = [], ChatTemplate.render

    def counted(self, messages, **options):
        renderings.append(messages)
        return render(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    assert find_formats(ChatTemplate(HARMFUL[name], "", "")) == PLAIN_FORMATS
    assert len(renderings) == 1


@pytest.mark.parametrize(("kind", "counts_on"), [("counted calls", False), ("calls counted on", True)])
def test_calls_are_counted_as_the_template_does(kind, counts_on) -> None:
    calls = FORMATS[kind].calls
    assert calls is not None and calls.first_number == 0 and calls.counts_on == counts_on
    earlier = Turn("assistant", "", (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")))
    turns = (Turn("user", "go"), earlier, Turn("tool", "r", call_id="a"), Turn("tool", "r", call_id="b"))
    tools = (ToolDefinition("f", "", {"type": "object", "properties": {}}),)
    grammar = compile_in_process(tool_constraint(calls, Conversation(turns, tools, must_call=True)), BYTE_VOCABULARY)
    first = 2 * counts_on
    for numbers, expected in (
        ([first], True),
        ([first, first + 1, first + 2], True),
        ([*range(first, first + 19)], True),
        ([first + 1], False),
        ([first, first], False),
        ([first, first + 2], False),
        ([2 - first], False),
    ):
        matcher = grammar.matcher()
        text = calls.lead + calls.render_calls([(str(number), "f", {}) for number in numbers])
        assert (all(matcher.accept(1 + byte) for byte in text.encode()) and matcher.is_accepting) == expected, numbers
