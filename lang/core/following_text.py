"""The text that an expression appends behind a gen, as far as it is known before the gen runs."""

from __future__ import annotations

from collections.abc import Sequence

from plait.lang.core.branch import Branch
from plait.lang.core.expressions import Expr, RoleEnd, Text
from plait.runtime.client.following_text import following_text


def text_behind(behind: Sequence[Expr], branch: Branch) -> str:
    """Returns the text that belongs to the constraint of a gen; "" if none does.

    `behind`: what the same expression appends after the gen. Texts and the end of the turn are known. Backends without
    a runtime of plait cannot constrain a value by the text behind it.
    """
    client = branch.run.client
    if not getattr(client, "takes_following_text", False):
        return ""
    parts: list[tuple[str, bool]] = []
    for expr in behind:
        if isinstance(expr, Text):
            parts.append((expr.text, False))
            continue
        if isinstance(expr, RoleEnd) and branch.open_turn is not None and branch.open_turn[0] == expr.role:
            parts.append((branch.turn_suffix(expr.role), True))
        break
    return following_text(parts, client.tokenizer)
