"""`run_batch(resume=)`: a resumed item gives everything that a fresh one gives."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace

import msgspec
import pydantic
import pytest
import resumable_programs
from resumable_programs import Colour, Person, every_kind
from tool_examples import call_text

import plait
from plait import gen
from plait.constrained import Choices, JsonSchema, Structural
from plait.lang.batches.saved_values import CannotSave, ValueCodec
from plait.lang.html.render import ShownList
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.messages import Generate

pytestmark = pytest.mark.timeout(60)
ITEMS = [{"question": "a"}, {"question": "b"}]


def answer(prompt, request):
    """A text that fits the constraint of the call."""
    schema = request.constraint.text if isinstance(request.constraint, JsonSchema) else ""
    if '"person"' in schema or '"address"' in schema:
        return '{"name": "Ada", "address": {"city": "Paris", "tags": ["x"]}}'
    if isinstance(request.constraint, Structural):
        return call_text("add", a=1, b=2)
    if '"x"' in schema:
        return '{"x": 3, "kind": "b"}'
    if schema:
        return "[1, 2"
    return "red" if isinstance(request.constraint, Choices) else " fine."


def observed(state):
    """All that can be read from a state; times are those of the run."""
    names = list(state._branch.variables)
    readable = [name for name in names if name != "cut"]
    with pytest.raises(plait.UnreadableValue) as cut:
        state["cut"]
    return {
        "values": {name: state[name] for name in readable},
        "types": {name: type(state[name]) for name in readable},
        "texts": {name: state.text_of(name) for name in names},
        "meta": {name: state.get_meta_info(name) for name in names if name not in ("seen", "turn")},
        "unreadable": (str(cut.value), cut.value.text, cut.value.variable, str(cut.value.place)),
        "text": state.text(),
        "pieces": "".join(state.text_iter()),
        "messages": state.messages(),
        "ret_value": state.ret_value,
        "usage": without_times(state.usage),
        "error": state.error(),
        "html": state._repr_html_(),
        "spans": [(name, place) for name, place in spans(state)],
    }


def spans(state):
    return [(f"{part.branch_id} {part.name}", str(part.place)) for part in state._run.call_segments()]


def without_times(usage):
    rounded = replace(usage, wall_s=round(usage.wall_s, 4), by_variable={})
    return asdict(rounded), {name: round(part.wall_s, 4) for name, part in usage.by_variable.items()}


def test_resumed_item_gives_everything_that_a_fresh_one_gives(backend, tmp_path):
    backend.scheduler.answer = answer
    file, how = tmp_path / "batch.jsonl", {"temperature": 0.5, "seed": 3}
    fresh = [observed(state) for state in every_kind.run_batch(ITEMS, resume=file, **how)]
    num_calls = len(backend.scheduler.sent(Generate))
    states = every_kind.run_batch(ITEMS, resume=file, **how)
    assert len(backend.scheduler.sent(Generate)) == num_calls, "nothing ran again"
    for resumed, expected in zip(map(observed, states), fresh, strict=True):
        for key, value in expected.items():
            assert resumed[key] == value, key
    state, trace = states[0], tmp_path / "trace.html"
    assert isinstance(state["person"], Person) and state["call"].tool.function is resumable_programs.add
    assert state["seen"]["colours"] == {Colour.RED} and state["leaf"] == [[" fine.", " fine."]]
    assert len(state.get_meta_info("mood")["choice_scores"]) == 2
    assert state["tint"] is Colour.RED and state.text_of("tint") == "red"
    assert state.show(trace) == trace and trace.read_text().count('<details class="call ') == state.usage.calls
    with pytest.raises(plait.PlaitError, match="the program has ended"):
        state._append(plait.lang.core.expressions.as_expr("more"))


def test_reasons_of_ended_branches_and_lists_of_beams_are_saved(backend, tmp_path):
    @plait.function
    def program(s, question):
        forks = s.fork(2)
        forks += question + gen("a")
        forks.adopt(0)
        return ShownList(repr, [1, 2])

    first, second = (program.run_batch(ITEMS, resume=tmp_path / "batch.jsonl")[0] for _ in range(2))
    assert first.ret_value == second.ret_value == [1, 2]
    assert len(backend.scheduler.sent(Generate)) == 4, "nothing ran again"
    assert first._run.ended_branches == second._run.ended_branches == {2: "another branch was adopted"}


def test_infinite_logprobs_are_saved_as_json(backend, tmp_path, monkeypatch):
    @plait.function
    def program(s, question):
        s += question + gen("a", return_logprob=True)

    def logprob(token, request):
        return TokenLogprob(token, -math.inf, [(token, -math.inf)])

    monkeypatch.setattr(backend.scheduler, "_logprob", logprob)
    file = tmp_path / "batch.jsonl"
    first, second = (program.run_batch(ITEMS, resume=file)[0].get_meta_info("a") for _ in range(2))
    assert first == second and "inf" in repr(first) and len(backend.scheduler.sent(Generate)) == 2
    for line in file.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_async_batch_gives_the_same(backend, tmp_path):
    backend.scheduler.answer = answer

    @plait.function
    async def program(s, question):
        s += question + gen("person", type=Person)
        return await s["person"]

    first, second = (program.run_batch(ITEMS, resume=tmp_path / "batch.jsonl")[1] for _ in range(2))
    assert second.ret_value == first.ret_value == second["person"] and second.usage.calls == 1
    assert asyncio.run(second_text(second)) == first.text()
    assert len(backend.scheduler.sent(Generate)) == 2


async def second_text(state):
    return "".join([piece async for piece in state.text_async_iter()])


def test_typed_handle_and_classes_that_no_module_has_are_found_again(backend, tmp_path):
    inner = pydantic.create_model("Inner", city=(str, ...), tags=(list[str], ...))
    local = pydantic.create_model("Local", name=(str, ...), address=(inner | None, ...))
    colour = gen("colour", type=Colour)

    @plait.function
    def program(s, question):
        s += question + gen("person", type=local) + colour

    backend.scheduler.answer = answer
    first, second = (program.run_batch(ITEMS, resume=tmp_path / "batch.jsonl")[0] for _ in range(2))
    assert second["person"] == first["person"] == local(name="Ada", address=inner(city="Paris", tags=["x"]))
    assert second[colour] is first[colour] is Colour.RED and second.text_of(colour) == "red"
    assert len(backend.scheduler.sent(Generate)) == 4
    with pytest.raises(plait.PlaitError, match="is not the value of this gen"):
        second[gen("colour", type=int)]


def test_class_that_is_gone_runs_the_item_again(backend, tmp_path, monkeypatch):
    backend.scheduler.answer = answer
    file = tmp_path / "batch.jsonl"
    every_kind.run_batch(ITEMS[:1], resume=file)
    num_calls = len(backend.scheduler.sent(Generate))
    file.write_text(file.read_text().replace('"Point"', '"Dot"'))
    with pytest.warns(UserWarning, match="item 0 runs again: its file has a value of Dot of resumable_programs"):
        every_kind.run_batch(ITEMS[:1], resume=file)
    assert len(backend.scheduler.sent(Generate)) == 2 * num_calls


@pytest.mark.parametrize(
    "name", [["os", "system"], ["subprocess", "Popen"], ["not_imported_yet", "X"], ["sys", "path"]]
)
@pytest.mark.parametrize("tag", ["object", "enum"])
def test_a_file_names_data_classes_only(name, tag):
    """Nothing is imported and nothing but a data class is built."""
    assert os and subprocess
    with pytest.raises(CannotSave, match="not there any more"):
        ValueCodec(every_kind._body).decode({"$": tag, "class": name, "fields": {}, "value": 0})
    assert "not_imported_yet" not in sys.modules


@pytest.mark.parametrize("name", ["system", "os.system", "run", "nobody"])
def test_a_file_names_tools_of_the_program_only(name):
    with pytest.raises(CannotSave, match=f"a call of {name}, which is not a name of the program"):
        ValueCodec(every_kind._body).decode({"$": "tool call", "function": name, "arguments": {}})


def test_dict_with_the_tag_as_key_and_struct_survive():
    codec, struct = ValueCodec(every_kind._body), resumable_programs.Struct
    for value in ({"$": "object", "class": ["os", "system"]}, {1: {2: None}}, [{"a": ()}], Colour.GREEN):
        assert codec.decode(codec.encode(value)) == value
    value = struct(resumable_programs.date(2024, 1, 2), resumable_programs.Point(1, "a"))
    assert codec.decode(codec.encode(value)) == value and isinstance(value, msgspec.Struct)
    with pytest.raises(CannotSave, match="a object"):
        codec.encode(object())
