"""Runs the search of `exact` requests: moves each request's sequence and matcher to the prefix that the search names.

The request's tokens are those of the prefix whose probabilities are computed next, and become the value at the end.
Tokens that the constraint forces behind the prefix are computed in the same step, since the search probably follows.
Nothing is sent before. Where the search leaves a prefix for another one, the KV of their common part stays.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Hashable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import msgspec
import numpy as np

from plait.constrained import Matcher, Vocabulary
from plait.constrained.specs import Spec
from plait.runtime.arrays import Float64Array, IntArray
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import ExactInfo
from plait.runtime.sampling.exact_search import ExactSearch, NothingAdmissible, Path, SearchLimitReached
from plait.runtime.sampling.prefix_tree import PrefixTree, PrefixTrees
from plait.runtime.sampling_params import fields_of_stages
from plait.runtime.scheduler.finish_info import FinishInfo
from plait.runtime.scheduler.token_mask import TokenMaskBuilder

MAX_FORCED = 16  # forced tokens that are computed in one step
LIMIT_REACHED = (
    "no value was drawn within {} model steps: the constraint allows too little of what the model would write here. "
    "Ask for the format in the prompt, or leave exact out"
)
NOTHING_ADMISSIBLE = "no value of the constraint has a probability above 0 within max_tokens and the sampling filters"


@dataclass
class _State:
    """One search. `path`: the output tokens whose probabilities it waits for."""

    search: ExactSearch
    constraint: MatcherConstraint
    tree: PrefixTree
    path: Path = ()
    rows: dict[Path, Float64Array] = field(default_factory=dict)  # probabilities that the search has not taken yet

    def info(self) -> ExactInfo:
        """Returns what the reply of a finished request reports about its search."""
        search, tree = self.search, self.tree
        return ExactInfo(search.logprob, min(tree.found_mass, tree.root.mass), tree.root.mass, search.num_model_steps)


class ExactSampling:
    """The searches of all exact requests, and the trees that they share. `max_length`: tokens a session can hold."""

    def __init__(
        self, vocabulary: Vocabulary, cache: PrefixCache, token_masks: TokenMaskBuilder, max_length: int
    ) -> None:
        self._vocabulary, self._cache, self._masks, self._max_length = vocabulary, cache, token_masks, max_length
        self._trees = PrefixTrees()
        self._states: WeakKeyDictionary[GenerationRequest, _State] = WeakKeyDictionary()

    def start(self, request: GenerationRequest, matcher: Matcher) -> FinishInfo | None:
        """Starts the search of a request; see `feed`."""
        assert request.exact_spec is not None
        max_tokens = request.num_tokens_left(self._max_length)
        tree = self._trees.get(request.owner.tenant, _tree_key(request, request.exact_spec, max_tokens))
        constraint = MatcherConstraint(matcher, self._vocabulary, self._masks, max_tokens)
        self._states[request] = state = _State(ExactSearch(tree, constraint, request.seed), constraint, tree)
        return self._advance(request, state)

    def add_probabilities(self, request: GenerationRequest, first: int, rows: list[Float64Array]) -> None:
        """Takes the probabilities [V] after the request's tokens from position `first` on, without the constraint."""
        tokens = request.output_tokens(0, request.num_output)
        for position, row in enumerate(rows, start=first):
            self._states[request].rows[tuple(tokens[: position + 1 - request.output_start])] = row

    def advance(self, request: GenerationRequest) -> FinishInfo | None:
        """Goes on with a search whose probabilities were added.

        Returns a FinishInfo when the request's tokens are the value. Raises RuntimeError if the search fails.
        """
        request.metrics.first_token_time = request.metrics.first_token_time or time.monotonic()
        request.num_sampled += 1
        return self._advance(request, self._states[request])

    def _advance(self, request: GenerationRequest, state: _State) -> FinishInfo | None:
        try:
            path = state.path if state.rows else state.search.advance()
            while path is not None and (row := state.rows.pop(path, None)) is not None:
                state.search.feed(row * state.constraint.allowed(path))
                path = state.search.advance()
        except SearchLimitReached:
            raise RuntimeError(LIMIT_REACHED.format(state.search.num_model_steps)) from None
        except NothingAdmissible:
            raise RuntimeError(NOTHING_ADMISSIBLE) from None
        state.rows.clear()
        if path is not None:
            state.path = path
            self._move_to(request, path, state.constraint.forced(path))
            return None
        value = state.search.value
        assert value is not None
        request.exact_info = state.info()
        end_token = value[-1] if value and value[-1] in self._vocabulary.eos_ids else None
        self._move_to(request, value if end_token is None else value[:-1], None)
        return FinishInfo("stop", end_token)

    def _move_to(self, request: GenerationRequest, path: Path, forced: Path | None) -> None:
        """Makes `path` and `forced` the request's output; tokens from the last of `path` on are left to be computed.

        With None, `path` is the value, and nothing is left to be computed.
        """
        first_wanted = request.output_start + len(path) - (forced is not None)
        path = path + (forced or ())
        current = request.output_tokens(0, request.num_output)
        common = common_length(current, path)
        length = request.output_start + common
        request.seq.tokens.truncate(length)
        del request.byte_ends[common:]
        for token in path[common:]:
            request.append(token, len(self._vocabulary.token_bytes[token]))
        num_kept = min(length, first_wanted)
        if request.seq.is_locked and request.seq.num_computed > num_kept:  # else its admission to a batch does this
            self._cache.truncate(request.seq, num_kept)
        request.logits_from = min(first_wanted, len(request.seq) - 1)


