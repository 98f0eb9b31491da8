"""The steps of a program whose text is known: those that `BranchText` reads. Each caller has further steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextStep:
    """Plain text. It is never tokenized into a control token."""

    text: str


@dataclass(frozen=True)
class RoleBeginStep:
    """The chat template's text before a turn."""

    role: str


@dataclass(frozen=True)
class RoleEndStep:
    """The chat template's text after a turn."""

    role: str
