"""`ReasoningFormat`: the marks around reasoning, and the constraint on an answer behind reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from plait.constrained.specs import Reasoning, Spec
from plait.runtime.server.chat.conversation import ReasoningRequest
from plait.runtime.server.errors import invalid


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts before and after the reasoning at the beginning of an answer.

    begin: "" if nothing opens reasoning but the prompt. field: where the template reads the reasoning of a message;
    "content" for a part of the content.
    """

    begin: str
    end: str
    field: str = "reasoning_content"


GENERIC_REASONING = ReasoningFormat("<think>", "</think>")


def reasoning_first(
    constraint: Spec | None, request: ReasoningRequest, marks: ReasoningFormat, is_open: bool
) -> Reasoning:
    """Returns `constraint` behind reasoning. `is_open`: the prompt has the opening mark. Raises ApiError without a
    constraint."""
    if constraint is None or isinstance(constraint, Reasoning):
        text = "'reasoning' needs a constraint on the answer, such as response_format; set enable_thinking without one"
        raise invalid(text, "reasoning", "unsupported_combination")
    return Reasoning(constraint, "" if is_open else marks.begin, marks.end, max_tokens=request.max_tokens)
