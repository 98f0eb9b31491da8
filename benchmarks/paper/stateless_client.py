"""A backend that works as a program written with an OpenAI client does: each call is a request with its whole text.

Branches and batches run concurrently, on threads. A select is one request constrained to its choices.
"""

from __future__ import annotations

import json
import re
import secrets
import urllib.request
from collections.abc import Sequence
from typing import Any

from plait.constrained.specs import Choices, JsonSchema, Regex, Spec
from plait.lang.backends.http_client import JsonHttp
from plait.lang.backends.remote_client import Part, RemoteClient, RemoteModel
from plait.lang.backends.without_runtime import CallRequest, TextCall
from plait.runtime.call_reports import Usage
from plait.runtime.errors import CallFailed
from plait.runtime.tokenizer.tokenizer import Tokenizer

REJECTED_SCORE = -100.0  # a log-likelihood
_HITS = re.compile(r"^vllm:prefix_cache_hits(?:_total)?(?:\{[^}]*\})? ([0-9.e+]+)", re.MULTILINE)


class StatelessClient(RemoteClient):
    """`url`: the server's, without /v1. Constraints are sent in vLLM's form if `owned_by` of its model is "vllm"."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        self._root, self._own = JsonHttp(url, {}), tokenizer
        model = self._root.get("/v1/models")["data"][0]
        self._model, self.is_vllm = model["id"], model.get("owned_by") == "vllm"
        self._salt: dict[str, str] = {}
        super().__init__(RemoteModel(self._model), tokenizer.chat_template, 64)

    def flush_cache(self) -> None:
        """Makes earlier prefixes unusable: vLLM gets a new cache salt, another server a request to flush its cache."""
        if self.is_vllm:
            self._salt = {"cache_salt": secrets.token_hex(8)}
        else:
            self._root.post("/flush_cache", None)

    def reported_cached_tokens(self) -> int | None:
        """Returns the prompt tokens that vLLM has found in its cache since it started; None for a server whose answers
        report them."""
        if not self.is_vllm:
            return None
        with urllib.request.urlopen(f"{self._root.base_url}/metrics", timeout=30) as answer:
            return round(sum(float(count) for count in _HITS.findall(answer.read().decode())))

    def check_request(self, request: CallRequest) -> None:
        _constraint(request.constraint, self.is_vllm)

    def run_call(self, call: TextCall, parts: Sequence[Part], request: CallRequest) -> None:
        params, choices = request.params, request.choices
        if choices is not None:
            self._select(call, parts, choices)
            return
        fields: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature}
        fields |= {"stop": list(params.stop)} if params.stop else {}
        fields |= {"seed": params.seed} if params.seed is not None else {}
        text, reason, usage = self._ask(parts, fields | _constraint(request.constraint, self.is_vllm))
        call.on_text(text, num_tokens=usage.completion_tokens)
        call.on_result(reason, usage)

    def _select(self, call: TextCall, parts: Sequence[Part], choices: tuple[str, ...]) -> None:
        room = max(len(choice.encode()) for choice in choices) + 1
        fields = {"max_tokens": room, "temperature": 0} | _constraint(Choices(choices), self.is_vllm)
        text, reason, usage = self._ask(parts, fields)
        call.on_text(text, num_tokens=usage.completion_tokens)
        # The server returns no scores. Programs that read them see the selected choice above all others.
        scores = [0.0 if choice == text else REJECTED_SCORE for choice in choices]
        call.on_result(reason, usage, None, {"choices": list(choices), "choice_scores": scores})

    def _ask(self, parts: Sequence[Part], fields: dict[str, Any]) -> tuple[str, Any, Usage]:
        ids = self._own.encode(list(parts), at_start=True)
        answer = self._root.post("/v1/completions", {"model": self._model, "prompt": ids, **fields, **self._salt})
        counts, choice = answer["usage"], answer["choices"][0]
        cached = int((counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        prompt, completion = int(counts["prompt_tokens"]), int(counts["completion_tokens"])
        return choice["text"], choice["finish_reason"], Usage(prompt, cached, prompt - cached, 0, completion)


def _constraint(spec: Spec | None, is_vllm: bool) -> dict[str, Any]:
    match spec:
        case None:
            return {}
        case Regex(pattern):
            return {"structured_outputs": {"regex": pattern}} if is_vllm else {"regex": pattern}
        case Choices(choices):
            return {"structured_outputs": {"choice": list(choices)}} if is_vllm else {"choices": list(choices)}
        case JsonSchema():
            schema = {"name": "value", "schema": json.loads(spec.text), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    raise CallFailed(f"no form for {type(spec).__name__}")
