"""A Jinja environment with limits on what a chat template can read, write and compute.

Access to attributes is restricted by Jinja's sandbox. Size: every operation that makes a value larger than its parts
(joining, repeating, padding, nesting) checks the size first. Time: the work is counted (`template_work`), and no single
operation takes long. Only filters that keep these limits are available.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import filters, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range
from jinja2.utils import Namespace, pass_environment
from jinja2.visitor import NodeTransformer

from plait.runtime.tokenizer.json_text import json_text
from plait.runtime.tokenizer.template_work import (
    CALL,
    FILTERS,
    TEXT_PER_UNIT,
    LimitReached,
    WorkTransformer,
    charge,
    charge_comparison,
    charge_reading,
    charged,
)

MAX_VALUE_SIZE = 4 * 2**20  # of one value: 1 per character, _ITEM_SIZE per item
_ITEM_SIZE = 8
MAX_WORK = 10_000_000  # units of one rendering
_MAX_INTEGER = 100_000  # as an argument of a call, other than of a macro, whose body is under the same limits


class RaisedByTemplate(Exception):
    """The template called raise_exception."""


def check_size(value: Any, times: int = 1) -> Any:
    """Returns `value` if `times` copies of it stay below MAX_VALUE_SIZE, else raises LimitReached.

    The size includes all contained values. A value that occurs twice counts twice, as it would when written out.
    """
    size_left = MAX_VALUE_SIZE // max(times, 1)
    if type(value) is str and len(value) < size_left:  # the common case
        charge(len(value) // TEXT_PER_UNIT)
        return value
    size = size_left
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, str | bytes):
            size_left -= len(item)
        elif isinstance(item, Mapping):
            size_left -= len(item) * _ITEM_SIZE
            if size_left >= 0:
                stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            size_left -= len(item) * _ITEM_SIZE
            if size_left >= 0:
                stack += item
        size_left -= 1
        if size_left < 0:
            raise LimitReached("it makes a value that is too large")
    charge((size - size_left) // _ITEM_SIZE)
    return value


class _SizeCheckTransformer(NodeTransformer):
    """Wraps every `a ~ b`, list, tuple and dict expression of the template in a filter that checks its size."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _wrap_in_filter(nodes.List(node.nodes), "plait_concat", node.lineno)

    def _container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        stored = getattr(node, "ctx", "load") != "load"  # the target of `for a, b in ...` builds no value
        return node if stored else _wrap_in_filter(node, "plait_weigh", node.lineno)

    visit_List = visit_Tuple = visit_Dict = _container


