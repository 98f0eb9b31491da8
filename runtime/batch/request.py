"""Requests, the unit of scheduling. A request is a sequence with tokens to compute, and the results to return.

    GenerationRequest   samples tokens after a session's text      (a Generate message)
    ScoringRequest      reads the logprobs of given tokens         (one of several for a Select message)
    PoolingRequest      pools the hidden states of a text          (an Embed message, see pooling_request.py)

A Generate message with `particles` or `exact` has a GenerationRequest that is in no batch, and PrefixRequests that are
(scheduler/sequence_sampling/prefix_requests.py).

A request holds its own progress only. `batch.py` defines the part of a request that one step computes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from plait.constrained import Matcher
from plait.constrained.specs import Spec
from plait.constrained.trailing_text_matcher import TrailingTextMatcher
from plait.runtime.batch.healing import BorderToken, Healing
from plait.runtime.batch.request_metrics import RequestMetrics
from plait.runtime.batch.seen_tokens import RecentTokens, SeenTokens
from plait.runtime.batch.value_span import ValueSpan
from plait.runtime.call_reports import ExactInfo, ParticlesInfo, TokenLogprob, Usage
from plait.runtime.drafts.draft import Draft
from plait.runtime.drafts.proposer import TextProposers
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import FinishReason, SelectMethod
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.stop_strings import StopScanner

MAX_FORCED_PENDING = 32  # pending tokens, most of them forced, behind which a draft may stand

ProgramId = tuple[bytes, int]  # (client, the client's number for the program)


class RequestOwner(NamedTuple):
    """The accounts that a request is charged to, and its priority. Larger priorities are scheduled first.

    is_background: it runs behind all requests that are not.
    """

    tenant: str
    program_id: ProgramId
    priority: int
    is_background: bool = False


class FinishInfo(NamedTuple):
    """How an output ended: the reason, and the stop string or stop token that matched."""

    reason: FinishReason
    matched: str | int | None = None


class Request:
    """Base class of all requests.

    Tokens [num_computed, len(seq)) are pending. From position `logits_from` on the request wants the logits, or the
    hidden states if `wants_states`. `owner` is None only for the model runner's own warm-up requests.
    """

    wants_states = False
    needs_probabilities = False  # of all tokens, instead of a token: it computes prefixes of a value drawn as a whole
    draft: Draft | None = None  # guesses at the end of `seq`, while a step verifies them
    in_flight_slot = -1  # index of its next token among those that the in-flight step samples; -1: none

    def __init__(self, owner: RequestOwner | None, seq: Sequence, call_id: int, logits_from: int) -> None:
        if owner is not None:
            self.owner = owner
        self.seq = seq
        self.call_id = call_id
        self.logits_from = logits_from
        self.metrics = RequestMetrics(len(seq))
        self.arrival_index = 0  # set by `Fairness.add`

    @property
    def num_pending(self) -> int:
        """Tokens that still have to be computed."""
        return self.seq.tokens.size - self.seq.pages.size

    @property
    def num_draft_tokens(self) -> int:
        """Tokens at the end of `seq` that are guesses."""
        return 0 if self.draft is None else len(self.draft.tokens)

    def may_draft(self) -> bool:
        """Whether a draft may pay in this step. Called once a step, because it counts down a cooldown."""
        return False

    def expects_more_tokens(self, max_length: int) -> bool:
        """Whether the request will probably sample another token after the in-flight one."""
        return False

    def drop_draft(self) -> None:
        """Removes the guesses from `seq`. The caller frees the pages that were computed for them."""
        self.seq.tokens.truncate(len(self.seq) - self.num_draft_tokens)
        self.draft = None


class GenerationRequest(Request):
    """A running Generate call. `seq` is the session's own sequence and grows with every token."""

    def __init__(self, owner: RequestOwner, seq: Sequence, call_id: int, params: SamplingParams, seed: int) -> None:
        super().__init__(owner, seq, call_id, len(seq) - 1)
        self.prompt_logprobs: list[TokenLogprob] | None = None
        if params.prompt_logprobs_from is not None:
            self.prompt_logprobs = []
            self.logits_from = min(self.logits_from, max(0, params.prompt_logprobs_from - 1))
        self.params = params
        self.seed = seed
        self.matcher: Matcher | None = None
        self.constraint_hash = 0  # of the constraint and the text behind its value
        self.warnings: tuple[str, ...] = ()  # of the constraint
        self.has_free_text = False  # whether the constraint allows free text to end anywhere
        self.ticket: int | None = None  # of the grammar in the compile pool
        self.stop_scanner = StopScanner(params.stop, params.stop_regex) if params.stop or params.stop_regex else None
        self.needs_only_argmax = params.needs_only_argmax
        self.output_start = len(seq)  # index of the first output token in seq.tokens
        self.byte_ends: list[int] = []  # byte_ends[i]: length in bytes of output tokens 0 to i
        self.num_sent = 0  # output tokens that were sent to the client
        self.forced_positions: list[int] = []  # in `seq`, of output tokens that the constraint forced: not sampled
        self.num_sampled = 0  # sampling steps so far; with `seed` it determines the next random number
        self.needs_output_counts = bool(params.frequency_penalty or params.presence_penalty)
        self.output_counts: dict[int, int] = {}  # token id -> uses, for the penalties
        self.seen_tokens: SeenTokens | RecentTokens | None = None  # those that the repetition penalty applies to
        if params.has_repetition_penalty:
            tokens, last_n = seq.tokens.view(), params.repeat_last_n
            self.seen_tokens = SeenTokens(tokens) if last_n < 0 else RecentTokens(tokens, last_n)
        self.unsent_logprobs: list[TokenLogprob] = []
        self.proposers: TextProposers | None = None  # of its draft tokens
        self.num_accepted_drafts = 0  # output tokens that were guessed correctly
        self.completion_plan: list[int] | None = None  # with params.complete: tokens that complete the value from here
        self.forced_queue: list[int] = []  # with params.logprobs: forced tokens that are still to be sampled one by one
        self.value_span: ValueSpan | None = None  # set if text behind the value belongs to the constraint
        self.healing: Healing | None = None  # while removed prompt tokens are sampled again
        self.border: BorderToken | None = None  # set if the first output token also spells the end of the prompt
        self.num_healed = 0  # sampled tokens that only spell the prompt
        self.exact_spec: Spec | None = None  # with params.exact: its constraint
        self.exact_info: ExactInfo | None = None  # with params.exact: how the value was drawn, once it is
        self.needs_probabilities = params.samples_sequence
        self.prefix_requests: list[GenerationRequest] = []  # with params.samples_sequence: what computes its prefixes
        self.particles_info: ParticlesInfo | None = None  # with params.particles: how the value was drawn, once it is
        self.is_end_optional = False  # the value may end here; the next token, sampled among all, decides
        self.is_closing = False  # `forced_queue` holds the completion plan: the value is complete at its end

    @property
    def num_reasoning(self) -> int:
        """Output tokens before the value of a `Reasoning` constraint; the matcher may be ahead of the output."""
        return 0 if self.matcher is None else self.matcher.num_reasoning_tokens

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.byte_ends)

    @property
    def num_output_bytes(self) -> int:
        """The length of the output."""
        return self.byte_ends[-1] if self.byte_ends else 0

    @property
    def num_forced(self) -> int:
        """Output tokens that were not sampled."""
        return len(self.forced_positions)

    def num_tokens_left(self, max_length: int) -> int:
        """Tokens that the output can still take. `max_length`: tokens that a session can hold."""
        return self.num_tokens_left_after((), max_length)

    def num_tokens_left_after(self, new_lengths: tuple[int, ...], max_length: int) -> int:
        """Returns `num_tokens_left` as it will be when tokens of these lengths in bytes are appended."""
        num_new = len(new_lengths)
        if self.value_span is None:
            num_value_tokens = len(self.byte_ends) + num_new
        else:
            num_value_tokens = self.value_span.num_tokens_begun(self.byte_ends, new_lengths)
        return min(self.params.max_tokens - num_value_tokens, max_length - self.seq.tokens.size - num_new)

    def count_forced(self) -> None:
        """Counts the next output token as one that was not sampled."""
        self.forced_positions.append(self.seq.tokens.size)

    def hold_trailing_text(self, num_new_bytes: int) -> None:
        """Holds back what may be the text after the value. `num_new_bytes`: those that the matcher has accepted and
        that are not appended yet."""
        if self.value_span is not None:
            assert isinstance(self.matcher, TrailingTextMatcher)
            num_trailing = self.matcher.num_trailing_bytes
            self.value_span.trailing_start = self.num_output_bytes + num_new_bytes - num_trailing
            self.is_end_optional = self.matcher.may_end

    def take_logprobs(self, end: int) -> list[TokenLogprob] | None:
        """Removes and returns the logprobs to send with the output tokens before index `end`."""
        count = len(self.unsent_logprobs) if self.value_span is None else end - self.num_sent
        if self.value_span is not None and self.border is not None and self.num_sent == 0 < end:
            count += len(self.border.value_tokens) - 1
        taken = self.unsent_logprobs[:count]
        del self.unsent_logprobs[:count]
        return taken or None

    def output_tokens(self, start: int, end: int) -> list[int]:
        """Returns the ids of output tokens [start, end). The first may be several, see `BorderToken`."""
        if start == 0 < end and self.border is not None:
            return [*self.border.value_tokens, *self.output_tokens(1, end)]
        if end - start == 1:
            return [self.seq.tokens.at(self.output_start + start)]
        token_ids: list[int] = self.seq.tokens.view()[self.output_start + start : self.output_start + end].tolist()
        return token_ids

    def append(self, token: int, num_bytes: int) -> None:
        """Appends a token to the output. `num_bytes`: its length, without a part that belongs to the prompt."""
        self._append_to_text(token)
        ends = self.byte_ends
        ends.append(ends[-1] + num_bytes if ends else num_bytes)
        if self.needs_output_counts:
            self.output_counts[token] = self.output_counts.get(token, 0) + 1

    def append_to_prompt(self, token: int) -> None:
        """Appends a token to the prompt; the output is empty."""
        self._append_to_text(token)
        self.output_start = self.seq.tokens.size
        self.metrics.num_prompt += 1

    def _append_to_text(self, token: int) -> None:
        self.logits_from = self.seq.tokens.size
        self.seq.tokens.append(token)
        if self.seen_tokens is not None:
            self.seen_tokens.add(token)

    def expects_more_tokens(self, max_length: int) -> bool:
        """See `Request`."""
        return self.in_flight_slot >= 0 and self.num_tokens_left(max_length) > 1

    def may_draft(self) -> bool:
        """See `Request`."""
        if self.proposers is None or not self.num_sampled or not self.num_output or self.is_closing:
            return False
        if self.num_pending > (1 if self.owner.is_background else MAX_FORCED_PENDING):
            return False
        return self.proposers.is_due()

    def num_safe_tokens(self) -> int:
        """Output tokens that no stop string, stop pattern or text behind the value can cut off any more."""
        if self.stop_scanner is None and self.value_span is None:
            return len(self.byte_ends)
        limits = [] if self.stop_scanner is None else [self.stop_scanner.num_safe]
        limits += [] if self.value_span is None else [self.value_span.trailing_start]
        num_safe_bytes, count = min(limits), self.num_output
        while count and self.byte_ends[count - 1] > num_safe_bytes:
            count -= 1
        return count


