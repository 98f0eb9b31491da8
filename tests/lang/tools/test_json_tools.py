"""Tools described by a JSON schema: as `Tool` objects and as dicts, with a function and without one."""

from __future__ import annotations

import asyncio
import json

import pytest
from tool_examples import add, call_validator, script_call

import plait
from plait import Tool, assistant, gen, user
from plait.constrained import Structural
from plait.lang.tools.make_tools import make_tools
from plait.runtime.messages import Generate

WEATHER = {
    "type": "object",
    "properties": {"town": {"type": "string", "description": "its name"}, "day": {"type": "integer"}},
    "required": ["town"],
}


@plait.function
def ask(s, tools, **keywords):
    s += user("Is it warm?") + assistant(gen("call", tools=tools, **keywords))
    return s.call("call")


@plait.function
def ask_and_answer(s, tools, result, **keywords):
    s += user("Is it warm?") + assistant(gen("call", tools=tools, **keywords))
    return s.tool_result("call", result)


def test_function_gets_the_arguments_as_keywords(backend):
    calls = []
    tool = Tool("weather.now", "The weather.", WEATHER, lambda **arguments: calls.append(arguments) or 21.5)
    script_call(backend, "weather.now", town="Ulm")
    state = ask.run([tool])
    assert calls == [{"town": "Ulm"}] and state["call"].arguments == {"town": "Ulm"}
    assert state.messages()[-1]["content"] == "Result of weather.now: 21.5"


@pytest.mark.parametrize("wrapped", [True, False])
def test_dict_in_openai_format_is_a_tool_without_a_function(backend, wrapped):
    function = {"name": "weather", "description": "The weather.", "parameters": WEATHER, "strict": True}
    tool = {"type": "function", "function": function} if wrapped else function
    script_call(backend, "weather", town="Ulm", day=1)
    state = ask_and_answer.run([tool, add], {"degrees": 21.5})
    assert state["call"].arguments == {"town": "Ulm", "day": 1} and state["call"].tool.strict
    assert state.ret_value.call is state["call"] and state.ret_value.error is None
    assert state.messages()[-1]["content"] == 'Result of weather: {"degrees":21.5}'
    with pytest.raises(plait.ProgramError, match=r"'weather' has no function.*s\.tool_result\('call', value\)"):
        ask.run([tool])


def test_tool_result_of_an_answer_in_text_is_an_error(backend):
    backend.script(default="It is.")
    with pytest.raises(plait.ProgramError, match="the model made no call"):
        ask_and_answer.run([add], 1, tool_choice="auto")


def test_async_program_appends_a_result(backend):
    @plait.function
    async def program(s):
        s += user("Is it warm?") + assistant(gen("call", tools=[Tool("weather", "", WEATHER)]))
        return (await s.tool_result("call", "warm")).text

    script_call(backend, "weather", town="Ulm")
    state = asyncio.run(program.arun())
    assert state.ret_value == "warm" and state.messages()[-1]["content"] == "Result of weather: warm"


def test_compiled_program_appends_a_result(backend):
    @plait.function
    def program(s, degrees):
        s += user("Is it warm?") + assistant(gen("call", tools=[Tool("weather", "", WEATHER)]))
        s.tool_result("call", degrees)

    script_call(backend, "weather", town="Ulm")
    graph = program.compile()
    assert "result of call = degrees" in str(graph)
    assert graph.run(degrees=4).messages()[-1]["content"] == "Result of weather: 4"


def test_resumed_state_has_the_call(backend, tmp_path):
    tools = [{"name": "weather", "parameters": WEATHER}]
    script_call(backend, "weather", town="Ulm")
    fresh, resumed = (
        ask_and_answer.run_batch([{"tools": tools, "result": 1}], resume=tmp_path / "states") for _ in range(2)
    )
    assert len(backend.scheduler.sent(Generate)) == 1 and resumed[0]["call"] == fresh[0]["call"]
    assert resumed[0]["call"].tool.parameters == WEATHER


def test_call_may_have_only_the_arguments_that_the_schema_names():
    open_object = {"type": "object", "additionalProperties": {"type": "integer"}}
    is_valid = call_validator([Tool("weather", "", WEATHER), Tool("any", "", open_object), Tool("none")])
    assert is_valid("weather", {"town": "Ulm"}) and is_valid("none", {})
    assert is_valid("any", {"x": 1})
    assert not is_valid("weather", {"town": "Ulm", "x": 1})
    assert not is_valid("none", {"x": 1})


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": {"tree": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"type": "integer"}}},
        {
            "type": "object",
            "properties": {"tree": {"$ref": "#/definitions/T"}},
            "definitions": {"T": {"type": "integer"}},
        },
        {"type": "object", "properties": {"x": {"type": "integer"}, "tree": {"$ref": "#/properties/x"}}},
        {"type": "object", "properties": {"default": {"type": "integer"}, "tree": {"$ref": "#/properties/default"}}},
    ],
)
@pytest.mark.parametrize("name", ["plant", "plant/tree"])
def test_references_of_any_kind_are_followed(parameters, name):
    is_valid = call_validator([Tool(name, "", parameters), Tool("other", "", parameters)])
    assert is_valid(name, {"tree": 1}) and not is_valid(name, {"tree": "x"})
    assert is_valid("other", {"tree": 1}) and not is_valid("other", {"tree": "x"})


