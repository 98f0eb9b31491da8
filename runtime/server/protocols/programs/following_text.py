"""The text behind a gen of a program, as far as it is known before the gen runs."""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.programs.steps import TextStep
from plait.runtime.server.protocols.programs.branch import ProgramBranch, resolve_value
from plait.runtime.server.protocols.programs.compiler import GenStep, Step, TurnEnd, VariableStep


async def text_behind(steps: Sequence[Step], index: int, program_branch: ProgramBranch) -> str:
    """Returns the text behind `steps[index]` that belongs to its constraint, if it is a gen; "" if none does.

    Waits for variables whose text a call still generates, if `following_nodes` counts them.
    """
    step = steps[index]
    if not isinstance(step, GenStep) or step.constraint is None or step.sampling.min_tokens:
        return ""
    known: list[TextStep | TurnEnd] = []
    num_following = len(steps) if step.following_nodes is None else step.following_nodes
    for number in range(index + 1, min(len(steps), index + 1 + num_following)):
        other = steps[number]
        if isinstance(other, VariableStep) and _is_known(other, step, program_branch):
            other = TextStep(await text_of(program_branch, other))
        if not isinstance(other, TextStep | TurnEnd):
            break
        known.append(other)
    return program_branch.text_behind(known, program_branch.client.tokenizer)


def _is_known(variable: VariableStep, gen: GenStep, program_branch: ProgramBranch) -> bool:
    """Whether the text of the variable does not come from the gen, and need not be waited for by default."""
    if variable.name == gen.name:
        return False
    return gen.following_nodes is not None or isinstance(program_branch.variables.get(variable.name), str)


async def text_of(program_branch: ProgramBranch, step: VariableStep) -> str:
    value = program_branch.variables[step.name]
    for index in step.index:
        assert isinstance(value, list)
        value = value[index]
    return str(await resolve_value(value))
