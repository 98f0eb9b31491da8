"""Values that only a run knows, as the body of a program that is being compiled holds them.

One can be appended, put into other text, and asked for its parts and methods: what comes of it is unknown too, and
remembers how it comes about. What would let the body decide something by it raises DependsOnValue.

Knows: how Python's operators reach an object. Must not know: states, nodes, who carries anything out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, SupportsIndex

from plait.lang.errors import DependsOnValue
from plait.lang.expressions import Concat, Expr, as_expr
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.answers import Readable
    from plait.lang.typed.form import Form

# What stands for a value in a string. Its blanks, capitals and brackets make it likely that cutting, stripping or
# changing such a string leaves no whole mark behind, and so is noticed.
_MARK = re.compile(" \ue000aZ([0-9]+)\ue001 ")
_ESCAPED = re.compile(r" (?:\ue000|\\ue000)aZ([0-9]+)(?:\ue001|\\ue001) ")
_TORN = re.compile("[\ue000\ue001]")


class Env(Protocol):
    """What a run knows: the arguments, what calls gave, and what was read on the way."""

    def argument(self, name: str) -> Any: ...

    def result(self, node: int, name: str | None) -> Readable:
        """The variable `name` as step `node` left it."""

    def kept(self, node: int) -> Any:
        """What step `node` gave."""


@dataclass(frozen=True)
class Argument:
    """An argument that compile() was not given."""

    name: str


@dataclass(frozen=True)
class Result:
    """What node number `node` of the graph gives; `sample`: which of the n that a gen asked for."""

    node: int
    name: str | None
    sample: int | None = None


Source = Argument | Result


class Marks:
    """The values that stand in strings as marks, by number."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.refused: DependsOnValue | None = None
        self._values: list[NotKnown] = []

    def mark(self, value: NotKnown) -> str:
        """A text that stands for `str(value)` in another."""
        self._values.append(value)
        return f" \ue000aZ{len(self._values) - 1}\ue001 "

    def split(self, text: str) -> Iterator[str | NotKnown]:
        """The known and unknown pieces of `text`. Raises DependsOnValue where a mark in it was changed."""
        for index, piece in enumerate(_MARK.split(text)):
            if index % 2:
                yield self._values[int(piece)]
            elif _TORN.search(piece):
                self.refuse(
                    "a text that holds a value which only a run knows was cut, stripped, split or put in another "
                    "case; change the value itself instead, s['x'].strip(), before it is put into the text"
                )
            elif piece:
                yield piece

    def readable(self, text: str) -> str:
        """`text` for people: each mark as what it stands for."""
        return _ESCAPED.sub(lambda found: f"{{{self._values[int(found[1])]._said}}}", text)

    def is_in(self, text: str) -> bool:
        """Whether `text`, of an exception, is about one of these values: by its mark, or by its type as Python says."""
        return bool(_ESCAPED.search(text)) or NotKnown.__name__ in text

    def refuse(self, text: str) -> NoReturn:
        """Raises DependsOnValue, and keeps it in case the body catches it. Its place comes from the traceback."""
        from plait.lang.errors import Problem
        from plait.lang.place import here

        error = DependsOnValue(self.program, [Problem(text, here())])
        self.refused = self.refused or error
        raise error


