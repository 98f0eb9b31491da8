"""`CallFormat`: how a model writes tool calls, and the text of given calls.

An answer's calls are `begin`, the calls with `separator` between them, `end`. A call is `head`, its arguments, `tail`.
`model_formats.py` derives a format from a chat template, `format_table.py` lists the exceptions, and `parser.py` reads
calls of every format.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

from plait.constrained.specs import CDATA_BEGIN, CDATA_END, PythonForm
from plait.runtime.tokenizer.json_text import json_text

# Stands before the text of a control token that the parser is shown. It is random, so that no text can forge one.
CONTROL = f"\ufdd0{secrets.token_hex(8)}"
IdSource = Literal["", "client", "counter"]
# A mark such as <tool_call>, [TOOL_CALLS] or <｜tool▁calls▁begin｜> at the beginning of a text.
_MARK = re.compile(f"(?:{CONTROL})?(?:" r"<[^<>\s{]+>|<[^<>\s{=]+=|\[[A-Z_]+\])")


@dataclass(frozen=True)
class JsonArguments:
    """One JSON object. `style`: the white space in it; see `JsonSchema`."""

    marks: ClassVar[tuple[str, ...]] = ()  # the fields that are texts of the format; so in all forms
    style: Literal["spaced", "compact", "any"] = "spaced"

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Returns the text of the arguments."""
        separators = (",", ":") if self.style == "compact" else None
        return json_text(arguments, ensure_ascii=False, separators=separators)


@dataclass(frozen=True)
class ElementArguments:
    """One element for each argument: `open` with {name}, the value, `close`; `separator` between two elements.

    Strings stand raw, other values as JSON. types: (JSON type, what {type} in `open` is for values of it).
    has_cdata: a value with markup or a line's end stands in a CDATA section. python: the values that are written as
    Python's literals, see `constrained.specs.Elements`.
    """

    marks: ClassVar[tuple[str, ...]] = ("open", "close", "separator")
    open: str
    close: str
    separator: str = ""
    types: tuple[tuple[str, str], ...] = ()
    has_cdata: bool = False
    python: PythonForm = ""

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Returns the text of the arguments."""
        return self.separator.join(
            f"{self.opening(name, json_type(value))}{self._escaped(self.text(value))}{self.close}"
            for name, value in arguments.items()
        )

    def opening(self, name: str, value_type: str) -> str:
        """Returns the opening mark of an argument."""
        return self.open.replace("{type}", dict(self.types).get(value_type, "")).replace("{name}", name)

    def text(self, value: Any) -> str:
        """Returns the text of a value."""
        is_literal = self.python == "values" or (self.python == "scalars" and isinstance(value, bool | None))
        return python_literal(value) if is_literal and not isinstance(value, str) else element_text(value)

    def _escaped(self, text: str) -> str:
        return f"{CDATA_BEGIN}{text}{CDATA_END}" if self.has_cdata and re.search(r"[<&\n]", text) else text


@dataclass(frozen=True)
class KeywordArguments:
    """Python's keyword arguments: `name=value, name=value` with Python literals; strings are written as in JSON, which
    Python reads alike. single_quotes: see `constrained.specs.Keywords`."""

    marks: ClassVar[tuple[str, ...]] = ()
    single_quotes: bool = False

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Returns the text of the arguments."""
        return ", ".join(f"{name}={self.text(value)}" for name, value in arguments.items())

    def text(self, value: Any) -> str:
        """Returns the text of a value."""
        is_single = self.single_quotes and isinstance(value, str) and not re.search(r"['\\\x00-\x1f]", value)
        return f"'{value}'" if is_single else python_literal(value)


