"""`ReasoningFormat`: the marks around reasoning."""

from __future__ import annotations

from dataclasses import dataclass


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
