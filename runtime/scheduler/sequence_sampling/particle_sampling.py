"""Runs the particles of calls with `particles`: a request in the batch for each prefix that the particles stand at.

A request leaves the batch while others of its call are still computed, so that it holds no row and calls cannot wait
for each other. Its tokens are drawn as soon as its probabilities are there, so that a step does the work of its own
rows only; the last request of a call's step also resamples. Nothing is sent before the value is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from plait.constrained import Grammar, Matcher, Vocabulary
from plait.runtime.batch.request import FinishInfo, GenerationRequest
from plait.runtime.call_reports import ParticlesInfo
from plait.runtime.sampling.particle_filter import NoParticleLeft, ParticleFilter, ParticleNode, Path
from plait.runtime.scheduler.sequence_sampling.exact_sampling import MatcherConstraint
from plait.runtime.scheduler.sequence_sampling.prefix_requests import (
    PrefixRequest,
    PrefixRequests,
    begins_with,
    common_length,
)
from plait.runtime.scheduler.token_mask import TokenMaskBuilder

MAX_CANONICAL_TRIED = 64  # tokens that may follow, of a prefix whose spelling is looked at
NO_PARTICLE_LEFT = (
    "no particle reached a complete value within max_tokens and the sampling filters; ask for the format in the "
    "prompt, or raise particles or max_tokens"
)


@dataclass
class _State:
    """One call. `requests`: of the nodes of the current step; the call's `prefix_requests` are the same."""

    filter: ParticleFilter
    requests: dict[ParticleNode, PrefixRequest]
    nodes: dict[PrefixRequest, ParticleNode]


class ParticleSampling:
    """The particles of all calls. `max_length`: tokens a session can hold."""

    def __init__(
        self, requests: PrefixRequests, vocabulary: Vocabulary, token_masks: TokenMaskBuilder, max_length: int
    ) -> None:
        self._requests = requests
        self._vocabulary, self._masks, self._max_length = vocabulary, token_masks, max_length
        self._states: WeakKeyDictionary[GenerationRequest, _State] = WeakKeyDictionary()

    def start(self, call: GenerationRequest, grammar: Grammar) -> FinishInfo | None:
        """Starts a call whose grammar is compiled. Returns a FinishInfo if its value is known at once."""
        num_particles = call.params.particles
        assert num_particles is not None
        max_tokens = call.num_tokens_left(self._max_length)
        constraint = PooledConstraint(grammar, self._vocabulary, self._masks, max_tokens, num_particles)
        self._states[call] = state = _State(ParticleFilter(constraint, num_particles, call.seed), {}, {})
        if state.filter.value is not None:
            return self._finish(call, state)
        (node,) = state.filter.nodes
        request = self._requests.add_first(call, node.path, node.forced)
        state.requests[node], state.nodes[request] = request, node
        return None

    def advance(self, request: PrefixRequest) -> FinishInfo | None:
        """Goes on with a call one of whose requests has all its probabilities.

        Returns a FinishInfo when the call's tokens are the value. Raises RuntimeError if no particle is left.
        """
        call, state = request.call, self._states[request.call]
        node = state.nodes[request]
        call.num_sampled += node.num_particles
        state.filter.feed(node, request.take_rows())
        if state.filter.num_waiting:
            self._requests.pause(request)
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
                request = self._requests.fork(call, old[node.parent].seq, node.path, node.forced)
                state.requests[node] = request
                added.append(request)
        for parent_node, request in old.items():
            heir = heirs.get(parent_node)
            if heir is None:
                self._requests.free(request)
                continue
            request.seq.tokens.extend(list(heir.tokens[len(parent_node.tokens) :]))
            request.set_path(heir.path, heir.forced)
            state.requests[heir] = request
            if request not in self._requests.scheduler.running:
                added.append(request)
        for request in added:
            self._requests.scheduler.add(request)
        state.nodes = {request: node for node, request in state.requests.items()}
        call.prefix_requests = list(state.requests.values())

    def _finish(self, call: GenerationRequest, state: _State) -> FinishInfo:
        """Makes the value the call's output."""
        found = state.filter
        assert found.value is not None
        call.particles_info = ParticlesInfo(
            log_weight=found.log_mass,
            logprob=found.logprob,
            effective_sample_size=found.effective_sample_size,
            resamplings=found.num_resamplings,
            model_steps=found.num_nodes,
            constraint_checks=found.num_checks,
            masks=found.num_masks,
        )
        return self._requests.finish(call, found.value)


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
        self._unlikely: dict[tuple[int, bytes], bool] = {}
        self.forces_unlikely = max_matchers == 1  # a single particle goes on in any case

    def accepts(self, path: Path, token: int) -> bool:
        """See `ParticleConstraint`."""
        if len(path) >= self._max_tokens and token not in self._eos_ids:
            return False
        self._move_to(path)
        if not self._matcher.accept(token):
            return False
        self._matcher.rollback(1)
        return True

    def is_unlikely(self, path: Path) -> bool:
        """Whether the tokenizer would spell the last token and each one that may follow otherwise."""
        if not path or path[-1] in self._eos_ids:
            return False
        self._move_to(path)
        if self._matcher.is_accepting:
            return False
        allowed = np.flatnonzero(self.allowed(path))
        if not 0 < len(allowed) <= MAX_CANONICAL_TRIED:
            return False
        key = (path[-1], allowed.tobytes())
        known = self._unlikely.get(key)
        if known is None:
            known = self._unlikely[key] = not any(self.is_canonical_pair(path[-1], int(token)) for token in allowed)
        return known

    def _move_to(self, path: Path) -> None:
        if tuple(self._accepted) != path:
            self._matcher, self._accepted = self._nearest(path)
        super()._move_to(path)

    def _nearest(self, path: Path) -> tuple[Matcher, list[int]]:
        """The matcher with the longest part of `path`; a new one where another prefix would have to move back."""
        before = [entry for entry in self._pool if begins_with(path, entry[1])]
        if before:
            return max(before, key=lambda entry: len(entry[1]))
        if len(self._pool) < self._max_matchers:
            self._pool.append((self._grammar.matcher(), []))
            return self._pool[-1]
        return max(self._pool, key=lambda entry: common_length(entry[1], path) - len(entry[1]))
