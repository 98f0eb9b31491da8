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
from plait.runtime.messages import TokenLogprob, Usage
from plait.runtime.sampling import SamplingParams
from plait.runtime.scheduler.lookup import PromptLookup
from plait.runtime.scheduler.page_pool import IntArray
from plait.runtime.scheduler.sequence import Sequence
from plait.runtime.scheduler.stops import StopScanner

if TYPE_CHECKING:
    from plait.runtime.scheduler.fairness import Account, Tenant
    from plait.runtime.scheduler.session import Session


class Meter:
    """Counts what a row's prompt cost; see `messages.Usage` for the meaning of each count."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.computed = self.recomputed = 0
        self.arrived = time.monotonic()
        self.admitted = self.first_token = self.compile_s = 0.0
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
            self.computed += min(end, self.num_prompt) - fresh_start
        if end > self._high_water:
            self._high_water = end

    def computed_below(self, end: int) -> int:
        """Prompt tokens before `end` that went through the model, the repeated last one aside."""
        return max(0, self.computed - max(0, self.num_prompt - end))

    def usage(self, completion_tokens: int, forced_tokens: int = 0, drafted_tokens: int = 0) -> Usage:
        """What the row cost so far; `completion_tokens` were sampled or forced, the one that ended it included."""
        now = time.monotonic()
        return Usage(
            prompt_tokens=self.num_prompt,
            cached_tokens=self.num_prompt - self.computed,
            computed_tokens=self.computed,
            recomputed_tokens=self.recomputed,
            completion_tokens=completion_tokens,
            forced_tokens=forced_tokens,
            drafted_tokens=drafted_tokens,
            queue_s=(self.admitted or now) - self.arrived,
            ttft_s=(self.first_token or now) - self.arrived,
            wall_s=now - self.arrived,
            compile_s=self.compile_s,
        )


class Row:
    """Base of all kinds. Tokens [num_computed, len(seq)) are still to compute, logits from `logits_from` on wanted, or
    the hidden states there for a row that `wants_states`."""

    session: Session
    tenant: Tenant  # this and the next are set by `Fairness` when it comes to wait the first time
    account: Account
    wants_states = False
    num_draft = 0  # tokens at the end of `seq` that are guesses, while a step verifies them
    awaited = -1  # where its next token is among those that the step under way samples; -1: none is

    def __init__(self, session: Session | None, seq: Sequence, call_id: int, logits_from: int) -> None:
        if session is not None:  # None: the model runner's own, before there are sessions
            self.session = session
        self.seq = seq
        self.call_id = call_id
        self.logits_from = logits_from
        self.meter = Meter(len(seq))
        self.arrival = 0  # set by `Fairness`, too

    @property
    def num_pending(self) -> int:
        return self.seq.tokens.size - self.seq.pages.size

    def may_draft(self) -> bool:
        """Whether to ask it for guesses, asked once a step."""
        return False

    def draft(self, most: int, price: float, entry: float, pause: int) -> None:
        """Adds at most `most` guesses to `seq`, see `PromptLookup.guess`."""

    def expects_another(self, max_length: int) -> bool:
        """Whether, as far as is known, one more token will be wanted after the one that is awaited."""
        return False

    def drop_draft(self) -> None:
        """Takes the guesses off `seq` again; pages computed for them are the caller's to free."""
        self.seq.tokens.truncate(len(self.seq) - self.num_draft)
        self.num_draft = 0


