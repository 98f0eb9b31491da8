"""The calls of all sessions: how many are owed a reply, what is sent of them, and how each ends, exactly once.

Knows: calls and their replies. Must not know: instructions, batches, logits, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from plait.constrained import CompilePool, Grammar, GrammarError
from plait.constrained.specs import Spec
from plait.runtime.messages import Failed, Finished, Generate, Reply, SessionCall, Tokens
from plait.runtime.scheduler.deadlines import Deadlines
from plait.runtime.scheduler.embedding import Embedding
from plait.runtime.scheduler.generating import Ending
from plait.runtime.scheduler.policy import Policy
from plait.runtime.scheduler.prefix_cache import PrefixCache
from plait.runtime.scheduler.rows import Generation, Scoring, Selection
from plait.runtime.scheduler.scoring import best_choice
from plait.runtime.scheduler.session import Broken, Call, ClientId, Session
from plait.runtime.scheduler.totals import Totals

Send = Callable[[ClientId, Reply], None]


class Calls:
    """`go_on` is told of each session whose call has ended."""

    def __init__(self, policy: Policy, compiler: CompilePool, send: Send, go_on: Callable[[Session], None]) -> None:
        self.policy = policy
        self.cache: PrefixCache = policy.cache
        self.compiler = compiler
        self.deadlines = Deadlines()
        self.totals = Totals()
        self.num_open = 0  # calls that are owed a reply, begun or not
        self._compiling: dict[int, Generation] = {}
        self._send = send
        self._go_on = go_on

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

    def await_grammar(self, gen: Generation, constraint: Spec) -> None:
        """Has the grammar of a call compiled; `compiled` gives it."""
        gen.ticket = self.compiler.submit(constraint)
        self._compiling[gen.ticket] = gen

    def compiled(self) -> Iterator[tuple[Generation, Grammar | GrammarError]]:
        """The calls whose grammar is ready, or refused, and that wait for it still."""
        for ticket, outcome in self.compiler.collect():
            gen = self._compiling.pop(ticket, None)
            if gen is not None:
                yield gen, outcome

    # -- what is sent of it, and its end ----------------------------------------------------------

    def send_tokens(self, gen: Generation, upto: int) -> None:
        """Tells the client the output tokens before `upto` that it has not heard of."""
        token_ids = gen.output_tokens(gen.num_sent, upto)
        logprobs = gen.unsent_logprobs or None
        if token_ids or logprobs:
            gen.num_sent = upto
            gen.unsent_logprobs = []
            self._send(gen.session.key.client, Tokens(gen.call_id, token_ids, logprobs))

    def finish_generation(self, gen: Generation, ending: Ending) -> None:
        self.send_tokens(gen, gen.num_output)
        usage = gen.meter.usage(gen.num_sampled + gen.num_forced, gen.num_forced, gen.num_drafted)
        self._end(
            gen,
            Finished(gen.call_id, ending.reason, usage, ending.matched, prompt_logprobs=gen.prompt_logprobs),
        )

    def finish_embedding(self, row: Embedding) -> None:
        """All of the text is computed."""
        vector = row.vector()
        if vector is None:
            self.fail(row, "internal", "the model's hidden states are not finite here")
        else:
            self._end(row, Finished(row.call_id, "stop", row.meter.usage(0), embedding=vector.tobytes()))

    def finish_row(self, row: Scoring) -> None:
        """One of a selection's rows is done; after the last the best choice becomes text."""
        self._end_row(row)
        selection = row.selection
        selection.num_left -= 1
        if selection.num_left:
            return
        choice = best_choice(selection)
        winner = selection.choices[choice.index]
        self.cache.shorten(selection.session.seq, selection.num_prompt)
        selection.session.seq.tokens.extend(winner)
        key = selection.session.key
        self._send(key.client, Tokens(selection.call_id, winner))
        self._end(selection, Finished(selection.call_id, "stop", selection.usage(), None, choice))

    def fail(self, call: Call, kind: str, text: str, *, breaks: bool = True) -> None:
        """Ends the call in failure; unless `breaks` is False, later calls of its session fail too."""
        if call.session.active is not call:
            return
        if isinstance(call, Generation):
            self.send_tokens(call, call.num_output)
        if breaks:
            call.session.broken = Broken(kind, text)
        self._end(call, Failed(call.call_id, kind, text))

    def _end(self, call: Call, reply: Finished | Failed) -> None:
        """Takes a call out of the batch and answers it; what it computed becomes cache."""
        session = call.session
        session.active = None
        self.totals.add(call)
        self.deadlines.drop(session.key, call.call_id)
        self.num_open -= 1
        if isinstance(call, Selection):
            for row in (*call.rows, *call.unconditional_rows):
                self._end_row(row)
        else:
            self.policy.remove(call)
            if call.seq.num_computed > len(call.seq):  # it ended among guesses that were right
                self.cache.truncate(call.seq, len(call.seq))
            self.cache.release(call.seq)
        ticket = call.ticket if isinstance(call, Generation) else None
        if ticket is not None and self._compiling.pop(ticket, None) is not None:
            self.compiler.cancel(ticket)
        self._send(session.key.client, reply)
        self._go_on(session)

    def _end_row(self, row: Scoring) -> None:
        self.policy.remove(row)
        self.cache.forget(row.seq)
