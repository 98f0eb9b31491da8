"""Rows: what the scheduler puts into a batch. A row is a sequence with tokens still to compute, and a reason.

    Generation  samples tokens after a session's text       (a Generate instruction)
    Scoring     reads the logprobs of given next tokens     (one of several for a Select instruction)
    Embedding   pools the states of a session's text        (an Embed instruction, see embedding.py)

Knows: one row's own progress. Must not know: the batch it runs in, the pool, or the wire.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from plait.constrained import Matcher
from plait.runtime.batch.ngram_proposer import NgramProposer
from plait.runtime.kv_cache.page_pool import IntArray
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import TokenLogprob, Usage
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.stop_strings import StopScanner

if TYPE_CHECKING:
    from plait.runtime.scheduler.fairness import ProgramAccount, TenantAccount
    from plait.runtime.scheduler.sessions.session import Session


class RequestMetrics:
    """Counts what a row's prompt cost; see `messages.Usage` for the meaning of each count."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.computed_tokens = self.recomputed = 0
        self.arrival_time = time.monotonic()
        self.admission_time = self.first_token_time = self.compile_s = 0.0
        self._high_water = 0  # tokens [0, high_water) were computed by, or cached for, this row before

    def count_cached(self, num_computed: int) -> None:
        """Notes that [0, num_computed) did not need the model, unless this row computed it before."""
        if num_computed > self._high_water:
            self._high_water = num_computed

    def count_computed(self, start: int, end: int) -> None:
        """Notes that tokens [start, end) go through the model now."""
        if start >= self._high_water and start >= self.num_prompt:
            self._high_water = end
            return
        fresh_start = min(max(start, self._high_water), end)
        self.recomputed += fresh_start - start
        if fresh_start < self.num_prompt:
            self.computed_tokens += min(end, self.num_prompt) - fresh_start
        if end > self._high_water:
            self._high_water = end

    def computed_before(self, end: int) -> int:
        """Prompt tokens before `end` that went through the model, the repeated last one aside."""
        return max(0, self.computed_tokens - max(0, self.num_prompt - end))

    def usage(self, completion_tokens: int, forced_tokens: int = 0, drafted_tokens: int = 0) -> Usage:
        """What the row cost so far; `completion_tokens` were sampled or forced, the one that ended it included."""
        now = time.monotonic()
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_prompt - self.computed_tokens,
            computed_tokens=self.computed_tokens,
            recomputed_tokens=self.recomputed,
            completion_tokens=completion_tokens,
            forced_tokens=forced_tokens,
            drafted_tokens=drafted_tokens,
            queue_s=(self.admission_time or now) - self.arrival_time,
            ttft_s=(self.first_token_time or now) - self.arrival_time,
            wall_s=now - self.arrival_time,
            compile_s=self.compile_s,
        )


class Request:
    """Base of all kinds. Tokens [num_computed, len(seq)) are still to compute, logits from `logits_from` on wanted, or
    the hidden states there for a row that `wants_states`."""

    session: Session
    tenant: TenantAccount  # this and the next are set by `Fairness` when it comes to wait the first time
    account: ProgramAccount
    wants_states = False
    num_draft_tokens = 0  # tokens at the end of `seq` that are guesses, while a step verifies them
    in_flight_slot = -1  # where its next token is among those that the step under way samples; -1: none is

    def __init__(self, session: Session | None, seq: Sequence, call_id: int, logits_from: int) -> None:
        if session is not None:  # None: the model runner's own, before there are sessions
            self.session = session
        self.seq = seq
        self.call_id = call_id
        self.logits_from = logits_from
        self.metrics = RequestMetrics(len(seq))
        self.arrival_index = 0  # set by `Fairness`, too

    @property
    def num_pending(self) -> int:
        return self.seq.tokens.size - self.seq.pages.size

    def may_draft(self) -> bool:
        """Whether to ask it for guesses, asked once a step."""
        return False

    def draft(self, max_draft: int, token_cost: float, first_token_cost: float, cooldown_steps: int) -> None:
        """Adds at most `max_draft` guesses to `seq`, see `NgramProposer.propose`."""

    def expects_more_tokens(self, max_length: int) -> bool:
        """Whether, as far as is known, one more token will be wanted after the one that is awaited."""
        return False

    def drop_draft(self) -> None:
        """Takes the guesses off `seq` again; pages computed for them are the caller's to free."""
        self.seq.tokens.truncate(len(self.seq) - self.num_draft_tokens)
        self.num_draft_tokens = 0


