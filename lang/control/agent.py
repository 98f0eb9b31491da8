"""`agent`: a program in which the model calls tools until it gives its answer."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from plait.lang.argument_checks import checked_int
from plait.lang.core.primitives import gen
from plait.lang.core.roles import assistant, system, user
from plait.lang.core.tool_use.tool_calls import ToolResult
from plait.lang.core.waiting import finish, value_of
from plait.lang.errors import CompileError, ProgramError, UnreadableValue, program_error
from plait.lang.program import Program
from plait.lang.source_location import error_location
from plait.lang.states.state import ProgramState
from plait.lang.tools.make_tools import ToolSource, function_tool, make_tools
from plait.lang.tools.running import check_seconds
from plait.lang.tools.tool import Tool, ToolCall
from plait.runtime.errors import InputError

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.states.async_state import AsyncState

    AnyState = ProgramState | AsyncState

MAX_TURNS = 1000


@dataclass(frozen=True)
class AgentStep:
    """One call of a tool. `arguments` is None if a validator rejected them, so that the tool did not run. `result` is
    what the model read. `error`: the error of the tool as text, or None. `seconds`: how long the tool ran."""

    tool: str
    arguments: dict[str, Any] | None
    result: str
    error: str | None
    seconds: float


@dataclass(frozen=True)
class AgentRun:
    """The return value of an agent. `finish_reason`: "answer", or "max_turns" if the last turn could only be the
    answer. `str(run)` is a trace of its steps."""

    answer: Any
    steps: list[AgentStep]
    finish_reason: Literal["answer", "max_turns"]

    def __str__(self) -> str:
        lines = []
        for number, step in enumerate(self.steps, 1):
            arguments = ", ".join(f"{name}={value!r}" for name, value in (step.arguments or {}).items())
            lines.append(f"{number}. {step.tool}({arguments}) -> {step.result} ({step.seconds:.2f} s)")
        return "\n".join([*lines, f"{self.finish_reason}: {self.answer}"])


@dataclass(frozen=True)
class _Settings:
    name: str
    instructions: str
    max_turns: int
    tool_timeout: float | None
    on_tool_error: Literal["text", "raise"]


def agent(
    instructions: str = "",
    tools: Iterable[ToolSource] = (),
    *,
    type: Any = str,
    max_turns: int = 10,
    tool_timeout: float | None = None,
    on_tool_error: Literal["text", "raise"] = "text",
    name: str = "agent",
) -> Program[[str]]:
    """Returns a program in which the model calls tools until it gives its answer: `agent(...).run(task)`.

    In each turn the model calls one of the tools, or the tool `final_answer`, whose argument is the answer. The turn is
    constrained, so it is always a valid call. `state["answer"]` is the answer, and `state.ret_value` an AgentRun with
    the steps. The prefix of all turns is cached. Runs on every backend that supports tools.

    - `instructions`: the text of the system turn, which also lists the tools. `type`: the type of the answer, as in
      `gen`.
    - `max_turns`: after so many turns there is an answer, since the last turn can only be `final_answer`. The tokens
      and seconds of all turns are limited by `run(budget=...)`; its seconds also limit the tools.
    - `tool_timeout`: in seconds, for one call of a tool. Afterwards its error is a TimeoutError.
    - `on_tool_error`: with "text" the model reads the error of a tool and goes on; with "raise" the program ends with a
      ProgramError whose `__cause__` is the error.

    The error of an agent that fails has its `steps` so far, the one that failed included, and its `messages`.

    The turns are the variables "agent_1", "agent_2", ... (`name` is the text before the number). Called on the state of
    another program, `helper(s, task)`, it continues that conversation, and writes no second system turn. In an async
    program, `await helper(s, task)` does; async tools are then awaited on its event loop.

    >>> helper = agent("You answer questions about towns.", [population], type=int)    # doctest: +SKIP
    >>> helper.run("How many people live in Rome?", budget=Budget(tokens=500))["answer"]    # doctest: +SKIP
    2800
    """
    for keyword, text in (("name", name), ("instructions", instructions)):
        if not isinstance(text, str) or (keyword == "name" and not text):
            raise InputError(f"agent: {keyword} must be {'non-empty ' * (keyword == 'name')}text, not {text!r:.80}")
    _check_limits(max_turns, tool_timeout, on_tool_error)
    offered = _checked_tools(tools, _answer_tool(type))
    settings = _Settings(name, instructions, max_turns, tool_timeout, on_tool_error)

    def body(s: ProgramState, task: str) -> AgentRun:
        return finish(_run(s, settings, offered, task))

    body.__name__ = body.__qualname__ = name
    body.__doc__ = "Calls tools until the model gives its answer."
    described = [dataclasses.astuple(settings), [tool.as_json() for tool in offered]]

    async def async_body(s: AsyncState, task: str) -> AgentRun:
        return await _run(s, settings, offered, task)

    body.settings_text = json.dumps(described)  # type: ignore[attr-defined]
    return Program(body, async_body=async_body)


def _begin(branch: Branch, settings: _Settings, offered: tuple[Tool, ...], task: str) -> None:
    if not branch.turns:
        branch.append(system(settings.instructions, tools=offered))
    branch.append(user(task))


def _begin_turn(branch: Branch, settings: _Settings, offered: tuple[Tool, ...], turn: int) -> tuple[str, bool]:
    """Starts a turn. Returns its variable, and whether it is the last one."""
    variable, is_last = f"{settings.name}_{turn}", turn == settings.max_turns
    branch.append(assistant(gen(variable, tools=offered, tool_choice=offered[-1] if is_last else None)))
    return variable, is_last


async def _run(s: AnyState, settings: _Settings, offered: tuple[Tool, ...], task: str) -> AgentRun:
    _begin(s._branch, settings, offered, task)
    steps, answer_tool = list[AgentStep](), offered[-1]
    try:
        for turn in range(1, settings.max_turns + 1):
            variable, is_last = _begin_turn(s._branch, settings, offered, turn)
            call: ToolCall | None = None
            try:
                call = await value_of(s[variable])
            except UnreadableValue:  # a validator rejected the arguments; the model then gets the error
                if is_last:
                    raise
            if call is not None and call.name == answer_tool.name:
                s.set_var("answer", call.arguments["answer"])
                return AgentRun(await value_of(s["answer"]), steps, "max_turns" if is_last else "answer")
            began_s = time.monotonic()
            result = await value_of(s.call(variable, _tool_timeout(s, settings)))
            steps.append(_step(call, result, began_s))
            _raise_for(s, settings, result)
    except Exception as error:
        if isinstance(error, CompileError):
            raise
        failed = error
        if not isinstance(failed, ProgramError):
            failed = program_error(s._run.program, None, error, error_location(error))
        failed.steps, failed.messages = tuple(steps), s._branch.finished_messages()
        raise failed from failed.__cause__
    raise AssertionError("the last turn is the answer")


def _tool_timeout(s: AnyState, settings: _Settings) -> float | None:
    tracker = s._run.budget_tracker
    return settings.tool_timeout if tracker is None else tracker.limit_timeout(settings.tool_timeout)


def _raise_for(s: AnyState, settings: _Settings, result: ToolResult) -> None:
    """Raises BudgetExceeded, or the error of the tool where that ends the program."""
    tracker = s._run.budget_tracker
    if tracker is not None and tracker.is_out_of_time():
        raise tracker.exceeded_error()
    if result.error is not None and settings.on_tool_error == "raise":
        raise result.error


def _step(call: ToolCall | None, result: ToolResult, began_s: float) -> AgentStep:
    """Returns the record of a call."""
    error = None if result.error is None else f"{result.error.__class__.__name__}: {result.error}"
    arguments = None if call is None else call.arguments
    return AgentStep(result.name, arguments, result.text, error, time.monotonic() - began_s)


def _answer_tool(type_: Any) -> Tool:
    def final_answer(answer: Any) -> Any:
        """Gives the final answer. Call it as soon as you know the answer."""
        return answer

    final_answer.__annotations__ = {"answer": type_}
    return function_tool("agent: type", final_answer)


def _check_limits(max_turns: object, tool_timeout: object, on_tool_error: object) -> None:
    checked_int("agent: max_turns", max_turns, 1, MAX_TURNS)
    if on_tool_error not in ("text", "raise"):
        raise InputError(f'agent: on_tool_error must be "text" or "raise", not {on_tool_error!r:.80}')
    if tool_timeout is not None:
        check_seconds("agent: tool_timeout", tool_timeout)


def _checked_tools(tools: object, answer_tool: Tool) -> tuple[Tool, ...]:
    """Returns the tools, with `answer_tool` as the last one. Raises InputError for one that cannot be run."""
    if isinstance(tools, (str, bytes, dict, Tool)) or not isinstance(tools, Iterable):
        raise InputError(f"agent: tools must be a list of functions or Tool objects, not {tools!r:.80}")
    sources = [*tools]
    if any(tool.name == answer_tool.name for tool in (make_tools("agent", sources) if sources else ())):
        raise InputError(f"agent: a tool is named {answer_tool.name!r}, as the agent's own tool for its answer")
    checked = make_tools("agent", [*sources, answer_tool])
    for tool in checked:
        if tool.function is None:
            raise InputError(f"agent: the tool {tool.name!r} has no function, so the agent cannot run it")
    return checked
