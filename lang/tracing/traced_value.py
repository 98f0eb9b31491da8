"""Values that only a run knows, as the body of a program that is being compiled holds them.

One can be appended, put into other text, and asked for its parts and methods: what comes of it is unknown too, and
remembers how it comes about. What would let the body decide something by it raises DependsOnValue.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex

from plait.lang.core.expressions import Concat, Expr, as_expr
from plait.lang.errors import DependsOnValue
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.results import Segment
    from plait.lang.typed.value_format import ValueFormat

# What stands for a value in a string. Its blanks, capitals and brackets make it likely that cutting, stripping or
# changing such a string leaves no whole mark behind, and so is noticed.
_PLACEHOLDER = re.compile(" \ue000aZ([0-9]+)\ue001 ")
_PLACEHOLDER_OR_REPR = re.compile(r" (?:\ue000|\\ue000)aZ([0-9]+)(?:\ue001|\\ue001) ")
_BROKEN_PLACEHOLDER = re.compile("[\ue000\ue001]")


class EvaluationContext(Protocol):
    """What a run knows: the arguments, what calls gave, and what was read on the way."""

    def argument(self, name: str) -> Any: ...

    def result(self, node: int, name: str | None) -> Segment:
        """The variable `name` as step `node` left it."""

    def step_output(self, node: int) -> Any:
        """What step `node` gave."""


@dataclass(frozen=True)
class Argument:
    """An argument that compile() was not given."""

    name: str


@dataclass(frozen=True)
class NodeOutput:
    """What node number `node` of the graph gives; `sample`: which of the n that a gen asked for."""

    node: int
    name: str | None
    sample: int | None = None


Source = Argument | NodeOutput


class Placeholders:
    """The values that stand in strings as marks, by number."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.first_refusal: DependsOnValue | None = None
        self._values: list[TracedValue] = []

    def insert(self, value: TracedValue) -> str:
        """A text that stands for `str(value)` in another."""
        self._values.append(value)
        return f" \ue000aZ{len(self._values) - 1}\ue001 "

    def split(self, text: str) -> Iterator[str | TracedValue]:
        """The known and unknown pieces of `text`. Raises DependsOnValue where a mark in it was changed."""
        for index, piece in enumerate(_PLACEHOLDER.split(text)):
            if index % 2:
                yield self._values[int(piece)]
            elif _BROKEN_PLACEHOLDER.search(piece):
                self.refuse(
                    "a text that holds a value which only a run knows was cut, stripped, split or put in another "
                    "case; change the value itself instead, s['x'].strip(), before it is put into the text"
                )
            elif piece:
                yield piece

    def expand(self, text: str) -> str:
        """`text` for people: each mark as what it stands for."""
        return _PLACEHOLDER_OR_REPR.sub(lambda found: f"{{{self._values[int(found[1])]._label}}}", text)

    def mentions_traced_value(self, text: str) -> bool:
        """Whether `text`, of an exception, is about one of these values: by its mark, or by its type as Python says."""
        return bool(_PLACEHOLDER_OR_REPR.search(text)) or TracedValue.__name__ in text

    def refuse(self, text: str) -> NoReturn:
        """Raises DependsOnValue, and keeps it in case the body catches it. Its place comes from the traceback."""
        from plait.lang.errors import Problem
        from plait.lang.source_location import caller_location

        error = DependsOnValue(self.program, [Problem(text, caller_location())])
        self.first_refusal = self.first_refusal or error
        raise error