class MatcherConstraint:
    """The constraint of one request as the search asks for it: a matcher that moves between prefixes.

    A value has at most `max_tokens` tokens. It ends with an end token, or where the matcher allows nothing else.
    """

    def __init__(
        self, matcher: Matcher, vocabulary: Vocabulary, token_masks: TokenMaskBuilder, max_tokens: int
    ) -> None:
        self._matcher, self._masks, self._max_tokens = matcher, token_masks, max_tokens
        self._eos_ids, self._vocab_size = list(vocabulary.eos_ids), len(vocabulary)
        self._words: IntArray = np.zeros(token_masks.num_words, dtype=np.int32)
        self._accepted: list[int] = []

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

    def allowed(self, path: Path) -> Float64Array:
        """Returns [V]: 1.0 for tokens that may follow, else 0.0."""
        self._move_to(path)
        self._matcher.fill_mask(self._words)
        allowed = np.unpackbits(self._words.view(np.uint8), count=self._vocab_size, bitorder="little")
        if len(path) >= self._max_tokens:
            only_end = np.zeros_like(allowed)
            only_end[self._eos_ids] = allowed[self._eos_ids]
            allowed = only_end
        return allowed.astype(np.float64)

    def forced(self, path: Path) -> Path:
        """Returns the tokens that the matcher forces after `path`, as the tokenizer spells them."""
        self._move_to(path)
        num_left = max(0, min(MAX_FORCED, self._max_tokens - len(path)))
        return tuple(self._matcher.forced_tokens()[:num_left])

    def _move_to(self, path: Path) -> None:
        common = common_length(self._accepted, path)
        if common < len(self._accepted):
            self._matcher.rollback(len(self._accepted) - common)
            del self._accepted[common:]
        for token in path[common:]:
            if not self._matcher.accept(token):
                raise RuntimeError(f"the constraint refused token {token}, which its own mask allowed")
            self._accepted.append(token)


def common_length(a: list[int], b: Path) -> int:
    """How many tokens two texts begin with alike."""
    limit = min(len(a), len(b))
    return next((i for i in range(limit) if a[i] != b[i]), limit)


def _tree_key(request: GenerationRequest, spec: Spec, max_tokens: int) -> Hashable:
    """Names everything that the probabilities and the admissible texts depend on."""
    params = request.params
    prompt = hashlib.sha256(request.seq.tokens.view().tobytes()).digest()
    constraint = hashlib.sha256(msgspec.msgpack.encode(spec)).digest()
    names = fields_of_stages(type(params), "logits", "filter", "draw")
    values = {name: getattr(params, name) for name in names if name != "seed"}
    values["logit_bias"] = tuple(sorted(params.logit_bias.items()))
    return (request.seq.namespace, prompt, constraint, tuple(values.items()), max_tokens)
