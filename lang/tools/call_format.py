"""`gen(name, tools=...)`: the constraint of a tool call, and how its text is parsed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from plait.constrained.specs import JsonSchema
from plait.lang.sampling_options import NO_STOP, Options, make_options
from plait.lang.tools.make_tools import make_tools
from plait.lang.tools.tool import Tool, ToolCall
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.tools.call_form import CallForm, FoundCall

ToolChoice = Literal["required", "auto", "none"]
CALL_END_MARKER = "\n<end of call>"
"""With tool_choice "auto" the constraint ends a call with this text. It is also a stop string, so it is not
returned."""


@dataclass(frozen=True)
class ToolCallFormat(ValueFormat):
    """The format of a tool call; with `choice` "auto" of text that may contain one, whose value can be None. form: how
    the call is written; None if there is none. value: the format of a JSON value that the text may be instead."""

    tools: tuple[Tool, ...] = ()
    form: CallForm | None = None
    value: ValueFormat | None = field(default=None, kw_only=True)

    def parse(self, text: str, *, is_marked: bool = False) -> tuple[FoundCall | None, str]:
        """Returns the call in a text, and what the text is without one; see `CallForm.parse`."""
        if self.form is None:
            return None, text
        is_json = self.value is not None
        call, plain = self.form.parse(text, self.tools, is_json=is_json, is_marked=is_marked)
        return call, text if self.form.messages is None else plain

    def read_call(self, text: str, *, is_marked: bool = False) -> Any:
        """Returns the call in a text, or what the text is without one. Raises ValueError for arguments that are not
        valid for the function, and for a text that is neither."""
        found, plain = self.parse(text, is_marked=is_marked)
        if found is not None:
            tool = next(tool for tool in self.tools if tool.name == found.name)
            return ToolCall(tool.name, tool.read(found.arguments), tool)
        if self.value is not None:
            return self.value.read(plain)
        if self.spec is not None and not self.allows_truncation:
            raise ValueError("it has no call")
        return None


def checked_tools(where: str, sources: object, choice: object) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Returns the tools and the choice. If `choice` is one of the tools or its name, only that tool is left.

    Raises InputError, beginning with `where`, for invalid tools or an unknown choice.
    """
    tools = make_tools(where, sources)
    match choice:
        case None | "required":
            return tools, "required"
        case "auto":
            return tools, "auto"
        case "none":
            return tools, "none"
    only = tuple(tool for tool in tools if choice is tool or choice in (tool.name, tool.function))
    if not only:
        names = ", ".join(tool.name for tool in tools)
        raise InputError(
            f'{where}: tool_choice is "required", "auto", "none", or one of the tools ({names}), not {choice!r:.80}'
        )
    return only, "required"


def call_options(where: str, choice: ToolChoice, sampling: dict[str, Any]) -> Options:
    """Returns the options of a gen with tools. A required call, and a call or a value, is complete and has no stop
    strings.

    Raises InputError, beginning with `where`, for a keyword that has no effect with tools.
    """
    if choice == "none":
        return make_options(where, **sampling)
    for keyword in NO_STOP:
        if keyword in sampling:
            raise InputError(f"{where}: {keyword} has no effect with tools, since a call ends when it is complete")
    if choice == "auto":
        if sampling.get("complete"):
            raise InputError(f'{where}: complete needs tool_choice="required", since "auto" allows free text')
        return make_options(where, **sampling)
    return make_options(where, **(sampling | NO_STOP | {"complete": sampling.get("complete") is not False}))


def tool_call_format(
    tools: tuple[Tool, ...],
    choice: ToolChoice,
    form: CallForm | None = None,
    value: ValueFormat | None = None,
    num_earlier: int = 0,
) -> ToolCallFormat:
    """Returns the format of a call of `tools`. form: how the call is written; by default in the default form. value:
    the format of a JSON value that the text may be instead. num_earlier: how many calls the text has.

    Raises InputError for tools that cannot be used as a constraint.
    """
    from plait.lang.tools.call_form import DEFAULT_FORM  # lazy: it loads the grammar libraries

    if choice == "none":
        return ToolCallFormat("text", None, _nothing, tools=tools)
    form = form or DEFAULT_FORM
    otherwise = None if value is None else value.spec
    assert otherwise is None or isinstance(otherwise, JsonSchema)
    must_call = choice == "required" and value is None
    is_free = choice == "auto" and value is None
    marker = CALL_END_MARKER if is_free else ""
    spec = form.constraint(tools, must_call=must_call, otherwise=otherwise, num_earlier=num_earlier, end_marker=marker)
    name = "call of a tool" if value is None else f"call of a tool or {value.type_name}"
    plain = ToolCallFormat(name, spec, _nothing, None, is_free, tools=tools, form=form, value=value)
    return replace(plain, read=plain.read_call)


def _nothing(text: str) -> None:
    return None
