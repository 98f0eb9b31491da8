"""The checked steps of a program that a request describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from plait.constrained.specs import Spec
from plait.runtime.messages import SelectMethod
from plait.runtime.programs.steps import RoleBeginStep, RoleEndStep, TextStep
from plait.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class VariableStep:
    name: str
    index: tuple[int, ...]


@dataclass(frozen=True)
class GenStep:
    path: str
    name: str | None
    sampling: SamplingParams
    constraint: Spec | None
    constraint_param: str | None
    n: int
    same_seed: bool
    following_nodes: int | None


@dataclass(frozen=True)
class SelectStep:
    path: str
    name: str | None
    choices: tuple[str, ...]
    method: SelectMethod
    timeout_s: float | None
    sampling: SamplingParams  # its seed, of the method "exact"
    same_seed: bool


@dataclass(frozen=True)
class TurnBegin(RoleBeginStep):
    path: str


@dataclass(frozen=True)
class TurnEnd(RoleEndStep):
    path: str


@dataclass(frozen=True)
class ForkStep:
    path: str
    branches: tuple[tuple[Step, ...], ...]
    join: Literal["gather", "append"]


Step: TypeAlias = TextStep | VariableStep | GenStep | SelectStep | TurnBegin | TurnEnd | ForkStep


@dataclass(frozen=True)
class CompiledProgram:
    """`max_calls`: the greatest number of calls that it can have in flight at once; see `call_count`."""

    steps: tuple[Step, ...]
    max_calls: int
