"""Calls in the form of chat templates of every kind: written, read back, and followed by their results.

The text of a program is what its template renders of the same conversation, so that a server finds it in the cache.
"""

from __future__ import annotations

import asyncio

import pytest
from call_templates import CALL_TEMPLATES
from message_templates import CHANNELS, MESSAGES_WITH_IDS, RECIPIENTS
from scripted_scheduler import ScriptedBackend

import plait
from plait import assistant, gen, system, user
from plait.runtime.chat.json_calls import render_call
from plait.runtime.client.constraint_check import constraint_mismatch
from plait.runtime.messages import Generate
from plait.runtime.tokenizer.chat_template import ChatTemplate

MARK = "{# 'tool' #}"  # a template that knows results names their role
JSON_RESULTS = CALL_TEMPLATES["list"].source.replace(
    "{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"
)
TEMPLATES = {kind: template.source + MARK for kind, template in CALL_TEMPLATES.items()} | {
    "results as JSON": JSON_RESULTS,
    "channels": CHANNELS + MARK,
    "recipients": RECIPIENTS + MARK,
    "messages with ids": MESSAGES_WITH_IDS + MARK,
}
MESSAGES = ("channels", "recipients", "messages with ids")
PYTHON = (
    "keywords",
    "keywords in single quotes",
    "elements that python writes",
)  # whose quotes differ from JSON's, which the constraint writes
NUMBER = {"type": "integer"}
TOWN = {"town": "Köln 'a'", "day": 3, "new": True, "tags": ["x", None]}


def weather(town: str, day: int, new: bool, tags: list[str | None]) -> str:
    """Tells the weather."""
    return f'It is "warm"\nin {town} on day {day}, {new}, {tags}'


def other(town: str) -> str:
    """Does something else."""
    return town


TOOLS = [weather, other]


def make_turns(s, **keywords):
    for turn in (1, 2):
        s += user(f"Question {turn}?")
        s += assistant(gen(f"call{turn}", tools=TOOLS, max_tokens=500, **keywords))
        yield s.call(f"call{turn}")
        s += assistant(gen(f"answer{turn}"))


@plait.function
def program(s, **keywords):
    return list(make_turns(s, **keywords))


@plait.function
async def async_program(s, **keywords):
    return [await result for result in make_turns(s, **keywords)]


def backend_of(source, before="", calls=True):
    """A backend that answers with calls of `weather` as the constraint allows them, and with "Fine." otherwise."""
    backend = ScriptedBackend(source)
    ids = iter(("000000000", "000000001"))

    def answer(prompt, request):
        spec = request.constraint
        if spec is None or not calls:
            return "Fine."
        call = next(call for call in spec.calls if call.name == "weather")
        text = before + render_call(spec, call, TOWN).removesuffix("\n<end of call>")
        number = len([sent for sent in backend.scheduler.sent(Generate) if sent.constraint is not None]) - 1
        call_id = str(spec.first_number) if spec.first_number is not None else next(ids, "")
        assert number < 2
        text = text.replace("{id}", call_id)
        assert constraint_mismatch(spec, text, require_complete=spec.at_least > 0) is None
        return text

    backend.scheduler.answer = answer
    return backend


def rendered(source, ids=("000000000", "000000001")):
    """What the template writes of the conversation."""
    messages = []
    for turn, call_id in zip((1, 2), ids, strict=True):
        call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": TOWN}}
        messages += [
            {"role": "user", "content": f"Question {turn}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": weather(**TOWN), "tool_call_id": call_id, "name": "weather"},
            {"role": "assistant", "content": "Fine."},
        ]
    return ChatTemplate(source, "", "<|im_end|>").render(messages)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", TEMPLATES)
