"""Free text with tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from msgspec import Meta

from plait.constrained.specs.checks import GrammarError, check_style, check_tags
from plait.constrained.specs.trigger import (
    MAX_CONTROL_TOKENS,
    MAX_TRIGGERS,
    Content,
    Trigger,
    checked_control_tokens,
    checked_openers,
    checked_triggers,
)
from plait.constrained.specs.values import JsonObject, JsonSchema

MAX_CALLS = 1000
MAX_NUMBERED = 16  # calls that are counted in a text
ID_PLACE = "{id}"
_CALL_ID = re.compile(r"(?:(?:\[[A-Za-z0-9_-]+\]|[A-Za-z0-9_-])(?:\+|\{[0-9]{1,2}(?:,[0-9]{1,2})?\})?)++")


if TYPE_CHECKING:
    Triggers: TypeAlias = Sequence[Trigger | tuple[str, Content, str]]
    Texts: TypeAlias = Sequence[str]
    ControlTokens: TypeAlias = Sequence[tuple[str, int]]
else:
    Triggers = Annotated[tuple[Trigger, ...], Meta(max_length=MAX_TRIGGERS)]
    Texts = Annotated[tuple[str, ...], Meta(max_length=MAX_TRIGGERS)]
    ControlTokens = Annotated[tuple[tuple[str, int], ...], Meta(max_length=MAX_CONTROL_TOKENS)]


class Structural(msgspec.Struct, frozen=True, tag="structural"):
    """Free text in which every `begin` is followed by its content, such as JSON that matches a schema, and then by its
    `end`: tool calls.

    `triggers` are 1 to 128 Trigger values or triples (begin, content, end); no begin may contain another. The text has
    `at_least` to `at_most` calls (None: any number). With `free_text=False` there is no other text before, between or
    after them, as where a tool must be called. `whitespace`, `compact` and `strict_formats` as in
    JsonSchema.

    With `otherwise`, the whole text may be this JSON value instead of calls, and there is no free text. No begin may be
    a possible beginning of JSON, so that the two can be distinguished. `otherwise_begin` is written before that value.

    `openers`: the texts that commit free text to a call, and that it does not contain; `begin` of this spec and of each
    trigger together start with one of them. By default they are the begins themselves. With openers, begins may
    contain each other, but none may start with another.

    `at_start`: calls begin the text, and it ends with them; other text does not begin with an opener.

    `begin`, `separator`, `end`: written before the first call, between two and behind the last one. With any of them
    all calls stand together, with free text before and behind; otherwise it may also stand between them.

    `control_tokens`: pairs of text and token id. Where one of these texts stands in a text of this spec, it means that
    control token, which no other text can spell. `free_tokens`: those of them that may stand in free text, unless they
    complete an opener. `call_id`: a pattern of classes and counts; `{id}` in the begin and
    end of a trigger then stands for a text that matches it. `first_number`: in a section {id} in a begin is the number
    of the call, counted from this one on, for the first MAX_NUMBERED calls; the others have any that matches `call_id`.

    >>> Structural([("<call>", {"type": "object"}, "</call>")], at_least=1).triggers[0].end
    '</call>'
    """

    triggers: Triggers
    at_least: int = 0
    at_most: int | None = None
    free_text: bool = True
    lenient: bool = False
    annotations: bool = False
    otherwise: JsonSchema | JsonObject | None = None
    whitespace: bool = False
    compact: bool = False
    strict_formats: bool = False
    openers: Texts = ()
    begin: str = ""
    separator: str = ""
    end: str = ""
    control_tokens: ControlTokens = ()
    call_id: str = ""
    at_start: bool = False
    free_tokens: Texts = ()
    otherwise_begin: str = ""
    first_number: int | None = None

    def __post_init__(self) -> None:
        check_style(self.whitespace, self.compact)
        check_tags(self, (), ("begin", "separator", "end", "call_id", "otherwise_begin"))
        msgspec.structs.force_setattr(self, "control_tokens", checked_control_tokens(self.control_tokens))
        if not {*self.free_tokens} <= dict(self.control_tokens).keys():
            raise GrammarError("free_tokens are texts of control_tokens")
        msgspec.structs.force_setattr(self, "free_tokens", tuple(self.free_tokens))
        triggers = checked_triggers(self.triggers)
        msgspec.structs.force_setattr(self, "triggers", triggers)
        msgspec.structs.force_setattr(self, "openers", checked_openers(self.openers, self.begin, triggers))
        if self.otherwise is not None and (self.free_text or self.at_least):
            raise GrammarError("otherwise cannot be combined with free text or with required calls")
        if self.otherwise_begin and self.otherwise is None:
            raise GrammarError("otherwise_begin is for a text with otherwise")
        if self.at_start and (not self.free_text or self.at_least or self.control_tokens):
            raise GrammarError("at_start is for free text with optional calls, and marks without control tokens")
        if self.first_number is not None and (type(self.first_number) is not int or not self.call_id):
            raise GrammarError("first_number is the number of a call, for a spec with call_id")
        for name, count in (("at_least", self.at_least), ("at_most", self.at_most)):
            if count is not None and (type(count) is not int or not 0 <= count <= MAX_CALLS):
                raise GrammarError(f"{name} must be a number from 0 to {MAX_CALLS}")
        if self.at_most is not None and self.at_most < max(1, self.at_least):
            raise GrammarError("at_most must be at least 1, and not less than at_least")
        if self.call_id and not _CALL_ID.fullmatch(self.call_id):
            raise GrammarError("call_id is a sequence of classes, letters and digits with counts, such as [a-z0-9]{9}")

    @property
    def calls(self) -> tuple[Trigger, ...]:
        """The triggers, as they are stored."""
        return tuple(trigger for trigger in self.triggers if isinstance(trigger, Trigger))

    @property
    def is_section(self) -> bool:
        """Whether all calls stand together."""
        return bool(self.begin or self.separator or self.end)
