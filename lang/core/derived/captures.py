"""Variables of the named groups of `gen(regex=...)` and of the captured rules of `gen(lark=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plait.constrained.captures import capture_names, captured_texts
from plait.constrained.specs import GrammarError, Spec
from plait.lang.core.expressions import CallExpr, Gen, GenToolCall, Select
from plait.lang.core.results import Segment
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.runtime.programs.steps import Step


@dataclass(frozen=True)
class GenWithCaptures(CallExpr):
    """A gen that also sets the variables `names`, to texts in its value. `spec` says where in the value they are."""

    gen: CallExpr
    spec: Spec
    names: tuple[str, ...]

    @property
    def _call(self) -> Gen | Select | GenToolCall:
        return self.gen._call

    @property
    def _variables(self) -> list[str]:
        return [*self.gen._variables, *self.names]

    def _begin(self, branch: Branch, following: Sequence[Step]) -> None:
        self.gen._begin(branch, following)
        named = self.gen._variables[:1]
        value = branch.variables[named[0]] if named else branch.segments[-1]
        for group in self.names:
            branch.set(group, CapturedText(value, self.spec, group))


def with_captures(where: str, expr: CallExpr, spec: Spec | None) -> CallExpr:
    """Returns `expr`, the gen of a value under `spec`, as a GenWithCaptures if `spec` names groups.

    Raises InputError for a group with the name of another variable of the gen.
    """
    try:
        names = capture_names(spec)
    except GrammarError as error:
        raise InputError(f"{where}: {error}") from None
    if not names or spec is None:
        return expr
    for name in expr._variables:
        if name in names:
            owner = "the gen" if name == expr._variables[0] else "its reasoning"
            raise InputError(f"{where}: the group {name!r} has the name of {owner}; both are variables, so rename one")
    return GenWithCaptures(expr, spec, names)


class CapturedText(Segment):
    """The text of one group in the value of a gen: a str, or None if the group has no part in it."""

    def __init__(self, value: Segment, spec: Spec, name: str) -> None:
        self.source, self.spec, self.name = value, spec, name
        self.parts = (value,)

    def value(self) -> Any:
        value = self.source.value()
        return [self._captured(sample) for sample in value] if isinstance(value, list) else self._captured(value)

    def text(self) -> str:
        value = self.value()
        first = value[0] if isinstance(value, list) else value
        return "" if first is None else str(first)

    def partial(self) -> Any:
        """Returns None until the value is complete: which text a group has is known at the end only."""
        return self.value() if all(call.done() for call in self.source.calls()) else None

    def meta(self) -> Any:
        return self.source.meta()

    def _captured(self, value: Any) -> str | None:
        return captured_texts(self.spec, str(value))[self.name]
