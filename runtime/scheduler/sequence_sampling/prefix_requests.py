"""Requests that compute the probabilities after prefixes of a value, for calls that draw it as a whole.

Such a call is in no batch itself. Its requests share their prefixes in the radix tree, as forks do. A request leaves
the batch while others of its call are still computed and there is nothing for it to do.
"""

from __future__ import annotations

import time

from plait.constrained import Vocabulary
from plait.runtime.arrays import Float32Array
from plait.runtime.batch.request import FinishInfo, GenerationRequest
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.sampling.exact_search import Path
from plait.runtime.scheduler.policy.batching import BatchScheduler

_PART = 64  # tokens that are compared at once


class PrefixRequest(GenerationRequest):
    """Computes the probabilities after the output tokens `path` of `call`, and after each of the `forced` ones behind.

    `seq`: the call's prompt and these tokens. `rows`: position -> probabilities [V] after the token there, as far as
    they are computed.
    """

    def __init__(self, call: GenerationRequest, seq: Sequence, path: Path, forced: Path) -> None:
        super().__init__(call.owner, seq, call.call_id, call.params, call.seed)
        self.call = call
        self.output_start = call.output_start
        self.set_path(path, forced)

    def set_path(self, path: Path, forced: Path) -> None:
        """Makes the request compute other tokens, which are the last of `seq`."""
        self.path, self.forced = path, forced
        self.rows: dict[int, Float32Array] = {}
        self.logits_from = self.output_start + len(path) - 1

    def expects_more_tokens(self, max_length: int) -> bool:
        """See `Request`. The next tokens depend on the probabilities that a step brings, not on a token it samples."""
        return False

    def take_rows(self) -> list[Float32Array]:
        """Returns the probabilities after the path and after each of the forced tokens, once all are computed."""
        first, rows = self.output_start + len(self.path) - 1, self.rows
        self.rows = {}
        return [rows[first + index] for index in range(1 + len(self.forced))]


def call_of(request: GenerationRequest) -> GenerationRequest:
    """Returns the call that a request works for: itself, unless it is one of several."""
    return request.call if isinstance(request, PrefixRequest) else request


class PrefixRequests:
    """Adds, moves and ends the requests that compute prefixes for a call with `exact` or `particles`."""

    def __init__(self, batch_scheduler: BatchScheduler, vocabulary: Vocabulary) -> None:
        self.scheduler, self.cache, self.vocabulary = batch_scheduler, batch_scheduler.cache, vocabulary

    def add_first(self, call: GenerationRequest, path: Path, forced: Path) -> PrefixRequest:
        """Adds the first request of a call, which also computes the call's prompt."""
        request = self.fork(call, call.seq, path, forced)
        request.metrics = call.metrics
        call.prefix_requests = [request]
        self.scheduler.add(request)
        return request

    def fork(self, call: GenerationRequest, seq: Sequence, path: Path, forced: Path) -> PrefixRequest:
        """Returns a new request, which the caller adds to the batch. `seq`: has the prompt and a part of `path`."""
        child = self.cache.fork(seq)
        child.tokens.extend(list((*path, *forced)[len(seq) - call.output_start :]))
        return PrefixRequest(call, child, path, forced)

    def move(self, request: PrefixRequest, path: Path, forced: Path) -> None:
        """Makes a running request compute other tokens. The KV of those that it leaves stays as cache."""
        tokens, seq = path + forced, request.seq
        num_kept = request.output_start + common_length(request.path + request.forced, tokens)
        num_computed = min(num_kept, request.output_start + len(path) - 1)
        if seq.is_locked and seq.num_computed > num_computed:  # else its admission to a batch does this
            self.cache.publish(seq)
            self.cache.truncate(seq, num_computed)
        seq.tokens.truncate(num_kept)
        seq.tokens.extend(list(tokens[num_kept - request.output_start :]))
        request.set_path(path, forced)

    def pause(self, request: PrefixRequest) -> None:
        """Takes a request out of the batch; its KV stays cached."""
        self.scheduler.remove(request)
        self.cache.release(request.seq)

    def free(self, request: PrefixRequest) -> None:
        """Ends a request. Its KV stays as cache."""
        self.scheduler.remove(request)
        self.cache.free(request.seq)
        if request.metrics is not request.call.metrics:
            request.call.metrics.recomputed += request.metrics.recomputed

    def finish(self, call: GenerationRequest, value: Path) -> FinishInfo:
        """Ends all requests of a call and makes the value its output."""
        for request in call.prefix_requests:
            assert isinstance(request, PrefixRequest)
            self.free(request)
        call.prefix_requests = []
        end_token = value[-1] if value and value[-1] in self.vocabulary.eos_ids else None
        for token in value if end_token is None else value[:-1]:
            call.append(token, len(self.vocabulary.token_bytes[token]))
        self.cache.activate(call.seq, len(call.seq))  # the session keeps what was computed of its text
        self.cache.extend_from_cache(call.seq, len(call.seq))
        call.metrics.first_token_time = time.monotonic()
        return FinishInfo("stop", end_token)


def common_length(a: list[int] | Path, b: Path) -> int:
    """How many tokens two texts begin with alike."""
    limit = min(len(a), len(b))
    if tuple(a[:limit]) == b[:limit]:  # nearly always
        return limit
    start = 0
    while tuple(a[start : start + _PART]) == b[start : start + _PART]:  # a tenth of the time of single tokens
        start += _PART
    return next(i for i in range(start, limit) if a[i] != b[i])


def begins_with(path: Path, tokens: list[int]) -> bool:
    """Whether the first tokens of `path` are `tokens`; most texts that it does not begin with end otherwise."""
    count = len(tokens)
    if not count:
        return True
    return count <= len(path) and tokens[-1] == path[count - 1] and tuple(tokens) == path[:count]
