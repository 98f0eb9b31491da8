"""The merges of a SentencePiece tokenizer, found from its scores; those of large vocabularies are kept on disk.

Finding the half a million merges of Gemma's 262,144 tokens takes more than a second, in the process of every client.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from plait.runtime.model_files import packed_cache
from plait.runtime.model_files.array_file import DamagedFile
from plait.runtime.model_files.packed_cache import CacheHeader, UnusableFolder

NORMAL = 1  # the type of a token that merges form
MAX_CHARS = 256  # of a token that merges form
MIN_TOKENS = 100_000  # of a vocabulary whose merges are kept
_VERSION = "merges 1"
Pairs = npt.NDArray[np.int32]  # [n, 2]: the tokens of each merge


def sentencepiece_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float], vocab: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Converts SentencePiece scores to an ordered merge list of the texts in `vocab`.

    SentencePiece merges the two neighbours that form the token with the highest score. So each way to split a token
    into two tokens is a merge, ordered by the score of the token.
    """
    normal = {text: i for text, i in vocab.items() if types[i] == NORMAL}
    pairs = _kept_pairs(normal, scores, len(tokens)) if len(tokens) >= MIN_TOKENS else find_pairs(normal, scores)
    if not len(pairs):
        return []
    left, right = (map(tokens.__getitem__, column.tolist()) for column in pairs.T)
    return list(zip(left, right, strict=True))


def find_pairs(normal: Mapping[str, int], scores: Sequence[float]) -> Pairs:
    """Returns the merges of the tokens `normal` (text: id), ordered by the score of what they form, then by ids."""
    found = [
        (i, normal[left], normal[right])
        for text, i in normal.items()
        if 2 <= len(text) <= MAX_CHARS
        for split in range(1, len(text))
        if (left := text[:split]) in normal and (right := text[split:]) in normal
    ]
    table = np.array(found, np.int32).reshape(-1, 3)
    order = np.lexsort((table[:, 2], table[:, 1], -np.array(scores, np.float64)[table[:, 0]]))
    return np.ascontiguousarray(table[order, 1:])


def _kept_pairs(normal: Mapping[str, int], scores: Sequence[float], num_tokens: int) -> Pairs:
    """Returns `find_pairs` from the folder of packed weights, or finds them and keeps them there.

    A folder that cannot be used is reported where it costs more: for the weights.
    """
    key = _key(normal, scores)
    with contextlib.suppress(UnusableFolder, OSError):
        if packed_cache.limit_bytes() and (pairs := _load(key, num_tokens)) is not None:
            return pairs
    pairs = find_pairs(normal, scores)
    with contextlib.suppress(UnusableFolder, OSError):
        if packed_cache.limit_bytes():
            header = CacheHeader(key, [], msgspec.Raw(msgspec.json.encode(len(pairs))))
            packed_cache.store(header, [pairs.reshape(-1).view(np.uint8)])
    return pairs


def _key(normal: Mapping[str, int], scores: Sequence[float]) -> str:
    """Returns a hash of all that the merges depend on."""
    digest = hashlib.sha256(_VERSION.encode())
    digest.update("".join(normal).encode("utf-8", "surrogatepass"))
    digest.update(np.fromiter(map(len, normal), np.int64, len(normal)).tobytes())
    digest.update(np.fromiter(normal.values(), np.int64, len(normal)).tobytes())
    digest.update(np.array(scores, np.float64).tobytes())
    return digest.hexdigest()


def _load(key: str, num_tokens: int) -> Pairs | None:
    """Returns the merges with this key; None if they are missing or damaged. Raises UnusableFolder."""
    try:
        if (found := packed_cache.load(key)) is None:
            return None
        mapped, header = found
        mapped.check(_run_in_turn)
        count = msgspec.json.decode(header.entries, type=int)
        pairs = mapped.data[: 8 * count].view("<i4").reshape(count, 2)
        if count and not 0 <= int(pairs.min()) <= int(pairs.max()) < num_tokens:
            raise DamagedFile("it names other tokens")
    except (DamagedFile, ValueError):  # of msgspec and of numpy
        packed_cache.remove(key)
        return None
    return pairs


def _run_in_turn(run: Callable[[Any], None], jobs: Sequence[Any]) -> None:
    for job in jobs:
        run(job)
