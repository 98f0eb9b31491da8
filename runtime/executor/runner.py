"""What every runner of a model is to the scheduler, and what all of them do alike: count pages, warm up.

Knows: batches, budgets. Must not know: tensors, devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.errors import InputError
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.models.config import ModelConfig

DEFAULT_CPU_BATCH_TOKENS = 256
MIN_PAGES = 16
StartupProgress = Callable[[float, str], None]  # share done, from 0 to 1, and what is being done
SUM_QUANTUM = 2.0**-26
AllowedIds = Mapping[int, npt.NDArray[np.int64]]


class Runner(Protocol):
    """One model on one device, with `num_pages` pages, each holding one token's KV in every layer.

    Hidden states and logits are arrays or tensors, on the device where the sampler computes.
    """

    num_pages: int
    max_batch_tokens: int

    @property
    def num_spared_tokens(self) -> int:
        """Cached tokens that attention read once for several rows, each counted once for every row but the first."""

    def forward(self, batch: Batch) -> Any:
        """Hidden states [batch.num_logits + batch.num_states, C], after the last norm, at the positions the rows want
        logits or states at, in row order."""

    def hidden_states_at(self, hidden: Any, places: list[int]) -> Float32Array:
        """Those of hidden states [n, C] that stand at `places`, [len(places), C] float32 on the host, a copy."""

    def sum_hidden_states(self, hidden: Any) -> Float64Array:
        """The sum of hidden states [n, C], [C] float64, each number rounded to a multiple of `SUM_QUANTUM`: then no sum is
        rounded (below 2^27), and the same comes out however a text was cut into chunks."""

    def argmax_tokens(self, hidden: Any) -> tuple[list[float], list[int]]:
        """The largest logit of each of hidden states [n, C], NaN where one is that, and the first token that has it."""

    def logits(self, hidden: Any, allowed_ids: AllowedIds) -> Any:
        """Logits [n, V] float32 of hidden states [n, C].

        `allowed_ids[i]` are the only token ids that row i can take: only those columns of the output head are computed,
        the others are -inf. The head is a third of a small model's step.
        """


class LoadedRunner(Runner, Protocol):
    """A runner as `build` makes it."""

    config: ModelConfig
    max_session_tokens: int


def choose_num_pages(budget: int, page_bytes: int, max_pages: int) -> int:
    """How many pages of that size the budget holds, `max_pages` at most unless that is 0. InputError for too few."""
    pages = budget // page_bytes
    if max_pages:
        pages = min(pages, max_pages)
    if pages < MIN_PAGES:
        raise InputError(
            f"a KV budget of {budget} bytes holds {pages} tokens; at least {MIN_PAGES} "
            f"({MIN_PAGES * page_bytes} bytes) are needed: raise kv_memory_bytes or max_pages"
        )
    return pages


def warm_up(runner: LoadedRunner, token_counts: tuple[int, ...] = (2,)) -> None:
    """A forward of each number of tokens, so that kernels are compiled and loaded before the first request."""
    for count in token_counts:
        count = min(count, runner.max_session_tokens)
        seq = Sequence(("", ""), [0] * count)
        seq.pages.extend(list(range(count)))
        batch = Batch(count)
        batch.add(Request(None, seq, 0, count - 1), 0, count)
        runner.logits(runner.forward(batch), {})
