"""`plait.agent`: turns, the answer, limits, errors of tools, resumed batches."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Annotated

import pydantic
import pytest
from scripted_scheduler import Gate
from tool_examples import call_text

import plait
from plait import Budget, Tool, gen, user
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Generate
from plait.testing import Scripted, call

EVER_S = 600.0


def population(town: str) -> int:
    """How many thousand people live in a town."""
    return {"Rome": 2800}[town]


def hang() -> str:
    """Waits until the process ends."""
    threading.Event().wait(EVER_S)
    return ""


async def hang_async() -> str:
    """Waits on an event loop."""
    await asyncio.sleep(EVER_S)
    return ""


class Answer(pydantic.BaseModel):
    thousands: Annotated[int, pydantic.AfterValidator(lambda value: value if value != 13 else int("thirteen"))]


@pytest.fixture
def script(backend):
    """Sets the calls of the turns, in order; the last one is repeated."""

    def set_calls(*calls):
        texts = iter(calls)
        current = [""]

        def answer(prompt, request):
            current[0] = next(texts, current[0])
            return current[0]

        backend.scheduler.answer = answer

    return set_calls


def test_tools_are_called_until_the_answer(backend, script):
    script(call_text("population", town="Rome"), call_text("final_answer", answer="2.8 million"))
    state = plait.agent("You know towns.", [population]).run("How many live in Rome?")
    run = state.ret_value
    assert state["answer"] == run.answer == "2.8 million" and run.finish_reason == "answer"
    assert [(step.tool, step.arguments, step.result, step.error) for step in run.steps] == [
        ("population", {"town": "Rome"}, "2800", None)
    ]
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]
    listing = state.messages()[0]["content"]
    assert listing.startswith("You know towns.") and '"population"' in listing and '"final_answer"' in listing
    lines = str(run).splitlines()
    assert lines[0].startswith("1. population(town='Rome') -> 2800 (") and lines[1] == "answer: 2.8 million"
    assert len({request.session for request in backend.scheduler.sent(Generate)}) == 1, "no prefix is sent again"


def test_answer_has_the_type(script):
    script(call_text("final_answer", answer={"thousands": 5}))
    assert plait.agent(type=Answer).run("?")["answer"] == Answer(thousands=5)


def test_rejected_answer_is_told_to_the_model_and_raised_in_the_last_turn(script):
    rejected, accepted = (call_text("final_answer", answer={"thousands": number}) for number in (13, 5))
    script(rejected, accepted)
    state = plait.agent(type=Answer).run("?")
    step = state.ret_value.steps[0]
    assert state["answer"] == Answer(thousands=5) and step.arguments is None and "thirteen" in step.error
    assert "thirteen" in state.messages()[3]["content"]
    script(rejected)
    with pytest.raises(plait.UnreadableValue, match="thirteen"):
        plait.agent(type=Answer, max_turns=2).run("?")


def test_last_turn_can_only_be_the_answer(backend, script):
    script(*[call_text("population", town="Rome")] * 2, call_text("final_answer", answer=1))
    state = plait.agent("", [population], type=int, max_turns=3).run("?")
    assert state.ret_value.finish_reason == "max_turns" and len(state.ret_value.steps) == 2 and state["answer"] == 1
    names = [[call.name for call in request.constraint.calls] for request in backend.scheduler.sent(Generate)]
    assert names == [["population", "final_answer"], ["population", "final_answer"], ["final_answer"]]


def test_error_of_a_tool_is_text_or_ends_the_program(script):
    script(call_text("population", town="Ulm"), call_text("final_answer", answer="unknown"))
    state = plait.agent("", [population]).run("?")
    assert state.ret_value.steps[0].error == "KeyError: 'Ulm'" and state["answer"] == "unknown"
    assert state.messages()[3]["content"] == "Result of population: Error: KeyError: 'Ulm'"
    script(call_text("population", town="Ulm"))
    with pytest.raises(plait.ProgramError, match="KeyError: 'Ulm'") as raised:
        plait.agent("", [population], on_tool_error="raise").run("?")
    assert isinstance(raised.value.__cause__, KeyError)


def test_stop_iteration_of_a_tool_is_the_cause(script):
    def first() -> str:
        return next(iter([]))

    script(call_text("first"))
    with pytest.raises(plait.ProgramError, match="StopIteration") as raised:
        plait.agent("", [first], on_tool_error="raise").run("?")
    assert isinstance(raised.value.__cause__, StopIteration)


@pytest.mark.parametrize("tool", [hang, hang_async])
def test_tool_that_hangs_is_a_timeout(script, tool):
    script(call_text(tool.__name__), call_text("final_answer", answer="late"))
    state = plait.agent("", [tool], tool_timeout=0.2).run("?")
    assert state.ret_value.steps[0].error == f"TimeoutError: the tool {tool.__name__} did not end within 0.2 s"
    assert state["answer"] == "late"


def test_timeout_error_of_a_tool_is_its_own(script):
    def refuse() -> None:
        raise TimeoutError("no answer from the town hall")

    script(call_text("refuse"), call_text("final_answer", answer="late"))
    run = plait.agent("", [refuse], tool_timeout=EVER_S).run("?").ret_value
    assert run.steps[0].error == "TimeoutError: no answer from the town hall"


def test_seconds_of_the_budget_limit_a_tool(script):
    script(call_text("hang"))
    with pytest.raises(plait.ProgramError) as raised:
        plait.agent("", [hang]).run("?", budget=Budget(seconds=1))
    assert isinstance(raised.value.__cause__, plait.BudgetExceeded)


def test_tokens_of_the_budget_limit_the_turns(script):
    helper = plait.agent("", [population], max_turns=1000)
    script(call_text("population", town="Rome"), call_text("final_answer", answer="b"))
    tokens = helper.run("?").get_meta_info("agent_1")["completion_tokens"]
    script(call_text("population", town="Rome"))
    with pytest.raises(plait.ProgramError) as raised:
        helper.run("?", budget=Budget(tokens=3 * tokens))
    assert isinstance(raised.value.__cause__, plait.BudgetExceeded)
    assert len(raised.value.steps) >= 2 and raised.value.messages[1] == {"role": "user", "content": "?"}


def test_agent_continues_the_conversation_of_another_program(script):
    helper = plait.agent("You know towns.", [population], name="helper")

    @plait.function
    def program(s):
        first = helper(s, "How many live in Rome?")
        second = helper(s, "And there?")
        return first.answer, second.answer

    script(call_text("final_answer", answer="a"), call_text("final_answer", answer="b"))
    state = program.run()
    assert state.ret_value == ("a", "b") and "helper_1" in state
    assert [message["role"] for message in state.messages()] == ["system", "user", "assistant", "user", "assistant"]


def test_resumed_agent_is_read_from_the_file(backend, script, tmp_path):
    def local(town: str) -> int:
        """A function that only the agent has."""
        return 7

    def run(**options):
        helper = plait.agent("", [local, Tool("other", "", function=print)], **options)
        return helper.run_batch([{"task": "?"}], resume=tmp_path / "runs")[0]

    script(call_text("local", town="Rome"), call_text("other"), call_text("final_answer", answer="b"))
    fresh, resumed = run(), run()
    assert len(backend.scheduler.sent(Generate)) == 3 and resumed.ret_value == fresh.ret_value
    assert resumed["agent_1"] == fresh["agent_1"] and resumed["answer"] == "b"
    run(max_turns=3)  # another agent: its runs are not those of the first one
    assert len(backend.scheduler.sent(Generate)) > 3


def test_run_modes(script):
    helper = plait.agent("", [population])
    script(call_text("final_answer", answer="b"))
    assert asyncio.run(helper.arun("?"))["answer"] == "b"
    assert "final_answer" in "".join(helper.run("?", stream=True).text_iter("agent_1"))
    with pytest.raises(plait.DependsOnValue):
        helper.compile()


def test_scripted_agent():
    with Scripted([call("population", town="Rome"), call("final_answer", answer=2800)]):
        run = plait.agent("", [population], type=int).run("How many live in Rome?").ret_value
    assert run.answer == 2800 and [step.result for step in run.steps] == ["2800"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [Tool("a")]}, "agent: the tool 'a' has no function"),
        ({"tools": population}, "agent: tools must be a list"),
        ({"tools": [Tool("final_answer", function=print)]}, "a tool is named 'final_answer', as the agent's own"),
        ({"max_turns": 0}, "max_turns must be an integer from 1 to 1000"),
        ({"tool_timeout": 0}, "tool_timeout must be a number of seconds above 0"),
        ({"on_tool_error": "ignore"}, 'on_tool_error must be "text" or "raise"'),
        ({"name": ""}, "name must be non-empty text"),
        ({"instructions": user("x")}, "instructions must be text"),
        ({"type": threading.Lock}, "agent: type: the tool 'final_answer' cannot be described"),
    ],
)
def test_wrong_argument_is_an_input_error(options, message):
    with pytest.raises(plait.InputError, match=message):
        plait.agent(**options)


def test_agent_inside_an_async_program(script):
    """The conversation goes on as in a plain program; an async tool is awaited on the program's own event loop."""
    loops = []

    async def population_of(town: str) -> int:
        """How many people live in a town."""
        loops.append(asyncio.get_running_loop())
        return {"Rome": 2800}[town]

    helper = plait.agent("", [population_of], type=int)

    @plait.function
    async def main(s):
        s += plait.system("You know towns.")
        run = await helper(s, "How many live in Ulm and in Rome?")
        return run, asyncio.get_running_loop()

    calls = [call_text("population_of", town=town) for town in ("Ulm", "Rome")]
    script(*calls, call_text("final_answer", answer=2800))
    state = main.run()
    run, loop = state.ret_value
    assert (run.answer, state["answer"], run.finish_reason) == (2800, 2800, "answer")
    assert [(step.arguments, step.result, step.error) for step in run.steps] == [
        ({"town": "Ulm"}, "Error: KeyError: 'Ulm'", "KeyError: 'Ulm'"),
        ({"town": "Rome"}, "2800", None),
    ]
    assert loops == [loop, loop]
    assert [message["role"] for message in state.messages()].count("system") == 1


