"""A backend that does what a program written with an OpenAI client does: each call is a request with all its text.

Branches and batches go side by side, on threads. A select is one request held to its choices.

Knows: `/v1/completions` of plait and of vLLM. Must not know: workloads, clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plait.constrained.specs import Choices, JsonSchema, Regex, Spec
from plait.lang.backends.http import Http
from plait.lang.backends.remote import RemoteClient, RemoteModel
from plait.lang.backends.session import Part, RemoteCall
from plait.runtime.errors import CallFailed
from plait.runtime.messages import SelectMethod, Usage
from plait.runtime.sampling import SamplingParams
from plait.runtime.tokenizer.tokenizer import Tokenizer


class FreshRequests(RemoteClient):
    """`base_url` ends in /v1. `dialect`: how constraints are said, "plait" or "vllm". `usage` adds up what was told."""

    def __init__(self, base_url: str, tokenizer: Tokenizer, dialect: str) -> None:
        self._http, self._own, self._dialect = Http(base_url, {}), tokenizer, dialect
        self._model = self._http.get("/models")["data"][0]["id"]
        super().__init__(RemoteModel(self._model), tokenizer.chat_template, 64)

    def flush_cache(self) -> bool:
        """Whether the server's cache could be emptied."""
        root = Http(self._http.base_url.removesuffix("/v1"), {})
        for path in ("/flush_cache", "/reset_prefix_cache"):
            try:
                root._open("POST", path, None, 30.0).close()
                return True
            except CallFailed:
                continue
        return False

    def check_generate(self, params: SamplingParams, constraint: Spec | None) -> None:
        _constraint(constraint, self._dialect)

    def check_select(self, choices: Sequence[str], method: SelectMethod) -> None:
        return

    def generate(
        self, call: RemoteCall, parts: Sequence[Part], params: SamplingParams, constraint: Spec | None
    ) -> None:
        said: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature}
        said |= {"stop": list(params.stop)} if params.stop else {}
        said |= {"seed": params.seed} if params.seed is not None else {}
        text, reason, usage = self._ask(parts, said | _constraint(constraint, self._dialect))
        call.on_text(text, usage.completion_tokens)
        call.on_result(reason, usage, None, None)

    def select(
        self,
        call: RemoteCall,
        parts: Sequence[Part],
        choices: Sequence[str],
        method: SelectMethod,
        timeout_s: float | None,
    ) -> None:
        room = max(len(choice.encode()) for choice in choices) + 1
        said = {"max_tokens": room, "temperature": 0} | _constraint(Choices(tuple(choices)), self._dialect)
        text, reason, usage = self._ask(parts, said)
        call.on_text(text, usage.completion_tokens)
        call.on_result(reason, usage, None, {"choices": list(choices)})

    def _ask(self, parts: Sequence[Part], said: dict[str, Any]) -> tuple[str, Any, Usage]:
        ids = self._own.encode(list(parts), at_start=True)
        answer = self._http.post("/completions", {"model": self._model, "prompt": ids, **said})
        counts, choice = answer["usage"], answer["choices"][0]
        cached = int((counts.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        prompt, completion = int(counts["prompt_tokens"]), int(counts["completion_tokens"])
        return choice["text"], choice["finish_reason"], Usage(prompt, cached, prompt - cached, 0, completion)


def _constraint(spec: Spec | None, dialect: str) -> dict[str, Any]:
    match spec:
        case None:
            return {}
        case Regex(pattern):
            return {"regex": pattern} if dialect == "plait" else {"structured_outputs": {"regex": pattern}}
        case Choices(choices):
            return (
                {"choices": list(choices)} if dialect == "plait" else {"structured_outputs": {"choice": list(choices)}}
            )
        case JsonSchema():
            import json

            schema = {"name": "value", "schema": json.loads(spec.text), "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    raise CallFailed(f"no form for {type(spec).__name__}")
