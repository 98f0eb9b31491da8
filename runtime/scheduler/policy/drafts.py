"""Drafts: which tokens a step verifies beside the next one, where they are expected to save time.

A draft is a chain of guesses; see `drafts/proposer.py`. It ends where its tokens are no longer likely enough to be
accepted to pay for their rows of the step, and it is dropped if it is not expected to save time as a whole.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from plait.constrained import GrammarError
from plait.runtime.batch.batch import Batch
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.config import DraftSource
from plait.runtime.drafts.draft import Draft
from plait.runtime.drafts.draft_account import PRIOR_WEIGHT
from plait.runtime.drafts.earlier_texts import EarlierTexts, EarlierTextsProposer
from plait.runtime.drafts.model_guesses import ModelGuesses
from plait.runtime.drafts.prompt_lookup import PromptLookup
from plait.runtime.drafts.proposer import SHARED_DECAY, AcceptanceRates, Proposer, RatedGuess, TextProposers
from plait.runtime.kv_cache.radix_node import CacheNamespace
from plait.runtime.scheduler.draft_walk import DraftWalk
from plait.runtime.scheduler.error_log import ErrorLog
from plait.runtime.scheduler.policy.guessing_model import AskedText, GuessingModel
from plait.runtime.scheduler.token_mask import TokenMaskBuilder

MAX_DRAFTING_TOKENS = 32  # sum of running requests and draft tokens in a step with drafts
MAX_DRAFT_TOKENS = 24  # of one request
MAX_NAMESPACES = 64  # whose texts and rates are kept; half a MB each
MAX_WALK_S = 0.005  # processor time after which a draft ends, for constraints whose masks take long

# The cost of a draft token relative to a decode token, multiplied by sqrt(batch size): the larger the batch, the less
# another row gains from sharing the read of the weights. Measured: 0.1 with 1 request, 0.5 with 16.
DRAFT_TOKEN_COST = 0.12
MAX_DRAFT_TOKEN_COST = 0.5  # no drafts at this cost or above

Given = TypeVar("Given")


def may_draft(num_running: int) -> bool:
    """Whether any draft may save time beside so many running requests."""
    return _supposed_costs(num_running)[0] < MAX_DRAFT_TOKEN_COST


def _supposed_costs(num_running: int) -> tuple[float, float]:
    """Returns what a draft token is supposed to cost, and the first one in addition, relative to a decode token.

    The first token of a step beside one of each row costs as much as two or three further ones.
    """
    cost = DRAFT_TOKEN_COST * math.sqrt(num_running)
    return cost, cost * (2 - 1 / max(1, num_running))


class _Shared:
    """What the texts of one namespace share."""

    def __init__(self) -> None:
        self.texts = EarlierTexts()
        self.lookup_rates = AcceptanceRates(PromptLookup.prior, SHARED_DECAY)
        self.earlier_rates = AcceptanceRates(EarlierTextsProposer.prior, SHARED_DECAY)
        self.model_rates = AcceptanceRates(ModelGuesses.prior, SHARED_DECAY, PRIOR_WEIGHT, is_mixed=True)


class PlannedDraft(NamedTuple):
    """A draft, and its cost relative to a step without one."""

    draft: Draft
    cost: float


# Ends with the draft, or None if it does not pay. Before that, it yields whenever the draft model is to guess.
DraftBuild = Generator[AskedText, None, PlannedDraft | None]


class Drafter:
    """Makes the drafts of all requests. sources: the proposers; model: the draft model. Without any, there are none."""

    def __init__(
        self,
        sources: Sequence[DraftSource],
        token_masks: TokenMaskBuilder,
        max_length: int,
        error_log: ErrorLog,
        model: GuessingModel[Any] | None = None,
    ) -> None:
        self._error_log, self.model = error_log, model
        self._sources, self._token_masks, self._max_length = sources, token_masks, max_length
        self._shared: OrderedDict[CacheNamespace, _Shared] = OrderedDict()  # the namespace used last at the end
        self._planned: dict[GenerationRequest, PlannedDraft | None] = {}  # of the step that is being built

    def begin(self, request: GenerationRequest) -> None:
        """Gives a request its proposers. Values that are drawn as a whole (`exact`, `particles`) have no drafts."""
        if request.params.samples_sequence or not (self._sources or self.model):
            return
        model = None if self.model is None else self.model.guesses_for(request)
        shared = self._shared_of(request.seq.namespace)
        proposers: list[tuple[Proposer, AcceptanceRates]] = []
        if "prompt" in self._sources:
            proposers.append((PromptLookup(), shared.lookup_rates))
        if "earlier" in self._sources:
            earlier = EarlierTextsProposer(shared.texts, request.constraint_hash, request.output_start)
            proposers.append((earlier, shared.earlier_rates))
        if model is not None:
            proposers.append((model, shared.model_rates))
        if proposers:
            request.proposers = TextProposers(proposers, model)

    def _shared_of(self, namespace: CacheNamespace) -> _Shared:
        shared = self._shared.get(namespace)
        if shared is None:
            self._make_room()
            shared = self._shared[namespace] = _Shared()
        self._shared.move_to_end(namespace)
        return shared

    def _make_room(self) -> None:
        """Forgets the namespace used longest ago of the tenant with the most, if there are too many."""
        if len(self._shared) >= MAX_NAMESPACES:
            counts = Counter(key.tenant for key in self._shared)
            self._forget(next(key for key in self._shared if counts[key.tenant] == max(counts.values())))

    def _forget(self, namespace: CacheNamespace) -> None:
        self._shared.pop(namespace).texts.close()

    def flush(self, tenant: str | None) -> None:
        """Forgets the texts of a tenant; None: of all."""
        for namespace in [key for key in self._shared if tenant is None or key.tenant == tenant]:
            self._forget(namespace)
        if self.model is not None:
            self.model.flush(tenant)

    def end(self, request: GenerationRequest) -> None:
        """Takes what the output of a request tells, which has ended."""
        if request.proposers is not None:
            request.proposers.accept(request.seq.tokens.view(), request.forced_positions)

    def plan(self, batch: Batch, requests: Sequence[GenerationRequest], num_running: int) -> None:
        """Makes the drafts of requests for which a draft model guesses, so that each forward pass of it serves all."""
        self._planned.clear()
        if self.model is not None:
            self.model.account.begin_step()
            asking = [request for request in requests if request.proposers is not None and request.proposers.model]
            self._finish({request: self._draft(batch, request, num_running, len(asking)) for request in asking})

    def add_draft(self, batch: Batch, request: GenerationRequest, num_running: int) -> None:
        """Appends draft tokens to the request: as many as fit the step and are expected to save time."""
        if request not in self._planned:
            self._finish({request: self._draft(batch, request, num_running)})
        planned = self._planned.pop(request)
        if planned is None or len(planned.draft.tokens) > self._max_tokens(batch, request, num_running):
            return
        assert request.proposers is not None
        request.draft, request.proposers.draft_cost = planned
        request.seq.tokens.extend(planned.draft.tokens)

    def record_step(self, batch: Batch, seconds: float) -> None:
        """Takes the time of a step that was computed, before its results are committed."""
        if self.model is None or not batch.rows:
            return
        num_guessed = 0
        for _, request in batch.drafted:
            if request.draft is not None and request.proposers is not None and request.proposers.model is not None:
                start = len(request.seq) - len(request.draft.tokens)
                num_guessed += request.proposers.model.num_guessed(request.draft.tokens, start)
        num_rows, num_drafted = len(batch.rows), batch.num_draft_tokens
        each, first = _supposed_costs(num_rows)
        self.model.account.record_step(
            num_rows, batch.num_tokens, num_drafted, num_guessed, first + each * num_drafted, seconds
        )
        self._ask(self.model, self.model.observe, batch)
        self.model.keep_verdict()

    def close(self) -> None:
        """Keeps what was measured of the draft model."""
        if self.model is not None:
            self.model.close()

    def _finish(self, builds: dict[GenerationRequest, DraftBuild]) -> None:
        """Runs the builds side by side and keeps their drafts in `_planned`."""
        while builds:
            asked: list[AskedText] = []
            for request, build in list(builds.items()):
                try:
                    asked.append(next(build))
                except StopIteration as end:
                    self._planned[request] = end.value
                    del builds[request]
            if asked:
                assert self.model is not None
                self._ask(self.model, self.model.guess, asked)

    def _ask(self, model: GuessingModel[Any], method: Callable[[Given], None], given: Given) -> None:
        """Calls a method of the draft model. After an error, requests go on without it."""
        try:
            method(given)
        except Exception as error:
            model.has_failed = True
            self._error_log.record(error)

    def _max_tokens(self, batch: Batch, request: GenerationRequest, num_running: int) -> int:
        """Returns how many draft tokens of the request fit the step."""
        num_free = MAX_DRAFTING_TOKENS - num_running - batch.num_draft_tokens
        num_unscheduled = num_running - len(batch.rows)
        return min(
            -(-num_free // max(1, num_unscheduled)),
            MAX_DRAFT_TOKENS,
            batch.tokens_within_budget(request, request.seq.num_computed) - request.num_pending,
            request.num_tokens_left(self._max_length) - 1,
        )

    def _draft(self, batch: Batch, request: GenerationRequest, num_running: int, num_beside: int = 1) -> DraftBuild:
        """Returns the build of the request's draft, one of `num_beside` at once.

        An error in it leaves the request without drafts.
        """
        assert request.proposers is not None
        factor = 1.0 if self.model is None else self.model.account.row_cost_factor(num_running)
        token_cost, first_token_cost = (factor * cost for cost in _supposed_costs(num_running))
        max_tokens = self._max_tokens(batch, request, num_running)
        request.proposers.accept(request.seq.tokens.view(), request.forced_positions)
        if max_tokens <= 0:
            return None
        is_first = batch.num_tokens == len(batch.rows) and request.num_pending == 1
        first_token_cost = first_token_cost / num_beside if is_first else 0.0
        try:
            draft = yield from self._build(request, max_tokens, token_cost, first_token_cost, num_running)
        except Exception as error:
            # A constraint raises again where the next token is sampled, and ends its call there, without a draft.
            if not isinstance(error, (RuntimeError, GrammarError)):
                self._error_log.record(error)
            request.proposers = None
            return None
        model = request.proposers.model
        cost = 1 + (0.0 if model is None else model.asked_cost)
        if draft is None:
            if model is None or self.model is None or self.model.account.is_resting:
                request.proposers.cooldown = num_running // 2  # about two requests look for a draft in each step
            request.proposers.draft_cost = cost if cost > 1 else 0.0
            return None
        return PlannedDraft(draft, cost + first_token_cost + token_cost * len(draft.tokens))

    def _build(
        self,
        request: GenerationRequest,
        max_tokens: int,
        token_cost: float,
        first_token_cost: float,
        num_running: int,
    ) -> Generator[AskedText, None, Draft | None]:
        """Returns the draft, or None if it does not pay.

        A draft token costs `token_cost`, and the first one `first_token_cost` in addition, relative to the value of one
        decode step. The rows of forced tokens cost time only if they are refused, as each is computed anyway.
        """
        assert request.proposers is not None
        speed, model = request.proposers.speed(request.num_sampled), request.proposers.model
        token_cost, first_token_cost = speed * token_cost, speed * first_token_cost
        if model is not None and self.model is not None:
            model.begin_step(num_running, speed, token_cost, first_token_cost)
            model.is_due = model.is_due and self.model.may_guess(request, num_running)
        text, spent_s, probability, gain = request.seq.tokens, 0.0, 1.0, -first_token_cost
        length, positions = len(text), list[tuple[int, list[RatedGuess], int]]()
        start_s = time.thread_time()
        with DraftWalk(request, self._token_masks) as walk:
            while len(walk.draft.tokens) < max_tokens and spent_s + time.thread_time() - start_s < MAX_WALK_S:
                position = len(text)
                guesses = request.proposers.guesses(text.view(), walk.forced_end)
                token, rate = _best_guess(walk, guesses)
                if model is not None and model.is_worth_asking(probability, rate, token_cost):
                    spent_s += time.thread_time() - start_s
                    yield AskedText(request, model, walk.mask)
                    start_s = time.thread_time()
                    model.count_asked(position)
                    guesses = request.proposers.guesses(text.view(), walk.forced_end)
                    token, rate = _best_guess(walk, guesses)
                probability *= rate
                num_added = 0
                if probability >= token_cost:
                    num_added = walk.append(token, max_tokens - len(walk.draft.tokens))
                positions.append((position, guesses, token if num_added else -1))
                if not num_added:
                    break
                gain += probability - token_cost * (1 + (num_added - 1) * (1 - probability))
            draft = walk.finish()
        pays = gain > 0 and bool(draft.tokens)
        for position, guesses, drafted in positions if pays else positions[:1]:
            request.proposers.remember(position, guesses, drafted if pays else -1)
        assert len(text) == length
        return draft if pays else None


def _best_guess(walk: DraftWalk, guesses: list[RatedGuess]) -> tuple[int, float]:
    """Returns the allowed token that is most likely next, and how likely it is; (-1, 0.0) without any."""
    if walk.forced_queue:
        return walk.forced_queue[0], 1.0
    return next(((guess.token, guess.rate) for guess in guesses if walk.allows(guess.token)), (-1, 0.0))
