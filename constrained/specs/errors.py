"""Why a constraint cannot be used."""

from __future__ import annotations


class GrammarError(ValueError):
    """Raised for a constraint that cannot be used. `reason` says why, `where` says at which place (None: unknown).

    `where` is a character index into a pattern, the index of an item, or the JSON pointer of a keyword (RFC 6901, ""
    for the whole schema).

    >>> GrammarError("unterminated character set", where=3).where
    3
    """

    def __init__(self, reason: str, where: int | str | None = None) -> None:
        super().__init__(f"{reason} (at {where})" if where or where == 0 else reason)
        self.reason = reason
        self.where = where


class CompileQueueFull(GrammarError):
    """Raised for a constraint that was not compiled, because too many others wait, no compiler process started, or
    the machine was too busy to compile it in time.

    It may be valid; try again later.
    """
