"""A chat request independent of its protocol: messages, tools, and constraints on the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from plait.constrained.specs import Lark, Regex, Spec

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Role = Literal["system", "user", "assistant", "tool"]
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model. `arguments` is JSON text, or the object. param: their path in the request, for
    errors."""

    id: str
    name: str
    arguments: str | Mapping[str, Any]
    param: str = ""


@dataclass(frozen=True)
class Turn:
    """One message of a conversation.

    calls, reasoning: of an assistant turn. call_id: the call whose result a tool turn holds. name: of the speaker, or
    of the tool.
    """

    role: Role
    text: str
    calls: tuple[ToolCall, ...] = ()
    reasoning: str | None = None
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class ToolDefinition:
    """A function that the model may call.

    parameters: the JSON schema of its arguments. param: the schema's path in the request, for errors. strict: an
    unsupported schema keyword is an error rather than an annotation. input: the constraint on its only argument, the
    text `input`; None for any other tool.
    """

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    param: str = "tools"
    strict: bool = False
    input: Regex | Lark | None = None


@dataclass(frozen=True)
class Thinking:
    """Reasoning before the answer.

    param: the request's field, for warnings. is_wanted: None leaves it to the template. max_tokens: of it (None: no
    limit). effort: for templates that read it. is_shown: the answer has it. is_constrained: a constrained answer has it
    too, of a model without marks as well, which gets `<think>`; otherwise only with a limit.
    """

    param: str = ""
    is_wanted: bool | None = None
    max_tokens: int | None = None
    effort: Effort | None = None
    is_shown: bool = True
    is_constrained: bool = False


@dataclass(frozen=True)
class Conversation:
    """A conversation, and what its next turn may be.

    tools: shown to the model. callable_names: the tools it may call (None: all). must_call: the answer is only tool
    calls. one_call: it has at most one. constraint: applies to an answer without calls; constraint_param: the request's
    parameter that it came from. continue_final: the answer continues the text of the last turn. template_variables:
    further variables of the chat template. strict_formats: an unknown format in a tool's schema is an error.
    untagged_calls: an answer that is nothing but a call without marks counts as a call (None: as the server does).
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
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    strict_formats: bool = False
    thinking: Thinking = Thinking()
    untagged_calls: bool | None = None

    @property
    def callable_tools(self) -> tuple[ToolDefinition, ...]:
        """The tools that the model may call."""
        names = self.callable_names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)
