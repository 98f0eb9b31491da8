"""The forms of constraint (pattern, choices, JSON Schema, grammar, tool calls) as immutable values with their
limits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

MAX_PATTERN_BYTES = 64 << 10
MAX_CHOICES = 10_000
MAX_CHOICES_BYTES = 1 << 20
MAX_SCHEMA_BYTES = 1 << 20
MAX_GRAMMAR_BYTES = 256 << 10
MAX_TRIGGERS = 128
MAX_TAG_BYTES = 1024
MAX_CONTROL_TOKENS = 64
MAX_CALLS = 1000
MAX_REASONING_TOKENS = 1 << 24

NAME_PLACE = "{name}"
TYPE_PLACE = "{type}"  # of a value in the mark of an element
ID_PLACE = "{id}"
_CALL_ID = re.compile(r"(?:(?:\[[A-Za-z0-9_-]+\]|[A-Za-z0-9_-])(?:\+|\{[0-9]{1,2}(?:,[0-9]{1,2})?\})?)+")

if TYPE_CHECKING:
    SchemaSource: TypeAlias = str | dict[str, Any] | bool | type
else:
    SchemaSource = str  # what `__post_init__` stores and messages carry


class GrammarError(ValueError):
    """Raised for a constraint that cannot be used. `reason` says why, `where` says at which place (None: unknown).

    `where` is a character index into a pattern, the index of an item, or the JSON pointer of a keyword (RFC 6901, ""
    for the whole schema).

    >>> GrammarError("unterminated character set", where=3).where
    3
    """

    def __init__(self, reason: str, where: int | str | None = None) -> None:
        super().__init__(f"{reason} (at {where})" if where or where == 0 else reason)
        self.reason = reason
        self.where = where


class CompileQueueFull(GrammarError):
    """Raised for a constraint that was not compiled, because too many others wait, no compiler process started, or
    the machine was too busy to compile it in time.

    It may be valid; try again later.
    """


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """The texts that `re.fullmatch(pattern, text)` matches, with Python's syntax and meaning.

    At most 64 KiB of UTF-8; anything else raises GrammarError (a msgspec.ValidationError while decoding).

    >>> Regex(r"[0-9]{4}-[0-9]{2}").pattern
    '[0-9]{4}-[0-9]{2}'
    """

    pattern: str

    def __post_init__(self) -> None:
        if _utf8_length(self.pattern, "the pattern", None) > MAX_PATTERN_BYTES:
            raise GrammarError(f"the pattern is longer than {MAX_PATTERN_BYTES} bytes")


class Choices(msgspec.Struct, frozen=True, tag="choices"):
    """Exactly one of the given texts: 1 to 10,000 distinct, non-empty texts, at most 1 MiB of UTF-8.

    A list is accepted as well as a tuple. Anything else raises GrammarError with the item's index (a
    msgspec.ValidationError while decoding).

    >>> Choices(("yes", "no")).choices
    ('yes', 'no')
    """

    choices: Annotated[tuple[str, ...], Meta(max_length=MAX_CHOICES)]

    def __post_init__(self) -> None:
        if isinstance(self.choices, list):
            msgspec.structs.force_setattr(self, "choices", tuple(self.choices))
        if not isinstance(self.choices, tuple):
            raise GrammarError(f"choices must be a tuple of texts, not {type(self.choices).__name__}")
        if not 1 <= len(self.choices) <= MAX_CHOICES:
            raise GrammarError(f"there must be 1 to {MAX_CHOICES} choices, not {len(self.choices)}")
        total, seen = 0, set[str]()
        for index, choice in enumerate(self.choices):
            total += _utf8_length(choice, "a choice", index)
            if not choice:
                raise GrammarError("a choice is empty", index)
            if choice in seen:
                raise GrammarError("a choice is given twice", index)
            if total > MAX_CHOICES_BYTES:
                raise GrammarError(f"the choices are longer than {MAX_CHOICES_BYTES} bytes together", index)
            seen.add(choice)


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """A JSON value that matches `schema`: a JSON text, a dict, or a Pydantic model class; at most 1 MiB.

    One space follows each comma and colon, as json.dumps writes it and as in most JSON that models were trained on.
    `compact` leaves it out; `whitespace` allows JSON white space between any two tokens. `annotations` treats all
    unknown keywords as annotations, as the specification does; without it probable misspellings are refused. An unknown
    `format` is an annotation, listed in `Grammar.warnings`; with `strict_formats` it is refused. `lenient` drops
    unsupported keywords, lists them in `Grammar.unchecked`, and leaves their validation to `Grammar.check`. Anything
    else raises GrammarError.

    >>> JsonSchema({"type": "integer"}).text
    '{"type":"integer"}'
    """

    schema: SchemaSource
    whitespace: bool = False
    lenient: bool = False
    annotations: bool = False
    compact: bool = False
    strict_formats: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", _schema_text(self.schema))
        for name in ("whitespace", "lenient", "annotations", "compact", "strict_formats"):
            if not isinstance(getattr(self, name), bool):
                raise GrammarError(f"{name} must be True or False")
        _check_style(self)

    @property
    def text(self) -> str:
        """The schema as JSON text."""
        return str(self.schema)


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    """Any JSON object, or any JSON value with `any_value`. `whitespace` and `compact` as in JsonSchema.

    >>> JsonObject().any_value
    False
    """

    any_value: bool = False
    whitespace: bool = False
    compact: bool = False

    def __post_init__(self) -> None:
        _check_style(self)


class Lark(msgspec.Struct, frozen=True, tag="lark"):
    """The texts of a context-free grammar in Lark's notation, starting from its rule `start`; at most 256 KiB.

    >>> Lark('start: "yes" | "no"').grammar
    'start: "yes" | "no"'
    """

    grammar: str

    def __post_init__(self) -> None:
        _check_grammar(self.grammar)


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """The texts of a context-free grammar in GBNF (llama.cpp), starting from its rule `root`; at most 256 KiB.

    >>> Ebnf('root ::= "yes" | "no"').grammar
    'root ::= "yes" | "no"'
    """

    grammar: str

    def __post_init__(self) -> None:
        _check_grammar(self.grammar)


class Elements(msgspec.Struct, frozen=True, tag="elements"):
    """The properties of an object that matches `schema`, each as `open`, value, `close`, with `separator` between two.

    `open` has {name} once, for the name. The order is that of the schema; optional properties may be left out, and an
    object that the schema leaves open has further ones, with names of up to 64 letters, digits, "_", "." and "-".
    A value that is a string stands raw: any text without `close`; others are JSON, in the style of JsonSchema. Where a
    string and other types are possible, what is JSON of one of these is not written as a string. For Trigger only.

    `types`: pairs of a JSON type and a text; {type} in `open`, behind {name}, stands for the text of the value's type.

    >>> Elements({"type": "object"}, "<parameter={name}>", "</parameter>").separator
    ''
    """

    schema: SchemaSource
    open: str
    close: str
    separator: str = ""
    whitespace: bool = False
    compact: bool = False
    types: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", _schema_text(self.schema))
        _check_style(self)
        _check_tags(self, ("open", "close"), ("separator",))
        if self.types and self.open.partition(NAME_PLACE)[2].count(TYPE_PLACE) != 1:
            raise GrammarError(f"open must have {TYPE_PLACE} once behind {NAME_PLACE}, for the type of a value")
        if self.open.count(NAME_PLACE) != 1 or self.open.endswith(NAME_PLACE):
            raise GrammarError(f"open must have {NAME_PLACE} once, for the name of a parameter, and a text behind it")


class Keywords(msgspec.Struct, frozen=True, tag="keywords"):
    """The properties of an object that matches `schema` as keyword arguments of Python: `a=1, b="x", c=None`.

    Order and names as in Elements; only names that are identifiers of ASCII letters, digits and "_". The values are
    literals: JSON with True, False and None. `whitespace` and `compact` as in JsonSchema, for containers. For Trigger
    only.

    >>> Keywords({"type": "object"}).schema
    '{"type":"object"}'
    """

    schema: SchemaSource
    whitespace: bool = False
    compact: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", _schema_text(self.schema))
        _check_style(self)


class JsonString(msgspec.Struct, frozen=True, tag="json_string"):
    """A JSON string, quotes included, whose value is a text of `of`; no character has another form than json.dumps
    with ensure_ascii=False gives it. For Trigger only.

    >>> JsonString(Regex("a|b")).of.pattern
    'a|b'
    """

    of: Regex | Lark


if TYPE_CHECKING:
    Content: TypeAlias = SchemaSource | JsonSchema | JsonObject | Regex | Lark | JsonString | Elements | Keywords
else:
    Content = str | JsonSchema | JsonObject | Regex | Lark | JsonString | Elements | Keywords


class Trigger(msgspec.Struct, frozen=True):
    """A call: `content` between the texts `begin` and `end`. `name`: of the tool, if it has one.

    `content` is a JSON schema, for JSON in the style of the Structural, or a spec of its own. `end` may be empty behind
    JSON. A text of Regex or Elements does not contain what ends it; a text of a grammar may.

    >>> Trigger("<call>", {"type": "object"}, "</call>").content
    '{"type":"object"}'
    """

    begin: str
    content: Content
    end: str
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.content, JsonSchema | JsonObject | Regex | Lark | JsonString | Elements | Keywords):
            msgspec.structs.force_setattr(self, "content", _schema_text(self.content))

    @property
    def schema(self) -> str | None:
        """The JSON schema of the content as text; None for a pattern and a grammar."""
        if isinstance(self.content, JsonObject):
            return "{}" if self.content.any_value else '{"type":"object"}'
        if isinstance(self.content, Regex | Lark | JsonString):
            return None
        return str(self.content if isinstance(self.content, str) else self.content.schema)  # type: ignore[union-attr]


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
    a possible beginning of JSON, so that the two can be distinguished.

    `openers`: the texts that commit free text to a call, and that it does not contain; `begin` of this spec and of each
    trigger together start with one of them. By default they are the begins themselves. With openers, begins may
    contain each other, but none may start with another.

    `begin`, `separator`, `end`: written before the first call, between two and behind the last one. With any of them
    all calls stand together, with free text before and behind; otherwise it may also stand between them.

    `control_tokens`: pairs of text and token id. Where one of these texts stands in a text of this spec, it means that
    control token, which no other text can spell. `call_id`: a pattern of classes and counts; `{id}` in the begin and
    end of a trigger then stands for a text that matches it.

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

    def __post_init__(self) -> None:
        _check_style(self)
        _check_tags(self, (), ("begin", "separator", "end", "call_id"))
        msgspec.structs.force_setattr(self, "control_tokens", _control_tokens(self.control_tokens))
        triggers = _triggers(self.triggers)
        msgspec.structs.force_setattr(self, "triggers", triggers)
        msgspec.structs.force_setattr(self, "openers", _openers(self.openers, self.begin, triggers))
        if self.otherwise is not None and (self.free_text or self.at_least):
            raise GrammarError("otherwise cannot be combined with free text or with required calls")
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


ValueSpec: TypeAlias = Regex | Choices | JsonSchema | JsonObject | Lark | Ebnf | Structural


class Reasoning(msgspec.Struct, frozen=True, tag="reasoning"):
    """Reasoning in free text, then a text of the constraint `then`.

    The text is `begin`, any text up to and with `end`, `separator`, and the value. The model writes `end`, which must
    be ordinary text of the vocabulary; after `max_tokens` tokens of reasoning (None: any number) it is forced.

    >>> Reasoning(Choices(("yes", "no")), max_tokens=64).end
    '</think>'
    """

    then: ValueSpec
    begin: str = "<think>"
    end: str = "</think>"
    separator: str = "\n\n"
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.then, Reasoning) or not isinstance(self.then, msgspec.Struct):
            raise GrammarError("then must be a constraint on the value, without reasoning")
        for name in ("begin", "end", "separator"):
            if _utf8_length(getattr(self, name), name, None) > MAX_TAG_BYTES:
                raise GrammarError(f"{name} is longer than {MAX_TAG_BYTES} bytes")
        if not self.end:
            raise GrammarError("end is empty, so the reasoning could not end")
        count = self.max_tokens
        if count is not None and (type(count) is not int or not 0 <= count <= MAX_REASONING_TOKENS):
            raise GrammarError(f"max_tokens must be a number from 0 to {MAX_REASONING_TOKENS}")


Spec: TypeAlias = ValueSpec | Reasoning
"""Every form of constraint; `msgspec.msgpack.Decoder(Spec)` decodes one from the wire."""


def kind_of(spec: Spec) -> str:
    """Returns what a spec is called in an error text.

    >>> kind_of(JsonSchema(True)), kind_of(Lark('start: "a"'))
    ('JSON schema', 'grammar')
    """
    names = {Regex: "pattern", Choices: "list of choices", JsonSchema: "JSON schema", Structural: "structure of calls"}
    return names.get(type(spec), "grammar") if not isinstance(spec, Reasoning) else kind_of(spec.then)


def _utf8_length(text: object, what: str, where: int | None) -> int:
    if not isinstance(text, str):
        raise GrammarError(f"{what} must be a text, not {type(text).__name__}", where)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        place = error.start if where is None else where
        raise GrammarError(f"{what} contains a lone surrogate", place) from None


def _check_style(spec: JsonSchema | JsonObject | Elements | Keywords | Structural) -> None:
    if spec.whitespace and spec.compact:
        raise GrammarError("whitespace and compact contradict each other")


def _check_grammar(grammar: object) -> None:
    if _utf8_length(grammar, "the grammar", None) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar is longer than {MAX_GRAMMAR_BYTES} bytes")


def _schema_text(schema: object) -> str:
    """Returns the JSON text of a schema given as text, dict, bool or Pydantic model."""
    model_schema = getattr(schema, "model_json_schema", None)
    if isinstance(schema, type) and callable(model_schema):
        schema = model_schema()
    if isinstance(schema, dict | bool):
        try:
            if len(text := msgspec.json.encode(schema)) > MAX_SCHEMA_BYTES:  # found faster than json.dumps writes it
                schema = text.decode()
            else:
                schema = json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise GrammarError(f"the schema is not JSON: {reason}") from None
    if not isinstance(schema, str):
        name = type(schema).__name__
        raise GrammarError(f"a schema is a dict, a bool, its JSON text or a Pydantic model, not {name}")
    if _utf8_length(schema, "the schema", None) > MAX_SCHEMA_BYTES:
        raise GrammarError(f"the schema is longer than {MAX_SCHEMA_BYTES} bytes")
    return schema


def _check_tags(spec: Elements | Structural, required: tuple[str, ...], optional: tuple[str, ...]) -> None:
    for name in (*required, *optional):
        if not int(name in required) <= _utf8_length(getattr(spec, name), name, None) <= MAX_TAG_BYTES:
            raise GrammarError(f"{name} must have {int(name in required)} to {MAX_TAG_BYTES} bytes")


def _triggers(given: object) -> tuple[Trigger, ...]:
    if not isinstance(given, tuple | list) or not 1 <= len(given) <= MAX_TRIGGERS:
        raise GrammarError(f"there must be 1 to {MAX_TRIGGERS} triggers")
    triggers: list[Trigger] = []
    for index, item in enumerate(given):
        if not isinstance(item, Trigger):
            if not isinstance(item, tuple | list) or len(item) != 3:
                raise GrammarError("a trigger is a triple of begin, content and end", index)
            item = Trigger(*item)
        is_json = isinstance(item.content, str | JsonSchema | JsonObject)
        for text, least in ((item.begin, 1), (item.end, int(not is_json)), (item.name, 0)):
            if not least <= _utf8_length(text, "a tag", index) <= MAX_TAG_BYTES:
                raise GrammarError(f"a tag must have {least} to {MAX_TAG_BYTES} bytes", index)
        triggers.append(item)
    return tuple(triggers)


def _openers(given: object, begin: str, triggers: tuple[Trigger, ...]) -> tuple[str, ...]:
    """Returns the openers. Raises GrammarError if the beginnings of calls cannot be distinguished."""
    if not isinstance(given, tuple | list) or len(given) > MAX_TRIGGERS:
        raise GrammarError(f"openers must be a tuple of at most {MAX_TRIGGERS} texts")
    for index, opener in enumerate(given):
        if not 1 <= _utf8_length(opener, "an opener", index) <= MAX_TAG_BYTES:
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
    return not isinstance(content, Elements) or following in (content.open[0], shorter.end[:1])


def _control_tokens(given: object) -> tuple[tuple[str, int], ...]:
    if not isinstance(given, tuple | list) or len(given) > MAX_CONTROL_TOKENS:
        raise GrammarError(f"control_tokens must be a tuple of at most {MAX_CONTROL_TOKENS} pairs")
    pairs: list[tuple[str, int]] = []
    for index, pair in enumerate(given):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or type(pair[1]) is not int or pair[1] < 0:
            raise GrammarError("a control token is a pair of its text and its id", index)
        if not 1 <= _utf8_length(pair[0], "a control token", index) <= MAX_TAG_BYTES:
            raise GrammarError(f"a control token must have 1 to {MAX_TAG_BYTES} bytes", index)
        if any(pair[0] == text for text, _ in pairs):
            raise GrammarError("a control token is given twice", index)
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)
