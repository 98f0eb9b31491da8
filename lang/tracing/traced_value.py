"""`TracedValue`: the placeholder of a value known at run time only, while the body of a program is being compiled.

It can be appended, put into other text, indexed, called and combined with operators. Each result is a TracedValue too,
which records how to compute it from run-time values. An operation whose result the body could branch on (a comparison,
`len()`, `bool()`, iteration, ...) raises DependsOnValue.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from plait.lang.core.expressions import Concat, Expr, as_expr
from plait.lang.errors import DependsOnValue
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.results import Segment
    from plait.lang.typed.value_format import ValueFormat
    from plait.runtime.programs.steps import Step

# The placeholder of a value inside a string. It has spaces, a capital, a digit and private-use characters, so that
# cutting, stripping or changing the case of such a string most likely damages the placeholder, which is then detected.
_PLACEHOLDER = re.compile(" \ue000aZ([0-9]+)\ue001 ")
_PLACEHOLDER_OR_REPR = re.compile(r" (?:\ue000|\\ue000)aZ([0-9]+)(?:\ue001|\\ue001) ")
_BROKEN_PLACEHOLDER = re.compile("[\ue000\ue001]")


class EvaluationContext(Protocol):
    """The values of one run: arguments, results of calls, and outputs of steps."""

    def argument(self, name: str) -> Any: ...

    def result(self, node: int, name: str | None) -> Segment:
        """Returns variable `name` as step `node` set it."""

    def step_output(self, node: int) -> Any:
        """Returns the output of step `node`, such as a text that was read or the result of a tool."""


@dataclass(frozen=True)
class Argument:
    """An argument that was not given to compile()."""

    name: str


@dataclass(frozen=True)
class NodeOutput:
    """The output of node number `node` of the graph; `sample`: the index of the sample, for a gen with n > 1."""

    node: int
    name: str | None
    sample: int | None = None


Source = Argument | NodeOutput


class Placeholders:
    """The traced values that were formatted into strings: each is represented there by a numbered placeholder."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.first_refusal: DependsOnValue | None = None
        self._values: list[TracedValue] = []

    def insert(self, value: TracedValue) -> str:
        """Returns a new placeholder, which represents `str(value)` inside other text."""
        self._values.append(value)
        return f" \ue000aZ{len(self._values) - 1}\ue001 "

    def split(self, text: str) -> Iterator[str | TracedValue]:
        """Yields the known and the traced pieces of `text`. Raises DependsOnValue if a placeholder in it is damaged."""
        for index, piece in enumerate(_PLACEHOLDER.split(text)):
            if index % 2:
                yield self._values[int(piece)]
            elif _BROKEN_PLACEHOLDER.search(piece):
                self.refuse(
                    "a text that contains a value known at run time only was cut, stripped, split or changed in case; "
                    "change the value itself, such as s['x'].strip(), before it is put into the text"
                )
            elif piece:
                yield piece

    def expand(self, text: str) -> str:
        """Returns `text` for error messages: each placeholder is replaced by the source text of its value."""
        return _PLACEHOLDER_OR_REPR.sub(lambda match: f"{{{self._values[int(match[1])]._label}}}", text)

    def mentions_traced_value(self, text: str) -> bool:
        """Whether `text`, the message of an exception, names a placeholder or the type TracedValue."""
        return bool(_PLACEHOLDER_OR_REPR.search(text)) or TracedValue.__name__ in text

    def refuse(self, text: str) -> NoReturn:
        """Raises DependsOnValue at the caller's line, and stores the first one in case the body catches it."""
        from plait.lang.errors import Problem
        from plait.lang.source_location import caller_location

        error = DependsOnValue(self.program, [Problem(text, caller_location())])
        self.first_refusal = self.first_refusal or error
        raise error


def _operation(operation: Callable[[Any, Any], Any], sign: str, *, reflected: bool = False) -> Any:
    """Returns the method of an operator, whose result is traced."""
    return lambda self, other: self._binary(operation, sign, other, reflected=reflected)


def _refusal(use: str) -> Any:
    """Returns the method of an operation whose result the body could branch on."""
    return lambda self, *_: self._refuse(use)


