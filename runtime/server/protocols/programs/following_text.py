"""The text behind a gen of a program, as far as it is known before the gen runs."""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.client.following_text import following_text
from plait.runtime.server.protocols.programs.branch import ProgramBranch
from plait.runtime.server.protocols.programs.compiler import GenStep, SelectStep, Step, TextStep, VariableStep


async def text_behind(
    step: GenStep | SelectStep, behind: Sequence[Step], program_branch: ProgramBranch, role: str | None
) -> str:
    """Returns the text that belongs to the constraint of a gen; "" if none does. `behind`: the steps after it; `role`:
    of the turn that ends behind them.

    Waits for variables whose text a call still generates, if `following_nodes` counts them.
    """
    if not isinstance(step, GenStep) or step.constraint is None or step.sampling.min_tokens:
        return ""
    parts: list[tuple[str, bool]] = []
    limit = len(behind) + 1 if step.following_nodes is None else step.following_nodes
    for other in behind[:limit]:
        if isinstance(other, TextStep):
            parts.append((other.text, False))
        elif isinstance(other, VariableStep) and _is_known(other, step, program_branch):
            parts.append((await text_of(program_branch, other), False))
        else:
            break
    else:
        if limit > len(behind) and role is not None:
            parts.append((program_branch.turn_suffix(role), True))
    return following_text(parts, program_branch.client.tokenizer)


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
    assert not isinstance(value, list)
    return value if isinstance(value, str) else await value
