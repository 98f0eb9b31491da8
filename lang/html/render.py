"""Renders the macros of displays.jinja, which escape every text that comes from a program or a model. `ShownList`:
lists of states and of beams, which a notebook shows as a table."""

from __future__ import annotations

import hashlib
import inspect
from base64 import b64encode
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from plait.lang.html import filters

if TYPE_CHECKING:
    from plait.lang.spans.call_spans import Trace


_FOLDER = Path(__file__).parent
STYLE = (_FOLDER / "displays.css").read_text(encoding="utf-8")


def fragment(macro: str, *values: Any) -> str:
    """Returns a display for a notebook: what a macro makes of the values, with a style that applies to nothing else."""
    html = str(_macros().fragment(getattr(_macros(), macro)(*values)))
    return html.encode(errors="replace").decode()  # an error can name a file whose name is no Unicode


def page(traces: Sequence[Trace]) -> str:
    """Returns the page of some traces: one file, which loads nothing and runs nothing."""
    programs = ", ".join(dict.fromkeys(trace.program for trace in traces))
    return str(_macros().page(_macros().traces(traces), programs[:80]))


@cache
def _macros() -> Any:
    import jinja2  # lazy: few programs need it
    from markupsafe import Markup

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    functions = {name: value for name, value in vars(filters).items() if inspect.isfunction(value)}
    environment.globals.update(functions)
    environment.filters.update(functions)
    digest = b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    environment.globals.update(STYLE=Markup(STYLE), STYLE_DIGEST=digest)
    return environment.from_string((_FOLDER / "displays.jinja").read_text(encoding="utf-8")).module


T = TypeVar("T")


class ShownList(list[T]):
    """A list that a notebook shows as a table; a part of it is one too."""

    def __init__(self, show: Callable[[Sequence[T]], str], items: Iterable[T]) -> None:
        """`show`: makes the table."""
        super().__init__(items)
        self._show = show

    @overload
    def __getitem__(self, index: SupportsIndex) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> ShownList[T]: ...
    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return ShownList(self._show, found) if isinstance(index, slice) else found

    def _repr_html_(self) -> str:
        """Returns a table for notebooks."""
        return self._show(self)
