"""race and cancel: losers and cancelled branches end at once, and their sessions are closed."""

from __future__ import annotations

import asyncio
import threading

import pytest
from scripted_scheduler import Gate

import plait
from plait import gen, race
from plait.runtime.errors import Aborted, CallFailed
from plait.runtime.messages import Abort

pytestmark = pytest.mark.timeout(120)


@plait.function
def contest(s, n, first):
    s += "Q"
    forks = s.fork(n)
    forks += lambda i: f"{i}:" + gen("x")
    winners = race(forks, first)
    open_now = s._run.client._transport.open_sessions()
    winners.join()
    return open_now, forks


def test_first_branch_wins_and_the_others_end_at_once(backend):
    never = Gate("late")
    backend.script(("1:", "one"), default=never)
    state = contest.run(3, 1)
    open_now, forks = state.ret_value
    assert state["x"] == ["one"] and state.error() is None
    assert open_now <= 2, "the losers' sessions were gone before the race returned"
    assert len(backend.scheduler.sent(Abort)) >= 2
    with pytest.raises(plait.ProgramError, match="Aborted"):
        forks[0]["x"]
    assert state.usage.calls == 1 and state.usage.failed_calls == 2
    assert backend.scheduler.open_sessions() == 0


def test_winners_are_in_order_of_completion(backend):
    gates = {str(i): Gate(f"<{i}>") for i in range(4)}
    backend.script(*((f"{i}:", gates[str(i)]) for i in range(4)))
    reached = threading.Thread(target=lambda: [gates["3"].reached.wait(60), gates["2"].open(), gates["0"].open()])
    reached.start()
    assert contest.run(4, 2)["x"] in (["<2>", "<0>"], ["<0>", "<2>"])
    reached.join()


def test_failed_branch_cannot_win(backend):
    backend.script(("1:", "one"), default=CallFailed("no", "deadline"))
    assert contest.run(3, 1)["x"] == ["one"]
    with pytest.raises(plait.ProgramError, match="program 'contest', variable 'x': DeadlineExceeded: no"):
        contest.run(3, 2)
    assert backend.scheduler.open_sessions() == 0


def test_forks_of_a_loser_end_too(backend):
    never = Gate("late")
    backend.script(("0:", "zero"), default=never)

    @plait.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks[0].__iadd__("0:" + gen("x"))
        forks[1].__iadd__("1:")
        inner = forks[1].fork(2)
        inner += "deep" + gen("y")
        forks[1].__iadd__(gen("x"))
        race(forks).join()
        return inner

    state = program.run()
    assert state["x"] == ["zero"] and state.error() is None
    assert isinstance(state.ret_value[1].error().__cause__, Aborted)


def test_race_is_awaited_in_an_async_program(backend):
    backend.script(("1:", "one"), default=Gate("late"))

    @plait.function
    async def program(s):
        s += "Q"
        forks = s.fork(3)
        forks += lambda i: f"{i}:" + gen("x")
        winners = await race(forks)
        await winners.join()
        return await s["x"]

    assert asyncio.run(program.arun()).ret_value == ["one"]


def test_only_the_winners_of_a_race_can_be_joined(backend):
    @plait.function
    def program(s):
        s += "Q"
        forks = s.fork(2)
        forks += gen("x")
        race(forks)
        with pytest.raises(plait.InputError, match="join the group that race"):
            forks.join()
        for first in (0, 3, True, "1"):
            with pytest.raises(plait.InputError, match="first must be from 1 to the 2 branches"):
                race(forks, first)
        with pytest.raises(plait.InputError, match="race takes the branches of one fork"):
            race([s])

    assert program.run().error() is None


def test_cancelled_branch_ends_and_the_program_continues(backend):
    gate = Gate("late")
    backend.script(("slow", gate), default="fast")

    @plait.function
    def program(s):
        s += "Q"
        side, main = s.fork(2)
        side += "slow" + gen("x")
        main += "quick" + gen("x")
        side.cancel()
        with pytest.raises(plait.InputError, match="this text was cancelled"):
            side += "more"
        s += gen("y")
        return main["x"]

    state = program.run()
    assert state.ret_value == "fast" and state["y"] == "fast" and state.error() is None


def test_cancel_of_a_streamed_run_ends_it(backend):
    gate = Gate("late")
    backend.script(default=gate)

    @plait.function
    def program(s):
        s += "Q" + gen("x")

    state = program.run(stream=True)
    assert gate.reached.wait(60)
    state.cancel()
    with pytest.raises(plait.ProgramError, match="Aborted"):
        state["x"]
