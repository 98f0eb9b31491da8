"""Parses texts and logprobs of SGLang's protocol.

Source: SGLang's native API pages (/generate), 0.5.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from plait.constrained.specs import JsonSchema, Spec, Structural
from plait.lang.meta_info import Logprob
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.stop_strings import StopScanner

if TYPE_CHECKING:
    from plait.runtime.chat.json_calls import JsonCall


class StreamedText:
    """Splits a cumulative stream of text into pieces, and ends it where the first match of a stop pattern begins."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.matched: str | None = None
        self._scanner = StopScanner((), patterns)
        self._seen = 0  # characters
        self._data, self._num_emitted = bytearray(), 0  # bytes

    def push(self, text: str, *, is_end: bool) -> str:
        """Returns the text that is certain now, where `text` is the whole text so far. Sets `matched` on a match.

        >>> streamed = StreamedText(("[0-9]+;",))
        >>> [streamed.push(text, is_end=False) for text in ("a1", "a12", "a12x", "a12x3;b")], streamed.matched
        (['a', '', '12x', ''], '[0-9]+;')
        """
        decoded = text if is_end else text.rstrip("\ufffd")  # U+FFFD: the last character is incomplete
        new_data = decoded[self._seen :].encode(errors="replace")
        self._seen = max(self._seen, len(decoded))
        self._data += new_data
        match = self._scanner.push(new_data)
        if match is not None:
            self.matched = match.text
        end = match.start if match is not None else len(self._data) if is_end else self._scanner.num_safe
        piece = self._data[self._num_emitted : end].decode()
        self._num_emitted = end
        return piece


def is_structural_tag(spec: Structural) -> bool:
    """Returns whether SGLang's `structural_tag` can say all of a spec."""
    is_json = all(isinstance(call.content, str) for call in spec.calls)
    return is_json and spec == Structural(
        spec.triggers,
        annotations=spec.annotations,
        strict_formats=spec.strict_formats,
        lenient=spec.lenient,
        whitespace=spec.whitespace,
        compact=spec.compact,
    )


def json_call_of(spec: Spec | None) -> tuple[JsonCall, JsonSchema | Structural] | None:
    """Returns the call of a tool that a spec is about, and a constraint that SGLang takes: on the JSON of a required
    call, or on text with a call, which a stop string ends. None for any other spec, and for calls of another form."""
    if not isinstance(spec, Structural):
        return None
    from plait.runtime.chat.json_calls import tool_calls  # lazy: it loads the grammar libraries

    calls = tool_calls(spec)
    call = None if calls is None else calls.as_json()
    if calls is None or call is None:
        return None
    if calls.is_required:
        return call, JsonSchema(call.schema, annotations=spec.annotations, strict_formats=spec.strict_formats)
    trigger = (call.begin, call.schema, call.end)
    return call, Structural([trigger], annotations=spec.annotations, strict_formats=spec.strict_formats)


def structural_tag(spec: Structural) -> str:
    """Returns calls in free text as SGLang's sampling parameter of that name.

    >>> structural_tag(Structural([("<f>", {"type": "null"}, "</f>")]))[:47]
    '{"type": "structural_tag", "structures": [{"beg'
    """
    structures = [
        {"begin": call.begin, "schema": json.loads(call.schema or "{}"), "end": call.end} for call in spec.calls
    ]
    names = [call.begin for call in spec.calls]
    return json.dumps({"type": "structural_tag", "structures": structures, "triggers": names}, ensure_ascii=False)


def logprob_fields(params: SamplingParams) -> dict[str, Any]:
    """Returns the fields of a request that concern logprobs."""
    if not params.logprobs and params.prompt_logprobs_from is None:
        return {}
    start = -1 if params.prompt_logprobs_from is None else params.prompt_logprobs_from
    fields = {"return_logprob": True, "logprob_start_len": start, "return_text_in_logprobs": True}
    return fields | ({"top_logprobs_num": params.top_logprobs} if params.top_logprobs else {})


def parse_logprobs(params: SamplingParams, meta: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the logprobs of `meta` as `get_meta_info` has them; None if none were requested."""
    parsed: dict[str, Any] = {}
    for side, is_requested in (("output", params.logprobs), ("input", params.prompt_logprobs_from is not None)):
        if is_requested:
            entries = meta.get(f"{side}_token_logprobs") or []
            tops = meta.get(f"{side}_top_logprobs") or [None] * len(entries)
            scored = [index for index, entry in enumerate(entries) if entry[0] is not None]  # the first token has none
            parsed[f"{side}_token_logprobs"] = [parse_logprob_entry(entries[index]) for index in scored]
            parsed[f"{side}_top_logprobs"] = [
                [parse_logprob_entry(entry) for entry in tops[index] or ()] for index in scored
            ]
    return parsed or None


def parse_logprob_entry(entry: Any) -> Logprob:
    """Returns one (logprob, token id, text) entry as `get_meta_info` has it."""
    logprob, token, text = entry
    return float(logprob), int(token), "" if text is None else str(text)
