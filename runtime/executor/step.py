"""One model step, split so that the host can work while the device computes.

    step = executor.launch(batch)     starts the forward pass
    step.sample(mask)                 starts sampling behind it
    step.collect()                    waits for the tokens

`executor.launch_overlapped(batch)` launches a step behind one whose tokens are not collected yet; the device takes
those tokens from the step before. Without such a device, each call does its work before it returns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.batch import Batch, ScheduledRequest
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.executor.runner import Runner
from plait.runtime.sampling.logit_ops import TokenMask
from plait.runtime.sampling.sampler import Sampler, SamplerOutput, argmax_output

PooledStates = dict[PoolingRequest, Float32Array | Float64Array]


class InFlightStep(Protocol):
    """A launched step; see the file's header."""

    def sample(self, mask: TokenMask | None) -> None:
        """Starts sampling. Call once. Rows that `mask` does not contain are unconstrained."""

    @property
    def is_done(self) -> bool:
        """Whether `collect` returns without waiting."""

    @property
    def can_overlap(self) -> bool:
        """Whether the tokens stay on the device, so that the next step can be launched before they are collected."""

    def collect(self) -> SamplerOutput:
        """Waits for the step's output. Call once, after `sample`."""


class AsyncStepLauncher(Protocol):
    """Launches steps that a device runs, sampling included, without the host."""

    max_batch_rows: int

    def launch(self, batch: Batch, *, overlapped: bool) -> InFlightStep | None:
        """Starts a step; None if the device cannot sample some row of the batch without the host.

        With `overlapped`, another step is in flight; None also where that one has to be collected first.
        """


class SyncStep:
    """Runs the forward pass at once, then the sampler on the host's side of the logits."""

    def __init__(self, runner: Runner, sampler: Sampler, batch: Batch) -> None:
        self._runner, self._sampler, self._batch = runner, sampler, batch
        self._hidden = runner.forward(batch)
        self._states: PooledStates = {}
        if batch.num_states:
            self._states = pooled_states(runner, self._hidden, batch.rows)
            self._hidden = self._hidden[logit_indices(batch.rows)]
        self._output = SamplerOutput()

    def sample(self, mask: TokenMask | None) -> None:
        if mask is None and self._batch.needs_only_argmax:
            self._output = argmax_output(*self._runner.argmax_tokens(self._hidden), self._batch)
        else:
            logits = self._runner.logits(self._hidden, mask.allowed_ids if mask else {})
            self._output = self._sampler.sample(logits, self._batch, mask)
        self._output.states = self._states

    @property
    def is_done(self) -> bool:
        return True

    @property
    def can_overlap(self) -> bool:
        return False

    def collect(self) -> SamplerOutput:
        return self._output


def logit_indices(rows: Sequence[ScheduledRequest]) -> list[int]:
    """Returns which of the hidden states [num_logits + num_states, C] of a step are for logits, in row order."""
    return [index for row, span in _row_spans(rows) if row.num_logits for index in range(*span)]


def pooled_states(runner: Runner, hidden: Any, rows: Sequence[ScheduledRequest]) -> PooledStates:
    """Pools hidden states [num_logits + num_states, C]; waits for the device.

    A mean-pooling request gets the sum of its states, a last-token request the state of its last token.
    """
    pooled: PooledStates = {}
    last_tokens: list[tuple[PoolingRequest, int]] = []
    for row, (start, end) in _row_spans(rows):
        if not isinstance(row.request, PoolingRequest) or start == end:
            continue
        if row.request.is_mean:
            pooled[row.request] = runner.sum_hidden_states(hidden[start:end])
        else:
            last_tokens.append((row.request, end - 1))
    if last_tokens:
        requests, indices = [request for request, _ in last_tokens], [index for _, index in last_tokens]
        pooled |= zip(requests, runner.hidden_states_at(hidden, indices), strict=True)
    return pooled


def _row_spans(rows: Sequence[ScheduledRequest]) -> list[tuple[ScheduledRequest, tuple[int, int]]]:
    """Each row with the first index of its hidden states and the one behind the last."""
    ends = itertools.accumulate((row.num_logits + row.num_states for row in rows), initial=0)
    return list(zip(rows, itertools.pairwise(ends), strict=True))


class StepExecutor:
    """Runs steps by the asynchronous launcher where there is one that takes the batch, else synchronously."""

    def __init__(self, runner: Runner, sampler: Sampler, async_launcher: AsyncStepLauncher | None = None) -> None:
        self._runner, self._sampler, self._async_launcher = runner, sampler, async_launcher

    def launch(self, batch: Batch) -> InFlightStep:
        """Launches a step while none is in flight."""
        step = self._async_launcher.launch(batch, overlapped=False) if self._async_launcher is not None else None
        return step or SyncStep(self._runner, self._sampler, batch)

    def launch_overlapped(self, batch: Batch) -> InFlightStep | None:
        """Launches a step behind the one in flight; None if the host needs that step's tokens first."""
        return self._async_launcher.launch(batch, overlapped=True) if self._async_launcher is not None else None