def _wrap_in_filter(node: nodes.Expr, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


class _QueueTransformer(NodeTransformer):
    """Rewrites `set x = ns.a.append(y)` and `set x = ns.a.pop(0)` of a list in a namespace to assignments to `ns.a`.

    A list that grows in place would escape the check of all values that contain it, so the sandbox refuses its methods.
    """

    def visit_Assign(self, node: nodes.Assign) -> Any:
        call = node.node
        if not (isinstance(call, nodes.Call) and isinstance(call.node, nodes.Getattr) and len(call.args) == 1):
            return node
        place = call.node.node
        if not (isinstance(place, nodes.Getattr) and isinstance(place.node, nodes.Name)):
            return node
        stored, argument = nodes.NSRef(place.node.name, place.attr, lineno=node.lineno), call.args[0]
        result: nodes.Expr
        left: nodes.Expr
        if call.node.attr == "append":
            result, left = nodes.Const(None), nodes.Add(place, nodes.List([argument]))
        elif call.node.attr == "pop" and isinstance(argument, nodes.Const) and argument.value == 0:
            after_first = nodes.Slice(nodes.Const(1), None, None)
            result, left = nodes.Getitem(place, argument, "load"), nodes.Getitem(place, after_first, "load")
        else:
            return node
        rewritten = nodes.Assign(node.target, result), nodes.Assign(stored, left)
        return [assignment.set_lineno(node.lineno) for assignment in rewritten]


class _GenerationExtension(Extension):
    """Renders the content of `{% generation %}...{% endgeneration %}`, which marks model output for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment that transformers uses for chat templates, with the limits of this module."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # The optimizer would compute constant expressions during compilation, outside the limits.
        extensions = [loopcontrols, _GenerationExtension]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False)
        self.filters = _filters(self.filters)
        self.globals = {
            "range": safe_range,
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _QueueTransformer().visit(tree)
        _SizeCheckTransformer().visit(tree)
        WorkTransformer().visit(tree)
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Joins the output of a template, a macro or a block."""
        return _join(parts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_power(left, right)
        elif operator == "%" and isinstance(left, str | bytes):
            _check_format(left, "%", right)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "+":
            check_size((left, right))
        return check_size(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        charge(CALL)
        for argument in () if isinstance(obj, Macro) else (*args, *kwargs.values()):
            if isinstance(argument, int) and abs(argument) > _MAX_INTEGER:
                raise LimitReached("it passes a number that is too large")
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if name in ("count", "index", "changed"):  # of lists, and of `loop`
            for value in (owner, *args):
                charge_comparison(value)
        if isinstance(owner, str | bytes):
            charge_reading(owner)
            if name == "replace":
                _check_replace(owner, *args[:2])
            elif name == "join" and args:
                args = ([*check_size(list(args[0]))], *args[1:])
                check_size(owner, len(args[0]))
            elif name in ("translate", "expandtabs"):
                raise LimitReached(f"it calls {name}")
        return check_size(super().call(context, obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, "{", args, kwargs)
            return wrapped(*args, **kwargs)

        return checked


def _raise_exception(message: Any) -> NoReturn:
    raise RaisedByTemplate(str(message)[:300])


def _strftime_now(layout: str) -> str:
    if len(layout) > 64 or re.search(r"\d{2}", layout):
        raise LimitReached("it asks for a date that is too long")
    return datetime.now().strftime(layout)


def _join(parts: Iterable[Any], separator: str = "") -> str:
    left, texts = MAX_VALUE_SIZE, []
    for part in parts:
        texts.append(str(part))
        left -= len(texts[-1]) + len(separator)
        charge(1 + (len(texts[-1]) + len(separator)) // TEXT_PER_UNIT)
        if left < 0:
            raise LimitReached("it writes too much")
    return separator.join(texts)


def _check_replace(text: str | bytes, old: Any, new: Any) -> None:
    if isinstance(old, type(text)) and isinstance(new, type(text)):
        charge_reading(text)
        count = text.count(old)  # type: ignore[arg-type]
        if count * len(new) + len(text) > MAX_VALUE_SIZE:
            raise LimitReached("it replaces too much")


def _check_format(layout: str | bytes, place: str, *values: Any) -> None:
    """Raises LimitReached for widths of four or more digits, for widths taken from arguments, and for values that are
    too large if each is written at each place. place: with what one begins; twice, it stands for itself."""
    text = layout if isinstance(layout, str) else layout.decode("latin-1")
    if len(text) > 65_536 or re.search(r"\d{4}|%[^a-zA-Z%]*\*|\{[^{}]*\{", text):
        raise LimitReached("it formats with a width that is too large")
    check_size(values, text.count(place) - 2 * text.count(2 * place))


def _check_power(base: Any, exponent: Any) -> None:
    if not (isinstance(base, int | float) and isinstance(exponent, int | float)):
        raise LimitReached("it raises a value that is not a number to a power")
    if abs(base) > 10_000 or abs(exponent) > 16:
        raise LimitReached("it computes a power that is too large")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > 256:
            raise LimitReached("it computes a number that is too large")
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(times, int):
            check_size(repeated, times + 1 if times > 0 else 1)


# Filters whose output in Jinja is bounded by the size of their input; the first ones do not read all of it.
_CONSTANT_TIME_FILTERS = ("abs", "count", "d", "default", "first", "items", "last", "length")
_UNCHANGED_FILTERS = (
    *("capitalize", "float", "int", "list", "lower", "map", "reject", "rejectattr", "reverse", "select"),
    *("selectattr", "string", "title", "trim", "truncate", "upper", "wordcount"),
)
_COMPARING_FILTERS = ("dictsort", "groupby", "max", "min", "sort", "unique")


def _filters(theirs: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    known: dict[str, Callable[..., Any]] = {name: theirs[name] for name in _CONSTANT_TIME_FILTERS}
    known |= {name: charged(theirs[name]) for name in _UNCHANGED_FILTERS}
    known |= {name: charged(theirs[name], compares=True) for name in _COMPARING_FILTERS}
    known |= FILTERS
    return known | {
        "plait_concat": _join,
        "plait_weigh": check_size,
        "format": _filter_format,
        "indent": _filter_indent,
        "join": _filter_join,
        "replace": _filter_replace,
        "round": _filter_round,
        "safe": lambda value: value,
        "tojson": _filter_tojson,
    }


def _filter_format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise TypeError("format takes either positional or named values")
    _check_format(str(value), "%", args, kwargs)
    return str(check_size(str(value) % (kwargs or args)))


def _filter_indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = len(width) if isinstance(width, str) else width
    if not 0 <= step <= 64:
        raise LimitReached("it indents too far")
    check_size(value, 1 + step)
    return filters.do_indent(value, width, first, blank)


@pass_environment
def _filter_join(environment: Any, value: Iterable[Any], d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    return _join(value, str(d))


def _filter_replace(value: Any, old: Any, new: Any, count: int = -1) -> str:
    text, before, after = str(value), str(old), str(new)
    _check_replace(text, before, after)
    return text.replace(before, after, -1 if count is None else count)


def _filter_round(value: float, precision: int = 0, method: str = "common") -> float:
    if not 0 <= precision <= 16:
        raise LimitReached("it rounds to too many digits")
    return filters.do_round(value, precision, method)  # type: ignore[arg-type]


def _filter_tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON; Jinja's own filter would escape it for HTML."""
    if indent is not None and not 0 <= (len(indent) if isinstance(indent, str) else indent) <= 16:
        raise LimitReached("it indents too far")
    check_size(separators)
    if isinstance(value, Iterator):  # of `map`, which other implementations of Jinja return as a list
        value = list(value)
    charge_comparison(value)
    return json_text(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
