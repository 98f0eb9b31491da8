"""Strategies of nested types (dataclasses, NamedTuples, Pydantic models, containers) with values and their JSON."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import itertools
from typing import Literal, NamedTuple

import pydantic
from hypothesis import strategies as st
from typed_examples import (
    Colour,
    Level,
    Mark,
    Starred,
)

# (type, strategy of pairs of a value and its JSON)
WORDS = st.text('ab \u00e9"\\', max_size=4)
LEAF_TYPES = [
    (int, st.integers(-(2**53) + 1, 2**53 - 1).map(lambda n: (n, n))),
    (str, WORDS.map(lambda text: (text, text))),
    (bool, st.booleans().map(lambda value: (value, value))),
    (float, st.integers(-999, 999).map(lambda n: (n / 4, n / 4))),
    (datetime.date, st.dates(datetime.date(1000, 1, 1)).map(lambda day: (day, day.isoformat()))),
    (decimal.Decimal, st.integers(0, 999).map(lambda n: (decimal.Decimal(n) / 8, str(decimal.Decimal(n) / 8)))),
    (Colour, st.sampled_from(Colour).map(lambda member: (member, member.value))),
    (Level, st.sampled_from(Level).map(lambda member: (member, member.value))),
    (Mark, st.sampled_from(Mark).map(lambda member: (member, member.value))),
    (Starred, st.sampled_from(Mark).map(lambda mark: (Starred(mark=mark), {"mark": mark.value}))),
    (Literal["x", 3, True, None], st.sampled_from(["x", 3, True, None]).map(lambda value: (value, value))),
]
KEYS = {str: WORDS, int: st.integers(-99, 99), Colour: st.sampled_from(Colour)}


def key_text(key):
    return str(key.value if isinstance(key, enum.Enum) else key)


@st.composite
def record_type(draw, parts):
    """A dataclass, a NamedTuple, a Pydantic model or a tuple of some of the types in `parts`."""
    fields = draw(st.lists(parts, min_size=1, max_size=3))
    names = [f"f{i}" for i in range(len(fields))]
    kind, types_ = draw(st.sampled_from(["dataclass", "named", "model", "tuple"])), [type_ for type_, _ in fields]
    members, number = list(zip(names, types_, strict=True)), next(NUMBERS)
    match kind:
        case "dataclass":
            type_ = dataclasses.make_dataclass(f"D{number}", members)
        case "named":
            type_ = NamedTuple(f"N{number}", members)
        case "model":
            type_ = pydantic.create_model(f"M{number}", **{name: (member, ...) for name, member in members})
        case _:
            type_ = tuple[tuple(types_)]
    as_list = kind in ("named", "tuple")

    def value_and_json(drawn):
        values, texts = zip(*drawn, strict=True)
        made = values if kind == "tuple" else type_(**dict(zip(names, values, strict=True)))
        return made, list(texts) if as_list else dict(zip(names, texts, strict=True))

    return type_, st.tuples(*(values for _, values in fields)).map(value_and_json)


@st.composite
def container_type(draw, parts):
    """A list, a dict or an Optional of a type in `parts`."""
    inner, values = draw(parts)
    kind = draw(st.sampled_from(["list", "dict", "optional"]))
    if kind == "list":
        return list[inner], st.lists(values, max_size=3).map(
            lambda pairs: ([v for v, _ in pairs], [t for _, t in pairs])
        )
    if kind == "optional":
        return inner | None, st.one_of(st.just((None, None)), values.filter(lambda pair: pair[1] is not None))
    key = draw(st.sampled_from(list(KEYS)))
    pairs = st.dictionaries(KEYS[key], values, max_size=3)
    return dict[key, inner], pairs.map(
        lambda items: ({k: v for k, (v, _) in items.items()}, {key_text(k): t for k, (_, t) in items.items()})
    )


NUMBERS = itertools.count()
NESTED = st.recursive(
    st.sampled_from(LEAF_TYPES), lambda parts: st.one_of(record_type(parts), container_type(parts)), max_leaves=5
)
