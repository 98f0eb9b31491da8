"""Writes answers in SGLang's format.

Each chunk of a stream has the whole text so far, as SGLang's own do: the last one is the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from plait.constrained.tokens.vocabulary import Vocabulary
from plait.runtime.call_reports import TokenLogprob
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import Client
from plait.runtime.client.stream import CallUpdate
from plait.runtime.errors import Aborted
from plait.runtime.server.generation.cache_miss import cache_miss_report
from plait.runtime.server.generation.logprobs import MIN_LOGPROB, LogprobAligner, token_text
from plait.runtime.server.generation.submission import RequestHandle
from plait.runtime.server.generation.threads import LARGE_TOKENS
from plait.runtime.server.http.response import encoded
from plait.runtime.server.protocols.sglang.request import PromptRequest
from plait.runtime.server.protocols.sglang.types import FinishReason, GenerateResponse, MetaInfo, TokenEntry
from plait.runtime.server.protocols.shared import importance_weight
from plait.runtime.tokenizer.detokenizer import Detokenizer


class SglangResponseWriter:
    """Collects one call's answer: `push` takes updates, `response()` is the answer so far."""

    def __init__(
        self, client: Client, prompt_request: PromptRequest, handle: RequestHandle, call: Call, index: int | None
    ) -> None:
        self._client, self._prompt_request, self._handle, self._call = client, prompt_request, handle, call
        self._warnings: list[str] | UnsetType = UNSET
        self._index = UNSET if index is None else index
        vocabulary = client.tokenizer.vocabulary
        self._logprob_aligner = LogprobAligner(vocabulary.token_bytes) if prompt_request.with_logprobs else None
        self._names = None if prompt_request.skip_special_tokens else Detokenizer(_with_control_texts(client))
        self._text: list[str] = []
        self._ids: list[int] = []
        self._entries: list[TokenEntry] = []  # of the answer, encoded once: every chunk of a stream has all of them
        self._top_entries: list[list[TokenEntry] | None] = []
        self._result: CallResult | None = None
        self.aborted = False

    def push(self, update: CallUpdate) -> bool:
        """Adds an update; returns whether the response changed. Raises the call's error, unless it was aborted by
        request."""
        text = update.text if self._names is None else self._names.push(update.token_ids)
        self._text.append(text)
        self._ids += update.token_ids
        if self._logprob_aligner is not None:
            logprobs = self._logprob_aligner.push(update)
            self._entries += [self._entry(logprob) for logprob in logprobs]
            if self._prompt_request.top_logprobs:
                self._top_entries += [self._top_of(logprob) for logprob in logprobs]
        if update.finished:
            try:
                self._result = self._call.result(0)
            except Aborted:
                if not self.aborted:
                    raise
            self._warnings = self._handle.warnings([] if self._result is None else [self._call])
        return bool(text) or update.finished

    @property
    def is_large(self) -> bool:
        """Whether making the response takes more than a few milliseconds."""
        num_prompt = 0 if self._prompt_request.input_start is None else len(self._prompt_request.submission.prompt_ids)
        return self._prompt_request.with_logprobs and num_prompt + len(self._ids) > LARGE_TOKENS

    def response(self) -> GenerateResponse:
        return GenerateResponse("".join(self._text), self._ids, self._meta_info(), self._index)

    def _meta_info(self) -> MetaInfo:
        result = self._result
        meta_info = MetaInfo(
            self._prompt_request.rid,
            self._finish_reason(),
            prompt_tokens=len(self._prompt_request.submission.prompt_ids),
            completion_tokens=len(self._ids) if result is None else result.usage.completion_tokens,
            cached_tokens=None if result is None else result.usage.cached_tokens,
            e2e_latency=UNSET if result is None else result.usage.wall_s,
            warnings=self._warnings,
            particles=UNSET if result is None or result.particles is None else result.particles.report(),
        )
        if result is not None:
            meta_info.weight = importance_weight(result)
            meta_info.cache_miss = cache_miss_report(self._client, result, self._prompt_request.submission.prompt_ids)
        if self._prompt_request.with_logprobs:
            meta_info.output_token_logprobs = self._entries
            if self._prompt_request.top_logprobs:
                meta_info.output_top_logprobs = self._top_entries
            if result is not None:
                self._add_input_logprobs(meta_info, result.prompt_logprobs or [])
        return meta_info

    def _finish_reason(self) -> FinishReason | None:
        if self.aborted:
            return FinishReason("abort", message="the request was aborted")
        if self._result is None:
            return None
        if self._result.finish_reason == "length":
            return FinishReason("length", length=self._result.usage.completion_tokens)
        return FinishReason("stop", matched=self._result.matched)

    def _add_input_logprobs(self, meta_info: MetaInfo, logprobs: Sequence[TokenLogprob]) -> None:
        first: list[TokenEntry] = []
        if self._prompt_request.input_start == 0:  # the first token of a text has no logprob
            token = self._prompt_request.submission.prompt_ids[0]
            first = [(None, token, self._token_text(token))]
        meta_info.input_token_logprobs = first + [self._entry(logprob) for logprob in logprobs]
        if self._prompt_request.top_logprobs:
            no_top: list[list[TokenEntry] | None] = [None] * len(first)
            meta_info.input_top_logprobs = no_top + [self._top_of(logprob) for logprob in logprobs]

    def _entry(self, logprob: TokenLogprob) -> TokenEntry:
        return encoded((max(logprob.logprob, MIN_LOGPROB), logprob.token_id, self._token_text(logprob.token_id)))

    def _top_of(self, logprob: TokenLogprob) -> list[TokenEntry]:
        return encoded([(max(value, MIN_LOGPROB), token, self._token_text(token)) for token, value in logprob.top])

    def _token_text(self, token: int) -> str | None:
        if not self._prompt_request.with_text:
            return None
        return token_text(self._client, token)


def _with_control_texts(client: Client) -> Vocabulary:
    """The vocabulary, with the names of control tokens as their bytes."""
    vocabulary, names = client.tokenizer.vocabulary, client.tokenizer.control_texts
    token_bytes = tuple(
        names[token].encode() if token in names else data for token, data in enumerate(vocabulary.token_bytes)
    )
    return Vocabulary(token_bytes, vocabulary.eos_ids, vocabulary.encode)
