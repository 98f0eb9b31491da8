"""Ends one branch of a program, and only that.

Knows: a strand and its run. Must not know: handles, races.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.lang.strand import Strand


def end_branch(strand: Strand, reason: str) -> None:
    """Ends the branch's calls at once. That it has no values is not the program's failure."""
    strand.run.let_go(strand.own_answers())
    strand.abort(reason)
