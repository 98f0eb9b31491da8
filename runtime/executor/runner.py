"""The model runner's interface to the scheduler, and what all runners share: KV cache size, partial logits, warm-up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from plait.runtime.adapters.adapter_pool import AdapterPool
from plait.runtime.arrays import Float32Array, Float64Array
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import Request
from plait.runtime.errors import InputError
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.kv_cache.sequence import Sequence

DEFAULT_CPU_BATCH_TOKENS = 256
MIN_PAGES = 16
StartupProgress = Callable[[float, str], None]  # (fraction done, 0 to 1; current activity)
SUM_QUANTUM = 2.0**-26  # see Runner.sum_hidden_states
AllowedIds = Mapping[int, npt.NDArray[np.int64]]  # row -> the only token ids that it may take


class Runner(Protocol):
    """One model on one device, with a KV cache of `num_pages` pages; a page holds one token's KV in every layer.

    Hidden states and logits are arrays or tensors on the device where the sampler runs.
    """

    num_pages: int
    max_batch_tokens: int

    @property
    def adapter_pool(self) -> AdapterPool | None:
        """The adapters that rows of a batch may have, if they are resident; None: the model has none."""

    @property
    def num_saved_reads(self) -> int:
        """Token reads that attention over shared prefixes saved: a token read once for n rows counts n - 1."""

    def use_device(self) -> None:
        """Prepares the calling thread for launching steps, if it is not the thread that made the runner."""

    def forward(self, batch: Batch) -> Any:
        """Returns hidden states [batch.num_logits + batch.num_states, C] after the last norm, in row order.

        They are those at the positions where the rows need logits or states.
        """

    def hidden_states_at(self, hidden: Any, indices: list[int]) -> Float32Array:
        """Copies hidden[indices] of hidden states [n, C] to the host, [len(indices), C] float32."""

    def sum_hidden_states(self, hidden: Any) -> Float64Array:
        """Returns the sum [C] of hidden states [n, C], each value rounded to a multiple of `SUM_QUANTUM` first.

        Such sums are exact (below 2^27), so the result does not depend on how a text was cut into chunks.
        """

    def argmax_tokens(self, hidden: Any) -> tuple[list[float], list[int]]:
        """Returns for each of hidden states [n, C] its largest logit and the first token that has it.

        The logit is NaN if any logit of the row is NaN.
        """

    def logits(self, hidden: Any, allowed_ids: AllowedIds) -> Any:
        """Returns logits [n, V] float32 of hidden states [n, C].

        Of rows in `allowed_ids`, only the columns of those token ids are computed; the others are -inf. The output
        head takes a third of a small model's step. If rows of the latest batch have adapters, these are the hidden
        states of all its logits, also in `argmax_tokens`: the adapters may change the head.
        """


class ModelSizes(Protocol):
    """What the runtime reads of any model's config."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def context_length(self) -> int: ...

    @property
    def has_lm_head(self) -> bool: ...


class LoadedRunner(Runner, Protocol):
    """A runner as `make_runner` returns it."""

    max_session_tokens: int

    @property
    def config(self) -> ModelSizes:
        """The model's sizes."""


def choose_num_pages(budget: int, page_bytes: int, max_pages: int) -> int:
    """Returns how many pages of `page_bytes` the budget (bytes) holds, at most `max_pages` unless that is 0.

    Raises InputError if they are fewer than MIN_PAGES.
    """
    pages = budget // page_bytes
    if max_pages:
        pages = min(pages, max_pages)
    if pages < MIN_PAGES:
        raise InputError(
            f"a KV budget of {budget} bytes holds {pages} tokens; at least {MIN_PAGES} "
            f"({MIN_PAGES * page_bytes} bytes) are needed: raise kv_memory_bytes or max_pages"
        )
    return pages


def fill_logits(out: Any, allowed_ids: Mapping[int, Any], compute: Callable[..., Any]) -> None:
    """Fills out [n, V], which holds -inf, with the logits of n hidden states as `Runner.logits` describes.

    `compute(rows, ids)` returns those of some rows: all logits, or with `ids` [len(rows), len(ids)].
    """
    unrestricted = [row for row in range(len(out)) if row not in allowed_ids]
    if unrestricted:
        out[unrestricted] = compute(unrestricted)
    for row, ids in allowed_ids.items():
        out[row, ids] = compute([row], ids)[0]


def add_text(batch: Batch, tokens: list[int], pages: list[int], start: int, logits_from: int) -> None:
    """Adds the tokens from `start` on of a text that is no client's, whose KV is in these pages."""
    seq = Sequence(CacheNamespace(), tokens)
    seq.pages.extend(pages)
    batch.add(Request(None, seq, 0, logits_from), start, len(tokens) - start)


def warm_up(runner: LoadedRunner, token_counts: tuple[int, ...] = (2,)) -> None:
    """Runs a forward pass of each number of tokens, which compiles and loads the kernels before the first request."""
    for num_tokens in token_counts:
        num_tokens = min(num_tokens, runner.max_session_tokens)
        batch = Batch(num_tokens)
        add_text(batch, [0] * num_tokens, list(range(num_tokens)), 0, num_tokens - 1)
        runner.logits(runner.forward(batch), {})