@dataclass(frozen=True, eq=False, repr=False)
class TracedValue(Expr):
    """A value that only a run knows. `_label` is how the program wrote it, `_sources` what it comes from, `_parts` the
    pieces of a text put together with +, `_evaluate` how a run gets it."""

    _placeholders: Placeholders
    _label: str
    _sources: frozenset[Source]
    _evaluate: Callable[[EvaluationContext], Any]
    _parts: tuple[str | TracedValue, ...] = ()
    _value_format: ValueFormat | None = None
    _is_plain: bool = False  # the text of one argument or variable, as it is

    def _derived(
        self, label: str, evaluate: Callable[[EvaluationContext], Any], *others: Any, is_plain: bool = False
    ) -> TracedValue:
        sources = self._sources.union(*(each._sources for each in others if isinstance(each, TracedValue)))
        return TracedValue(self._placeholders, label, sources, evaluate, (), None, is_plain)

    # -- what stays unknown -----------------------------------------------------------------------

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return self._placeholders.insert(
            self._derived(f"repr({self._label})", lambda context: repr(self._evaluate(context)))
        )

    def __format__(self, spec: str) -> str:
        label = f"{self._label}:{spec}" if spec else self._label
        is_plain = self._is_plain and not spec
        return self._placeholders.insert(
            self._derived(label, lambda context: format(self._evaluate(context), spec), is_plain=is_plain)
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._derived(f"{self._label}.{name}", lambda context: getattr(self._evaluate(context), name))

    def __getitem__(self, key: object) -> Any:
        return self._derived(
            f"{self._label}[{_label(key)}]", lambda context: self._evaluate(context)[resolve_value(key, context)], key
        )

    def __call__(self, *args: Any, **kwargs: Any) -> TracedValue:
        given = [*map(_label, args), *(f"{name}={_label(value)}" for name, value in kwargs.items())]

        def evaluate(context: EvaluationContext) -> Any:
            return self._evaluate(context)(*resolve_value(args, context), **resolve_value(kwargs, context))

        return self._derived(f"{self._label}({', '.join(given)})", evaluate, *args, *kwargs.values())

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str):
            return self._joined((*self._pieces(), *self._placeholders.split(other)))
        if isinstance(other, TracedValue):
            return self._joined((*self._pieces(), *other._pieces()), f"{self._label} + {other._label}")
        if isinstance(other, Expr):
            return Concat((self, *Concat((other,)).parts))
        return self._binary(operator.add, "+", other)

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return self._joined((*self._placeholders.split(other), *self._pieces()))
        if isinstance(other, Expr):
            return as_expr(other) + Concat((self,))
        return self._binary(operator.add, "+", other, reflected=True)

    def __sub__(self, other: Any) -> TracedValue:
        return self._binary(operator.sub, "-", other)

    def __rsub__(self, other: Any) -> TracedValue:
        return self._binary(operator.sub, "-", other, reflected=True)

    def __mul__(self, other: Any) -> TracedValue:
        return self._binary(operator.mul, "*", other)

    def __rmul__(self, other: Any) -> TracedValue:
        return self._binary(operator.mul, "*", other, reflected=True)

    def __truediv__(self, other: Any) -> TracedValue:
        return self._binary(operator.truediv, "/", other)

    def __mod__(self, other: Any) -> TracedValue:
        return self._binary(operator.mod, "%", other)

    def _binary(
        self, work: Callable[[Any, Any], Any], sign: str, other: Any, *, reflected: bool = False
    ) -> TracedValue:
        label = f"{_label(other)} {sign} {self._label}" if reflected else f"{self._label} {sign} {_label(other)}"

        def evaluate(context: EvaluationContext) -> Any:
            mine, others = self._evaluate(context), resolve_value(other, context)
            return work(others, mine) if reflected else work(mine, others)

        return self._derived(f"({label})", evaluate, other)

    def _pieces(self) -> tuple[str | TracedValue, ...]:
        return self._parts or (self,)

    def _joined(self, parts: tuple[str | TracedValue, ...], label: str | None = None) -> TracedValue:
        sources = frozenset[Source]().union(*(each._sources for each in parts if isinstance(each, TracedValue)))

        def evaluate(context: EvaluationContext) -> Any:
            values = resolve_value(parts, context)
            return sum(values[1:], values[0]) if values and not isinstance(values[0], str) else "".join(values)

        whole = label or " + ".join(_label(each) for each in parts)
        return TracedValue(self._placeholders, f"({whole})", sources, evaluate, parts)

    # -- what would decide something --------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        names = sorted({each.name for each in self._sources if isinstance(each, Argument)})
        hint = f"; give it: compile({', '.join(f'{name}=...' for name in names)})" if names else ""
        self._placeholders.refuse(
            f"what the body does next depends on {self._label}, a value that only a run knows: it {what}{hint}"
        )

    def __bool__(self) -> bool:
        self._refuse("decides a condition")

    def __eq__(self, other: object) -> bool:
        self._refuse(f"is compared with {_label(other)}")

    def __ne__(self, other: object) -> bool:
        self._refuse(f"is compared with {_label(other)}")

    def __lt__(self, other: object) -> bool:
        self._refuse(f"is compared with {_label(other)}")

    __le__ = __gt__ = __ge__ = __lt__

    def __hash__(self) -> int:
        self._refuse("is looked up in a dict or a set")

    def __len__(self) -> int:
        self._refuse("is measured with len()")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("is gone through item by item")

    def __contains__(self, item: object) -> bool:
        self._refuse("is searched with in")

    def __int__(self) -> int:
        self._refuse("is made a number")

    def __float__(self) -> float:
        self._refuse("is made a number")

    def __index__(self) -> int:
        self._refuse("is used as a count or an index")

    def __round__(self, digits: SupportsIndex = 0) -> float:
        self._refuse("is made a number")


def resolve_value(value: Any, context: EvaluationContext) -> Any:
    """`value` with everything unknown in it replaced by what the run knows."""
    if isinstance(value, TracedValue):
        return value._evaluate(context)
    if isinstance(value, tuple | list):
        return type(value)([resolve_value(each, context) for each in value])
    if isinstance(value, Mapping):
        return {name: resolve_value(each, context) for name, each in value.items()}
    return value


def resolve_text(value: TracedValue, context: EvaluationContext) -> str:
    """The value as text to append. InputError where the program appended something else."""
    found = value._evaluate(context)
    if not isinstance(found, str):
        raise InputError(f"only text and expressions can be appended, not {type(found).__name__}; write str(...)")
    return found


def _label(value: object) -> str:
    if isinstance(value, TracedValue):
        return value._label
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_label, value))}]"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
