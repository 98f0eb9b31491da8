"""A step under way: launched, given its masks, collected. On the CPU each of these is done when it returns.

    flight = launcher.launch(batch)   the forward has begun
    flight.sample(mask)               and the sampler behind it
    flight.collect()                  waits for the tokens

Between these the host is free. `launcher.follow(batch)` launches behind a step whose tokens are not collected yet; the
device takes them from there. Knows: the order. Must not know: sessions, how a device computes.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

from plait.runtime.running import Floats, Runner, Sums
from plait.runtime.sampler import Mask, Sampled, Sampler, take_likeliest
from plait.runtime.scheduler.embedding import Embedding
from plait.runtime.scheduler.rows import Batch


class Flight(Protocol):
    """See the file's header."""

    def sample(self, mask: Mask | None) -> None:
        """Masks of the sampled rows; what they do not name is free. Once."""

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""

    @property
    def can_be_followed(self) -> bool:
        """Whether its tokens stay on the device, for a step launched behind it."""

    def collect(self) -> Sampled:
        """What the step gave. Once, after `sample`."""


class DeviceSteps(Protocol):
    """Steps that the device does on its own."""

    def launch(self, batch: Batch, *, behind: bool) -> Flight | None:
        """None for a batch that asks for what the device alone does not have. `behind`: a step is under way; None then
        too where that would have to be settled first."""


class PlainFlight:
    """The runner's forward, then the sampler, which reads the logits back."""

    def __init__(self, runner: Runner, sampler: Sampler, batch: Batch) -> None:
        self._runner, self._sampler, self._batch = runner, sampler, batch
        self._hidden = runner.forward(batch)
        self._states: dict[Embedding, Floats | Sums] = {}
        if batch.num_states:
            self._hidden, self._states = without_states(runner, self._hidden, batch)
        self._sampled = Sampled()

    def sample(self, mask: Mask | None) -> None:
        if mask is None and self._batch.asks_for_likeliest:
            self._sampled = take_likeliest(*self._runner.likeliest(self._hidden), self._batch)
        else:
            logits = self._runner.logits(self._hidden, mask.narrow if mask else {})
            self._sampled = self._sampler.sample(logits, self._batch, mask)
        self._sampled.states = self._states

    @property
    def is_done(self) -> bool:
        return True

    @property
    def can_be_followed(self) -> bool:
        return False

    def collect(self) -> Sampled:
        return self._sampled


def without_states(runner: Runner, hidden: Any, batch: Batch) -> tuple[Any, dict[Embedding, Floats | Sums]]:
    """Of hidden states [num_logits + num_states, C]: those that logits are wanted of, in order, and what each
    embedding takes of its own."""
    ends = itertools.accumulate((each.num_logits + each.num_states for each in batch.rows), initial=0)
    spans = list(zip(batch.rows, itertools.pairwise(ends), strict=True))
    taken: dict[Embedding, Floats | Sums] = {}
    lasts: list[tuple[Embedding, int]] = []
    for each, (start, end) in spans:
        if not isinstance(each.row, Embedding) or start == end:
            continue
        if each.row.is_mean:
            taken[each.row] = runner.total(hidden[start:end])
        else:
            lasts.append((each.row, end - 1))
    if lasts:
        taken |= zip((row for row, _ in lasts), runner.hidden_states_at(hidden, [at for _, at in lasts]), strict=True)
    return hidden[[at for each, span in spans if each.num_logits for at in range(*span)]], taken


class Launcher:
    """Chooses how a batch is computed: by the device alone where there is one that can, else step by step."""

    def __init__(self, runner: Runner, sampler: Sampler, device_steps: DeviceSteps | None = None) -> None:
        self._runner, self._sampler, self._device_steps = runner, sampler, device_steps

    def launch(self, batch: Batch) -> Flight:
        """Nothing is under way."""
        flight = self._device_steps.launch(batch, behind=False) if self._device_steps is not None else None
        return flight or PlainFlight(self._runner, self._sampler, batch)

    def follow(self, batch: Batch) -> Flight | None:
        """None where the batch needs the host, which has to know the tokens of the step before first."""
        return self._device_steps.launch(batch, behind=True) if self._device_steps is not None else None
