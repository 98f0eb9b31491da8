"""`Step`, what a program of the language or of `POST /v1/programs` does next, and the steps that both have.

A step does its work by the methods of a branch, which tell what happens: one that is compiled records it, one of the
server may have to wait. So the callers differ in the steps that only they have, and in waiting.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any


class Step:
    """One step. The name of its method has an underscore, because a value that is traced in `compile` is a step too,
    whose other attributes are those of the value."""

    def _run_on(self, branch: Any, following: Sequence[Step]) -> Awaitable[None] | None:
        """Does the step on a branch. `following`: the steps after it. What is returned is to be waited for."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextStep(Step):
    """Plain text. It is never tokenized into a control token."""

    text: str

    def _run_on(self, branch: Any, following: Sequence[Step]) -> None:
        branch.write(self.text)


@dataclass(frozen=True)
class RoleBeginStep(Step):
    """The chat template's text before a turn."""

    role: str

    def _run_on(self, branch: Any, following: Sequence[Step]) -> Awaitable[None] | None:
        waiting: Awaitable[None] | None = branch.begin_role(self.role, following)
        return waiting


@dataclass(frozen=True)
class RoleEndStep(Step):
    """The chat template's text after a turn."""

    role: str

    def _run_on(self, branch: Any, following: Sequence[Step]) -> None:
        branch.end_turn(self.role)
