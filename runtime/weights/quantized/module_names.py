"""Matches names of modules with the lists of a quantization_config."""

from __future__ import annotations

import re
from collections.abc import Sequence

from plait.runtime.errors import UnsupportedModel

REGEX_PREFIX = "re:"
MAX_PATTERN = 200  # characters
MAX_REPEATS = 3  # of any length, in one pattern: more of them take long on names that do not match
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression of a config. Raises UnsupportedModel for one that is invalid or could take long to match."""
    if len(pattern) > MAX_PATTERN or _REPEATED_GROUP.search(pattern) or len(_REPEAT.findall(pattern)) > MAX_REPEATS:
        raise UnsupportedModel(
            f"the pattern {pattern!r:.80} in quantization_config is too complex; plait matches up to {MAX_PATTERN} "
            f"characters, {MAX_REPEATS} repetitions and no repeated groups"
        )
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnsupportedModel(f"the pattern {pattern!r:.80} in quantization_config is invalid: {error}") from None


class ExactNames:
    """compressed-tensors' rule: a complete name, or a pattern after `re:` that matches from the name's beginning."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._names = {entry for entry in entries if not entry.startswith(REGEX_PREFIX)}
        self._patterns = [
            compile_pattern(entry.removeprefix(REGEX_PREFIX)) for entry in entries if entry.startswith(REGEX_PREFIX)
        ]

    def match(self, module: str) -> bool:
        return module in self._names or any(pattern.match(module) for pattern in self._patterns)


class PartialNames:
    """transformers' rule: an entry is some consecutive components of the name, or a pattern from its beginning.

    >>> PartialNames(["mlp.gate"]).match("model.layers.0.mlp.gate")
    True
    >>> PartialNames(["mlp.gate"]).match("model.layers.0.mlp.gate_proj")
    False
    """

    def __init__(self, entries: Sequence[str]) -> None:
        self._parts = [f".{entry.strip('.')}." for entry in entries]
        self._patterns = [
            compile_pattern(entry) for entry in entries if any(character in entry for character in "*+?[(|^$\\")
        ]

    def match(self, module: str) -> bool:
        name = f".{module}."
        return any(part in name for part in self._parts) or any(pattern.match(module) for pattern in self._patterns)
