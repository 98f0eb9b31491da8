"""Turns with calls of tools: the gen of a call, its result, and the system turn that lists tools.

All in the form of the chat template, or in a default form. Imported only by programs with tools, since it loads the
grammar libraries.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from plait.lang.core.expressions import Gen, GenToolCall, SystemWithTools
from plait.lang.core.results import GenResult, TextSegment
from plait.lang.tools.call_form import CallForm, call_form
from plait.lang.tools.call_format import CALL_END_MARKER, ToolCallFormat, tool_call_format
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.chat.call_turns import CallTurn, ResultTurn, call_id, writes_json
from plait.runtime.chat.derivation.model_formats import formats_of
from plait.runtime.chat.formats.call_format import CallFormat, JsonArguments
from plait.runtime.client.stream import ReadPosition
from plait.runtime.errors import InputError, PlaitError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.tools.call_form import FoundCall
    from plait.lang.tools.tool import Tool
    from plait.runtime.chat.formats.control_marks import ControlMarks
    from plait.runtime.client.call import CallResult
    from plait.runtime.tokenizer.chat_template import ChatTemplate


_SYSTEM = "Qzsystemz"


def begin_call_turn(branch: Branch, role: str) -> None:
    """Begins a turn that begins with a call. Where an answer is messages, the first one does not begin as a text."""
    formats = formats_of(branch.run.chat_template)
    if formats.messages is None or formats.calls is None:
        branch.begin_turn(role)
        return
    begin, head = formats.messages.begin, formats.messages.texts[0]
    branch.begin_turn(role, without=(begin if formats.calls.opener.startswith(begin) else "") + head)


def tool_call_gen(branch: Branch, expr: GenToolCall) -> tuple[str, Gen]:
    """Returns the template's text before the gen of a call, and the constrained gen."""
    if expr.choice == "none":
        return "", Gen(expr.name, expr.options, None, tool_call_format(expr.tools, expr.choice))
    is_free = expr.choice == "auto" and expr.value_format is None
    form, before = _form(branch, is_json=expr.value_format is not None, is_free=is_free), ""
    if form.opens_reasoning and form.reasoning is not None and not is_free:  # a call is constrained from its beginning
        before = form.reasoning.lead + form.reasoning.end + form.reasoning.separator
        form = replace(form, opens_reasoning=False)
    value_format = tool_call_format(expr.tools, expr.choice, form, expr.value_format, _num_calls(branch))
    options = expr.options
    if is_free:  # the text ends after its first call
        options = replace(options, fields={**options.fields, "stop": (CALL_END_MARKER,)})
    if expr.choice == "required":
        branch.open_shape = _call_turn(branch, form.calls, expr.tools[0].name)  # the end of the turn has no name
    return before, Gen(expr.name, options, value_format.spec, value_format)


def _form(branch: Branch, *, is_json: bool, is_free: bool) -> CallForm:
    if branch.open_turn is None:
        return CallForm()
    last = branch.segments[-1]
    is_begun = branch.open_turn[1] == len(branch.segments) and isinstance(last, TextSegment) and last.control
    return call_form(branch.run, last.text() if is_begun else "", is_json=is_json, is_free=is_free)


def _num_calls(branch: Branch) -> int:
    return sum(isinstance(turn.shape, CallTurn) for turn in branch.turns)


def _call_turn(branch: Branch, calls: CallFormat, name: str, written_id: str = "") -> CallTurn | None:
    """Returns the shape of a turn with a call; None where the template writes none, so that it is part of the text."""
    if (branch.open_turn is None and not branch.turns) or not (calls.is_native and calls.writes_calls):
        return None
    return CallTurn(calls, name, call_id(calls, name, _num_calls(branch), written_id))


def append_result(branch: Branch, variable: GenResult, value_format: ToolCallFormat, name: str, text: str) -> None:
    """Appends a result as the template has it: as a turn, or as a line inside an open turn."""
    template = branch.run.chat_template
    if template is None or branch.in_turn or not branch.turns:
        branch.open_shape = None
        branch.write(f"\nResult of {name}: {text}\n")
        return
    if not _try_tool_turn(branch, template, variable, value_format, name, text):
        branch.begin_turn("user")
        branch.write(f"Result of {name}: {text}")
        branch.end_turn("user")


def _try_tool_turn(
    branch: Branch, template: ChatTemplate, variable: GenResult, value_format: ToolCallFormat, name: str, text: str
) -> bool:
    """Writes a turn of role "tool". Returns False if the template has none, or refuses it here; some refuse two in a
    row."""
    calls = value_format.form.calls if value_format.form is not None else None
    result: ResultTurn | None = None
    has_tool_turns = _has_tool_turns(template)
    # a chat API's results need ids that its own calls have
    if calls is not None and calls.is_native and (has_tool_turns or branch.run.client.takes_token_ids):
        result = ResultTurn(name, _name_call(branch, variable, value_format, calls, name))
    elif not has_tool_turns:
        return False
    try:
        is_json = result is not None and writes_json(branch.turn_suffix, result)
        branch.begin_turn("tool", result)
    except InputError:
        return False
    branch.write(json.dumps(text, ensure_ascii=False)[1:-1] if is_json else text)
    branch.end_turn("tool")
    return True


