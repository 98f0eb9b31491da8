"""The hint for a misspelt name in an error message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def similar_name(name: str, known: Iterable[str], min_similarity: float = 0.6) -> str | None:
    """Returns the known name that is most similar, or None if none is. `min_similarity`: from 0 to 1.

    >>> similar_name("temprature", ["temperature", "top_p"])
    'temperature'
    """
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=min_similarity)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns `" (did you mean 'stop'?)"`, or "" if no known name is similar."""
    meant = similar_name(name, known)
    return f" (did you mean {meant!r}?)" if meant else ""
