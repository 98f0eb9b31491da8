"""`separate_reasoning`: splits the output of a reasoning model into its reasoning and its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from plait.lang.core.expressions import Concat, Expr, Gen, as_expr
from plait.lang.core.results import Segment
from plait.runtime.errors import InputError

REASONING_SUFFIX = "_reasoning_content"


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around reasoning. `starts_inside`: the opening tag is in the prompt, so the output starts inside it."""

    begin: str
    end: str
    starts_inside: bool = False

    def split(self, text: str) -> tuple[str, str]:
        """Returns (reasoning, answer). If the text ends before the closing tag, the answer is empty.

        >>> ReasoningTags("<think>", "</think>").split("<think>so</think>yes")
        ('so', 'yes')
        """
        stripped = text.lstrip()
        if stripped.startswith(self.begin):
            stripped = stripped.removeprefix(self.begin)
        elif not self.starts_inside:
            return "", text
        reasoning, _, answer = stripped.partition(self.end)
        return reasoning.strip(), answer.strip()


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
    """A gen whose variable is the answer alone. The reasoning is a second variable."""

    gen: Gen
    tags: ReasoningTags


def separate_reasoning(expr: str | Expr | None = None, model_type: str | None = None) -> Expr:
    """Returns `expr`, in which each named gen sets two variables: `name` (the answer) and `name_reasoning_content`.

    The text of the state is not changed. `model_type` selects the tags around reasoning: deepseek-r1, deepseek-v3,
    glm45, kimi, qwen3, qwen3-thinking or step3. Raises InputError for any other, and for a constrained or unnamed gen.

    >>> s += assistant(separate_reasoning(gen("answer"), model_type="qwen3"))       # doctest: +SKIP
    >>> s["answer_reasoning_content"]                                               # doctest: +SKIP
    """
    tags = REASONING_TAGS.get(str(model_type).lower())
    if tags is None:
        raise InputError(
            f"separate_reasoning: model_type must be one of {', '.join(REASONING_TAGS)}, not {model_type!r:.80}"
        )
    expression = as_expr(expr)
    parts = expression.parts if isinstance(expression, Concat) else (expression,)
    return Concat(tuple(_separate_part(part, tags) for part in parts))


def _separate_part(part: Expr, tags: ReasoningTags) -> Expr:
    if not isinstance(part, Gen):
        return part
    if part.name is None:
        raise InputError("separate_reasoning: a gen needs a name, for its answer and its reasoning")
    if part.constraint is not None or part.value_format is not None:
        raise InputError(f"separate_reasoning: gen({part.name!r}) is constrained, so it cannot contain reasoning")
    return SeparateReasoning(part, tags)


class ReasoningPart(Segment):
    """The reasoning (`index` 0) or the answer (`index` 1) in the output of a gen."""

    def __init__(self, output: Segment, tags: ReasoningTags, index: int) -> None:
        self.output, self.tags, self.index = output, tags, index

    def value(self) -> Any:
        output = self.output.value()
        return [self._part(text) for text in output] if isinstance(output, list) else self._part(output)

    def text(self) -> str:
        return self._part(self.output.text())

    def meta(self) -> Any:
        return self.output.meta()

    def abort(self) -> None:
        self.output.abort()

    async def aiter_text(self) -> Any:
        await self.output.wait_ready()
        yield self.text()

    async def wait_ready(self) -> None:
        await self.output.wait_ready()

    def _part(self, text: str) -> str:
        return self.tags.split(text)[self.index]