def test_rejected_answer_in_an_async_program(script):
    rejected, accepted = (call_text("final_answer", answer={"thousands": number}) for number in (13, 5))

    @plait.function
    async def main(s, max_turns):
        return await plait.agent(type=Answer, max_turns=max_turns)(s, "?")

    script(rejected, accepted)
    run = main.run(2).ret_value
    assert run.answer == Answer(thousands=5)
    assert run.steps[0].arguments is None
    script(rejected)
    with pytest.raises(plait.ProgramError, match="thirteen"):
        main.run(1)


def broken() -> str:
    """Fails."""
    raise LookupError("no such town")


def test_failed_agent_has_its_steps_and_messages(script):
    script(call_text("population", town="Rome"), call_text("broken"))
    helper = plait.agent("You know towns.", [population, broken], on_tool_error="raise")
    with pytest.raises(plait.ProgramError, match="LookupError: no such town") as raised:
        helper.run("How many?")
    error = raised.value
    assert [(step.tool, step.result, step.error) for step in error.steps] == [
        ("population", "2800", None),
        ("broken", "Error: LookupError: no such town", "LookupError: no such town"),
    ]
    assert [message["role"] for message in error.messages][-2:] == ["assistant", "user"]
    assert error.messages[1]["content"] == "How many?" and "broken" in error.messages[-2]["content"]
    copied = copy.deepcopy(error)
    assert copied.steps == error.steps and copied.messages == error.messages


