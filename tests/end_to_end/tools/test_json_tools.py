"""Tools described by a JSON schema: every call of the embedded model is valid for the schema of its tool."""

from __future__ import annotations

import jsonschema
import pytest

import plait
from plait import Tool, assistant, gen, system, user

NODE = {
    "type": "object",
    "properties": {"size": {"type": "integer", "minimum": 1, "maximum": 99}, "next": {"$ref": "#/definitions/node"}},
    "required": ["size"],
    "additionalProperties": False,
}
PLANT = {
    "type": "object",
    "properties": {"node": {"$ref": "#/definitions/node"}, "color": {"$ref": "#/properties/node/x-color"}},
    "required": ["node", "color"],
    "definitions": {"node": NODE},
}
PLANT["properties"]["node"]["x-color"] = {"enum": ["red", "green"]}
BOOK = {"type": "object", "properties": {"seat": {"type": "string", "pattern": "^[A-F][0-9]$"}}, "required": ["seat"]}
TOOLS = [
    Tool("garden/plant", "Plants a row of trees.", PLANT, lambda **arguments: arguments),
    {"type": "function", "function": {"name": "book", "description": "Books a seat.", "parameters": BOOK}},
]


@plait.function
def agent(s, **keywords):
    s += system("You help.", tools=TOOLS)
    s += user("Plant two trees, or book a seat.")
    s += assistant(gen("step", tools=TOOLS, max_tokens=90, **keywords))
    result = s.tool_result("step", "done") if s["step"].tool.function is None else s.call("step")
    s += assistant(gen("answer", max_tokens=2))
    return result


@pytest.mark.parametrize("choice", ["required", "book"])
def test_every_call_is_valid_for_the_schema_of_its_tool(runtime, choice):
    states = agent.run_batch([{"tool_choice": choice}] * 3, backend=runtime, temperature=1.3, seed=5)
    for state in states:
        call = state["step"]
        assert choice in ("required", call.name)
        jsonschema.validate(call.arguments, dict(call.tool.parameters), jsonschema.Draft202012Validator)
        result = state.ret_value
        assert result.text == "done" if call.name == "book" else result.value == call.arguments


def test_strict_refuses_an_unknown_format_and_names_it(runtime):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "x-town"}}}

    @plait.function
    def program(s, strict):
        s += user("Go.") + assistant(gen("step", tools=[Tool("f", "", schema, strict=strict)], max_tokens=60))

    assert program.run(strict=False, backend=runtime)["step"].name == "f"
    with pytest.raises(plait.ProgramError, match="x-town"):
        program.run(strict=True, backend=runtime)
