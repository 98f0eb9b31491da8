"""A step under way: launched, given its masks, collected. On the CPU each of these is done when it returns.

    flight = launcher.launch(batch)   the forward has begun
    flight.sample(mask)               and the sampler behind it
    flight.collect()                  waits for the tokens

Between these the host is free. `launcher.launch_overlapped(batch)` launches behind a step whose tokens are not collected yet; the
device takes them from there. Knows: the order. Must not know: sessions, how a device computes.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.executor.runner import Runner
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.sampler import Sampler, SamplerOutput, argmax_output


class InFlightStep(Protocol):
    """See the file's header."""

    def sample(self, mask: TokenMask | None) -> None:
        """Masks of the sampled rows; what they do not name is free. Once."""

    @property
    def is_done(self) -> bool:
        """Whether `collect` would not wait."""

    @property
    def can_overlap(self) -> bool:
        """Whether its tokens stay on the device, for a step launched behind it."""

    def collect(self) -> SamplerOutput:
        """What the step gave. Once, after `sample`."""


class AsyncStepLauncher(Protocol):
    """Steps that the device does on its own."""

    def launch(self, batch: Batch, *, overlapped: bool) -> InFlightStep | None:
        """None for a batch that asks for what the device alone does not have. `overlapped`: a step is under way; None then
        too where that would have to be settled first."""


class SyncStep:
    """The runner's forward, then the sampler, which reads the logits back."""

    def __init__(self, runner: Runner, sampler: Sampler, batch: Batch) -> None:
        self._runner, self._sampler, self._batch = runner, sampler, batch
        self._hidden = runner.forward(batch)
        self._states: dict[PoolingRequest, Float32Array | Float64Array] = {}
        if batch.num_states:
            self._hidden, self._states = split_hidden_states(runner, self._hidden, batch)
        self._sampled = SamplerOutput()

    def sample(self, mask: TokenMask | None) -> None:
        if mask is None and self._batch.needs_only_argmax:
            self._sampled = argmax_output(*self._runner.argmax_tokens(self._hidden), self._batch)
        else:
            logits = self._runner.logits(self._hidden, mask.allowed_ids if mask else {})
            self._sampled = self._sampler.sample(logits, self._batch, mask)
        self._sampled.states = self._states

    @property
    def is_done(self) -> bool:
        return True

    @property
    def can_overlap(self) -> bool:
        return False

    def collect(self) -> SamplerOutput:
        return self._sampled


def split_hidden_states(
    runner: Runner, hidden: Any, batch: Batch
) -> tuple[Any, dict[PoolingRequest, Float32Array | Float64Array]]:
    """Of hidden states [num_logits + num_states, C]: those that logits are wanted of, in order, and what each
    embedding takes of its own."""
    ends = itertools.accumulate((each.num_logits + each.num_states for each in batch.rows), initial=0)
    spans = list(zip(batch.rows, itertools.pairwise(ends), strict=True))
    pooled: dict[PoolingRequest, Float32Array | Float64Array] = {}
    lasts: list[tuple[PoolingRequest, int]] = []
    for each, (start, end) in spans:
        if not isinstance(each.request, PoolingRequest) or start == end:
            continue
        if each.request.is_mean:
            pooled[each.request] = runner.sum_hidden_states(hidden[start:end])
        else:
            lasts.append((each.request, end - 1))
    if lasts:
        pooled |= zip((row for row, _ in lasts), runner.hidden_states_at(hidden, [at for _, at in lasts]), strict=True)
    return hidden[[at for each, span in spans if each.num_logits for at in range(*span)]], pooled


class StepExecutor:
    """Chooses how a batch is computed: by the device alone where there is one that can, else step by step."""

    def __init__(self, runner: Runner, sampler: Sampler, async_launcher: AsyncStepLauncher | None = None) -> None:
        self._runner, self._sampler, self._async_launcher = runner, sampler, async_launcher

    def launch(self, batch: Batch) -> InFlightStep:
        """Nothing is under way."""
        step = self._async_launcher.launch(batch, overlapped=False) if self._async_launcher is not None else None
        return step or SyncStep(self._runner, self._sampler, batch)

    def launch_overlapped(self, batch: Batch) -> InFlightStep | None:
        """None where the batch needs the host, which has to know the tokens of the step before first."""
        return self._async_launcher.launch(batch, overlapped=True) if self._async_launcher is not None else None