def _name_call(branch: Branch, variable: GenResult, value_format: ToolCallFormat, calls: CallFormat, name: str) -> str:
    """Gives the turn with a call its shape, now that the call is known. Returns the call's id."""
    turns = enumerate(branch.turns)
    index = next((i for i, turn in turns if variable in branch.segments[turn.start : turn.stop]), -1)
    branch.turns[index] = branch.turns[index]._replace(shape=None)
    found, _ = variable.parse_call(value_format)
    shape = _call_turn(branch, calls, name, found.id if found is not None else "")
    branch.turns[index] = branch.turns[index]._replace(shape=shape)
    return shape.call_id if shape is not None else call_id(calls, name, _num_calls(branch))


def _has_tool_turns(template: ChatTemplate) -> bool:
    """Whether the template mentions the role "tool". Many templates render any role name, known to the model or not."""
    return "'tool'" in template.source or '"tool"' in template.source


def write_system_turn(branch: Branch, turn: SystemWithTools) -> None:
    """Writes a system turn that lists tools: as the chat template lists them in a first system turn, or as JSON lines
    after the content."""
    tools = turn.tools
    tokenizer = branch.run.client.tokenizer
    template = branch.run.chat_template
    is_first = not branch.turns and not branch.segments
    around_content = _template_system_turn(template, tools) if template is not None and is_first else None
    listing = msgspec.json.encode([tool.as_json() for tool in tools]).decode()
    listing_tokens = tokenizer.encode([(listing, True)], at_start=False)
    # the template writes descriptions as its own text: a control token in one could end the turn
    if around_content is not None and not tokenizer.control_ids.intersection(listing_tokens):
        before, after = around_content
        branch.open_turn_with("system", before)
        branch.append(turn.content)
        branch.close_turn_with(after)
        return
    branch.begin_turn("system")
    branch.append(turn.content)
    branch.write("\n\n" + _tool_listing(tools, call_form(branch.run, "").calls))
    branch.end_turn("system")


def _template_system_turn(template: ChatTemplate, tools: Iterable[Tool]) -> tuple[str, str] | None:
    """Returns the template's text before and after the content of a first system turn that lists `tools`; None if the
    template does not list tools there."""
    if "tools" not in template.source:
        return None
    message = {"role": "system", "content": _SYSTEM}
    try:
        without_tools = template.render([message])
        with_tools = template.render([message], tools=[tool.as_json() for tool in tools])
    except PlaitError:
        return None
    if with_tools == without_tools or with_tools.count(_SYSTEM) != 1:
        return None
    before, _, after = with_tools.partition(_SYSTEM)
    return before, after


def _tool_listing(tools: Iterable[Tool], calls: CallFormat) -> str:
    """Returns the list of `tools` for a system turn: one JSON line per tool, and the form of a call."""
    lines = [json.dumps(tool.as_json()["function"], ensure_ascii=False) for tool in tools]
    arguments: Any = "{...}" if isinstance(calls.arguments, JsonArguments) else {"...": "..."}
    written = calls.render_calls([("...", "...", arguments)])
    return "\n".join(["You can call these tools:", *lines, f"A call is written {written}"])


# -- calls whose marks are control tokens ---------------------------------------------------------


class MarkedCall(GenResult):
    """The call is read from the tokens, since text may spell a control token without being one."""

    value_format: ToolCallFormat

    def text(self) -> str:
        return "".join(text for text, _ in self.marked_parts())

    def marked_parts(self) -> Sequence[tuple[str, bool]]:
        return self._marks.split(self._marked_text())

    def iter_text(self) -> Iterator[str]:
        show = self._shown_pieces()
        for _ in self.iter_progress():
            yield from filter(None, (show(),))

    async def aiter_text(self) -> AsyncIterator[str]:
        show = self._shown_pieces()
        async for _ in self.aiter_progress():
            if piece := show():
                yield piece

    def parse_call(self, value_format: ToolCallFormat) -> tuple[FoundCall | None, str]:
        return value_format.parse(self._marked_text(), is_marked=True)

    def _read_value(self, value_format: ValueFormat, result: CallResult) -> Any:
        assert isinstance(value_format, ToolCallFormat)
        marked = self._marked_text()
        reads_marked = replace(value_format, read=lambda text: value_format.read_call(marked, is_marked=True))
        return reads_marked.read_result(self.text(), result.finish_reason)

    @property
    def _marks(self) -> ControlMarks:
        assert self.value_format.form is not None and self.value_format.form.marks is not None
        return self.value_format.form.marks

    def _marked_text(self) -> str:
        return self._marks.detokenizer().push(self.result().token_ids)

    def _shown_pieces(self) -> Callable[[], str]:
        """Returns a function that returns at each call what has arrived of the text since the last one."""
        detokenizer, position = self._marks.detokenizer(), ReadPosition()

        def show() -> str:
            nonlocal position
            update, position = self.call.read_since(position)
            return "".join(text for text, _ in self._marks.split(detokenizer.push(update.token_ids)))

        return show
