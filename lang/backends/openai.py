"""`OpenAI(model)`: programs on OpenAI's chat API, or on any server that speaks it.

Knows: `/chat/completions`. Must not know: states, threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from plait.constrained.specs import Choices, Spec
from plait.lang.backends.chat import TEMPLATE, messages_of, structured
from plait.lang.backends.http import Http
from plait.lang.backends.remote import MAX_CONCURRENCY, RemoteClient, RemoteModel
from plait.lang.backends.session import Part, RemoteCall
from plait.runtime.errors import CallFailed, ConstraintFailed, InputError
from plait.runtime.messages import SelectMethod, Usage
from plait.runtime.sampling import SamplingParams

_DEFAULTS = SamplingParams()
_REFUSED = {
    "min_tokens": "min_tokens",
    "top_k": "top_k",
    "min_p": "min_p",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "logprobs": "return_logprob",
    "prompt_logprobs_from": "logprob_start_len",
}


class OpenAI(RemoteClient):
    """A model behind OpenAI's chat API (`base_url` for others: vLLM, Ollama, LiteLLM's proxy, plait's own server).

    A chat API generates whole assistant turns: text inside one before or between gens is refused. Constraints become
    structured output; `select` does too, since no choice can be scored: `get_meta_info` says so under `method`.

    >>> plait.set_default_backend(OpenAI("gpt-4o-mini"))             # doctest: +SKIP
    """

    def __init__(
        self,
        model_name: str,
        base_url: str = "https://api.openai.com/v1",
        api_key: str | None = None,
        *,
        max_concurrency: int = MAX_CONCURRENCY,
    ) -> None:
        if not isinstance(model_name, str) or not model_name:
            raise InputError(f"OpenAI needs the name of a model, not {model_name!r:.80}")
        key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY")
        if key is None and "api.openai.com" in base_url:
            raise InputError("OpenAI needs a key: api_key=..., or OPENAI_API_KEY in the environment")
        self._http = Http(base_url, {"authorization": f"Bearer {key}"} if key else {})
        self._is_openai = "api.openai.com" in base_url
        self.name = f"the chat API at {self._http.base_url}"
        super().__init__(RemoteModel(model_name), TEMPLATE, max_concurrency)

    def check_generate(self, params: SamplingParams, constraint: Spec | None) -> None:
        structured(constraint, "a chat API")
        for field, said in _REFUSED.items():
            if getattr(params, field) != getattr(_DEFAULTS, field):
                raise InputError(f"{said} is not supported by a chat API")

    def check_select(self, choices: Sequence[str], method: SelectMethod) -> None:
        if method != "token_length_normalized":
            raise InputError(f"a chat API scores nothing, so it has no {method}; leave choices_method out")

    def generate(
        self, call: RemoteCall, parts: Sequence[Part], params: SamplingParams, constraint: Spec | None
    ) -> None:
        self._chat(call, parts, params, constraint, None)

    def select(
        self,
        call: RemoteCall,
        parts: Sequence[Part],
        choices: Sequence[str],
        method: SelectMethod,
        timeout_s: float | None,
    ) -> None:
        params = SamplingParams(max_tokens=max(len(each.encode()) for each in choices) + 32, temperature=0.0)
        said = {"choices": list(choices), "choice_scores": None, "method": "structured output"}
        self._chat(call, parts, params, Choices(tuple(choices)), said, timeout_s)

    def _chat(
        self,
        call: RemoteCall,
        parts: Sequence[Part],
        params: SamplingParams,
        constraint: Spec | None,
        said: dict[str, Any] | None,
        timeout_s: float | None = None,
    ) -> None:
        form = structured(constraint, self.name)
        body = self._body(messages_of(parts, self.name), params)
        if form is not None:
            schema = {"name": "value", "schema": form.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        text, reason, usage = "", None, Usage()
        for event in self._http.events("/chat/completions", body, timeout_s or params.timeout_s, call.done):
            usage = _usage(event.get("usage")) or usage
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                if delta.get("refusal"):
                    raise CallFailed(f"the model refused: {delta['refusal'][:200]}")
                piece = delta.get("content") or ""
                text += piece
                if form is None and piece:
                    call.on_text(piece, 1)
                reason = choice.get("finish_reason") or reason
        if call.done():
            return
        if reason not in ("stop", "length"):
            raise CallFailed(f"{self.name} ended the call: {reason or 'the stream broke off'}")
        if form is not None:
            if reason == "length":
                raise ConstraintFailed(f"max_tokens={params.max_tokens} ended the value; a chat API cannot complete it")
            call.on_text(_read(form.read, text), usage.completion_tokens)
        call.on_result(reason, usage, None, said)

    def _body(self, messages: list[dict[str, str]], params: SamplingParams) -> dict[str, Any]:
        limit = "max_completion_tokens" if self._is_openai else "max_tokens"
        body: dict[str, Any] = {
            "model": self.model.model_path,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            limit: params.max_tokens,
        }
        for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed"):
            if getattr(params, name) != getattr(_DEFAULTS, name):
                body[name] = getattr(params, name)
        if params.stop:
            body["stop"] = list(params.stop)
        return body


def _read(read: Any, text: str) -> str:
    try:
        return str(read(text))
    except (ValueError, KeyError, TypeError):
        raise ConstraintFailed(
            f"the model answered {text[:80]!r}, which is not of the form that was asked for"
        ) from None


def _usage(said: dict[str, Any] | None) -> Usage | None:
    if not said:
        return None
    prompt = int(said.get("prompt_tokens") or 0)
    cached = int((said.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    return Usage(prompt, cached, prompt - cached, 0, int(said.get("completion_tokens") or 0))
