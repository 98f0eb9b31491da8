"""What stands within a tool call that is no JSON: elements, keyword arguments, and text in a JSON string."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

from plait.constrained.specs.checks import GrammarError, SchemaSource, check_style, check_tags, schema_text
from plait.constrained.specs.values import Lark, Regex

NAME_PLACE = "{name}"
TYPE_PLACE = "{type}"  # of a value in the mark of an element

PythonForm: TypeAlias = Literal["", "scalars", "values"]  # which values are written as Python does
PYTHON_FORMS = ("", "scalars", "values")
CDATA_BEGIN, CDATA_END = "<![CDATA[", "]]>"


class Elements(msgspec.Struct, frozen=True, tag="elements"):
    """The properties of an object that matches `schema`, each as `open`, value, `close`, with `separator` between two.

    `open` has {name} once, for the name. The order is that of the schema; optional properties may be left out, and an
    object that the schema leaves open has further ones, with names of up to 64 letters, digits, "_", "." and "-".
    A value that is a string stands raw: any text without `close`; others are JSON, in the style of JsonSchema. Where a
    string and other types are possible, what is JSON of one of these is not written as a string. For Trigger only.

    `types`: pairs of a JSON type and a text; {type} in `open`, behind {name}, stands for the text of the value's type.
    `python`: "values" that are no strings are Python's literals, as in Keywords; with "scalars" only None, True and
    False that are a whole value. `has_cdata`: a string with "<", "&" or a line's end stands in a CDATA section.

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
    python: PythonForm = ""
    has_cdata: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", schema_text(self.schema))
        check_style(self.whitespace, self.compact)
        check_tags(self, ("open", "close"), ("separator",))
        if self.python not in PYTHON_FORMS:
            raise GrammarError(f"python must be one of {', '.join(map(repr, PYTHON_FORMS))}")
        if self.types and self.open.partition(NAME_PLACE)[2].count(TYPE_PLACE) != 1:
            raise GrammarError(f"open must have {TYPE_PLACE} once behind {NAME_PLACE}, for the type of a value")
        if self.open.count(NAME_PLACE) != 1 or self.open.endswith(NAME_PLACE):
            raise GrammarError(f"open must have {NAME_PLACE} once, for the name of a parameter, and a text behind it")


class Keywords(msgspec.Struct, frozen=True, tag="keywords"):
    """The properties of an object that matches `schema` as keyword arguments of Python: `a=1, b="x", c=None`.

    Order and names as in Elements; only names that are identifiers of ASCII letters, digits and "_". The values are
    literals: JSON with True, False and None. With `single_quotes` a string that is a whole value stands between these
    if nothing in it is escaped there. `whitespace` and `compact` as in JsonSchema, for containers. For Trigger only.

    >>> Keywords({"type": "object"}).schema
    '{"type":"object"}'
    """

    schema: SchemaSource
    whitespace: bool = False
    compact: bool = False
    single_quotes: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", schema_text(self.schema))
        check_style(self.whitespace, self.compact)


class JsonString(msgspec.Struct, frozen=True, tag="json_string"):
    """A JSON string, quotes included, whose value is a text of `of`; no character has another form than json.dumps
    with ensure_ascii=False gives it. For Trigger only.

    >>> JsonString(Regex("a|b")).of.pattern
    'a|b'
    """

    of: Regex | Lark


class Notation(msgspec.Struct, frozen=True, tag="notation"):
    """An object that matches `schema` in a notation without quotes: `{a:1,b:[true,None],c:{d:<|"|>text<|"|>}}`.

    A string is any text without `quote` between two of them. A name is a text without ":", ",", quotes, brackets and
    white space; names that the schema does not list are as in Elements. `null` is the text of null, and with
    `is_sorted` members stand in the order of their names, whatever their case. For Trigger only.

    >>> Notation({"type": "object"}, '<|"|>').null
    'null'
    """

    whitespace: ClassVar[bool] = False
    compact: ClassVar[bool] = True
    schema: SchemaSource
    quote: str
    null: str = "null"
    is_sorted: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "schema", schema_text(self.schema))
        check_tags(self, ("quote", "null"), ())
