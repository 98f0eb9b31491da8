"""gen with tools and a type (or a schema): the text is a valid call or a valid value."""

from __future__ import annotations

import dataclasses
import json

import pytest
from scripted_scheduler import ScriptedBackend
from tool_examples import add

import plait
from plait import assistant, gen, user
from plait.constrained import JsonSchema, Structural
from plait.runtime.client.constraint_check import constraint_mismatch
from plait.runtime.messages import Generate
from plait.testing import Scripted, call

PLAIN_JSON_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "{% else %}{{ m.content }}{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@dataclasses.dataclass
class Answer:
    total: int
    note: str = ""


@plait.function
def step(s, **keywords):
    s += user("1 + 5?") + assistant(gen("step", tools=[add], **keywords))
    return s.call("step")


def test_value_is_an_object_of_the_type_and_a_call_a_tool_call(backend):
    backend.script(default='{"total": 6, "note": "<tool_call>\\n{}"}')
    state = step.run(type=Answer)
    assert state["step"] == Answer(6, "<tool_call>\n{}") and state.ret_value is None
    backend.script(default=CALL)
    state = step.run(type=Answer)
    assert state["step"].arguments == {"a": 1, "b": 5} and state.ret_value.value == 6
    assert state.messages()[1]["content"] == CALL and state.messages()[2]["content"] == "Result of add: 6"
    sampling = backend.scheduler.sent(Generate)[-1].sampling
    assert sampling.complete and not sampling.stop


def test_value_of_a_schema_is_its_text(backend):
    backend.script(default='{"x": 1}')
    assert step.run(json_schema={"type": "object"})["step"] == '{"x": 1}'


def test_constraint_is_the_union(backend):
    backend.script(default="{}")
    step.run(
        json_schema={"type": "object", "properties": {"total": {"type": "integer"}}, "additionalProperties": False}
    )
    constraint = backend.scheduler.sent(Generate)[-1].constraint
    assert isinstance(constraint, Structural) and isinstance(constraint.otherwise, JsonSchema)
    for valid in (CALL, '{"total": 5}', "{}"):
        assert constraint_mismatch(constraint, valid) is None
    for invalid in ("It is 6.", '{"name": "add"}', CALL + CALL, CALL.replace("add", "sub"), "{}" + CALL, CALL + "x"):
        assert constraint_mismatch(constraint, invalid) is not None, invalid


def test_template_whose_calls_are_plain_json_is_not_ambiguous():
    backend = ScriptedBackend(PLAIN_JSON_CALLS)
    backend.script(default=CALL)
    assert step.run(type=Answer, backend=backend)["step"].name == "add"
    assert backend.scheduler.sent(Generate)[-1].constraint.triggers[0].begin.startswith("<tool_call>\n")


@pytest.mark.parametrize(("type_", "text", "value"), [(int, "7", 7), (list[int], "[1, 2]", [1, 2]), (str, '"a"', "a")])
def test_value_of_any_type_is_json(backend, type_, text, value):
    backend.script(default=text)
    assert step.run(type=type_)["step"] == value
    assert step.compile(type=type_) is not None


def test_value_cut_off_is_unreadable(backend):
    backend.script(default=json.dumps({"total": 6}))
    with pytest.raises(plait.UnreadableValue, match="max_tokens cut the call of a tool or Answer off"):
        step.run(type=Answer, max_tokens=4, complete=False)


@pytest.mark.parametrize("answer", [Answer(6), call("add", a=1)])
def test_script_answers_with_a_value_or_a_call(answer):
    with Scripted([answer]):
        value = step.run(type=Answer)["step"]
    assert value == answer or (value.name == "add" and value.arguments["a"] == 1)
