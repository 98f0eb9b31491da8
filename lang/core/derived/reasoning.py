"""`separate_reasoning` and `gen(..., think=True)`: outputs that are reasoning first and then an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plait.constrained.specs import GrammarError, Reasoning
from plait.lang.core.expressions import CallExpr, Concat, Expr, Gen, as_expr
from plait.lang.core.results import GenResult, Samples, Segment
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.runtime.programs.steps import Step

SEPARATOR = "\n\n"  # between constrained reasoning and its value
REASONING_SUFFIX = "_reasoning_content"


@dataclass(frozen=True)
class ReasoningTags:
    """The tags around reasoning.

    `starts_inside`: the opening tag is in the prompt, so the output starts inside it.
    """

    begin: str
    end: str
    starts_inside: bool = False
    is_constrained: bool = False  # the answer is a constrained value, which keeps its white space

    def split(self, text: str) -> tuple[str, str]:
        """Returns (reasoning, answer). If the text ends before the closing tag, the answer is empty.

        >>> ReasoningTags("<think>", "</think>").split("<think>so</think>yes")
        ('so', 'yes')
        """
        stripped = text if self.is_constrained else text.lstrip()
        if stripped.startswith(self.begin):
            stripped = stripped.removeprefix(self.begin)
        elif not self.starts_inside:
            return "", text
        reasoning, _, answer = stripped.partition(self.end)
        if self.is_constrained:
            return reasoning, answer.removeprefix(SEPARATOR)
        return reasoning.strip(), answer.strip()


THINK_TAGS = ReasoningTags("<think>", "</think>")
REASONING_TAGS = {
    "deepseek-r1": replace(THINK_TAGS, starts_inside=True),
    "deepseek-v3": THINK_TAGS,
    "glm45": THINK_TAGS,
    "kimi": ReasoningTags("◁think▷", "◁/think▷"),
    "qwen3": THINK_TAGS,
    "qwen3-thinking": replace(THINK_TAGS, starts_inside=True),
    "step3": replace(THINK_TAGS, starts_inside=True),
}


@dataclass(frozen=True)
class SeparateReasoning(CallExpr):
    """A gen whose variable is the answer alone. The reasoning is a second variable."""

    gen: Gen
    tags: ReasoningTags

    @property
    def _call(self) -> Gen:
        return self.gen

    @property
    def _variables(self) -> list[str]:
        return [str(self.gen.name), f"{self.gen.name}{REASONING_SUFFIX}"]

    def _begin(self, branch: Branch, following: Sequence[Step]) -> None:
        self.gen._begin(branch, ())
        output = branch.variables[str(self.gen.name)]
        for index, name in enumerate(self._variables):
            branch.set(name, ReasoningPart(output, self.tags, 1 - index))


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
        self.parts = (output,)

    def value(self) -> Any:
        if isinstance(self.output, Samples):
            return [self._value_of(sample) for sample in self.output.call_segments]
        return self._value_of(self.output)

    def _value_of(self, output: Segment) -> Any:
        """Returns the part of one output; of an answer with a type, the object that its format reads."""
        if self.index == 1 and isinstance(output, GenResult) and output.value_format is not None:
            return output.value()
        return self._part(output.text())

    def partial(self) -> Any:
        if self.index == 1 and isinstance(self.output, GenResult) and self.output.value_format is not None:
            return self.output.partial()
        return self._partial_text()

    def _partial_text(self) -> str:
        calls = self.output.calls()
        return self._part(calls[0].text_so_far() if calls else self.output.text())

    def text(self) -> str:
        return self._part(self.output.text())

    def meta(self) -> Any:
        return self.output.meta()

    def _part(self, text: str) -> str:
        return self.tags.split(text)[self.index]


def think_first(where: str, gen: Gen, think: bool | str | None, think_tokens: int | None) -> SeparateReasoning:
    """Returns `gen` with reasoning before its value. Raises InputError without a name, a constraint or valid marks.

    `think`: True, or a `model_type` of `separate_reasoning`, which names the marks. The opening mark is written unless
    the chat template of that model writes it.
    """
    if think is None or think is False:
        raise InputError(f"{where}: think_tokens needs think=True")
    tags = THINK_TAGS if think is True else REASONING_TAGS.get(str(think).lower())
    if tags is None:
        raise InputError(f"{where}: think must be True or one of {', '.join(REASONING_TAGS)}, not {think!r:.80}")
    if gen.name is None:
        raise InputError(f"{where}: think needs a name, for the value and its reasoning")
    if gen.constraint is None or isinstance(gen.constraint, Reasoning):
        raise InputError(
            f"{where}: think needs a constraint, such as json_schema or type; separate_reasoning(...) splits free text"
        )
    begin = "" if tags.starts_inside else tags.begin
    try:
        spec = Reasoning(gen.constraint, begin, tags.end, max_tokens=think_tokens)
    except GrammarError:
        raise InputError(f"{where}: think_tokens must be a number of tokens from 0 on, not {think_tokens!r}") from None
    value_format = gen.value_format
    if value_format is not None:
        value_format = _after_reasoning(value_format, spec)
    gen = replace(gen, constraint=spec, value_format=value_format)
    return SeparateReasoning(gen, replace(tags, is_constrained=True))


def _after_reasoning(value_format: ValueFormat, spec: Reasoning) -> ValueFormat:
    """Returns a format that reads the value behind the reasoning."""
    mark, read_partial = spec.end + spec.separator, value_format.read_partial

    def value_text(text: str) -> str:
        return text[len(spec.begin) :].partition(mark)[2]

    return replace(
        value_format,
        spec=spec,
        read=lambda text: value_format.read(value_text(text)),
        max_text_tokens=None,
        read_partial=None if read_partial is None else lambda text: read_partial(value_text(text)),
    )