class ScoringRequest(Request):
    """One of the requests that score a Select: the prompt, followed by tokens that several choices may share.

    `targets[position]`: tokens whose logprob after tokens [0, position] is requested.
    """

    def __init__(
        self,
        owner: RequestOwner,
        call_id: int,
        seq: Sequence,
        logits_from: int,
        targets: dict[int, tuple[int, ...]],
        selection: Selection,
    ) -> None:
        super().__init__(owner, seq, call_id, logits_from)
        self.targets = targets
        self.selection = selection
        self.logprobs: dict[tuple[int, int], float] = {}  # (position, token) -> logprob
        self.top: dict[int, list[tuple[int, float]]] = {}  # position -> the most likely tokens, if requested


@dataclass(eq=False)
class Selection:
    """A running Select call: its choices and the requests that score them.

    `requests[request_of_choice[i]]` scores choice i. `num_prompt`: tokens of the session's text before the choices;
    the choices replace any further tokens.
    """

    owner: RequestOwner
    call_id: int
    choices: list[list[int]]
    method: SelectMethod
    num_prompt: int
    top_logprobs: int = 0
    seed: int = 0
    requests: list[ScoringRequest] = field(default_factory=list)
    unconditional_requests: list[ScoringRequest] = field(default_factory=list)
    request_of_choice: list[int] = field(default_factory=list)
    num_unfinished: int = 0

    def usage(self) -> Usage:
        """Counts the prompt once, although every request computes its last token again for the logits."""
        first = self.requests[0].metrics.usage(0)
        num_processed = 1 + sum(request.metrics.computed_before(self.num_prompt) - 1 for request in self.requests)
        computed = min(num_processed, self.num_prompt)  # exceeded if the prompt was evicted between two requests
        recomputed = sum(request.metrics.recomputed for request in self.requests)
        return msgspec.structs.replace(
            first,
            prompt_tokens=self.num_prompt,
            computed_tokens=computed,
            cached_tokens=self.num_prompt - computed,
            recomputed_tokens=num_processed - computed + recomputed,
        )
