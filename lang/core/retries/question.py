"""The question after a refused value: a user turn with the reason, and the beginning of the next answer.

Outside an assistant turn the question is a line of plain text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from plait.lang.core.results import TextSegment

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch

MAX_REASON_CHARS = 2000  # a validator's message may repeat the text that it refuses

Ask = Callable[[Any, int, str], None]


def question_after(branch: Branch, question: Callable[[str], str] | None = None) -> Ask:
    """Returns a function `ask(session, number, reason)` that appends `question(reason)` after answer `number`, counted
    from 1, to a session that has the branch's text and that answer. By default it asks for a valid answer."""
    write, lead = question or _correction, _text_before_call(branch)
    if branch.open_turn is None or branch.open_turn[0] != "assistant":
        return _ask_in_a_line(write, lead)
    template, roles = branch.template(), branch.roles()

    def ask(session: Any, number: int, reason: str) -> None:
        before = (*roles, *("assistant", "user") * (number - 1))
        asked = (*before, "assistant")
        session.append(template.turn_suffix(before, "assistant"), control=True)
        session.append(template.turn_prefix(asked, "user"), control=True)
        session.append(write(reason))
        session.append(template.turn_suffix(asked, "user"), control=True)
        session.append(template.turn_prefix((*asked, "user"), "assistant"), control=True)
        if lead:
            session.append(lead)

    return ask


def _ask_in_a_line(write: Callable[[str], str], lead: str) -> Ask:
    last_line = lead.rpartition("\n")[2]

    def ask(session: Any, number: int, reason: str) -> None:
        session.append(f"\n{write(reason)}\n{last_line}")

    return ask


def _correction(reason: str) -> str:
    return f"This answer is not valid: {reason[:MAX_REASON_CHARS]}\nCorrect it, and give the complete answer again."


def _text_before_call(branch: Branch) -> str:
    """Returns the literal text of the open turn (or of the text without turns) since its last call."""
    start = 0 if branch.open_turn is None else branch.open_turn[1]
    lead: list[str] = []
    for segment in reversed(branch.segments[start:]):
        if not isinstance(segment, TextSegment) or segment.control:
            break
        lead.insert(0, segment.text())
    return "".join(lead)