def test_agent_whose_call_fails_has_its_steps_too(backend, script):
    outcomes = iter([call_text("population", town="Rome"), CallFailed("the machine burns")])
    backend.scheduler.answer = lambda prompt, request: next(outcomes)
    state = plait.agent("", [population]).run_batch([{"task": "?"}])[0]
    error = state.error()
    assert "the machine burns" in str(error) and [step.result for step in error.steps] == ["2800"]
    assert [message["content"] for message in error.messages][-2:] == ["Result of population: 2800", ""]


def test_agent_that_spends_its_budget_has_its_steps(script):
    script(call_text("population", town="Rome"), call_text("hang"))
    with pytest.raises(plait.ProgramError) as raised:
        plait.agent("", [population, hang]).run("?", budget=Budget(seconds=1))
    assert isinstance(raised.value.__cause__, plait.BudgetExceeded)
    assert [step.tool for step in raised.value.steps] == ["population", "hang"]


def test_program_that_catches_the_error_of_an_agent_sees_its_steps(script):
    script(call_text("broken"))
    helper = plait.agent("", [broken], on_tool_error="raise")

    @plait.function
    def program(s):
        try:
            helper(s, "?")
        except plait.ProgramError as error:
            return [step.tool for step in error.steps]

    @plait.function
    async def program_async(s):
        try:
            await helper(s, "?")
        except plait.ProgramError as error:
            return [step.tool for step in error.steps]

    assert program.run().ret_value == program_async.run().ret_value == ["broken"]


class Picture:
    """An object without a text."""


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (b"\x89PNG", "TypeError: the result is bytes, which the model cannot read; text or data is needed"),
        ([Picture()], "TypeError: the result holds a value of type Picture, which is no text or data"),
        ("\ud83d", "UnicodeEncodeError: "),
        ("long " * 300_000, "ValueError: the result is too long: 1,500,000 tokens, and "),
    ],
)
def test_result_that_the_model_cannot_read_is_an_error_for_it(script, value, error):
    def fetch():
        return value

    script(call_text("fetch"), call_text("final_answer", answer="none"))
    state = plait.agent("", [fetch]).run("?")
    (step,) = state.ret_value.steps
    assert state["answer"] == "none" and step.error.startswith(error)
    assert state.messages()[3]["content"].startswith(f"Result of fetch: Error: {error}")


def test_long_error_of_a_tool_is_cut(script):
    def fetch() -> str:
        raise ValueError("x" * 3_000_000 + "\ud83d")

    script(call_text("fetch"), call_text("final_answer", answer="none"))
    state = plait.agent("", [fetch]).run("?")
    assert state["answer"] == "none" and len(state.ret_value.steps[0].result) < 2100


def test_agent_that_another_branch_ends_has_its_steps(backend):
    gate = Gate("y" * 190)

    def release() -> str:
        """Lets the other branch spend the budget."""
        gate.open()
        return "released"

    turns = iter([call_text("population", town="Rome"), call_text("release")])
    backend.scheduler.answer = lambda prompt, request: gate if prompt.endswith("side:") else next(turns)

    @plait.function
    def program(s):
        s += "x"
        (side,) = s.fork(1)
        side += "side:" + gen("side")
        assert gate.reached.wait(60)
        plait.agent("", [population, release])(s, "?")

    with pytest.raises(plait.ProgramError) as raised:
        program.run(budget=Budget(tokens=200))
    assert isinstance(raised.value.__cause__, plait.BudgetExceeded)
    assert [step.result for step in raised.value.steps] == ["2800"]