@dataclass(frozen=True, eq=False, repr=False)
class NotKnown(Expr):
    """A value that only a run knows. `_said` is how the program wrote it, `_sources` what it comes from, `_parts` the
    pieces of a text put together with +, `_evaluate` how a run gets it."""

    _marks: Marks
    _said: str
    _sources: frozenset[Source]
    _evaluate: Callable[[Env], Any]
    _parts: tuple[str | NotKnown, ...] = ()
    _form: Form | None = None
    _is_plain: bool = False  # the text of one argument or variable, as it is

    def _derived(self, said: str, evaluate: Callable[[Env], Any], *others: Any, is_plain: bool = False) -> NotKnown:
        sources = self._sources.union(*(each._sources for each in others if isinstance(each, NotKnown)))
        return NotKnown(self._marks, said, sources, evaluate, (), None, is_plain)

    # -- what stays unknown -----------------------------------------------------------------------

    def __str__(self) -> str:
        return format(self)

    def __repr__(self) -> str:
        return self._marks.mark(self._derived(f"repr({self._said})", lambda env: repr(self._evaluate(env))))

    def __format__(self, spec: str) -> str:
        said = f"{self._said}:{spec}" if spec else self._said
        is_plain = self._is_plain and not spec
        return self._marks.mark(self._derived(said, lambda env: format(self._evaluate(env), spec), is_plain=is_plain))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._derived(f"{self._said}.{name}", lambda env: getattr(self._evaluate(env), name))

    def __getitem__(self, key: object) -> Any:
        return self._derived(f"{self._said}[{_said(key)}]", lambda env: self._evaluate(env)[known(key, env)], key)

    def __call__(self, *args: Any, **kwargs: Any) -> NotKnown:
        given = [*map(_said, args), *(f"{name}={_said(value)}" for name, value in kwargs.items())]

        def evaluate(env: Env) -> Any:
            return self._evaluate(env)(*known(args, env), **known(kwargs, env))

        return self._derived(f"{self._said}({', '.join(given)})", evaluate, *args, *kwargs.values())

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str):
            return self._joined((*self._pieces(), *self._marks.split(other)))
        if isinstance(other, NotKnown):
            return self._joined((*self._pieces(), *other._pieces()), f"{self._said} + {other._said}")
        if isinstance(other, Expr):
            return Concat((self, *Concat((other,)).parts))
        return self._binary(operator.add, "+", other)

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return self._joined((*self._marks.split(other), *self._pieces()))
        if isinstance(other, Expr):
            return as_expr(other) + Concat((self,))
        return self._binary(operator.add, "+", other, reflected=True)

    def __sub__(self, other: Any) -> NotKnown:
        return self._binary(operator.sub, "-", other)

    def __rsub__(self, other: Any) -> NotKnown:
        return self._binary(operator.sub, "-", other, reflected=True)

    def __mul__(self, other: Any) -> NotKnown:
        return self._binary(operator.mul, "*", other)

    def __rmul__(self, other: Any) -> NotKnown:
        return self._binary(operator.mul, "*", other, reflected=True)

    def __truediv__(self, other: Any) -> NotKnown:
        return self._binary(operator.truediv, "/", other)

    def __mod__(self, other: Any) -> NotKnown:
        return self._binary(operator.mod, "%", other)

    def _binary(self, work: Callable[[Any, Any], Any], sign: str, other: Any, *, reflected: bool = False) -> NotKnown:
        said = f"{_said(other)} {sign} {self._said}" if reflected else f"{self._said} {sign} {_said(other)}"

        def evaluate(env: Env) -> Any:
            mine, others = self._evaluate(env), known(other, env)
            return work(others, mine) if reflected else work(mine, others)

        return self._derived(f"({said})", evaluate, other)

    def _pieces(self) -> tuple[str | NotKnown, ...]:
        return self._parts or (self,)

    def _joined(self, parts: tuple[str | NotKnown, ...], said: str | None = None) -> NotKnown:
        sources = frozenset[Source]().union(*(each._sources for each in parts if isinstance(each, NotKnown)))

        def evaluate(env: Env) -> Any:
            values = known(parts, env)
            return sum(values[1:], values[0]) if values and not isinstance(values[0], str) else "".join(values)

        whole = said or " + ".join(_said(each) for each in parts)
        return NotKnown(self._marks, f"({whole})", sources, evaluate, parts)

    # -- what would decide something --------------------------------------------------------------

    def _refuse(self, what: str) -> NoReturn:
        names = sorted({each.name for each in self._sources if isinstance(each, Argument)})
        hint = f"; give it: compile({', '.join(f'{name}=...' for name in names)})" if names else ""
        self._marks.refuse(
            f"what the body does next depends on {self._said}, a value that only a run knows: it {what}{hint}"
        )

    def __bool__(self) -> bool:
        self._refuse("decides a condition")

    def __eq__(self, other: object) -> bool:
        self._refuse(f"is compared with {_said(other)}")

    def __ne__(self, other: object) -> bool:
        self._refuse(f"is compared with {_said(other)}")

    def __lt__(self, other: object) -> bool:
        self._refuse(f"is compared with {_said(other)}")

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


def known(value: Any, env: Env) -> Any:
    """`value` with everything unknown in it replaced by what the run knows."""
    if isinstance(value, NotKnown):
        return value._evaluate(env)
    if isinstance(value, tuple | list):
        return type(value)([known(each, env) for each in value])
    if isinstance(value, Mapping):
        return {name: known(each, env) for name, each in value.items()}
    return value


def text_of(value: NotKnown, env: Env) -> str:
    """The value as text to append. InputError where the program appended something else."""
    found = value._evaluate(env)
    if not isinstance(found, str):
        raise InputError(f"only text and expressions can be appended, not {type(found).__name__}; write str(...)")
    return found


def _said(value: object) -> str:
    if isinstance(value, NotKnown):
        return value._said
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_said, value))}]"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
