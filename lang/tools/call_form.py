"""`CallForm`: how a gen writes and reads the call of a tool: in the form of the chat template, or in a default form.

The default form, for templates without tools and for text without turns, is that of many open models:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Imported only by programs with tools, since it loads the grammar libraries.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from plait.constrained.specs import GrammarError, JsonObject, JsonSchema, Structural
from plait.lang.tools.tool import Tool
from plait.runtime.chat.call_constraint import CallableTool, ToolError, call_constraint
from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT_BESIDE_JSON
from plait.runtime.chat.derivation.model_formats import fitted_calls, formats_of
from plait.runtime.chat.formats.call_format import CallFormat, JsonArguments
from plait.runtime.chat.formats.control_marks import ControlMarks, control_marks, texts_around
from plait.runtime.chat.formats.reasoning_format import MessageFormat, ReasoningFormat
from plait.runtime.chat.json_calls import call_schema
from plait.runtime.chat.parser import OutputParser, ParsedPart
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.run import Run

JSON_BEGINNINGS = ("", *'{["-0123456789tfn')


class FoundCall(NamedTuple):
    """A call in a text. arguments: their JSON text. id: that the model has written, or "". is_complete: the call ends
    within the text."""

    name: str
    arguments: str
    id: str
    is_complete: bool


@dataclass(frozen=True)
class CallForm:
    """The form of a gen's calls.

    marks: the control tokens in it. messages: how messages of an answer begin; in_message: the text before the gen ends
    with such a beginning. text_head: what begins the message of an answer without calls. opens_reasoning: the text
    before the gen ends with the beginning of reasoning.
    """

    calls: CallFormat = GENERIC_FORMAT_BESIDE_JSON
    marks: ControlMarks | None = None
    reasoning: ReasoningFormat | None = None
    messages: MessageFormat | None = None
    in_message: bool = False
    text_head: str = ""
    opens_reasoning: bool = False

    def constraint(
        self,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        otherwise: JsonSchema | JsonObject | None = None,
        num_earlier: int = 0,
        end_marker: str = "",
    ) -> Structural:
        """Returns the constraint on a text with at most one call; see `call_constraint`. end_marker: follows the call.

        Raises InputError for the schema of a tool that cannot be used.
        """
        calls = replace(self.calls, end=self.calls.end + end_marker)
        given = [CallableTool(tool.name, tool.parameters, tool.strict) for tool in tools]
        marks = self.marks
        try:
            spec = call_constraint(
                calls,
                given,
                must_call=must_call,
                one_call=True,
                otherwise=otherwise,
                num_earlier=num_earlier,
                control_tokens=marks.pairs if marks else (),
                free_tokens=marks.within(*texts_around(self.reasoning, self.messages)) if marks else (),
                text_head=self.text_head,
            )
            call_schema(spec.calls, "name", "arguments")  # names the tool whose schema refers to nothing
        except ToolError as error:
            reason = f"tool {tools[error.index].name!r}: {error}"
            raise InputError(f"the schema of the tools cannot be used as a constraint: {reason}") from None
        except GrammarError as error:
            raise InputError(f"the schema of the tools cannot be used as a constraint: {error}") from None
        return spec

    def parse(
        self, text: str, tools: Sequence[Tool], *, is_json: bool, is_marked: bool
    ) -> tuple[FoundCall | None, str]:
        """Returns the first call in a text, and the text without the marks of messages and reasoning.

        is_json: it is a call or a JSON value. is_marked: control tokens stand in it as `ControlMarks` shows them.
        """
        marks = self.marks if is_marked else None
        reasoning, messages = self.reasoning, self.messages
        parser = OutputParser(
            marks.mark_reasoning(reasoning) if marks and reasoning else reasoning,
            self.opens_reasoning,
            marks.mark_calls(self.calls) if marks else self.calls,
            {tool.name: tool.parameters for tool in tools},
            is_json,
            marks.mark_messages(messages) if marks and messages else messages,
            self.in_message,
        )
        parts: list[ParsedPart] = [*parser.push(text), *parser.finish()]
        plain = "".join(part.text for part in parts if part.kind == "text")
        first = next((part for part in parts if part.kind == "call"), None)
        if first is None:
            return None, plain
        arguments = "".join(part.text for part in parts if part.kind == "arguments" and part.number == 0)
        return FoundCall(first.text, arguments, first.call_id, not parser.is_within_arguments), plain


DEFAULT_FORM = CallForm()


def call_form(run: Run, before: str, *, is_json: bool = False, is_free: bool = False) -> CallForm:
    """Returns the form of a call in a turn that the template has begun with the text `before`; "" within a turn.

    is_json: the text may be a JSON value instead. is_free: or any text.
    """
    formats, tokenizer = formats_of(run.chat_template), run.client.tokenizer
    messages, reasoning = formats.messages, formats.reasoning
    calls = fitted_calls(formats, tokenizer, with_json_answer=True)
    has_own_runtime = run.client.takes_token_ids
    if not calls.is_native or not (has_own_runtime or _is_json_in_marks(calls)):
        return DEFAULT_FORM
    if is_free and calls.is_whole_answer and not has_own_runtime:
        return DEFAULT_FORM  # a service cannot be told that other text does not begin so
    if messages is None and is_json and calls.opener.strip()[:1] in JSON_BEGINNINGS:
        return DEFAULT_FORM  # values and calls must be distinguishable
    marks = control_marks(tokenizer, calls, reasoning, messages) if has_own_runtime else None
    form = CallForm(calls, marks if marks is not None and marks.pairs else None, reasoning, messages)
    if reasoning is not None and reasoning.begin and before.rstrip().endswith(reasoning.begin):
        return replace(form, opens_reasoning=True)
    if messages is None:
        return form
    if calls.opener.startswith(messages.begin):
        return replace(form, text_head=messages.begin + messages.texts[0])
    if before.endswith(messages.begin):
        return replace(form, in_message=True, text_head=messages.texts[0])
    return DEFAULT_FORM  # the message of a text has begun


def _is_json_in_marks(calls: CallFormat) -> bool:
    """Whether calls are a JSON object between two texts. Services take no constraint on calls of another form."""
    is_object = re.search(r'\{"\w+": "\{name\}", "\w+": $', calls.head) is not None and calls.tail.startswith("}")
    return isinstance(calls.arguments, JsonArguments) and is_object and not calls.id_source
