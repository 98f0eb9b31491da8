"""The steps of a program that was sent: what its nodes were compiled to. Each runs on a `ProgramBranch`."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from plait.constrained.specs import Spec
from plait.runtime.client.call import Call
from plait.runtime.messages import SelectMethod
from plait.runtime.programs.steps import RoleBeginStep, RoleEndStep, Step, TextStep
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.server.protocols.programs.branch import ProgramBranch


@dataclass(frozen=True)
class TextNode(TextStep):
    path: str  # of the node, as "program[2]"; so in all steps


@dataclass(frozen=True)
class VariableStep(Step):
    path: str
    name: str
    index: tuple[int, ...]

    def _run_on(self, branch: ProgramBranch, following: Sequence[Step]) -> Awaitable[None]:
        return branch.write_variable(self.name, self.index)


@dataclass(frozen=True)
class CallStep(Step):
    path: str
    name: str | None
    sampling: SamplingParams  # of a select, the seed of the method "exact"
    same_seed: bool

    def _run_on(self, branch: ProgramBranch, following: Sequence[Step]) -> Awaitable[None]:
        return branch.run.call(self, branch, following)

    async def trailing_text(self, branch: ProgramBranch, following: Sequence[Step]) -> str:
        """Returns the text of the steps behind this one that belongs to its constraint; "" if none does."""
        return ""

    def start(self, branch: ProgramBranch, trailing_text: str) -> list[Call]:
        """Starts the call, and its further samples, after the text of the branch."""
        raise NotImplementedError


@dataclass(frozen=True)
class GenStep(CallStep):
    constraint: Spec | None
    constraint_param: str | None
    n: int
    following_nodes: int | None

    async def trailing_text(self, branch: ProgramBranch, following: Sequence[Step]) -> str:
        """Waits for variables whose text a call still generates, if `following_nodes` counts them."""
        if self.constraint is None or self.sampling.min_tokens:
            return ""
        known: list[Step] = []
        for step in following[: self.following_nodes]:
            if isinstance(step, VariableStep) and self._knows(step.name, branch):
                step = TextStep(await branch.text_of(step.name, step.index))
            if not isinstance(step, TextStep | TurnEnd):
                break
            known.append(step)
        return branch.trailing_text(known, branch.run.client.tokenizer)

    def _knows(self, name: str, branch: ProgramBranch) -> bool:
        """Whether the text of a variable does not come from this gen, and need not be waited for by default."""
        if name == self.name:
            return False
        return self.following_nodes is not None or isinstance(branch.variables.get(name), str)

    def start(self, branch: ProgramBranch, trailing_text: str) -> list[Call]:
        sampling = branch.seed_path.params_of_next_gen(self.sampling, same_seed=self.same_seed)
        return branch.start_gen(self.name, sampling, self.constraint, self.n, trailing_text)


@dataclass(frozen=True)
class SelectStep(CallStep):
    choices: tuple[str, ...]
    method: SelectMethod
    timeout_s: float | None

    def start(self, branch: ProgramBranch, trailing_text: str) -> list[Call]:
        draw = self.sampling if self.method == "exact" else None
        return [branch.start_select(self.name, self.choices, self.method, self.timeout_s, draw, self.same_seed)]


@dataclass(frozen=True)
class TurnBegin(RoleBeginStep):
    path: str


@dataclass(frozen=True)
class TurnEnd(RoleEndStep):
    path: str


@dataclass(frozen=True)
class ForkStep(Step):
    path: str
    branches: tuple[tuple[ProgramStep, ...], ...]
    join: Literal["gather", "append"]

    def _run_on(self, branch: ProgramBranch, following: Sequence[Step]) -> Awaitable[None]:
        return branch.run.fork(self, branch)


ProgramStep: TypeAlias = TextNode | VariableStep | CallStep | TurnBegin | TurnEnd | ForkStep