class Generation(Row):
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
        self.stops = StopScanner(params.stop, params.stop_regex) if params.stop or params.stop_regex else None
        self.is_plainly_greedy = params.is_plainly_greedy
        self.first = len(session.seq)  # where the output begins in seq.tokens
        self.byte_ends: list[int] = []  # byte_ends[i]: length of the output's bytes through token i
        self.num_sent = 0  # output tokens already told to the client
        self.num_forced = 0  # output tokens that the constraint left no choice about
        self.num_sampled = 0  # sampling steps taken: with `seed`, what the next one's randomness depends on
        self.counts_output = bool(params.frequency_penalty or params.presence_penalty)
        self.output_counts: dict[int, int] = {}  # for these penalties
        self.unsent_logprobs: list[TokenLogprob] = []
        self.lookup: PromptLookup | None = None  # what guesses this text's next tokens
        self.num_drafted = 0  # output tokens that were guessed right
        self.plan: list[int] | None = None  # tokens that make the text whole from here, where that is wanted
        self.ahead: list[int] = []  # with params.logprobs: tokens that must come next, to be sampled one by one
        self.is_closing = False  # `ahead` is the plan, and the text is whole behind it

    @property
    def num_output(self) -> int:
        return len(self.byte_ends)

    def output_tokens(self, start: int, end: int) -> list[int]:
        """Token ids [start, end) of the output."""
        if end - start == 1:
            return [self.seq.tokens.at(self.first + start)]
        token_ids: list[int] = self.seq.tokens.view()[self.first + start : self.first + end].tolist()
        return token_ids

    def append(self, token: int, token_bytes: bytes) -> None:
        """Adds a sampled token to the text."""
        tokens, ends = self.seq.tokens, self.byte_ends
        self.logits_from = tokens.size
        tokens.push(token)
        ends.append(ends[-1] + len(token_bytes) if ends else len(token_bytes))
        if self.counts_output:
            self.output_counts[token] = self.output_counts.get(token, 0) + 1

    def expects_another(self, max_length: int) -> bool:
        return self.awaited >= 0 and min(self.params.max_tokens - self.num_output, max_length - len(self.seq)) > 1

    def may_draft(self) -> bool:
        if self.lookup is None or not self.num_output or self.num_output < self.params.min_tokens:
            return False
        return self.lookup.is_due()

    def draft(self, most: int, price: float, entry: float, pause: int) -> None:
        assert self.lookup is not None
        most = min(most, self.params.max_tokens - self.num_output - 1)
        guesses = self.lookup.guess(self.seq.tokens.view(), most, price, entry, pause)
        self.seq.tokens.extend(guesses)
        self.num_draft = len(guesses)

    def num_safe_tokens(self) -> int:
        """Output tokens that no stop string or pattern can cut off any more."""
        if self.stops is None:
            return len(self.byte_ends)
        safe, count = self.stops.num_safe, self.num_output
        while count and self.byte_ends[count - 1] > safe:
            count -= 1
        return count


class Scoring(Row):
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
    """A Select on its way: its choices, the rows that score them, and which row scores choice i (`row_of[i]`).

    `num_prompt`: tokens of the session's text that the choices stand behind; they replace the others.
    """

    session: Session
    call_id: int
    choices: list[list[int]]
    method: str
    num_prompt: int
    top_logprobs: int = 0
    rows: list[Scoring] = field(default_factory=list)
    unconditional_rows: list[Scoring] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)
    num_left: int = 0

    def usage(self) -> Usage:
        """The prompt once. Every row computes its last token again, for the logits; that counts once as well."""
        first = self.rows[0].meter.usage(0)
        passes = 1 + sum(row.meter.computed_below(self.num_prompt) - 1 for row in self.rows)
        computed = min(passes, self.num_prompt)  # more where the prompt was evicted between two rows
        return msgspec.structs.replace(
            first,
            prompt_tokens=self.num_prompt,
            computed_tokens=computed,
            cached_tokens=self.num_prompt - computed,
            recomputed_tokens=passes - computed + sum(row.meter.recomputed for row in self.rows),
        )


class Ahead(NamedTuple):
    """A row's one token that the step before has yet to sample: its place among that step's tokens, and the page it
    is to have, which the cache has lent until the token is known."""

    slot: int
    page: int


