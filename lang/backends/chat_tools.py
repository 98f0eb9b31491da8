"""Tools with `tool_choice="auto"` over a chat API: the request's fields, and the text of the call in the answer.

The text is what a model of plait's own runtime would have written, so that the gen reads its value from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from plait.constrained.specs import Spec, Structural
from plait.lang.tools.call_format import CALL_END_MARKER
from plait.runtime.errors import ConstraintFailed


@dataclass(frozen=True)
class OptionalTools:
    """Tools that the model may call once. A call is written as `begin`, JSON with the two keys, `end`."""

    begin: str
    end: str
    name_key: str
    arguments_key: str
    functions: tuple[dict[str, Any], ...]

    def request_fields(self) -> dict[str, Any]:
        """The fields of a chat completion request."""
        tools = [{"type": "function", "function": function} for function in self.functions]
        return {"tools": tools, "tool_choice": "auto", "parallel_tool_calls": False}

    def render_call(self, name: str, arguments: str) -> str:
        """The text of a call whose arguments are JSON text. Raises ConstraintFailed if max_tokens cut them off."""
        try:
            value = json.loads(arguments)
        except ValueError:
            raise ConstraintFailed(f"the arguments of a call of {name!r} are not complete JSON") from None
        call = {self.name_key: name, self.arguments_key: value}
        return f"{self.begin}{json.dumps(call, ensure_ascii=False)}{self.end}"


def optional_tools(spec: Spec | None) -> OptionalTools | None:
    """The tools of a gen with `tool_choice="auto"`; None for any other constraint."""
    if not isinstance(spec, Structural) or len(spec.triggers) != 1:
        return None
    (trigger,) = spec.calls
    if not trigger.end.endswith(CALL_END_MARKER):
        return None
    schema = json.loads(trigger.schema or "{}")
    calls = schema.get("anyOf") or [schema]
    name_key, arguments_key = calls[0]["required"]
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    functions = tuple(
        {
            "name": call["properties"][name_key]["const"],
            "parameters": call["properties"][arguments_key] | definitions,
        }
        for call in calls
    )
    end = trigger.end.removesuffix(CALL_END_MARKER)
    return OptionalTools(trigger.begin, end, name_key, arguments_key, functions)
