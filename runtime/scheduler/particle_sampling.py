"""Runs the particles of calls with `particles`: a request in the batch for each prefix that the particles stand at.

The requests share their prefixes in the radix tree, as forks do. A request leaves the batch while others of its call
are still computed, so that it holds no row and calls cannot wait for each other. Its tokens are drawn as soon as its
probabilities are there, so that a step does the work of its own rows only; the last request of a call's step also
resamples. Nothing is sent before the value is drawn.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from plait.constrained import Grammar, Matcher, Vocabulary
from plait.runtime.arrays import Float64Array
from plait.runtime.batch.request import GenerationRequest
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.messages import ParticlesInfo
from plait.runtime.sampling.particle_filter import NoParticleLeft, ParticleFilter, ParticleNode, Path
from plait.runtime.scheduler.batching import BatchScheduler
from plait.runtime.scheduler.exact_sampling import MatcherConstraint, common_length
from plait.runtime.scheduler.finish_info import FinishInfo
from plait.runtime.scheduler.token_mask import TokenMaskBuilder

NO_PARTICLE_LEFT = (
    "no particle reached a complete value within max_tokens and the sampling filters; ask for the format in the "
    "prompt, or raise particles or max_tokens"
)


class ParticleRequest(GenerationRequest):
    """Computes the probabilities after one prefix of `call`, which is in no batch itself.

    `seq`: the call's prompt and the tokens of `node`. `rows`: position -> probabilities [V] float64 after the node's
    path and after each of its forced tokens, as far as they are computed.
    """

    def __init__(self, call: GenerationRequest, seq: Sequence, node: ParticleNode) -> None:
        super().__init__(call.owner, seq, call.call_id, call.params, call.seed)
        self.call = call
        self.output_start = call.output_start
        self.set_node(node)

    def set_node(self, node: ParticleNode) -> None:
        """Makes the request compute `node`, whose tokens are the last of `seq`."""
        self.node = node
        self.rows: dict[int, Float64Array] = {}
        self.logits_from = self.output_start + len(node.path) - 1


def call_of(request: GenerationRequest) -> GenerationRequest:
    """Returns the call that a request works for: itself, unless it is one of several."""
    return request.call if isinstance(request, ParticleRequest) else request


@dataclass
class _State:
    """One call. `requests`: of the nodes of the current step; the call's `particle_requests` are the same."""

    filter: ParticleFilter
    requests: dict[ParticleNode, ParticleRequest]


