"""Random messages, steps and events for an EngineLoop over the hash-chain model, checked against `Reference`.

`PLAIT_SCHEDULER_STEPS=1000000 python tests/support/engine/scheduler_model.py [SEED]` runs it long.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import sys
import time
from collections import Counter
from types import SimpleNamespace

from fake_engine import VOCAB, ReadyCompiler, generate, make_engine_loop
from scheduler_reference import Limits, Reference
from scripted_matchers import ForcingMatcher, TextMatcher

from plait.constrained import GrammarError
from plait.constrained.specs import Regex
from plait.runtime.batch import pooling_request, request_metrics
from plait.runtime.messages import (
    Abort,
    Append,
    Close,
    Embed,
    Failed,
    Finished,
    FlushCache,
    Fork,
    Generate,
    Inspect,
    Open,
    Select,
    SessionCall,
    Status,
    Tokens,
)
from plait.runtime.scheduler import engine_loop
from plait.runtime.scheduler.policy import batching, fairness, light_tenants
from plait.runtime.scheduler.sessions import deadlines, session_manager

TIMED_MODULES = (batching, deadlines, engine_loop, pooling_request, request_metrics, session_manager)
CLIENTS = (b"a", b"b", b"c")
TENANTS = ("", "", "t", "u", "v")
SMALL = {"LEVEL_TOKENS": 4, "TIER_TOKENS": 8, "TIER_BITS": 1, "TURN_TOKENS": 3}  # so that short calls reach them
EXTRA_STEPS = {"LIGHT_PART": 1, "EXTRA_SHARE": 1e6, "CHEAP_PART": 0}  # for any tenant, whenever time passes
SIZES = ((fairness, SMALL), (light_tenants, EXTRA_STEPS))
SPELLED = {Regex("one"): [5, 6, 7], Regex("two"): [9, 9, 8, 8, 7, 7, 6, 5, 4], Regex("three"): [3] * 30}
REFUSED = Regex("refused")
METHODS = ("token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized")
EPISODE = 300  # actions with one engine in a long run


class RandomDraw:
    """Draws from a `random.Random`; `HypothesisDraw` has the same methods."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, options):
        return options[self.integer(0, len(options) - 1)]


class HeldCompiler(ReadyCompiler):
    """Keeps the grammars until `release`; a constraint that it does not know is refused."""

    def __init__(self) -> None:
        grammars = {spec: TextMatcher(tokens) for spec, tokens in SPELLED.items()}
        grammars[Regex("two")] = ForcingMatcher(SPELLED[Regex("two")], {0: 2, 4: 3})
        super().__init__({**grammars, REFUSED: GrammarError("refused")})
        self.held = []

    def submit(self, spec, tenant=""):
        ticket = super().submit(spec, tenant)
        self.held.append(self.done.pop())
        return ticket

    def cancel(self, ticket):
        super().cancel(ticket)
        self.held = [(t, grammar) for t, grammar in self.held if t != ticket]

    def release(self):
        self.done += self.held
        self.held = []


