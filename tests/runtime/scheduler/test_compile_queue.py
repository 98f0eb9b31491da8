"""What the scheduler tells the grammar compiler, and how calls end whose grammar is not compiled."""

from __future__ import annotations

from fake_engine import ReadyCompiler, generate, make_engine_loop, outcomes, post, run_until_idle, spell

from plait.constrained import CompileQueueFull, GrammarError, Regex
from plait.constrained.specs import Spec
from plait.runtime.messages import Abort, Append, Close, Generate, Open

SPEC = Regex("[a-z]+")


class WaitingCompiler(ReadyCompiler):
    """Notes the tenant of each ticket and answers none."""

    def __init__(self) -> None:
        super().__init__()
        self.tenants: dict[int, str] = {}
        self.cancelled: list[int] = []

    def submit(self, spec: Spec, tenant: str = "") -> int:
        ticket = next(self.tickets)
        self.tenants[ticket] = tenant
        return ticket

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)


def constrained(session: int, call: int) -> Generate:
    message = generate(session, call)
    return Generate(message.session, message.call, message.sampling, SPEC)


def test_a_full_queue_is_an_overload_and_an_invalid_grammar_is_not() -> None:
    for answer, kind in (
        (CompileQueueFull("the queue of grammars is full"), "overloaded"),
        (GrammarError("no"), "constraint"),
    ):
        loop, transport, _ = make_engine_loop(grammars={SPEC: answer})
        calls = run_until_idle(loop, transport, Open(1), Append(1, spell("ab")), constrained(1, 1), Close(1))
        assert (calls[1].end.kind, calls[1].end.text) == (kind, str(answer))


def test_the_compiler_is_told_whether_other_tenants_have_running_sequences() -> None:
    loop, transport, _ = make_engine_loop()
    assert isinstance(loop.compiler, ReadyCompiler)
    is_beside_others = loop.compiler.is_beside_others
    assert not is_beside_others("first")
    post(transport, Open(1, tenant="first"), Append(1, spell("ab")), generate(1, 1))
    loop.step(timeout_s=0.0)
    assert (is_beside_others("first"), is_beside_others("second")) == (False, True)
    post(transport, Abort(1, 1))
    while loop.has_work or transport.inbox:
        loop.step(timeout_s=0.0)
    assert not is_beside_others("second")


def test_compiles_are_charged_to_tenants_and_cancelled_with_their_calls() -> None:
    loop, transport, _ = make_engine_loop()
    compiler = loop.compiler = loop.calls.compiler = WaitingCompiler()
    for client, tenant in ((b"c", "first"), (b"d", "second"), (b"e", "third")):
        post(transport, Open(1, tenant=tenant), Append(1, spell("ab")), constrained(1, 1), client=client)
    loop.step(timeout_s=0.0)
    assert list(compiler.tenants.values()) == ["first", "second", "third"]
    tickets = {tenant: ticket for ticket, tenant in compiler.tenants.items()}
    post(transport, Abort(1, 1))
    transport.vanished.append(b"d")
    loop.step(timeout_s=0.0)
    assert sorted(compiler.cancelled) == sorted([tickets["first"], tickets["second"]])
    assert outcomes(transport)[1].end.kind == "aborted"
    assert loop.calls.num_compiling == 1
