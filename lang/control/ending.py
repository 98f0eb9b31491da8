"""Ends one branch of a program, and only that.

Knows: a strand and its run. Must not know: handles, races.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch


def cancel_branch(branch: Branch, reason: str) -> None:
    """Ends the branch's calls at once. That it has no values is not the program's failure."""
    branch.run.detach(branch.own_call_segments())
    branch.abort(reason)