@dataclass(frozen=True, eq=False, repr=False)
class TracedValue(Expr):
    """A value that is known at run time only.

    `_label`: its source text in the program. `_sources`: the arguments and outputs that it is computed from.
    `_evaluate`: computes it in a run. `_parts`: the pieces of a text concatenated with `+`.
    The names of all attributes begin with `_`, because `__getattr__` traces every other name.
    """

    _placeholders: Placeholders
    _label: str
    _sources: frozenset[Source]
    _evaluate: Callable[[EvaluationContext], Any]
    _parts: tuple[str | TracedValue, ...] = ()
    _value_format: ValueFormat | None = None
    _is_plain: bool = False  # the unchanged text of one argument or variable

    def _derived(
        self, label: str, evaluate: Callable[[EvaluationContext], Any], *others: Any, is_plain: bool = False
    ) -> TracedValue:
        """Returns a value computed from this one and `others`."""
        sources = self._sources.union(*(other._sources for other in others if isinstance(other, TracedValue)))
        return TracedValue(self._placeholders, label, sources, evaluate, (), None, is_plain)

    def _run_on(self, branch: Any, following: Sequence[Step]) -> None:
        branch.append_traced(self)

    # -- operations whose result is traced too ----------------------------------------------------

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
        arguments = [*map(_label, args), *(f"{name}={_label(value)}" for name, value in kwargs.items())]

        def evaluate(context: EvaluationContext) -> Any:
            return self._evaluate(context)(*resolve_value(args, context), **resolve_value(kwargs, context))

        return self._derived(f"{self._label}({', '.join(arguments)})", evaluate, *args, *kwargs.values())

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

    __sub__, __rsub__ = _operation(operator.sub, "-"), _operation(operator.sub, "-", reflected=True)
    __mul__, __rmul__ = _operation(operator.mul, "*"), _operation(operator.mul, "*", reflected=True)
    __truediv__, __mod__ = _operation(operator.truediv, "/"), _operation(operator.mod, "%")

    def _binary(
        self, operation: Callable[[Any, Any], Any], sign: str, other: Any, *, reflected: bool = False
    ) -> TracedValue:
        label = f"{_label(other)} {sign} {self._label}" if reflected else f"{self._label} {sign} {_label(other)}"

        def evaluate(context: EvaluationContext) -> Any:
            own_value, other_value = self._evaluate(context), resolve_value(other, context)
            return operation(other_value, own_value) if reflected else operation(own_value, other_value)

        return self._derived(f"({label})", evaluate, other)

    def _pieces(self) -> tuple[str | TracedValue, ...]:
        return self._parts or (self,)

    def _joined(self, parts: tuple[str | TracedValue, ...], label: str | None = None) -> TracedValue:
        sources = frozenset[Source]().union(*(part._sources for part in parts if isinstance(part, TracedValue)))

        def evaluate(context: EvaluationContext) -> Any:
            values = resolve_value(parts, context)
            return sum(values[1:], values[0]) if values and not isinstance(values[0], str) else "".join(values)

        label = label or " + ".join(_label(part) for part in parts)
        return TracedValue(self._placeholders, f"({label})", sources, evaluate, parts)

    # -- operations that the body could branch on: refused ----------------------------------------

    def _refuse(self, use: str) -> NoReturn:
        names = sorted({source.name for source in self._sources if isinstance(source, Argument)})
        hint = f"; give it to compile: compile({', '.join(f'{name}=...' for name in names)})" if names else ""
        self._placeholders.refuse(
            f"the next step of the body depends on {self._label}, a value known at run time only: it {use}{hint}"
        )

    def __eq__(self, other: object) -> bool:
        self._refuse(f"is compared with {_label(other)}")

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __bool__ = _refusal("is used as a condition")
    __hash__ = _refusal("is looked up in a dict or a set")
    __len__ = _refusal("is measured with len()")
    __iter__ = _refusal("is iterated over")
    __contains__ = _refusal("is searched with in")
    __int__ = __float__ = __round__ = _refusal("is converted to a number")
    __index__ = _refusal("is used as a count or an index")


def resolve_value(value: Any, context: EvaluationContext) -> Any:
    """Returns `value` with every traced value in it replaced by its value in this run."""
    if isinstance(value, TracedValue):
        return value._evaluate(context)
    if isinstance(value, tuple | list):
        return type(value)([resolve_value(item, context) for item in value])
    if isinstance(value, Mapping):
        return {name: resolve_value(item, context) for name, item in value.items()}
    return value


def resolve_text(value: TracedValue, context: EvaluationContext) -> str:
    """Returns the text to append. Raises InputError if the value in this run is not text."""
    text = value._evaluate(context)
    if not isinstance(text, str):
        raise InputError(f"only text and expressions can be appended, not {type(text).__name__}; write str(...)")
    return text


def _label(value: object) -> str:
    if isinstance(value, TracedValue):
        return value._label
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_label, value))}]"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
