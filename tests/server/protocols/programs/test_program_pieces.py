"""The texts and turns of a program are prepared in pieces, or in a thread: other requests are served meanwhile."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import httpx

from plait.constrained.specs import Regex
from plait.runtime.programs.branch import Turn
from plait.runtime.sampling_params import sampling_params
from plait.runtime.server.protocols.programs import branch as branch_module
from plait.runtime.server.protocols.programs import program_run
from plait.runtime.server.protocols.programs.branch import ProgramBranch
from plait.runtime.server.protocols.programs.steps import GenStep, VariableStep


def new_branch(monkeypatch) -> ProgramBranch:
    monkeypatch.setattr(branch_module, "check_fits_context", lambda client, num_chars: None)
    run = SimpleNamespace(client=None, count_turns=lambda count: None, abort_sessions=lambda: None)
    return ProgramBranch(run, SimpleNamespace(append=lambda text, control: None))


def test_others_are_served_between_calls(monkeypatch) -> None:
    branch, order = new_branch(monkeypatch), []

    async def run() -> None:
        for number in range(3):
            asyncio.get_running_loop().call_soon(order.append, "other")
            branch.write("x" * 5000)
            await branch.run_tokenizing(lambda number=number: order.append(number))

    asyncio.run(run())
    assert order == ["other", 0, "other", 1, "other", 2]


def test_many_short_texts_are_tokenized_in_a_thread(monkeypatch) -> None:
    branch = new_branch(monkeypatch)

    async def run(num_texts: int) -> int:
        for _ in range(num_texts):
            branch.write("a")
        return await branch.run_tokenizing(threading.get_ident)

    assert asyncio.run(run(10)) == threading.get_ident()
    assert asyncio.run(run(2000)) != threading.get_ident()


def test_many_turns_are_rendered_in_a_thread(monkeypatch) -> None:
    branch, threads = new_branch(monkeypatch), []

    def turn_prefix(roles, role) -> str:
        threads.append(threading.get_ident() == threading.main_thread().ident)
        return ""

    model_template = SimpleNamespace(turn_prefix=turn_prefix, turn_suffix=turn_prefix, num_rendered_turns=int)
    monkeypatch.setattr(branch, "template", lambda: model_template)

    async def run() -> None:
        for _ in range(40):
            await branch.begin_role("user", ())
            branch.turns.append(Turn("user", 0, 0))

    asyncio.run(run())
    assert threads == [True] * 33 + [False] * 7


def test_too_many_turns_are_refused(serve, monkeypatch) -> None:
    monkeypatch.setattr(program_run, "MAX_RENDERED_TURNS", 500)  # 31 turns render 496
    address, state = serve()
    turns = [{"role": "user", "content": [{"text": "a"}]}] * 40
    program = [*turns, {"gen": {"max_tokens": 1}}]
    answer = httpx.post(f"{address}/v1/programs", json={"program": program}, timeout=60)
    assert answer.status_code == 400 and "too many turns" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"].startswith("program[31]")
    assert state.in_flight.num_admitted == 0


def test_the_text_behind_a_gen_has_no_value_of_the_gen_itself(monkeypatch) -> None:
    """A variable of the request may have the name of the gen; behind the gen it is the gen's own text."""
    branch, gen = new_branch(monkeypatch), GenStep("", "a", sampling_params(), False, Regex("x+"), None, 1, None)
    branch.run.client = SimpleNamespace(tokenizer=None)
    branch.variables = {"a": "old", "b": "known"}
    for name, text in (("a", ""), ("b", "known")):
        assert asyncio.run(gen.trailing_text(branch, [VariableStep("", name, ())])) == text
