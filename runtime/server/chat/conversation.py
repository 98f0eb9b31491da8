"""A conversation as every chat protocol brings it: turns, tools, and what the answer must be.

Knows: roles, texts, tool calls. Must not know: protocols, templates, tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.constrained.specs import Spec

Role = Literal["system", "user", "assistant", "tool"]
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made: `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Turn:
    """One turn. `calls` and `reasoning` are an assistant's; `call_id` says which call a tool's turn answers.

    `name`: of who speaks, or of the tool.
    """

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ToolDefinition:
    """A function that the model may call; `parameters` is the JSON schema of its arguments.

    `param` is where the schema stands in the request. `strict`: a keyword that cannot be honoured is an error.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    param: str = "tools"
    strict: bool = False


@dataclass(frozen=True)
class Conversation:
    """What is asked: the turns so far, and how the next one is to be.

    `tools` are shown to the model; `callable_names` those it may call (None: all). `must_call`: it calls, and says
    nothing else. `one_call`: at most one. `constraint` (from the parameter `constraint_param`) is for an answer
    without calls. `continue_final`: the answer goes on from the last turn's text.
    """

    turns: tuple[Turn, ...]
    tools: tuple[ToolDefinition, ...] = ()
    callable_names: frozenset[str] | None = None
    must_call: bool = False
    one_call: bool = False
    constraint: Spec | None = None
    constraint_param: str | None = None
    add_generation_prompt: bool = True
    continue_final: bool = False

    @property
    def callable_tools(self) -> tuple[ToolDefinition, ...]:
        names = self.callable_names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)
