"""Tracks calls from admission to their reply. Every call is answered exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from plait.constrained import CompilePool, Grammar, GrammarError
from plait.constrained.specs import Spec
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import FinishInfo, GenerationRequest, Request, ScoringRequest, Selection
from plait.runtime.batch.value_span import ValueEnd
from plait.runtime.call_reports import encode_logprobs
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import Failed, Finished, Generate, ServerMessage, SessionCall, Tokens
from plait.runtime.scheduler.policy.batching import BatchScheduler
from plait.runtime.scheduler.sessions.choice_scoring import best_choice
from plait.runtime.scheduler.sessions.deadlines import Deadlines
from plait.runtime.scheduler.sessions.session import Call, Session, SessionError
from plait.runtime.scheduler.sessions.usage_totals import UsageTotals
from plait.runtime.transport.base import ClientId

Send = Callable[[ClientId, ServerMessage], None]


class CallTracker:
    """The calls of all sessions. `on_call_finished` is called with the session of each call that ends."""

    def __init__(
        self,
        batch_scheduler: BatchScheduler,
        compiler: CompilePool,
        send: Send,
        on_call_finished: Callable[[Session], None],
    ) -> None:
        self.batch_scheduler = batch_scheduler
        self.cache: PrefixCache = batch_scheduler.cache
        self.compiler = compiler
        self.deadlines = Deadlines()
        self.totals = UsageTotals()
        self.num_open = 0  # calls without a final reply, started or queued
        self._sessions: dict[Call, Session] = {}  # the session of each active call
        self._compiling: dict[int, GenerationRequest] = {}  # by ticket
        self._send = send
        self._on_call_finished = on_call_finished
        compiler.watch_others(lambda tenant: any(other.owner.tenant != tenant for other in batch_scheduler.running))

    @property
    def num_compiling(self) -> int:
        """Calls whose grammar is being compiled."""
        return len(self._compiling)

    # -- before a call starts ---------------------------------------------------------------------

    def admit(self, session: Session, message: SessionCall) -> None:
        """Counts a call as open and starts its timeout."""
        self.num_open += 1
        timeout_s = message.sampling.timeout_s if isinstance(message, Generate) else message.timeout_s
        self.deadlines.add(session.key, message.call, timeout_s)

    def reject(self, session: Session, call_id: int, kind: str, text: str) -> None:
        """Answers an admitted call that was not started with a failure."""
        self.num_open -= 1
        self.deadlines.drop(session.key, call_id)
        self._send(session.key.client, Failed(call_id, kind, text))

    def start(self, session: Session, call: Call) -> None:
        """Makes an admitted call the session's active call."""
        session.active_call = call
        self._sessions[call] = session

    def is_active(self, call: Call) -> bool:
        """Whether the call was started and has not ended."""
        return call in self._sessions

    def is_queued(self, call: Call) -> bool:
        """Whether an active call still waits for its first step, so that nothing was computed for it."""
        requests: Iterable[Request]
        if isinstance(call, Selection):
            requests = (*call.requests, *call.unconditional_requests)
        else:
            requests = (isinstance(call, GenerationRequest) and call.prefix_requests) or (call,)
        waiting = self.batch_scheduler.waiting
        return all(request in waiting and not request.metrics.admission_time for request in requests)

    def submit_grammar(self, request: GenerationRequest, constraint: Spec) -> None:
        """Starts to compile the grammar of a call; `collect_compiled` returns it."""
        request.ticket = self.compiler.submit(constraint, request.owner.tenant)
        self._compiling[request.ticket] = request

    def collect_compiled(self) -> Iterator[tuple[GenerationRequest, Grammar | GrammarError]]:
        """Yields the calls whose grammar is compiled or refused."""
        for ticket, outcome in self.compiler.collect():
            request = self._compiling.pop(ticket, None)
            if request is not None:
                yield request, outcome

    # -- results ----------------------------------------------------------------------------------

    def send_tokens(self, request: GenerationRequest, end: int) -> None:
        """Sends the client the unsent output tokens before index `end`."""
        token_ids, logprobs = request.output_tokens(request.num_sent, end), request.take_logprobs(end)
        if token_ids or logprobs:
            request.num_sent = end
            self._send(self._sessions[request].key.client, Tokens(request.call_id, token_ids, logprobs))

    def _send_value_end(self, request: GenerationRequest, end: ValueEnd) -> None:
        """Sends the rest of a value that text follows."""
        token_ids = request.output_tokens(request.num_sent, end.num_whole) + end.last_tokens
        logprobs = request.take_logprobs(end.num_tokens)
        if token_ids or logprobs:
            self._send(self._sessions[request].key.client, Tokens(request.call_id, token_ids, logprobs))

    def finish_generation(self, request: GenerationRequest, finish_info: FinishInfo) -> None:
        """Ends a generation and sends the rest of its output."""
        num_forced = request.num_forced
        num_completion = request.num_sampled + num_forced - request.num_healed
        if request.params.samples_sequence:
            num_completion = request.num_output + (finish_info.matched is not None)
        span = request.value_span
        if span is not None and span.end is not None:
            self._send_value_end(request, span.end)
            num_completion = span.end.num_tokens
            num_forced = sum(position - request.output_start < num_completion for position in request.forced_positions)
        else:
            self.send_tokens(request, request.num_output)
        num_reasoning = min(request.num_reasoning, num_completion)
        num_drafted = min(request.num_accepted_drafts, num_completion)
        usage = request.metrics.usage(num_completion, num_forced, num_drafted, num_reasoning)
        reply = Finished(
            request.call_id,
            finish_info.reason,
            usage,
            finish_info.matched,
            prompt_logprobs=None if request.prompt_logprobs is None else encode_logprobs(request.prompt_logprobs),
            warnings=request.warnings,
            exact=request.exact_info,
            particles=request.particles_info,
            cache_miss=request.metrics.cache_miss,
        )
        self._end(request, reply)

    def finish_embedding(self, request: PoolingRequest) -> None:
        """Ends an embedding call whose tokens are all computed."""
        vector = request.vector()
        if vector is None:
            self.fail(request, "internal", "the model's hidden states are not finite here")
        else:
            usage, miss = request.metrics.usage(0), request.metrics.cache_miss
            self._end(request, Finished(request.call_id, "stop", usage, embedding=vector.tobytes(), cache_miss=miss))

    def finish_scoring(self, request: ScoringRequest) -> None:
        """Ends one request of a selection. After the last one, the best choice is appended to the session's text."""
        self._release_scoring_request(request)
        selection = request.selection
        selection.num_unfinished -= 1
        if selection.num_unfinished:
            return
        scores = best_choice(selection)
        winner = selection.choices[scores.index]
        session = self._sessions[selection]
        self.cache.truncate_idle(session.seq, selection.num_prompt)
        session.seq.tokens.extend(winner)
        self._send(session.key.client, Tokens(selection.call_id, winner))
        self._end(selection, Finished(selection.call_id, "stop", selection.usage(), None, scores))

    def fail(self, call: Call, kind: str, text: str, *, breaks_session: bool = True, where: str | None = None) -> None:
        """Ends an active call with a failure. With `breaks_session`, later calls of its session fail, too."""
        session = self._sessions.get(call)
        if session is None:
            return
        if isinstance(call, GenerationRequest) and not call.params.samples_sequence:
            self.send_tokens(call, call.num_safe_tokens() if call.value_span is not None else call.num_output)
        if breaks_session:
            session.error = SessionError(kind, text)
        self._end(call, Failed(call.call_id, kind, text, where))

    def _end(self, call: Call, reply: Finished | Failed) -> None:
        """Removes a call from the batch and sends its final reply. Its computed tokens become cache."""
        session = self._sessions.pop(call)
        session.active_call = None
        self.totals.add(call)
        self.deadlines.drop(session.key, call.call_id)
        self.num_open -= 1
        if isinstance(call, Selection):
            for request in (*call.requests, *call.unconditional_requests):
                self._release_scoring_request(request)
        else:
            self.batch_scheduler.remove(call)
            if call.seq.num_computed > len(call.seq):  # it ended within an accepted draft
                self.cache.truncate(call.seq, len(call.seq))
            self.cache.release(call.seq)
        if isinstance(call, GenerationRequest):
            self._end_generation(call)
        self._send(session.key.client, reply)
        self._on_call_finished(session)

    def _end_generation(self, call: GenerationRequest) -> None:
        """Ends what belongs to a generation, and completes the session's text."""
        self.batch_scheduler.drafter.end(call)
        for prefix_request in call.prefix_requests:
            self.batch_scheduler.remove(prefix_request)
            self.cache.free(prefix_request.seq)
        if call.healing is not None:  # no output followed the prompt tokens that token healing removed
            self.cache.truncate_idle(call.seq, call.healing.start)
            call.seq.tokens.extend(call.healing.removed)
        span = call.value_span
        if span is not None and span.end is None:  # the text after the value follows even without a value
            call.seq.tokens.extend(span.trailing_text.tokens)
        if call.ticket is not None and self._compiling.pop(call.ticket, None) is not None:
            self.compiler.cancel(call.ticket)

    def _release_scoring_request(self, request: ScoringRequest) -> None:
        self.batch_scheduler.remove(request)
        self.cache.free(request.seq)
