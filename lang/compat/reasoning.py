"""`separate_reasoning`: what a reasoning model thinks, apart from what it answers.

Knows: the marks around reasoning, by family. Must not know: calls, sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plait.lang.answers import Readable
from plait.lang.expressions import Concat, Expr, Gen, as_expr
from plait.runtime.errors import InputError

SUFFIX = "_reasoning_content"


@dataclass(frozen=True)
class Marks:
    """`is_inside`: the text begins inside the reasoning, its opening mark was in the prompt."""

    begin: str
    end: str
    is_inside: bool = False

    def split(self, text: str) -> tuple[str, str]:
        """(reasoning, answer). Reasoning that was cut off before its end mark leaves no answer.

        >>> Marks("<think>", "</think>").split("<think>so</think>yes")
        ('so', 'yes')
        """
        stripped = text.lstrip()
        if stripped.startswith(self.begin):
            stripped = stripped.removeprefix(self.begin)
        elif not self.is_inside:
            return "", text
        thought, _, answer = stripped.partition(self.end)
        return thought.strip(), answer.strip()


_THINK = Marks("<think>", "</think>")
MARKS = {
    "deepseek-r1": replace(_THINK, is_inside=True),
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "kimi": Marks("◁think▷", "◁/think▷"),
    "qwen3": _THINK,
    "qwen3-thinking": replace(_THINK, is_inside=True),
    "step3": replace(_THINK, is_inside=True),
}


@dataclass(frozen=True)
class Reasoned(Expr):
    """A gen whose variable is the answer alone; its reasoning is a second variable."""

    gen: Gen
    marks: Marks


def separate_reasoning(expr: str | Expr | None = None, model_type: str | None = None) -> Expr:
    """`expr`, in which each named gen gives two variables: `name`, the answer, and `name_reasoning_content`.

    The text of the state stays whole. `model_type`: one of deepseek-r1, deepseek-v3, glm45, kimi, qwen3,
    qwen3-thinking, step3; it says how reasoning is marked.

    >>> s += assistant(separate_reasoning(gen("answer"), model_type="qwen3"))       # doctest: +SKIP
    >>> s["answer_reasoning_content"]                                               # doctest: +SKIP
    """
    marks = MARKS.get(str(model_type).lower())
    if marks is None:
        raise InputError(f"separate_reasoning: model_type must be one of {', '.join(MARKS)}, not {model_type!r:.80}")
    whole = as_expr(expr)
    parts = whole.parts if isinstance(whole, Concat) else (whole,)
    return Concat(tuple(_reasoned(part, marks) for part in parts))


def _reasoned(part: Expr, marks: Marks) -> Expr:
    if not isinstance(part, Gen):
        return part
    if part.name is None:
        raise InputError("separate_reasoning: a gen needs a name, for its answer and its reasoning")
    if part.constraint is not None or part.form is not None:
        raise InputError(f"separate_reasoning: gen({part.name!r}) is constrained and cannot hold reasoning")
    return Reasoned(part, marks)


class Half(Readable):
    """One of the two parts of an answer."""

    def __init__(self, whole: Readable, marks: Marks, index: int) -> None:
        self._whole, self._marks, self._index = whole, marks, index

    def value(self) -> Any:
        whole = self._whole.value()
        return [self._part(text) for text in whole] if isinstance(whole, list) else self._part(whole)

    def text(self) -> str:
        return self._part(self._whole.text())

    def meta(self) -> Any:
        return self._whole.meta()

    def abort(self) -> None:
        self._whole.abort()

    async def aiter_text(self) -> Any:
        await self._whole.arrive()
        yield self.text()

    async def arrive(self) -> None:
        await self._whole.arrive()

    def _part(self, text: str) -> str:
        return self._marks.split(text)[self._index]
