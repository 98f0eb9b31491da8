"""`compile_body`: runs a program's body once without a model and returns the graph of its steps. `warm_prefix`:
computes the prefix that all runs share before the first run, so that it is in the cache."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from plait.constrained.specs import Choices, Spec
from plait.lang.core.branch import Branch
from plait.lang.core.expressions import CallExpr, Gen, GenToolCall
from plait.lang.core.run import Run
from plait.lang.errors import CompileError, DependsOnValue, Problem, ProgramError
from plait.lang.execution.event_loop import require_no_running_loop
from plait.lang.sampling_options import Options
from plait.lang.source_location import error_location, function_location
from plait.lang.states.async_state import AsyncState
from plait.lang.states.state import ProgramState
from plait.lang.tools.call_format import tool_call_format
from plait.lang.tracing.graph import Graph
from plait.lang.tracing.nodes import Append, ForkInto, Node
from plait.lang.tracing.traced_run import TracedBranch, TracedRun
from plait.lang.tracing.traced_value import Argument, TracedValue
from plait.runtime.errors import PlaitError
from plait.runtime.sampling_params import sampling_params

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient
    from plait.runtime.tokenizer.chat_template import ChatTemplate


def compile_body(
    name: str, body: Callable[..., Any], bound: inspect.BoundArguments, defaults: Options, template: ChatTemplate | None
) -> Graph:
    """Calls `body` once, with traced values for missing arguments, and returns its graph. Raises CompileError."""
    traced_run = TracedRun(name, defaults, template)
    parameters = _add_missing_arguments(bound, traced_run)
    traced_run.arguments = dict(list(bound.arguments.items())[1:])
    returned = _run_body(body, TracedBranch(traced_run), bound)
    problems = find_problems(traced_run)
    del returned  # kept until here: a branch that the body returns counts as used
    if problems:
        raise CompileError(name, problems)
    place = function_location(getattr(inspect.unwrap(body), "__code__", None))
    return Graph(name, tuple(traced_run.nodes), tuple(traced_run.branch_parents), parameters, defaults, place)


def _add_missing_arguments(bound: inspect.BoundArguments, traced_run: TracedRun) -> tuple[str, ...]:
    """Adds a traced value for each required argument that was not given. Returns their names."""
    missing = []
    for name, parameter in list(bound.signature.parameters.items())[1:]:
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name not in bound.arguments and parameter.default is parameter.empty and not is_open:
            bound.arguments[name] = _argument(traced_run, name)
            missing.append(name)
    return tuple(missing)


def _argument(traced_run: TracedRun, name: str) -> TracedValue:
    sources = frozenset([Argument(name)])
    return TracedValue(traced_run.placeholders, name, sources, lambda run: run.argument(name), _is_plain=True)


def _run_body(body: Callable[..., Any], branch: TracedBranch, bound: inspect.BoundArguments) -> Any:
    """Runs the body and returns its return value. Raises CompileError."""
    traced_run, is_async = branch.run, inspect.iscoroutinefunction(body)
    if is_async:
        require_no_running_loop("compile the program outside the event loop, or in another thread")
    try:
        if is_async:
            returned = asyncio.run(body(AsyncState(branch), *bound.args[1:], **bound.kwargs))
        else:
            returned = body(ProgramState(branch), *bound.args[1:], **bound.kwargs)
    except Exception as error:
        if traced_run.placeholders.first_refusal is not None:
            raise traced_run.placeholders.first_refusal from (
                None if error is traced_run.placeholders.first_refusal else error
            )
        raise _failed(traced_run, error) from error
    finally:
        traced_run.end()
    if traced_run.placeholders.first_refusal is not None:  # the body caught the exception
        raise traced_run.placeholders.first_refusal
    return returned


def _failed(traced_run: TracedRun, error: Exception) -> CompileError:
    """Converts an exception of the body to a CompileError."""
    text, place = str(error), error_location(error)
    if traced_run.placeholders.mentions_traced_value(text):
        hint = "; inside a text write f'{value}'" if "str instance" in text else ""
        text = traced_run.placeholders.expand(text)
        text = f"a value known at run time only is used where a known value is needed: {text}{hint}"
        return DependsOnValue(traced_run.program, [Problem(text, place)])
    if isinstance(error, ProgramError) and error.program == traced_run.program:
        text = text.removeprefix(f"program {traced_run.program!r}: ").removesuffix(f" (at {error.place})")
    elif not isinstance(error, PlaitError):
        text = f"the body raised {type(error).__name__}{': ' + text if text else ''}"
    return CompileError(traced_run.program, [Problem(text, place)])


# -- graph checks ---------------------------------------------------------------------------------
# Checks of a compiled program: constraints that cannot be compiled, and branches whose results are never used.


def find_problems(traced_run: TracedRun) -> list[Problem]:
    """Returns all problems, in the order of the program."""
    numbered_problems = [*_constraints(traced_run), *_unused_forks(traced_run)]
    return [problem for _, problem in sorted(numbered_problems, key=lambda numbered: numbered[0])]


def _constraints(traced_run: TracedRun) -> Iterator[tuple[int, Problem]]:
    """Yields constraints that do not compile. Each is compiled once, in a separate process, as the runtime does."""
    errors: dict[Spec, str | None] = {}
    for number, node in enumerate(traced_run.nodes):
        spec = _constraint_of(node)
        if spec is None or isinstance(spec, Choices):
            continue
        if spec not in errors:
            from plait.runtime.client.constraint_check import constraint_error  # lazy: loads the grammar libraries

            errors[spec] = constraint_error(spec)
        reason = errors[spec]
        if reason is not None:
            assert isinstance(node, Append)
            name = f"gen({node.name!r})" if node.name else "gen"
            yield number, Problem(f"{name}: the constraint cannot be used: {reason}", node.place)


def _constraint_of(node: Node) -> Spec | None:
    if not isinstance(node, Append) or not isinstance(node.expr, CallExpr):
        return None
    expr = node.expr._call
    if isinstance(expr, GenToolCall):
        return tool_call_format(expr.tools, expr.choice, value=expr.value_format).spec
    return expr.constraint if isinstance(expr, Gen) else None


def _unused_forks(traced_run: TracedRun) -> Iterator[tuple[int, Problem]]:
    """Yields forks whose branches were never joined or read, and to which no reference is left after the body."""
    for number, handles in traced_run.forks:
        node = traced_run.nodes[number]
        assert isinstance(node, ForkInto)
        if traced_run.read_branches.isdisjoint(node.branches) and all(handle() is None for handle in handles):
            fork = f"the {len(node.branches)} branches of this fork are" if len(node.branches) > 1 else "this fork is"
            text = f"{fork} never used: neither joined nor read nor returned"
            yield number, Problem(text, node.place)


# -- the prefix -----------------------------------------------------------------------------------


def warm_prefix(prefix: Sequence[Append], client: BackendClient) -> int:
    """Computes `prefix`. Returns how many of its tokens were not cached before. Raises the CallFailed of the
    runtime."""
    if not prefix:
        return 0
    run = Run("cache", client, Options())
    branch = Branch(run)
    try:
        for node in prefix:
            branch.append(node.expr)
        call = branch.session().generate(sampling_params(max_tokens=0, temperature=0.0))
        return call.result().usage.computed_tokens
    finally:
        run.end()
