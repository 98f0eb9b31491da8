"""What SGLang's protocol gives of a text: its pieces, and logprobs, as programs read them.

Source: SGLang's native API pages (/generate), 0.5.
"""

from __future__ import annotations

from typing import Any

from plait.lang.meta_info import Logprob
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.stop_strings import StopScanner


class StreamedText:
    """A text that comes as what it is so far, cut where a stop pattern's first match begins."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.matched: str | None = None
        self._scanner = StopScanner((), patterns)
        self._seen = 0  # characters
        self._data, self._num_emitted = bytearray(), 0  # bytes

    def push(self, text: str, *, is_end: bool) -> str:
        """What can be told now that the text is `text` so far. `matched` is the pattern, once one was found.

        >>> given = Given(("[0-9]+;",))
        >>> [given.push(text, is_end=False) for text in ("a1", "a12", "a12x", "a12x3;b")], given.matched
        (['a', '', '12x', ''], '[0-9]+;')
        """
        whole = text if is_end else text.rstrip("\ufffd")  # a character that is still on its way
        fresh = whole[self._seen :].encode(errors="replace")
        self._seen = max(self._seen, len(whole))
        self._data += fresh
        hit = self._scanner.push(fresh)
        if hit is not None:
            self.matched = hit.text
        end = hit.start if hit is not None else len(self._data) if is_end else self._scanner.num_safe
        piece = self._data[self._num_emitted : end].decode()
        self._num_emitted = end
        return piece


def logprob_fields(params: SamplingParams) -> dict[str, Any]:
    """The part of a request that is about logprobs."""
    if not params.logprobs and params.prompt_logprobs_from is None:
        return {}
    start = -1 if params.prompt_logprobs_from is None else params.prompt_logprobs_from
    asked = {"return_logprob": True, "logprob_start_len": start, "return_text_in_logprobs": True}
    return asked | ({"top_logprobs_num": params.top_logprobs} if params.top_logprobs else {})


def parse_logprobs(params: SamplingParams, meta: dict[str, Any]) -> dict[str, Any] | None:
    """The logprobs of `meta` under the names and in the form that `get_meta_info` has for them; None for none."""
    told: dict[str, Any] = {}
    for side, is_asked in (("output", params.logprobs), ("input", params.prompt_logprobs_from is not None)):
        if is_asked:
            entries = meta.get(f"{side}_token_logprobs") or []
            tops = meta.get(f"{side}_top_logprobs") or [None] * len(entries)
            kept = [at for at, entry in enumerate(entries) if entry[0] is not None]  # the very first has none
            told[f"{side}_token_logprobs"] = [parse_logprob_entry(entries[at]) for at in kept]
            told[f"{side}_top_logprobs"] = [[parse_logprob_entry(each) for each in tops[at] or ()] for at in kept]
    return told or None


def parse_logprob_entry(said: Any) -> Logprob:
    """One entry as `get_meta_info` has it."""
    logprob, token, text = said
    return float(logprob), int(token), "" if text is None else str(text)
