"""Counters, gauges and histograms in Prometheus' text format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/. All metrics are updated on one thread, so this is shorter
than a dependency would be.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LabelValues = tuple[str, ...]  # in the order of the metric's label names


class Metric:
    """A gauge or counter with one value per combination of label values."""

    def __init__(self, kind: str, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.kind, self.name, self.text, self.labels = kind, name, text, tuple(labels)
        self.values: dict[LabelValues, float] = {} if labels else {(): 0.0}

    def set(self, value: float, *labels: str) -> None:
        """Sets the value."""
        self.values[labels] = value

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Adds `amount` to the value."""
        self.values[labels] = self.values.get(labels, 0.0) + amount

    def lines(self) -> list[str]:
        """Returns the lines of the text format, HELP and TYPE first."""
        head = [f"# HELP {self.name} {_escape(self.text, quote=False)}", f"# TYPE {self.name} {self.kind}"]
        return head + [f"{self.name}{self._braces(labels)} {_number(value)}" for labels, value in self.values.items()]

    def _braces(self, values: LabelValues, extra: str = "") -> str:
        pairs = [f'{name}="{_escape(value)}"' for name, value in zip(self.labels, values, strict=True)]
        inner = ",".join([*pairs, extra] if extra else pairs)
        return f"{{{inner}}}" if inner else ""


class Histogram(Metric):
    """Counts observations at or below each of `bounds`, in the unit of the observations."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str] = ()) -> None:
        super().__init__("histogram", name, text, labels)
        self.bounds = tuple(bounds)
        self.counts: dict[LabelValues, list[int]] = {} if labels else {(): self._empty()}

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Adds `times` observations of `value`."""
        counts = self.counts.get(labels)
        if counts is None:
            counts = self.counts[labels] = self._empty()
        counts[bisect.bisect_left(self.bounds, value)] += times
        self.add(value * times, *labels)

    def lines(self) -> list[str]:
        lines = super().lines()[:2]
        for labels, counts in self.counts.items():
            cumulative = list(itertools.accumulate(counts))
            for bound, count in zip([*map(_number, self.bounds), "+Inf"], cumulative, strict=True):
                le = f'le="{bound}"'
                lines.append(f"{self.name}_bucket{self._braces(labels, le)} {count}")
            lines.append(f"{self.name}_sum{self._braces(labels)} {_number(self.values.get(labels, 0.0))}")
            lines.append(f"{self.name}_count{self._braces(labels)} {cumulative[-1]}")
        return lines

    def _empty(self) -> list[int]:
        return [0] * (len(self.bounds) + 1)


def to_prometheus_text(metrics: Sequence[Metric]) -> str:
    """Returns the text of a scrape."""
    return "\n".join(line for metric in metrics for line in metric.lines()) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(text: str, *, quote: bool = True) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