def test_conversation_is_written_as_the_template_renders_it(kind, is_async) -> None:
    source = TEMPLATES[kind]
    backend = backend_of(source)
    state = asyncio.run(async_program.arun(backend=backend)) if is_async else program.run(backend=backend)
    for turn in (1, 2):
        assert state[f"call{turn}"].name == "weather" and state[f"call{turn}"].arguments == TOWN
    assert [result.value for result in state.ret_value] == [weather(**TOWN)] * 2
    written, expected = state.text(), rendered(source)
    if kind in PYTHON:
        written, expected = written.replace("'", '"'), expected.replace("'", '"')
    assert written == expected


@pytest.mark.parametrize("kind", TEMPLATES)
def test_compiled_program_writes_the_same(kind) -> None:
    @plait.function
    def once(s):
        s += user("Question?") + assistant(gen("call", tools=TOOLS, max_tokens=500))
        s.call("call")
        s += assistant(gen("answer"))

    source = TEMPLATES[kind]
    assert once.compile().run(backend=backend_of(source)).text() == once.run(backend=backend_of(source)).text()


@pytest.mark.parametrize("kind", [kind for kind in TEMPLATES if kind not in MESSAGES])
def test_optional_call_is_read_behind_text(kind) -> None:
    is_whole = kind == "bare json"
    source = TEMPLATES[kind]
    state = program.run(backend=backend_of(source, "" if is_whole else "Let me see."), tool_choice="auto")
    assert state["call1"].arguments == TOWN and state.ret_value[1].value == weather(**TOWN)
    if not is_whole:
        assert state.text_of("call1").startswith("Let me see.")
    nothing = program.run(backend=backend_of(source, calls=False), tool_choice="auto")
    assert nothing["call1"] is None and nothing.ret_value == [None, None] and nothing.text_of("call1") == "Fine."


@pytest.mark.parametrize("kind", TEMPLATES)
def test_value_beside_calls_is_read(kind) -> None:
    @plait.function
    def value_or_call(s):
        s += user("Question?") + assistant(gen("x", tools=TOOLS, max_tokens=500, json_schema=NUMBER))

    backend = backend_of(TEMPLATES[kind])
    assert value_or_call.run(backend=backend)["x"].arguments == TOWN
    spec = backend.scheduler.sent(Generate)[-1].constraint
    backend.script(default=spec.otherwise_begin + "17")
    assert value_or_call.run(backend=backend)["x"] == "17"


@pytest.mark.parametrize("kind", ["json in tags", "elements", "section"])
def test_refused_arguments_are_told_to_the_model(kind) -> None:
    def positive(n: int) -> int:
        """Takes a number."""
        return n

    @plait.function
    def ask(s):
        s += user("Question?") + assistant(gen("call", tools=[positive, plait.Tool("f", read=int)]))
        return s.call("call")

    backend = ScriptedBackend(TEMPLATES[kind])

    def answer(prompt, request):
        spec = request.constraint
        return render_call(spec, spec.calls[1], {})

    backend.scheduler.answer = answer
    result = ask.run(backend=backend).ret_value
    assert result.call is None and result.name == "f" and isinstance(result.error, TypeError | ValueError)


def test_call_behind_own_text_of_a_message_has_the_default_form() -> None:
    """A message of text has begun, in which no call can be written."""

    @plait.function
    def begun(s):
        s += user("Question?") + assistant("I say: " + gen("call", tools=[other]))
        return s.call("call")

    backend = ScriptedBackend(CHANNELS)
    backend.script(default='<tool_call>\n{"name": "other", "arguments": {"town": "Ulm"}}\n</tool_call>')
    assert begun.run(backend=backend).ret_value.value == "Ulm"


def test_system_turn_shows_the_form_of_a_call() -> None:
    """Where the template lists tools, but not in a system turn."""

    @plait.function
    def listing(s):
        s += system("Help.", tools=[other])

    source = TEMPLATES["elements"].replace("{%- if tools %}", "{%- if tools and messages[-1].role != 'system' %}")
    text = listing.run(backend=ScriptedBackend(source)).text()
    assert '"name": "other"' in text and "A call is written <tool_call>\n<function=...>" in text