class SchedulerModel:
    """One engine loop and its reference. `close` restores the clock."""

    def __init__(self, draw) -> None:
        self.draw, self.now, self.num_calls, self.num_ids = draw, 1000.0, 0, 0
        fake_time = SimpleNamespace(
            monotonic=lambda: self.now, thread_time=time.thread_time, perf_counter=time.perf_counter
        )
        self._real_times = [(module, module.time) for module in TIMED_MODULES]
        for module in TIMED_MODULES:
            module.time = fake_time
        self._real_sizes = [(module, name, getattr(module, name)) for module, sizes in SIZES for name in sizes]
        for module, sizes in SIZES:
            for name, value in sizes.items() if draw.integer(0, 2) else ():
                setattr(module, name, value)
        pages = draw.integer(16, 160)
        sizes = {
            "context": draw.integer(max(8, pages // 2), pages),
            "rows": draw.integer(1, 6),
            "batch_tokens": draw.integer(1, 40),
        }
        limits = {"max_sessions": draw.choice([3, 12, 60, 60]), "max_waiting_calls": draw.choice([3, 20, 60, 60])}
        order = draw.choice(["fair", "first-come"])
        weights = {tenant: draw.choice([0.001, 0.5, 1.0, 3.0, 1000.0]) for tenant in TENANTS if draw.integer(0, 1)}
        self.loop, self.transport, self.runner = make_engine_loop(
            pages=pages, pooling="last", order=order, tenant_weights=weights, **sizes, **limits
        )
        self.compiler = self.loop.compiler = self.loop.calls.compiler = HeldCompiler()
        self.reference = Reference(Limits(self.loop.sessions.max_length, grammars=SPELLED, **limits))
        self.actions = Counter()

    def close(self) -> None:
        for module, real_time in self._real_times:
            module.time = real_time
        for module, name, value in self._real_sizes:
            setattr(module, name, value)

    # -- actions --------------------------------------------------------------------------------------

    def act(self) -> None:
        """Does one random action and checks the state."""
        kind = self.draw.choice(ACTIONS)
        if kind in RARE and self.draw.integer(0, 4):
            kind = "step"
        self.actions[kind] += 1
        getattr(self, "act_" + kind)()
        self.check()

    def act_open(self) -> None:
        draw = self.draw
        self.num_ids += 1
        session = draw.choice([self.num_ids, self.num_ids, draw.integer(-1, 6)])
        opened = Open(
            session,
            draw.choice(TENANTS),
            draw.choice(["", "", "s"]),
            draw.integer(-1, 1),
            draw.integer(0, 3),
            draw.choice([False, False, True]),
        )
        client = draw.choice(CLIENTS)
        self._post(opened, client)
        if draw.integer(0, 12):  # calls in an empty session fail
            self._post(Append(session, [draw.choice([1, 2, 3]) for _ in range(draw.integer(1, 6))]), client)

    def act_append(self) -> None:
        count = self.draw.choice([1, 2, 5, 5, 20, 60] if self.draw.integer(0, 5) == 0 else [1, 3, 8])
        tokens = [self.draw.choice([1, 1, 2, 3]) for _ in range(self.draw.integer(0, count))]
        if self.draw.integer(0, 150) == 0:
            tokens.append(self.draw.choice([-1, VOCAB, 2**31, 2**63]))
        self._post(Append(self._session(), tokens))

    def act_generate(self) -> None:
        draw, fields = self.draw, {}
        if draw.integer(0, 3) == 0:
            fields |= {"temperature": draw.choice([0.7, 1.5]), "seed": draw.integer(0, 5)}
            fields |= {"top_p": draw.choice([1.0, 0.9]), "top_k": draw.choice([-1, 5])}
        if draw.integer(0, 3) == 0:
            fields |= {"stop": ("a",), "min_tokens": draw.integer(0, 2)}
        if draw.integer(0, 5) == 0:
            fields |= {"stop_token_ids": (draw.integer(1, VOCAB - 1), 7), "logprobs": True, "top_logprobs": 2}
        if draw.integer(0, 5) == 0:
            fields |= {"prompt_logprobs_from": draw.integer(0, 9)}
        max_tokens = draw.choice([0, 3, 4, 9, 30, 60])
        fields["min_tokens"] = min(fields.get("min_tokens", 0), max_tokens)
        message = generate(self._session(), self._call(), max_tokens, ignore_eos=bool(draw.integer(0, 1)),
                           timeout_s=self._timeout(), **fields)  # fmt: skip
        self._post(message)

    def act_constrained(self) -> None:
        spec = self.draw.choice([*SPELLED, *SPELLED, REFUSED])
        message = generate(self._session(), self._call(), self.draw.choice([0, 2, 9, 40]), timeout_s=self._timeout())
        self._post(Generate(message.session, message.call, message.sampling, spec))

    def act_select(self) -> None:
        draw = self.draw
        choices = [[draw.choice([1, 2, 3]) for _ in range(draw.integer(1, 5))] for _ in range(draw.integer(1, 5))]
        if draw.integer(0, 25) == 0:
            choices.append(draw.choice([[], [-1], [VOCAB]]))
        replaced = draw.choice([0, 0, 1, 3, 8])
        timeout_s, top = self._timeout(), draw.choice([0, 0, 3])
        self._post(Select(self._session(), self._call(), choices, draw.choice(METHODS), timeout_s, top, replaced))

    def act_embed(self) -> None:
        self._post(Embed(self._session(), self._call(), self.draw.choice([0, 7]), None, self._timeout()))

    def act_fork(self) -> None:
        children = []
        for _ in range(self.draw.integer(1, 3)):
            self.num_ids += 1
            children.append(self.draw.choice([self.num_ids, self.num_ids, self.draw.integer(-1, 9)]))
        self._post(Fork(self._session(), children))

    def act_close(self) -> None:
        self._post(Close(self._session()))

    def act_abort(self) -> None:
        if self.draw.integer(0, 5) == 0 or not self.reference.calls:
            self._post(Abort(self._session()))
            return
        client, call = self.draw.choice(list(self.reference.calls))
        message = self.reference.calls[client, call].message
        self._post(Abort(message.session, call), client)

    def act_disconnect(self) -> None:
        client = self.draw.choice(CLIENTS)
        self.transport.vanished.append(client)
        self.loop.receive(0.0)
        self._take_replies()
        self.reference.on_disconnect(client)
        self.reference.on_progress()

    def act_ask(self) -> None:
        self.transport.inbox.append((b"a", self.draw.choice([Inspect, FlushCache])(-5)))
        self._receive()
        (status,) = self._statuses
        assert status.free_pages + status.cached_pages + status.used_pages == status.total_pages

    def act_release(self) -> None:
        self.compiler.release()
        self._receive()

    def act_time(self) -> None:
        self.now += self.draw.choice([0.05, 0.5, 3.0, 15.0])
        self._receive()

    def act_step(self) -> None:
        self._step()

    def act_steps(self) -> None:
        for _ in range(self.draw.integer(2, 12)):
            self._step()

    def act_failing_step(self) -> None:
        self.runner.fail_when = lambda batch: True
        with contextlib.redirect_stderr(io.StringIO()):  # the traceback of this error
            self._step(fails=True)
        self.runner.fail_when = lambda batch: False
        self.loop.error_log._counts.clear()

    def act_drain(self) -> None:
        """Every call ends without further events."""
        for _ in range(3000):
            self.compiler.release()
            self._step()
            if not self.loop.has_work and not self.loop.calls.num_compiling:
                break
        assert not self.loop.has_work and not self.reference.calls, "calls do not end"
        assert self.loop.cache.counts()[2] == 0, "an idle engine holds pages"

    # -- helpers --------------------------------------------------------------------------------------

    def _session(self) -> tuple[bytes, int]:
        """Mostly an open session of some client, whose name `_post` uses."""
        known = list(self.reference.sessions)
        if self.draw.integer(0, 9):
            known = [key for key in known if self.reference.sessions[key].error is None] or known
        self._client, session = self.draw.choice(known) if known and self.draw.integer(0, 99) else (b"a", 99)
        return session

    def _call(self) -> int:
        self.num_calls += 1
        return self.num_calls

    def _timeout(self) -> float | None:
        return self.draw.choice([*[None] * 12, 0.05, 1.0, 20.0])

    def _post(self, message, client: bytes | None = None) -> None:
        client = client or (self.draw.choice(CLIENTS) if isinstance(message, Open) else self._client)
        if isinstance(message, SessionCall):
            self.reference.sent(client, message, self.now)
        self.transport.inbox.append((client, message))
        self.loop.receive(0.0)
        self._take_replies()
        self.reference.on_message(client, message, self.now)
        self.reference.on_progress()

    def _receive(self) -> None:
        self.loop.receive(0.0)
        self._take_replies()
        self.reference.on_time(self.now)
        self.reference.on_progress()

    def _step(self, fails: bool = False) -> None:
        isolated = {request.call_id for request in self.loop.batch_scheduler.isolated}
        self.loop.step(0.0)
        self._take_replies()
        self.reference.may_fail = isolated if fails else set()
        self.reference.on_time(self.now)
        self.reference.on_progress()

    def _take_replies(self) -> None:
        replies, self.transport.outbox = self.transport.outbox, []
        self._statuses = [reply for _, reply in replies if isinstance(reply, Status)]
        self.reference.on_replies([r for r in replies if isinstance(r[1], (Tokens, Finished, Failed))])

    # -- checks ---------------------------------------------------------------------------------------

    def check(self) -> None:
        """Sessions, calls, texts, pages, locks and pins are exactly those of the reference."""
        manager, reference = self.loop.sessions, self.reference
        assert set(map(tuple, manager._sessions)) == set(reference.sessions)
        assert self.loop.calls.num_open == len(reference.calls), "a call without a final reply is not open, or reverse"
        for key, session in manager._sessions.items():
            expected = reference.sessions[tuple(key)]
            assert (session.fork_parent is None) == expected.is_materialized
            if session.active_call is None and session.error is None:
                assert session.seq.tokens.view().tolist() == expected.text
            assert (session.error is None) == (expected.error is None)
        assert not self.loop.error_log._counts, f"internal errors: {dict(self.loop.error_log._counts)}"
        sequences = manager.sequences()
        self.loop.cache.check_integrity(sequences)
        self._check_locks(sequences)
        programs = Counter(session.owner.program_id for session in manager._sessions.values())
        assert manager._programs == programs
        self._check_rows(programs)

    def _check_rows(self, programs) -> None:
        scheduler = self.loop.batch_scheduler
        assert len(scheduler.running) <= scheduler.max_batch_rows
        assert not scheduler.running.keys() & scheduler.waiting.keys()
        assert scheduler.isolated.keys() <= scheduler.running.keys() | scheduler.waiting.keys()
        ranks = scheduler.fairness
        assert ranks._accounts.keys() == scheduler.running.keys() | scheduler.waiting.keys()
        assert set(ranks._programs) <= set(programs)
        rows = Counter(ranks.queue(request) for request in scheduler.running)
        held = {(bool(kind), name): shares.held(name) for kind, shares in enumerate(ranks._shares)
                for name in shares.holders()}  # fmt: skip
        assert held == rows, "a row is counted twice, or not at all"

    def _check_locks(self, sequences) -> None:
        locks, pins = Counter(), Counter()
        for seq in sequences:
            node = seq.node
            if not seq.is_locked and node is not None:
                pins[id(node)] += 1
            while seq.is_locked and node is not None:
                locks[id(node)] += 1
                node = node.parent
        for node in self.loop.cache.tree.nodes():
            assert node.lock_count == locks[id(node)], "a lock is lost or left over"
            assert len(node.pins) == pins[id(node)], "a pin is lost or left over"
        running = {id(request.seq) for request in self.loop.batch_scheduler.running}
        assert {id(seq) for seq in sequences if seq.is_locked} == running


WEIGHTS = {"open": 4, "append": 8, "generate": 8, "constrained": 2, "select": 4, "embed": 2, "fork": 3, "close": 2,
           "abort": 1, "disconnect": 1, "ask": 1, "release": 4, "time": 1, "step": 16, "steps": 9, "failing_step": 1,
           "drain": 1}  # fmt: skip
RARE = ("failing_step", "disconnect", "close", "drain")
ACTIONS = [kind for kind, weight in WEIGHTS.items() for _ in range(weight)]


def run_random(num_actions: int, seed: int) -> Counter:
    """Runs episodes of random actions; returns counts. An error names the seed of its episode."""
    totals: Counter = Counter()
    for episode in range(-(-num_actions // EPISODE)):
        model = SchedulerModel(RandomDraw(seed + episode))
        try:
            for _ in range(min(EPISODE, num_actions - episode * EPISODE)):
                model.act()
            model.act_drain()
            model.check()
        except Exception as error:
            error.add_note(f"seed {seed + episode}, after {sum(model.actions.values())} actions")
            raise
        finally:
            model.close()
        totals += model.actions + model.reference.ends
        totals += Counter(engine_steps=model.loop.num_steps, pauses=model.loop.batch_scheduler.num_pauses,
                          retractions=model.loop.batch_scheduler.num_retractions)  # fmt: skip
    return totals


if __name__ == "__main__":
    started = time.monotonic()
    first_seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    totals = run_random(int(os.environ.get("PLAIT_SCHEDULER_STEPS", "10000")), first_seed)
    print(f"{time.monotonic() - started:.0f} s, {dict(totals)}")
