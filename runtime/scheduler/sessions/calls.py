"""The calls of all sessions: how many are owed a reply, what is sent of them, and how each ends, exactly once.

Knows: calls and their replies. Must not know: instructions, batches, logits, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from plait.constrained import CompilePool, Grammar, GrammarError
from plait.constrained.specs import Spec
from plait.runtime.batch.pooling_request import PoolingRequest
from plait.runtime.batch.request import GenerationRequest, ScoringRequest, Selection
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import Failed, Finished, Generate, ServerMessage, SessionCall, Tokens
from plait.runtime.scheduler.batching import BatchScheduler
from plait.runtime.scheduler.output_processor import FinishInfo
from plait.runtime.scheduler.sessions.choice_scoring import best_choice
from plait.runtime.scheduler.sessions.deadlines import Deadlines
from plait.runtime.scheduler.sessions.session import Call, ClientId, Session, SessionError
from plait.runtime.scheduler.sessions.usage_totals import UsageTotals

Send = Callable[[ClientId, ServerMessage], None]


class CallTracker:
    """`on_call_finished` is told of each session whose call has ended."""

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
        self.num_open = 0  # calls that are owed a reply, begun or not
        self._compiling: dict[int, GenerationRequest] = {}
        self._send = send
        self._on_call_finished = on_call_finished

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    # -- before a call begins ---------------------------------------------------------------------

    def admit(self, session: Session, message: SessionCall) -> None:
        """Counts a call, which is owed a reply from now on."""
        self.num_open += 1
        timeout_s = message.sampling.timeout_s if isinstance(message, Generate) else message.timeout_s
        self.deadlines.add(session.key, message.call, timeout_s)

    def reject(self, session: Session, call_id: int, kind: str, text: str) -> None:
        """Answers a call that was admitted and has not begun."""
        self.num_open -= 1
        self._send(session.key.client, Failed(call_id, kind, text))

    def submit_grammar(self, gen: GenerationRequest, constraint: Spec) -> None:
        """Has the grammar of a call compiled; `collect_compiled` gives it."""
        gen.ticket = self.compiler.submit(constraint)
        self._compiling[gen.ticket] = gen

    def collect_compiled(self) -> Iterator[tuple[GenerationRequest, Grammar | GrammarError]]:
        """The calls whose grammar is ready, or refused, and that wait for it still."""
        for ticket, outcome in self.compiler.collect():
            gen = self._compiling.pop(ticket, None)
            if gen is not None:
                yield gen, outcome

    # -- what is sent of it, and its end ----------------------------------------------------------

    def send_tokens(self, gen: GenerationRequest, upto: int) -> None:
        """Tells the client the output tokens before `upto` that it has not heard of."""
        token_ids = gen.output_tokens(gen.num_sent, upto)
        logprobs = gen.unsent_logprobs or None
        if token_ids or logprobs:
            gen.num_sent = upto
            gen.unsent_logprobs = []
            self._send(gen.session.key.client, Tokens(gen.call_id, token_ids, logprobs))

    def finish_generation(self, gen: GenerationRequest, finish_info: FinishInfo) -> None:
        self.send_tokens(gen, gen.num_output)
        usage = gen.metrics.usage(gen.num_sampled + gen.num_forced, gen.num_forced, gen.num_accepted_drafts)
        self._end(
            gen,
            Finished(gen.call_id, finish_info.reason, usage, finish_info.matched, prompt_logprobs=gen.prompt_logprobs),
        )

    def finish_embedding(self, request: PoolingRequest) -> None:
        """All of the text is computed."""
        vector = request.vector()
        if vector is None:
            self.fail(request, "internal", "the model's hidden states are not finite here")
        else:
            self._end(request, Finished(request.call_id, "stop", request.metrics.usage(0), embedding=vector.tobytes()))

    def finish_scoring(self, request: ScoringRequest) -> None:
        """One of a selection's rows is done; after the last the best choice becomes text."""
        self._finish_scoring_request(request)
        selection = request.selection
        selection.num_unfinished -= 1
        if selection.num_unfinished:
            return
        choice = best_choice(selection)
        winner = selection.choices[choice.index]
        self.cache.truncate_idle(selection.session.seq, selection.num_prompt)
        selection.session.seq.tokens.extend(winner)
        key = selection.session.key
        self._send(key.client, Tokens(selection.call_id, winner))
        self._end(selection, Finished(selection.call_id, "stop", selection.usage(), None, choice))

    def fail(self, call: Call, kind: str, text: str, *, breaks_session: bool = True) -> None:
        """Ends the call in failure; unless `breaks_session` is False, later calls of its session fail too."""
        if call.session.active_call is not call:
            return
        if isinstance(call, GenerationRequest):
            self.send_tokens(call, call.num_output)
        if breaks_session:
            call.session.error = SessionError(kind, text)
        self._end(call, Failed(call.call_id, kind, text))

    def _end(self, call: Call, reply: Finished | Failed) -> None:
        """Takes a call out of the batch and answers it; what it computed becomes cache."""
        session = call.session
        session.active_call = None
        self.totals.add(call)
        self.deadlines.drop(session.key, call.call_id)
        self.num_open -= 1
        if isinstance(call, Selection):
            for request in (*call.requests, *call.unconditional_requests):
                self._finish_scoring_request(request)
        else:
            self.batch_scheduler.remove(call)
            if call.seq.num_computed > len(call.seq):  # it ended among guesses that were right
                self.cache.truncate(call.seq, len(call.seq))
            self.cache.release(call.seq)
        ticket = call.ticket if isinstance(call, GenerationRequest) else None
        if ticket is not None and self._compiling.pop(ticket, None) is not None:
            self.compiler.cancel(ticket)
        self._send(session.key.client, reply)
        self._on_call_finished(session)

    def _finish_scoring_request(self, request: ScoringRequest) -> None:
        self.batch_scheduler.remove(request)
        self.cache.free(request.seq)
