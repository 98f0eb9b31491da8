"""One answer in SGLang's shape, while it comes and when it is whole.

Chunks of a stream hold everything so far, as SGLang's own do: the last one is the whole answer.

Knows: SGLang's `meta_info`. Must not know: HTTP, sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.constrained.vocabulary import Vocabulary
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.errors import Aborted
from plait.runtime.messages import TokenLogprob
from plait.runtime.server.generation.logprobs import LogprobAligner
from plait.runtime.server.protocols.openai.tokenize import token_text
from plait.runtime.server.protocols.sglang.request import PromptRequest
from plait.runtime.tokenizer.detokenizer import Detokenizer

MIN_LOGPROB = -9999.0  # the logprob of what cannot be; JSON has no infinity


class SglangResponseWriter:
    """One call's answer. `push` what is new; `body()` is the answer so far."""

    def __init__(self, client: Client, prompt_request: PromptRequest, call: Call, index: int | None) -> None:
        self._client, self._prompt_request, self._call, self._index = client, prompt_request, call, index
        vocabulary = client.tokenizer.vocabulary
        self._logprob_aligner = LogprobAligner(vocabulary.token_bytes) if prompt_request.with_logprobs else None
        self._names = None if prompt_request.skip_special_tokens else Detokenizer(_with_control_texts(client))
        self._text: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._result: CallResult | None = None
        self.aborted = False

    def push(self, update: CallUpdate) -> bool:
        """Adds what is new; says whether a client would see it. Raises what the call failed with, unless it was
        ended on request."""
        text = update.text if self._names is None else self._names.push(update.token_ids)
        self._text.append(text)
        self._ids += update.token_ids
        if self._logprob_aligner is not None:
            self._logprobs += self._logprob_aligner.push(update)
        if update.finished:
            try:
                self._result = self._call.result(0)
            except Aborted:
                if not self.aborted:
                    raise
        return bool(text) or update.finished

    def body(self) -> dict[str, Any]:
        """SGLang's answer object."""
        told: dict[str, Any] = {"text": "".join(self._text), "output_ids": self._ids, "meta_info": self._meta()}
        return told if self._index is None else {**told, "index": self._index}

    def _meta(self) -> dict[str, Any]:
        result = self._result
        meta: dict[str, Any] = {
            "id": self._prompt_request.rid,
            "finish_reason": self._reason(),
            "prompt_tokens": len(self._prompt_request.submission.prompt_ids),
            "completion_tokens": len(self._ids) if result is None else result.usage.completion_tokens,
            "cached_tokens": None if result is None else result.usage.cached_tokens,
        }
        if result is not None:
            meta["e2e_latency"] = result.usage.wall_s
        return meta | self._logprob_fields()

    def _reason(self) -> dict[str, Any] | None:
        if self.aborted:
            return {"type": "abort", "message": "the request was aborted"}
        if self._result is None:
            return None
        if self._result.finish_reason == "length":
            return {"type": "length", "length": self._result.usage.completion_tokens}
        matched = self._result.matched
        return {"type": "stop"} if matched is None else {"type": "stop", "matched": matched}

    def _logprob_fields(self) -> dict[str, Any]:
        """Of the answer so far; of the prompt, once they are all known."""
        prompt_request = self._prompt_request
        if not prompt_request.with_logprobs:
            return {}
        told: dict[str, Any] = {"output_token_logprobs": [self._entry(each) for each in self._logprobs]}
        if prompt_request.top_logprobs:
            told["output_top_logprobs"] = [self._top(each) for each in self._logprobs]
        if self._result is None:
            return told
        inputs = self._result.prompt_logprobs or []
        first: list[Any] = []
        if prompt_request.input_start == 0:  # the very first token comes after nothing, so it has no logprob
            first = [
                (
                    None,
                    prompt_request.submission.prompt_ids[0],
                    self._token_text(prompt_request.submission.prompt_ids[0]),
                )
            ]
        told["input_token_logprobs"] = first + [self._entry(each) for each in inputs]
        if prompt_request.top_logprobs:
            told["input_top_logprobs"] = [None] * len(first) + [self._top(each) for each in inputs]
        return told

    def _entry(self, each: TokenLogprob) -> tuple[float, int, str | None]:
        return max(each.logprob, MIN_LOGPROB), each.token_id, self._token_text(each.token_id)

    def _top(self, each: TokenLogprob) -> list[tuple[float, int, str | None]]:
        return [(max(logprob, MIN_LOGPROB), token, self._token_text(token)) for token, logprob in each.top]

    def _token_text(self, token: int) -> str | None:
        if not self._prompt_request.with_text:
            return None
        return token_text(self._client, token)


def _with_control_texts(client: Client) -> Vocabulary:
    """The vocabulary in which control tokens have the texts that stand for them."""
    plain, names = client.tokenizer.vocabulary, client.tokenizer.control_texts
    token_bytes: Sequence[bytes] = [
        names[token].encode() if token in names else data for token, data in enumerate(plain.token_bytes)
    ]
    return Vocabulary(tuple(token_bytes), plain.eos_ids, plain.encode)