@dataclass(frozen=True)
class NotationArguments:
    """An object in a notation without quotes, see `constrained.specs.Notation`: {a:1,b:<|"|>text<|"|>}."""

    marks: ClassVar[tuple[str, ...]] = ("quote",)
    quote: str
    null: str = "null"
    is_sorted: bool = False

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Returns the text of the arguments."""
        return self.text(arguments)

    def text(self, value: Any) -> str:
        """Returns the text of a value."""
        if isinstance(value, Mapping):
            names = sorted(value, key=str.lower) if self.is_sorted else value
            return "{" + ",".join(f"{name}:{self.text(value[name])}" for name in names) + "}"
        if isinstance(value, list | tuple):
            return "[" + ",".join(map(self.text, value)) + "]"
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        return self.null if value is None else json_text(value)


ArgumentsForm: TypeAlias = JsonArguments | ElementArguments | KeywordArguments | NotationArguments
_TEXTS = ("begin", "head", "tail", "separator", "end")  # of a format, beside those of its arguments


@dataclass(frozen=True)
class CallFormat:
    """How a model writes tool calls.

    head, tail: contain {name}, and {id} if the calls have ids. begin, separator, end: see the module. lead: white space
    before the first call of an answer without text.
    id_source: what {id} is: the call's id, or a number that the template counts up. id_pattern: a regex of the ids.
    first_number: that of the first call, if the template counts them, in each answer, or with `counts_on` in the whole
    conversation.
    id_form: the form of a client's id that the template accepts, with {name} and {index}; "" for any.
    takes_text: the template writes arguments that are given as JSON text without a change, so they are rendered as the
    model wrote them. values_as_text: the template is given arguments other than strings as their JSON text, since it
    would not write them as JSON.
    is_whole_answer: calls without a mark, JSON only, are the whole of their answer; other text may quote such JSON.
    is_single: an answer has at most one call. has_long_opener: the first mark alone is no opener, since answers without
    calls have it, too.
    is_message: a call is one of the messages of an answer, and others begin like it up to the name.
    other_heads: further forms of the head, which models write and the template does not.
    is_native: the template lists the tools. writes_calls: it writes calls, too; otherwise they are part of the text of
    their answer.
    """

    head: str
    tail: str
    arguments: ArgumentsForm = JsonArguments()
    begin: str = ""
    separator: str = ""
    end: str = ""
    lead: str = ""
    id_source: IdSource = ""
    id_pattern: str = ""
    first_number: int | None = None
    counts_on: bool = False
    id_form: str = ""
    takes_text: bool = False
    values_as_text: bool = False
    is_whole_answer: bool = False
    is_single: bool = False
    has_long_opener: bool = False
    is_message: bool = False
    other_heads: tuple[str, ...] = ()
    is_native: bool = True
    writes_calls: bool = True

    @property
    def opener(self) -> str:
        """The text that commits an answer to a call: the first mark, or all text before the name."""
        before = self.begin + self.head_start
        match = None if self.has_long_opener else _MARK.match(before)
        return match[0] if match else before

    @property
    def head_start(self) -> str:
        """The head's text before the name and the id."""
        return re.split(r"\{name\}|\{id\}", self.head)[0]

    def call_head(self, name: str, call_id: str = "") -> str:
        """Returns the text of a call before its arguments."""
        return self.head.replace("{name}", name).replace("{id}", call_id)

    def next_number(self, num_earlier: int) -> int | None:
        """Returns the number of an answer's first call behind some earlier calls; None if they are not counted."""
        return self.first_number if self.first_number is None or not self.counts_on else self.first_number + num_earlier

    def render_calls(self, calls: Sequence[tuple[str, str, str | Mapping[str, Any]]]) -> str:
        """Returns the text of (id, name, arguments or their text) as a model writes them."""
        texts = []
        for call_id, name, arguments in calls:
            text = arguments if isinstance(arguments, str) else self.arguments.render(arguments)
            texts.append(f"{self.call_head(name, call_id)}{text}{self.tail.replace('{id}', call_id)}")
        return f"{self.begin}{self.separator.join(texts)}{self.end}"

    def template_arguments(self, arguments: Mapping[str, Any]) -> str | Mapping[str, Any]:
        """Returns arguments in the form in which the template writes them as the model does."""
        if self.takes_text:
            return self.arguments.render(arguments)
        if not self.values_as_text:
            return arguments
        text = self.arguments.text if isinstance(self.arguments, ElementArguments) else element_text
        return {name: text(value) for name, value in arguments.items()}

    @property
    def first_heads(self) -> tuple[str, ...]:
        """The texts before the arguments of an answer's first call."""
        return (self.begin + self.head, *self.other_heads)

    def texts(self) -> Iterator[str]:
        """Yields all texts of the format."""
        yield from (getattr(self, name) for name in _TEXTS)
        yield from self.other_heads
        yield from (getattr(self.arguments, name) for name in self.arguments.marks)

    def with_texts(self, change: Callable[[str], str]) -> CallFormat:
        """Returns the format with `change` applied to all of its texts."""
        form: Any = self.arguments
        form = replace(form, **{name: change(getattr(form, name)) for name in form.marks})
        texts: dict[str, Any] = {name: change(getattr(self, name)) for name in _TEXTS}
        return replace(self, arguments=form, other_heads=tuple(map(change, self.other_heads)), **texts)


def formed_ids(id_form: str, names: Sequence[str]) -> list[str]:
    """Returns the ids of calls of these names in a template's form, which has {name} and {index}; [] for any form.

    >>> formed_ids("functions.{name}:{index}", ["f", "g"])
    ['functions.f:0', 'functions.g:1']
    """
    if "{name}" not in id_form:
        return []
    return [id_form.replace("{name}", name).replace("{index}", str(index)) for index, name in enumerate(names)]


def element_text(value: Any) -> str:
    """Returns a string as it is, and another value as JSON."""
    return value if isinstance(value, str) else json_text(value, ensure_ascii=False)


def json_type(value: Any) -> str:
    """Returns JSON Schema's name for the type of a value.

    >>> json_type(True), json_type(1), json_type(1.5), json_type([])
    ('boolean', 'integer', 'number', 'array')
    """
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", tuple: "array"}
    return names.get(type(value), "object")


def python_literal(value: Any) -> str:
    """Returns a JSON value as Python writes it, with strings as in JSON.

    >>> python_literal({"a": [True, None, "x"]})
    '{"a": [True, None, "x"]}'
    """
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{json_text(k, ensure_ascii=False)}: {python_literal(v)}" for k, v in value.items()) + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(python_literal, value)) + "]"
    return json_text(value, ensure_ascii=False)
