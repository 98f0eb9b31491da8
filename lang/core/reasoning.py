"""`separate_reasoning`: what a reasoning model thinks, apart from what it answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plait.lang.core.expressions import Concat, Expr, Gen, as_expr
from plait.lang.core.results import Segment
from plait.runtime.errors import InputError

REASONING_SUFFIX = "_reasoning_content"


@dataclass(frozen=True)
class ReasoningTags:
    """`starts_inside`: the text begins inside the reasoning, its opening mark was in the prompt."""

    begin: str
    end: str
    starts_inside: bool = False

    def split(self, text: str) -> tuple[str, str]:
        """(reasoning, answer). Reasoning that was cut off before its end mark leaves no answer.

        >>> Marks("<think>", "</think>").split("<think>so</think>yes")
        ('so', 'yes')
        """
        stripped = text.lstrip()
        if stripped.startswith(self.begin):
            stripped = stripped.removeprefix(self.begin)
        elif not self.starts_inside:
            return "", text
        thought, _, answer = stripped.partition(self.end)
        return thought.strip(), answer.strip()


_THINK = ReasoningTags("<think>", "</think>")
REASONING_TAGS = {
    "deepseek-r1": replace(_THINK, starts_inside=True),
    "deepseek-v3": _THINK,
    "glm45": _THINK,
    "kimi": ReasoningTags("◁think▷", "◁/think▷"),
    "qwen3": _THINK,
    "qwen3-thinking": replace(_THINK, starts_inside=True),
    "step3": replace(_THINK, starts_inside=True),
}


@dataclass(frozen=True)
class SeparateReasoning(Expr):
    """A gen whose variable is the answer alone; its reasoning is a second variable."""

    gen: Gen
    tags: ReasoningTags


def separate_reasoning(expr: str | Expr | None = None, model_type: str | None = None) -> Expr:
    """`expr`, in which each named gen gives two variables: `name`, the answer, and `name_reasoning_content`.

    The text of the state stays whole. `model_type`: one of deepseek-r1, deepseek-v3, glm45, kimi, qwen3,
    qwen3-thinking, step3; it says how reasoning is marked.

    >>> s += assistant(separate_reasoning(gen("answer"), model_type="qwen3"))       # doctest: +SKIP
    >>> s["answer_reasoning_content"]                                               # doctest: +SKIP
    """
    tags = REASONING_TAGS.get(str(model_type).lower())
    if tags is None:
        raise InputError(
            f"separate_reasoning: model_type must be one of {', '.join(REASONING_TAGS)}, not {model_type!r:.80}"
        )
    whole = as_expr(expr)
    parts = whole.parts if isinstance(whole, Concat) else (whole,)
    return Concat(tuple(_separate_part(part, tags) for part in parts))


def _separate_part(part: Expr, tags: ReasoningTags) -> Expr:
    if not isinstance(part, Gen):
        return part
    if part.name is None:
        raise InputError("separate_reasoning: a gen needs a name, for its answer and its reasoning")
    if part.constraint is not None or part.value_format is not None:
        raise InputError(f"separate_reasoning: gen({part.name!r}) is constrained and cannot hold reasoning")
    return SeparateReasoning(part, tags)


class ReasoningPart(Segment):
    """One of the two parts of an answer."""

    def __init__(self, whole: Segment, tags: ReasoningTags, index: int) -> None:
        self._segment, self._tags, self._index = whole, tags, index

    def value(self) -> Any:
        whole = self._segment.value()
        return [self._part(text) for text in whole] if isinstance(whole, list) else self._part(whole)

    def text(self) -> str:
        return self._part(self._segment.text())

    def meta(self) -> Any:
        return self._segment.meta()

    def abort(self) -> None:
        self._segment.abort()

    async def aiter_text(self) -> Any:
        await self._segment.wait_ready()
        yield self.text()

    async def wait_ready(self) -> None:
        await self._segment.wait_ready()

    def _part(self, text: str) -> str:
        return self._tags.split(text)[self._index]
