"""`TracedResult`: the placeholder of a step's result while a program is being compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.lang.core.results import Segment
from plait.lang.tracing.traced_value import EvaluationContext, NodeOutput, TracedValue

if TYPE_CHECKING:
    from plait.lang.tracing.traced_run import TracedRun
    from plait.lang.typed.value_format import ValueFormat


class TracedResult(Segment):
    """The future result of a step. If `result.sample` is None and n > 1, the value is a list of n. `base`: its traced
    value, if it is not the one that the step gives."""

    def __init__(
        self,
        traced_run: TracedRun,
        branch_id: int,
        result: NodeOutput,
        n: int = 1,
        value_format: ValueFormat | None = None,
        base: TracedValue | None = None,
    ) -> None:
        self.base = base if base is not None else make_traced_value(traced_run, result, value_format)
        self.result, self.n = result, n
        self._traced_run, self._branch_id = traced_run, branch_id

    @property
    def value_format(self) -> ValueFormat | None:
        return self.base._value_format

    def value(self) -> Any:
        self._traced_run.read_branches.add(self._branch_id)
        if self.n == 1:
            return self.base
        samples = [NodeOutput(self.result.node, self.result.name, index) for index in range(self.n)]
        return [make_traced_value(self._traced_run, sample, self.value_format) for sample in samples]

    def has_format(self, value_format: ValueFormat | None) -> bool:
        return self.n == 1 and self.value_format is value_format

    def partial(self) -> Any:
        return self.value()

    def text(self) -> Any:
        """Returns the text of the result, which is part of the state's text."""
        self._traced_run.read_branches.add(self._branch_id)
        return (
            self.base
            if self.value_format is None and self.n == 1
            else self.base._derived(f"s.text_of({self.result.name!r})", self._text, is_plain=True)
        )

    def _text(self, context: EvaluationContext) -> str:
        return context.result(self.result.node, self.result.name).text()

    def meta(self) -> Any:
        return self._read("get_meta_info", lambda segment: segment.meta())

    def weight(self) -> Any:
        return self._read("weight", lambda segment: segment.weight())

    def logprob(self) -> Any:
        return self._read("logprob", lambda segment: segment.logprob())

    def _read(self, method: str, read: Callable[[Segment], Any]) -> Any:
        """Returns what `read` finds in the result; for n > 1 a list."""
        self._traced_run.read_branches.add(self._branch_id)
        node, name = self.result.node, self.result.name

        def read_sample(sample: int | None) -> TracedValue:
            def evaluate(context: EvaluationContext) -> Any:
                found = read(context.result(node, name))
                return found if sample is None else found[sample]

            return self.base._derived(f"s.{method}({name!r})", evaluate)

        return read_sample(None) if self.n == 1 else [read_sample(index) for index in range(self.n)]


def make_traced_value(
    traced_run: TracedRun, result: NodeOutput, value_format: ValueFormat | None = None
) -> TracedValue:
    """Returns the value that `result` has in a run, parsed by `value_format`."""
    name = "gen(...)" if result.name is None else f"s[{result.name!r}]"
    label = name if result.sample is None else f"{name}[{result.sample}]"

    def evaluate(context: EvaluationContext) -> Any:
        value = context.result(result.node, result.name).value()
        return value if result.sample is None else value[result.sample]

    return TracedValue(
        traced_run.placeholders,
        label,
        frozenset([result]),
        evaluate,
        (),
        value_format,
        value_format is None or value_format.type_name == "str",
    )
