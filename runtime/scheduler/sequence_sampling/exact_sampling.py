"""Runs the searches of `exact` calls: requests that compute the prefixes which a search names.

Tokens that the constraint forces behind a prefix are computed in the same step, since the search probably follows.
Nothing is sent before the value is found. Where the search leaves a prefix for another one, its KV stays cached.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from plait.constrained import Grammar, Matcher, Vocabulary
from plait.constrained.specs import Spec
from plait.runtime.arrays import Float32Array, IntArray
from plait.runtime.batch.request import FinishInfo, GenerationRequest
from plait.runtime.call_reports import ExactInfo
from plait.runtime.sampling.exact_search import ExactSearch, NothingAdmissible, Path, SearchLimitReached
from plait.runtime.sampling.prefix_tree import AllowedTokens, PrefixTree, PrefixTrees
from plait.runtime.sampling_params import MAX_SEARCH_ROWS
from plait.runtime.sampling_table import fields_of_stages
from plait.runtime.scheduler.sequence_sampling.prefix_requests import PrefixRequest, PrefixRequests, common_length
from plait.runtime.scheduler.token_mask import TokenMaskBuilder

MAX_FORCED = 16  # forced tokens that are computed in one step
LONG_TOKEN = 4  # bytes of a token to come at least, where it is asked how many are missing
MAX_KEPT_ROWS = 2 * MAX_FORCED  # rows of one search that it has not taken
LIMIT_REACHED = (
    "no value was drawn within {} model steps: the constraint allows too little of what the model would write here. "
    "Ask for the format in the prompt, or leave exact out"
)
NOTHING_ADMISSIBLE = "no value of the constraint has a probability above 0 within max_tokens and the sampling filters"


@dataclass
class _State:
    """One search. `requests`: those in the batch, by their path."""

    search: ExactSearch
    constraint: MatcherConstraint
    tree: PrefixTree
    requests: dict[Path, PrefixRequest] = field(default_factory=dict)
    rows: dict[Path, Float32Array] = field(default_factory=dict)  # probabilities that the search has not taken yet

    def info(self) -> ExactInfo:
        """Returns what the reply of a finished call reports about its search."""
        search, tree = self.search, self.tree
        return ExactInfo(search.logprob, min(tree.found_mass, tree.root.mass), tree.root.mass, search.num_model_steps)


class ExactSampling:
    """The searches of all exact calls, and the trees that they share. `max_length`: tokens a session can hold."""

    def __init__(
        self, requests: PrefixRequests, vocabulary: Vocabulary, token_masks: TokenMaskBuilder, max_length: int
    ) -> None:
        self._requests = requests
        self._vocabulary, self._masks, self._max_length = vocabulary, token_masks, max_length
        self._trees = PrefixTrees()
        self._states: WeakKeyDictionary[GenerationRequest, _State] = WeakKeyDictionary()

    def start(self, call: GenerationRequest, grammar: Grammar) -> FinishInfo | None:
        """Starts a call whose grammar is compiled. Returns a FinishInfo if its value is known at once.

        Raises RuntimeError if the search fails.
        """
        assert call.exact_spec is not None
        max_tokens = call.num_tokens_left(self._max_length)
        tree = self._trees.get(call.owner.tenant, _tree_key(call, call.exact_spec, max_tokens))
        constraint = MatcherConstraint(grammar.matcher(), self._vocabulary, self._masks, max_tokens)
        search = ExactSearch(tree, constraint, call.seed, MAX_SEARCH_ROWS)
        self._states[call] = state = _State(search, constraint, tree)
        return self._advance(call, state, [])

    def advance(self, request: PrefixRequest) -> FinishInfo | None:
        """Goes on with the search of a call one of whose requests has all its probabilities.

        Returns a FinishInfo when the call's tokens are the value. Raises RuntimeError if the search fails.
        """
        call, state = request.call, self._states[request.call]
        call.metrics.first_token_time = call.metrics.first_token_time or time.monotonic()
        call.num_sampled += 1
        del state.requests[request.path]
        tokens = request.path + request.forced
        rows = request.take_rows()
        state.rows |= {tokens[: len(request.path) + index]: row for index, row in enumerate(rows)}
        return self._advance(call, state, [request])

    def _advance(self, call: GenerationRequest, state: _State, idle: list[PrefixRequest]) -> FinishInfo | None:
        """Takes the rows that the search needs, and gives what it needs next to the `idle` requests and new ones."""
        search = state.search
        try:
            search.advance()
            while known := [path for path in search.pending if path in state.rows]:
                for path in known:
                    allowed = state.constraint.allowed(path)
                    search.feed(path, AllowedTokens.of(state.rows.pop(path), allowed))
                search.advance()
        except SearchLimitReached:
            raise RuntimeError(LIMIT_REACHED.format(search.num_model_steps)) from None
        except NothingAdmissible:
            raise RuntimeError(NOTHING_ADMISSIBLE) from None
        if search.value is not None:
            call.exact_info = state.info()
            return self._requests.finish(call, search.value)
        for path in list(state.rows)[: -MAX_KEPT_ROWS or None]:
            del state.rows[path]
        new = [path for path in search.pending if path not in state.requests]
        forced = list(map(state.constraint.forced, new))  # before any request is made, which an error would leave
        for path, tokens in zip(new, forced, strict=True):
            state.requests[path] = self._compute(call, path, tokens, idle)
        for request in idle:
            self._requests.free(request)
        call.prefix_requests = list(state.requests.values())
        return None

    def _compute(self, call: GenerationRequest, path: Path, forced: Path, idle: list[PrefixRequest]) -> PrefixRequest:
        """Gives a prefix to the idle request that has most of it, or to a new one."""
        if not idle:
            if not call.prefix_requests:
                return self._requests.add_first(call, path, forced)
            request = self._requests.fork(call, call.seq, path, forced)
            self._requests.scheduler.add(request)
            return request
        request = max(idle, key=lambda request: common_length(request.path + request.forced, path))
        idle.remove(request)
        self._requests.move(request, path, forced)
        return request


class MatcherConstraint:
    """The constraint of one request as the search asks for it: a matcher that moves between prefixes.

    A value has at most `max_tokens` tokens. It ends with an end token, or where the matcher allows nothing else.
    """

    forces_unlikely = False  # whether `forced` also has tokens behind a text that the tokenizer would spell otherwise

    def __init__(
        self, matcher: Matcher, vocabulary: Vocabulary, token_masks: TokenMaskBuilder, max_tokens: int
    ) -> None:
        self._matcher, self._masks, self._max_tokens = matcher, token_masks, max_tokens
        self._eos_ids, self._vocab_size = list(vocabulary.eos_ids), len(vocabulary)
        self._token_bytes, self._encode = vocabulary.token_bytes, vocabulary.encode
        self._words: IntArray = np.zeros(token_masks.num_words, dtype=np.int32)
        self._accepted: list[int] = []
        self._num_bytes: int | None = None  # that a text has at least; None until it is asked for

    def is_end(self, path: Path) -> bool:
        """See `Constraint`."""
        if path and path[-1] in self._eos_ids:
            return True
        self._move_to(path)
        return self._masks.allows_only_eos(self._matcher)

    def is_dead(self, path: Path) -> bool:
        """See `Constraint`."""
        if len(path) < self._max_tokens:
            return False
        self._move_to(path)
        return not self._matcher.is_accepting

    def num_missing(self, path: Path) -> float:
        """See `Constraint`. A text is taken to have at least the bytes of the completion of the empty one."""
        if self._num_bytes is None:
            self._move_to(())
            self._num_bytes = self._size(self._matcher.completion(self._max_tokens) or [])
        size = self._size(path)
        return max(0, self._num_bytes - size) / max(LONG_TOKEN, size / max(1, len(path)))

    def _size(self, tokens: Sequence[int]) -> int:
        return sum(len(self._token_bytes[token]) for token in tokens)

    def allowed(self, path: Path) -> npt.NDArray[np.bool_]:
        """Returns [V]: whether each token may follow."""
        self._move_to(path)
        self._matcher.fill_mask(self._words)
        allowed = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
        if len(path) >= self._max_tokens:
            only_end = np.zeros_like(allowed)
            only_end[self._eos_ids] = allowed[self._eos_ids]
            allowed = only_end
        return allowed.view(np.bool_)

    def forced(self, path: Path) -> Path:
        """Returns the tokens that the matcher forces after `path`, as the tokenizer spells them.

        Empty if the tokenizer would spell the last token and the first forced one otherwise: a model hardly ever writes
        the text so, and computing all of it would be a waste.
        """
        self._move_to(path)
        num_left = max(0, min(MAX_FORCED, self._max_tokens - len(path)))
        forced = tuple(self._matcher.forced_tokens()[:num_left])
        if not forced or not path or self.forces_unlikely:
            return forced
        return forced if self.is_canonical_pair(path[-1], forced[0]) else ()

    def is_canonical_pair(self, token: int, following: int) -> bool:
        """Whether the tokenizer spells the text of two tokens with the first of them."""
        text = (self._token_bytes[token] + self._token_bytes[following]).decode("utf-8", "ignore")
        return list(self._encode(text)[:1]) == [token]

    def _move_to(self, path: Path) -> None:
        common = common_length(self._accepted, path)
        if common < len(self._accepted):
            self._matcher.rollback(len(self._accepted) - common)
            del self._accepted[common:]
        for token in path[common:]:
            if not self._matcher.accept(token):
                raise RuntimeError(f"the constraint refused token {token}, which its own mask allowed")
            self._accepted.append(token)


def _tree_key(request: GenerationRequest, spec: Spec, max_tokens: int) -> Hashable:
    """Names everything that the probabilities and the admissible texts depend on."""
    params = request.params
    prompt = hashlib.sha256(request.seq.tokens.view().tobytes()).digest()
    constraint = hashlib.sha256(msgspec.msgpack.encode(spec)).digest()
    names = fields_of_stages(type(params), "logits", "filter", "draw")
    values = {name: getattr(params, name) for name in names if name != "seed"}
    values["logit_bias"] = tuple(sorted(params.logit_bias.items()))
    return (request.seq.namespace, prompt, constraint, tuple(values.items()), max_tokens)