class GenerationRequest(Request):
    """A Generate on its way. `seq` is the session's own sequence and grows as tokens are sampled."""

    def __init__(self, session: Session, call_id: int, params: SamplingParams, seed: int) -> None:
        super().__init__(session, session.seq, call_id, len(session.seq) - 1)
        self.prompt_logprobs: list[TokenLogprob] | None = None
        if params.prompt_logprobs_from is not None:
            self.prompt_logprobs = []
            self.logits_from = min(self.logits_from, max(0, params.prompt_logprobs_from - 1))
        self.params = params
        self.seed = seed
        self.matcher: Matcher | None = None
        self.has_free_text = False  # whether its constraint lets free text end anywhere
        self.ticket: int | None = None  # of its grammar, while that compiles
        self.stop_scanner = StopScanner(params.stop, params.stop_regex) if params.stop or params.stop_regex else None
        self.needs_only_argmax = params.needs_only_argmax
        self.output_start = len(session.seq)  # where the output begins in seq.tokens
        self.byte_ends: list[int] = []  # byte_ends[i]: length of the output's bytes through token i
        self.num_sent = 0  # output tokens already told to the client
        self.num_forced = 0  # output tokens that the constraint left no choice about
        self.num_sampled = 0  # sampling steps taken: with `seed`, what the next one's randomness depends on
        self.needs_output_counts = bool(params.frequency_penalty or params.presence_penalty)
        self.output_counts: dict[int, int] = {}  # for these penalties
        self.unsent_logprobs: list[TokenLogprob] = []
        self.ngram_proposer: NgramProposer | None = None  # what guesses this text's next tokens
        self.num_accepted_drafts = 0  # output tokens that were guessed right
        self.completion_plan: list[int] | None = None  # tokens that make the text whole from here, where that is wanted
        self.forced_queue: list[int] = []  # with params.logprobs: tokens that must come next, to be sampled one by one
        self.is_closing = False  # `forced_queue` is the plan, and the text is whole behind it

    @property
    def num_output(self) -> int:
        return len(self.byte_ends)

    def output_tokens(self, start: int, end: int) -> list[int]:
        """Token ids [start, end) of the output."""
        if end - start == 1:
            return [self.seq.tokens.at(self.output_start + start)]
        token_ids: list[int] = self.seq.tokens.view()[self.output_start + start : self.output_start + end].tolist()
        return token_ids

    def append(self, token: int, token_bytes: bytes) -> None:
        """Adds a sampled token to the text."""
        tokens, ends = self.seq.tokens, self.byte_ends
        self.logits_from = tokens.size
        tokens.append(token)
        ends.append(ends[-1] + len(token_bytes) if ends else len(token_bytes))
        if self.needs_output_counts:
            self.output_counts[token] = self.output_counts.get(token, 0) + 1

    def expects_more_tokens(self, max_length: int) -> bool:
        return (
            self.in_flight_slot >= 0 and min(self.params.max_tokens - self.num_output, max_length - len(self.seq)) > 1
        )

    def may_draft(self) -> bool:
        if self.ngram_proposer is None or not self.num_output or self.num_output < self.params.min_tokens:
            return False
        return self.ngram_proposer.is_due()

    def draft(self, max_draft: int, token_cost: float, first_token_cost: float, cooldown_steps: int) -> None:
        assert self.ngram_proposer is not None
        max_draft = min(max_draft, self.params.max_tokens - self.num_output - 1)
        guesses = self.ngram_proposer.propose(
            self.seq.tokens.view(), max_draft, token_cost, first_token_cost, cooldown_steps
        )
        self.seq.tokens.extend(guesses)
        self.num_draft_tokens = len(guesses)

    def num_safe_tokens(self) -> int:
        """Output tokens that no stop string or pattern can cut off any more."""
        if self.stop_scanner is None:
            return len(self.byte_ends)
        safe, count = self.stop_scanner.num_safe, self.num_output
        while count and self.byte_ends[count - 1] > safe:
            count -= 1
        return count


class ScoringRequest(Request):
    """One of the rows that score a Select: the prompt, then tokens that several choices may share.

    `targets[position]` are the tokens whose logprob after [0, position] is wanted.
    """

    def __init__(
        self,
        session: Session,
        call_id: int,
        seq: Sequence,
        logits_from: int,
        targets: dict[int, tuple[int, ...]],
        selection: Selection,
    ) -> None:
        super().__init__(session, seq, call_id, logits_from)
        self.targets = targets
        self.selection = selection
        self.logprobs: dict[tuple[int, int], float] = {}  # (position, token) -> logprob
        self.top: dict[int, list[tuple[int, float]]] = {}  # position -> the likeliest tokens, where asked for


@dataclass
class Selection:
    """A Select on its way: its choices, the rows that score them, and which row scores choice i (`request_of_choice[i]`).

    `num_prompt`: tokens of the session's text that the choices stand behind; they replace the others.
    """

    session: Session
    call_id: int
    choices: list[list[int]]
    method: str
    num_prompt: int
    top_logprobs: int = 0
    requests: list[ScoringRequest] = field(default_factory=list)
    unconditional_requests: list[ScoringRequest] = field(default_factory=list)
    request_of_choice: list[int] = field(default_factory=list)
    num_unfinished: int = 0

    def usage(self) -> Usage:
        """The prompt once. Every row computes its last token again, for the logits; that counts once as well."""
        first = self.requests[0].metrics.usage(0)
        passes = 1 + sum(request.metrics.computed_before(self.num_prompt) - 1 for request in self.requests)
        computed = min(passes, self.num_prompt)  # more where the prompt was evicted between two rows
        return msgspec.structs.replace(
            first,
            prompt_tokens=self.num_prompt,
            computed_tokens=computed,
            cached_tokens=self.num_prompt - computed,
            recomputed_tokens=passes - computed + sum(request.metrics.recomputed for request in self.requests),
        )


