"""One kind of call in a Structural, and the checks of its marks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from plait.constrained.specs.call_contents import Elements, JsonString, Keywords, Notation
from plait.constrained.specs.checks import MAX_TAG_BYTES, GrammarError, SchemaSource, schema_text, utf8_length
from plait.constrained.specs.values import JsonObject, JsonSchema, Lark, Regex

MAX_TRIGGERS = 128
MAX_CONTROL_TOKENS = 64


ContentSpec: TypeAlias = JsonSchema | JsonObject | Regex | Lark | JsonString | Elements | Keywords | Notation
if TYPE_CHECKING:
    Content: TypeAlias = SchemaSource | ContentSpec
else:
    Content = str | ContentSpec


class Trigger(msgspec.Struct, frozen=True):
    """A call: `content` between the texts `begin` and `end`. `name`: of the tool, if it has one.

    `content` is a JSON schema, for JSON in the style of the Structural, or a spec of its own. `end` may be empty behind
    JSON and Notation. A text of Regex or Elements does not contain what ends it; a text of a grammar may.

    >>> Trigger("<call>", {"type": "object"}, "</call>").content
    '{"type":"object"}'
    """

    begin: str
    content: Content
    end: str
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.content, ContentSpec):
            msgspec.structs.force_setattr(self, "content", schema_text(self.content))

    @property
    def schema(self) -> str | None:
        """The JSON schema of the content as text; None for a pattern and a grammar."""
        if isinstance(self.content, JsonObject):
            return "{}" if self.content.any_value else '{"type":"object"}'
        if isinstance(self.content, Regex | Lark | JsonString):
            return None
        return str(self.content if isinstance(self.content, str) else self.content.schema)  # type: ignore[union-attr]


def checked_triggers(given: object) -> tuple[Trigger, ...]:
    """Returns the triggers. Raises GrammarError with the index of one that cannot be used."""
    if not isinstance(given, tuple | list) or not 1 <= len(given) <= MAX_TRIGGERS:
        raise GrammarError(f"there must be 1 to {MAX_TRIGGERS} triggers")
    triggers: list[Trigger] = []
    for index, item in enumerate(given):
        if not isinstance(item, Trigger):
            if not isinstance(item, tuple | list) or len(item) != 3:
                raise GrammarError("a trigger is a triple of begin, content and end", index)
            item = Trigger(*item)
        is_json = isinstance(item.content, str | JsonSchema | JsonObject | Notation)
        for text, least in ((item.begin, 1), (item.end, int(not is_json)), (item.name, 0)):
            if not least <= utf8_length(text, "a tag", index) <= MAX_TAG_BYTES:
                raise GrammarError(f"a tag must have {least} to {MAX_TAG_BYTES} bytes", index)
        triggers.append(item)
    return tuple(triggers)


def checked_openers(given: object, begin: str, triggers: tuple[Trigger, ...]) -> tuple[str, ...]:
    """Returns the openers. Raises GrammarError if the beginnings of calls cannot be distinguished."""
    if not isinstance(given, tuple | list) or len(given) > MAX_TRIGGERS:
        raise GrammarError(f"openers must be a tuple of at most {MAX_TRIGGERS} texts")
    for index, opener in enumerate(given):
        if not 1 <= utf8_length(opener, "an opener", index) <= MAX_TAG_BYTES:
            raise GrammarError(f"an opener must have 1 to {MAX_TAG_BYTES} bytes", index)
        if any(opener in other or other in opener for other in given[:index]):
            raise GrammarError("one opener occurs within another", index)
    for index, trigger in enumerate(triggers):
        whole = begin + trigger.begin
        if given and not any(whole.startswith(opener) for opener in given):
            raise GrammarError("no opener is the beginning of its begin", index)
        for other in triggers[:index]:
            if trigger.begin == other.begin:
                raise GrammarError("two triggers have the same begin", index)
            if _continues(trigger, other) or _continues(other, trigger):
                raise GrammarError("one begin starts with another", index)
            if not (given or begin) and (trigger.begin in other.begin or other.begin in trigger.begin):
                raise GrammarError("one begin occurs within another", index)
    return tuple(given)


def _continues(longer: Trigger, shorter: Trigger) -> bool:
    """Returns whether one begin starts with another one, so that its rest may be read as content of that one."""
    if not longer.begin.startswith(shorter.begin):
        return False
    following = longer.begin[len(shorter.begin)]
    content = shorter.content
    if isinstance(content, Notation):
        return following == "{"
    return not isinstance(content, Elements) or following in (content.open[0], shorter.end[:1])


def checked_control_tokens(given: object) -> tuple[tuple[str, int], ...]:
    """Returns the pairs of text and id. Raises GrammarError with the index of one that cannot be used."""
    if not isinstance(given, tuple | list) or len(given) > MAX_CONTROL_TOKENS:
        raise GrammarError(f"control_tokens must be a tuple of at most {MAX_CONTROL_TOKENS} pairs")
    pairs: list[tuple[str, int]] = []
    for index, pair in enumerate(given):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or type(pair[1]) is not int or pair[1] < 0:
            raise GrammarError("a control token is a pair of its text and its id", index)
        if not 1 <= utf8_length(pair[0], "a control token", index) <= MAX_TAG_BYTES:
            raise GrammarError(f"a control token must have 1 to {MAX_TAG_BYTES} bytes", index)
        if any(pair[0] == text for text, _ in pairs):
            raise GrammarError("a control token is given twice", index)
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)