class ParticleSampling:
    """The particles of all calls. `max_length`: tokens a session can hold."""

    def __init__(
        self, batch_scheduler: BatchScheduler, vocabulary: Vocabulary, token_masks: TokenMaskBuilder, max_length: int
    ) -> None:
        self._scheduler, self._cache = batch_scheduler, batch_scheduler.cache
        self._vocabulary, self._masks, self._max_length = vocabulary, token_masks, max_length
        self._states: WeakKeyDictionary[GenerationRequest, _State] = WeakKeyDictionary()

    def start(self, call: GenerationRequest, grammar: Grammar) -> FinishInfo | None:
        """Starts a call whose grammar is compiled. Returns a FinishInfo if its value is known at once."""
        num_particles = call.params.particles
        assert num_particles is not None
        max_tokens = call.num_tokens_left(self._max_length)
        constraint = PooledConstraint(grammar, self._vocabulary, self._masks, max_tokens, num_particles)
        self._states[call] = state = _State(ParticleFilter(constraint, num_particles, call.seed), {})
        if state.filter.value is not None:
            return self._finish(call, state)
        (node,) = state.filter.nodes
        seq = self._cache.fork(call.seq)
        seq.tokens.extend(list(node.forced))
        request = ParticleRequest(call, seq, node)
        request.metrics = call.metrics  # the first request computes the call's prompt
        state.requests[node] = request
        call.particle_requests = [request]
        self._scheduler.add(request)
        return None

    def add_probabilities(self, request: GenerationRequest, first: int, rows: list[Float64Array]) -> None:
        """Takes the probabilities [V] after the request's tokens from position `first` on, without the constraint."""
        assert isinstance(request, ParticleRequest)
        request.rows |= dict(enumerate(rows, start=first))

    def advance(self, request: GenerationRequest) -> FinishInfo | None:
        """Goes on with a call one of whose requests has all its probabilities.

        Returns a FinishInfo when the call's tokens are the value. Raises RuntimeError if no particle is left.
        """
        assert isinstance(request, ParticleRequest)
        call, state, node = request.call, self._states[request.call], request.node
        first = request.output_start + len(node.path) - 1
        rows = [request.rows[first + index] for index in range(1 + len(node.forced))]
        request.rows = {}
        call.num_sampled += node.num_particles
        state.filter.feed(node, rows)
        if state.filter.num_waiting:
            self._scheduler.remove(request)
            self._cache.release(request.seq)
            return None
        try:
            state.filter.advance()
        except NoParticleLeft:
            raise RuntimeError(NO_PARTICLE_LEFT) from None
        if state.filter.value is not None:
            return self._finish(call, state)
        self._set_requests(call, state)
        return None

    def _set_requests(self, call: GenerationRequest, state: _State) -> None:
        """Gives each new node the request of its parent, or for a further node of the same parent a fork of it."""
        old, state.requests = state.requests, {}
        heirs = {node.parent: node for node in reversed(state.filter.nodes) if node.parent is not None}
        added = []
        for node in state.filter.nodes:
            assert node.parent is not None
            if heirs[node.parent] is not node:
                parent = old[node.parent]
                seq = self._cache.fork(parent.seq)
                seq.tokens.extend(list(node.tokens[len(node.parent.tokens) :]))
                state.requests[node] = ParticleRequest(call, seq, node)
                added.append(state.requests[node])
        for parent_node, request in old.items():
            heir = heirs.get(parent_node)
            if heir is None:
                self.free(request)
                continue
            request.seq.tokens.extend(list(heir.tokens[len(parent_node.tokens) :]))
            request.set_node(heir)
            state.requests[heir] = request
            if request not in self._scheduler.running:
                added.append(request)
        for request in added:
            self._scheduler.add(request)
        call.particle_requests = list(state.requests.values())

    def free(self, request: GenerationRequest) -> None:
        """Removes a request whose prefix has no particle any more. Its KV stays as cache."""
        assert isinstance(request, ParticleRequest)
        self._scheduler.remove(request)
        self._cache.free(request.seq)
        if request.metrics is not request.call.metrics:
            request.call.metrics.recomputed += request.metrics.recomputed

    def _finish(self, call: GenerationRequest, state: _State) -> FinishInfo:
        """Makes the value the call's output."""
        found = state.filter
        assert found.value is not None
        for request in call.particle_requests:
            self.free(request)
        call.particle_requests = []
        tokens = found.value
        end_token = tokens[-1] if tokens and tokens[-1] in self._vocabulary.eos_ids else None
        for token in tokens if end_token is None else tokens[:-1]:
            call.append(token, len(self._vocabulary.token_bytes[token]))
        self._cache.activate(call.seq, len(call.seq))  # the session keeps what the particles computed of its text
        self._cache.extend_from_cache(call.seq, len(call.seq))
        call.metrics.first_token_time = time.monotonic()
        call.particles_info = ParticlesInfo(
            log_weight=found.log_mass,
            logprob=found.logprob,
            effective_sample_size=found.effective_sample_size,
            resamplings=found.num_resamplings,
            model_steps=found.num_nodes,
            constraint_checks=found.num_checks,
            masks=found.num_masks,
        )
        return FinishInfo("stop", end_token)


class PooledConstraint(MatcherConstraint):
    """A constraint whose prefixes have matchers of their own, at most `max_matchers`, so that few are moved back."""

    def __init__(
        self,
        grammar: Grammar,
        vocabulary: Vocabulary,
        token_masks: TokenMaskBuilder,
        max_tokens: int,
        max_matchers: int,
    ) -> None:
        super().__init__(grammar.matcher(), vocabulary, token_masks, max_tokens)
        self._grammar, self._max_matchers = grammar, max_matchers
        self._pool: list[tuple[Matcher, list[int]]] = [(self._matcher, self._accepted)]

    def accepts(self, path: Path, token: int) -> bool:
        """See `ParticleConstraint`."""
        if len(path) >= self._max_tokens and token not in self._eos_ids:
            return False
        self._move_to(path)
        if not self._matcher.accept(token):
            return False
        self._matcher.rollback(1)
        return True

    def _move_to(self, path: Path) -> None:
        if tuple(self._accepted) != path:
            self._matcher, self._accepted = self._nearest(path)
        super()._move_to(path)

    def _nearest(self, path: Path) -> tuple[Matcher, list[int]]:
        """The matcher with the longest part of `path`; a new one where another prefix would have to move back."""
        before = [entry for entry in self._pool if common_length(entry[1], path) == len(entry[1])]
        if before:
            return max(before, key=lambda entry: len(entry[1]))
        if len(self._pool) < self._max_matchers:
            self._pool.append((self._grammar.matcher(), []))
            return self._pool[-1]
        return max(self._pool, key=lambda entry: common_length(entry[1], path) - len(entry[1]))