@dataclass(slots=True, eq=False)  # not frozen: sixteen of them are made for every step, and that takes twice as long
class BatchRow:
    """Tokens [start, start + count) of `row` in this step; logits are wanted for the last `num_logits` of them, or the
    hidden states of the last `num_states`.

    `is_sampled`: the row's last token is among them, so what follows it is known after this step.
    """

    row: Row
    start: int
    count: int
    num_logits: int
    num_draft: int = 0  # how many of the tokens are guesses; the logits before each tell whether it is right
    is_sampled: bool = True
    ahead: Ahead | None = None
    num_states: int = 0

    @property
    def is_current(self) -> bool:
        """Whether what this step samples comes right behind the row's text as it is now."""
        return self.start + self.count == self.row.seq.tokens.size

    def token_ids(self) -> IntArray:
        """[count] int32; -1 - slot stands for a token that the step before samples."""
        if self.ahead is not None:
            return np.array([-1 - self.ahead.slot], dtype=np.int32)
        return self.row.seq.tokens.view()[self.start : self.start + self.count]

    def only_token(self) -> int:
        """`token_ids` of a row that brings one."""
        return self.row.seq.tokens.at(self.start) if self.ahead is None else -1 - self.ahead.slot

    def pages(self) -> IntArray:
        """[start + count] int32: where the KV of all tokens up to the last new one is, or will be."""
        pages = self.row.seq.pages.view()[: self.start + self.count]
        return pages if self.ahead is None else np.append(pages[: self.start], np.int32(self.ahead.page))


class Batch:
    """The rows of one step, ragged: each brings count >= 1 new tokens."""

    def __init__(self, max_tokens: int, max_logits: int = 1 << 30) -> None:
        self.budget = max_tokens
        self.logits_budget = max_logits
        self.keep([])

    def keep(self, rows: list[BatchRow]) -> None:
        """The batch has these rows and no others; what is left of its budgets stays as it is."""
        self.rows: list[BatchRow] = []
        self.num_tokens = self.num_logits = self.num_states = self.num_drafts = 0
        self.asks_for_likeliest = True  # nothing but the likeliest tokens is wanted of its logits
        self.sampled: list[tuple[int, Generation]] = []  # who gets one token, each with the index of its logits
        for each in rows:
            self._take(each)

    def _take(self, each: BatchRow) -> None:
        row, num_logits = each.row, each.num_logits
        self.rows.append(each)
        self.num_tokens += each.count
        self.num_logits += num_logits
        self.num_drafts += each.num_draft
        self.num_states += each.num_states
        if not isinstance(row, Generation):
            self.asks_for_likeliest &= row.wants_states
        elif each.num_draft:
            self.asks_for_likeliest &= row.is_plainly_greedy
        else:
            if not row.is_plainly_greedy or num_logits != each.is_sampled:
                self.asks_for_likeliest = False
            if each.is_sampled:
                self.sampled.append((self.num_logits - 1, row))

    def add(self, row: Row, start: int, count: int) -> None:
        end = start + count
        num_wanted = max(0, end - max(start, row.logits_from))
        num_logits, num_states = (0, num_wanted) if row.wants_states else (num_wanted, 0)
        is_sampled = end == row.seq.tokens.size
        self._take(BatchRow(row, start, count, num_logits, row.num_draft, is_sampled, num_states=num_states))
        self.budget -= count
        self.logits_budget -= num_logits

    def add_next(self, row: Row, start: int) -> None:
        """`add` for a row whose one token to compute, at `start`, is its last and no guess."""
        self._take(BatchRow(row, start, 1, 1))
        self.budget -= 1
        self.logits_budget -= 1

    def add_ahead(self, row: Row, page: int) -> None:
        """The token that `row` awaits, and a place for the one behind it."""
        self._take(BatchRow(row, len(row.seq), 1, 1, ahead=Ahead(row.awaited, page)))
        self.budget -= 1
        self.logits_budget -= 1

    def room_for(self, row: Row, start: int) -> int:
        """How many of the row's tokens from `start` on the two budgets allow."""
        if row.wants_states:
            return self.budget
        return min(self.budget, max(0, row.logits_from - start) + self.logits_budget)

    def token_ids(self) -> IntArray:
        """[num_tokens] int32: the new tokens of every row, one row after the other; see BatchRow."""
        if self.num_tokens == len(self.rows):  # nearly every step: spare the arrays
            return np.array([each.only_token() for each in self.rows], dtype=np.int32)
        return np.concatenate([each.token_ids() for each in self.rows])
