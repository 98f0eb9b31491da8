"""`ReasoningFormat`: the marks around reasoning; `MessageFormat`: those of answers that consist of messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The texts before and after the reasoning at the beginning of an answer.

    begin: "" if nothing opens reasoning but the prompt. field: where the template reads the reasoning of a message;
    "content" for a part of the content. lead, separator: what the template writes before and behind `end`.
    """

    begin: str
    end: str
    field: str = "reasoning_content"
    lead: str = "\n"
    separator: str = "\n\n"


@dataclass(frozen=True)
class MessageFormat:
    """How the messages of an answer begin, of models that write reasoning, text and each call as a message of its own.

    begin: of every message; the prompt ends with that of the first one. texts: what follows it before a text, as the
    template writes it, and in other forms.
    """

    begin: str
    texts: tuple[str, ...]


GENERIC_REASONING = ReasoningFormat("<think>", "</think>")