class PlaceholderToken(NamedTuple):
    """A row's one token that the step before has yet to sample: its place among that step's tokens, and the page it
    is to have, which the cache has lent until the token is known."""

    slot: int
    page: int


@dataclass(slots=True, eq=False)  # not frozen: sixteen of them are made for every step, and that takes twice as long
class ScheduledRequest:
    """Tokens [start, start + count) of `request` in this step; logits are wanted for the last `num_logits` of them, or the
    hidden states of the last `num_states`.

    `is_sampled`: the row's last token is among them, so what follows it is known after this step.
    """

    request: Request
    start: int
    count: int
    num_logits: int
    num_draft_tokens: int = 0  # how many of the tokens are guesses; the logits before each tell whether it is right
    is_sampled: bool = True
    placeholder: PlaceholderToken | None = None
    num_states: int = 0

    @property
    def is_still_next(self) -> bool:
        """Whether what this step samples comes right behind the row's text as it is now."""
        return self.start + self.count == self.request.seq.tokens.size

    def token_ids(self) -> IntArray:
        """[count] int32; -1 - slot stands for a token that the step before samples."""
        if self.placeholder is not None:
            return np.array([-1 - self.placeholder.slot], dtype=np.int32)
        return self.request.seq.tokens.view()[self.start : self.start + self.count]

    def single_token_id(self) -> int:
        """`token_ids` of a row that brings one."""
        return self.request.seq.tokens.at(self.start) if self.placeholder is None else -1 - self.placeholder.slot

    def pages(self) -> IntArray:
        """[start + count] int32: where the KV of all tokens up to the last new one is, or will be."""
        pages = self.request.seq.pages.view()[: self.start + self.count]
        return pages if self.placeholder is None else np.append(pages[: self.start], np.int32(self.placeholder.page))


class Batch:
    """The rows of one step, ragged: each brings count >= 1 new tokens."""

    def __init__(self, max_tokens: int, max_logits: int = 1 << 30) -> None:
        self.token_budget = max_tokens
        self.logits_budget = max_logits
        self.set_rows([])

    def set_rows(self, rows: list[ScheduledRequest]) -> None:
        """The batch has these rows and no others; what is left of its budgets stays as it is."""
        self.rows: list[ScheduledRequest] = []
        self.num_tokens = self.num_logits = self.num_states = self.num_draft_tokens = 0
        self.needs_only_argmax = True  # nothing but the likeliest tokens is wanted of its logits
        self.sampled_requests: list[
            tuple[int, GenerationRequest]
        ] = []  # who gets one token, each with the index of its logits
        for each in rows:
            self._append(each)

    def _append(self, each: ScheduledRequest) -> None:
        request, num_logits = each.request, each.num_logits
        self.rows.append(each)
        self.num_tokens += each.count
        self.num_logits += num_logits
        self.num_draft_tokens += each.num_draft_tokens
        self.num_states += each.num_states
        if not isinstance(request, GenerationRequest):
            self.needs_only_argmax &= request.wants_states
        elif each.num_draft_tokens:
            self.needs_only_argmax &= request.needs_only_argmax
        else:
            if not request.needs_only_argmax or num_logits != each.is_sampled:
                self.needs_only_argmax = False
            if each.is_sampled:
                self.sampled_requests.append((self.num_logits - 1, request))

    def add(self, request: Request, start: int, count: int) -> None:
        end = start + count
        num_wanted = max(0, end - max(start, request.logits_from))
        num_logits, num_states = (0, num_wanted) if request.wants_states else (num_wanted, 0)
        is_sampled = end == request.seq.tokens.size
        self._append(
            ScheduledRequest(
                request, start, count, num_logits, request.num_draft_tokens, is_sampled, num_states=num_states
            )
        )
        self.token_budget -= count
        self.logits_budget -= num_logits

    def add_decode(self, request: Request, start: int) -> None:
        """`add` for a row whose one token to compute, at `start`, is its last and no guess."""
        self._append(ScheduledRequest(request, start, 1, 1))
        self.token_budget -= 1
        self.logits_budget -= 1

    def add_placeholder(self, request: Request, page: int) -> None:
        """The token that `request` awaits, and a place for the one behind it."""
        self._append(
            ScheduledRequest(
                request, len(request.seq), 1, 1, placeholder=PlaceholderToken(request.in_flight_slot, page)
            )
        )
        self.token_budget -= 1
        self.logits_budget -= 1

    def tokens_within_budget(self, request: Request, start: int) -> int:
        """How many of the row's tokens from `start` on the two budgets allow."""
        if request.wants_states:
            return self.token_budget
        return min(self.token_budget, max(0, request.logits_from - start) + self.logits_budget)

    def token_ids(self) -> IntArray:
        """[num_tokens] int32: the new tokens of every row, one row after the other; see ScheduledRequest."""
        if self.num_tokens == len(self.rows):  # nearly every step: spare the arrays
            return np.array([each.single_token_id() for each in self.rows], dtype=np.int32)
        return np.concatenate([each.token_ids() for each in self.rows])