BOOLEAN = {"$anchor": "b", "type": "boolean"}
RESOURCE = {"$id": "https://example.org/f.json", "type": "object", "required": ["p"]}
OF_CLIENTS = {
    "anchor": {"type": "object", "properties": {"p": {"$ref": "#b"}}, "$defs": {"B": BOOLEAN}, "required": ["p"]},
    "id": RESOURCE | {"properties": {"p": {"$ref": "#/definitions/B"}}, "definitions": {"B": {"type": "boolean"}}},
    "id_by_name": RESOURCE | {"properties": {"p": {"$ref": "f.json#/$defs/B"}}, "$defs": {"B": {"type": "boolean"}}},
    "draft7": RESOURCE
    | {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"p": {"$ref": "#/definitions/B"}}}
    | {"definitions": {"B": {"type": "boolean", "maximum": 3}, "C": {"items": [{"type": "null"}]}}},
    "enum": RESOURCE
    | {"properties": {"p": {"$ref": "#/$defs/B"}, "enum": {"$ref": "#/$defs/B"}}, "$defs": {"B": BOOLEAN}},
}


def test_each_tool_is_a_resource_of_its_own(backend):
    tools = [Tool(name, "", parameters) for name, parameters in OF_CLIENTS.items()]
    for chosen in (tools, *([tool] for tool in tools)):
        is_valid = call_validator(chosen)
        for tool in chosen:
            assert is_valid(tool.name, {"p": True})
            assert not is_valid(tool.name, {"p": 1})
            assert not is_valid(tool.name, {"p": True, "new": True})
            script_call(backend, tool.name, p=True)
            assert ask_and_answer.run(chosen, 1)["call"].arguments == {"p": True}


def test_a_draft_7_schema_keeps_its_meaning():
    pair = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {
        "p": {"items": [{"type": "null"}, {"type": "boolean"}], "additionalItems": False},
        "q": {"$ref": "#/properties/p/items/1", "type": "null"},
    }}  # fmt: skip
    is_valid = call_validator([Tool("f", "", pair)])
    assert is_valid("f", {"p": [None, True], "q": True})
    assert not any(is_valid("f", args) for args in ({"p": [None, True, 1]}, {"p": [1]}, {"q": None}))


def test_an_error_names_the_tool():
    bad = Tool("bad", "", {"type": "object", "properties": {"p": {"$ref": "#nowhere"}}})
    with pytest.raises(plait.PlaitError, match="tool 'bad': the reference points to nothing"):
        ask.run([add, bad])


def test_reference_to_the_schema_itself_is_followed():
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "data": {"const": {"$ref": "#"}}}}
    is_valid = call_validator([Tool("plant", "", tree)])
    assert is_valid("plant", {"left": {"left": {}}})
    assert not is_valid("plant", {"left": {"left": 1}})
    assert is_valid("plant", {"data": {"$ref": "#"}}), "a value is not a reference"


def test_schema_is_shown_as_given_and_later_changes_have_no_effect():
    parameters = {"type": "object", "title": "W", "properties": {"town": {"type": "string", "format": "x-town"}}}
    tool = Tool("weather", "The weather.", parameters)
    parameters["properties"].clear()
    shown = tool.as_json()["function"]["parameters"]
    assert shown["title"] == "W" and shown["properties"]["town"]["format"] == "x-town"


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_unknown_keywords_are_annotations_unless_a_tool_is_strict(backend, choice):
    call = json.dumps({"name": "weather", "arguments": {"town": "Ulm"}})
    backend.script(default=f"<tool_call>\n{call}\n</tool_call>")
    for strict in (False, True):
        ask_and_answer.run([Tool("weather", "", WEATHER, strict=strict)], 1, tool_choice=choice)
        constraint = backend.scheduler.sent(Generate)[-1].constraint
        assert constraint.annotations is not strict
        assert isinstance(constraint, Structural) and constraint.free_text == (choice == "auto")


def test_tool_choice_may_be_a_tool(backend):
    weather = Tool("weather", "", WEATHER)
    script_call(backend, "weather", town="Ulm")
    ask_and_answer.run([add, weather], 1, tool_choice=weather)
    assert [call.name for call in backend.scheduler.sent(Generate)[-1].constraint.calls] == ["weather"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tool("a b"), "the name of a tool must be 1 to 128 letters.*not 'a b'"),
        (lambda: Tool("a", 1), "tool 'a': description must be text"),
        (lambda: Tool("a", "", []), "tool 'a': parameters must be a JSON schema as a dict"),
        (lambda: Tool("a", "", {"type": "string"}), 'must have "type": "object", not \'string\''),
        (
            lambda: Tool("a", "", {"type": "object", "default": {1}}),
            "tool 'a': the schema of the parameters is not JSON",
        ),
        (lambda: Tool("a", "", WEATHER, "f"), "tool 'a': function must be callable or None, not 'f'"),
        (lambda: Tool("a", strict=1), "tool 'a': strict must be True or False"),
        (lambda: make_tools("gen", Tool("a")), "gen: tools must be a list of functions or Tool objects"),
        (lambda: make_tools("gen", {"name": "a"}), "gen: tools must be a list of functions or Tool objects"),
        (lambda: make_tools("gen", [{"name": "a", "paramters": {}}]), "'paramters' .did you mean 'parameters'?"),
        (lambda: make_tools("gen", [{"description": "a"}]), "gen: a tool needs a name"),
        (lambda: make_tools("gen", [{"type": "function", "name": "a"}]), "gen: a tool has no 'type'"),
        (lambda: make_tools("gen", [{"type": "function", "function": "a"}]), "gen: a tool as a dict is"),
        (lambda: make_tools("gen", [{"name": "a", "parameters": {}}]), "gen: tool 'a': the schema"),
        (lambda: make_tools("gen", [Tool("add"), add]), "two tools are named 'add'"),
    ],
)
def test_invalid_tool_is_an_input_error(make, message):
    with pytest.raises(plait.InputError, match=message):
        make()
