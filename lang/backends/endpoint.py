"""`RuntimeEndpoint(url)`: a server that speaks SGLang's protocol, SGLang's own or plait's.

Knows: `/generate`, `/get_model_info`, `/flush_cache`. Must not know: states, threads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.constrained.specs import Choices, Ebnf, JsonObject, JsonSchema, Regex, Spec
from plait.lang.backends.http import Http
from plait.lang.backends.remote import MAX_CONCURRENCY, RemoteClient, RemoteModel
from plait.lang.backends.scoring import scores_of
from plait.lang.backends.session import Part, RemoteCall
from plait.runtime.errors import CallFailed, ConstraintFailed, InputError
from plait.runtime.messages import SelectMethod, Usage
from plait.runtime.sampling import SamplingParams
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer

# ours: theirs
_SAMPLING = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "ignore_eos": "ignore_eos",
    "seed": "sampling_seed",
}


class RuntimeEndpoint(RemoteClient):
    """Programs on a server elsewhere. Each call posts the whole text so far; the server's prefix cache finds it again.

    `tokenizer`: a model's folder or GGUF file on this machine; by default the server's own `model_path` where that is
    a path here too. With it texts are tokenized here, turns are the model's own, and no text of a user can become a
    control token. Without it plain text is sent, which the server tokenizes, and turns need `chat_template`, Jinja's
    source with the model's own marks in it.

    >>> plait.set_default_backend(RuntimeEndpoint("http://localhost:30000"))        # doctest: +SKIP
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: None = None,
        chat_template_name: None = None,
        *,
        tokenizer: str | Path | None = None,
        chat_template: str | None = None,
        max_concurrency: int = MAX_CONCURRENCY,
    ) -> None:
        if verify is not None:
            raise InputError(
                "RuntimeEndpoint: verify is not supported; the system's certificates are used (SSL_CERT_FILE)"
            )
        if chat_template_name is not None:
            raise InputError(
                "RuntimeEndpoint: plait has no table of templates; give tokenizer=... or chat_template=..."
            )
        self._http = Http(base_url, {"authorization": f"Bearer {api_key}"} if api_key else {})
        self.name = f"the server at {self._http.base_url}"
        info = self._http.get("/get_model_info")
        if not isinstance(info, dict) or not isinstance(info.get("model_path"), str):
            raise InputError(f"{self.name} does not speak SGLang's protocol: /get_model_info has no model_path")
        self._own = _tokenizer(info["model_path"], tokenizer)
        model = RemoteModel(info["model_path"], context_length=int(info.get("context_length") or 0))
        template = self._own.chat_template if self._own is not None else None
        if chat_template is not None:
            template = ChatTemplate(chat_template, "", "")
        super().__init__(model, template, max_concurrency)

    def flush_cache(self) -> Any:
        return self._http.post("/flush_cache", None)

    def server_info(self) -> dict[str, Any]:
        info: dict[str, Any] = self._http.get("/server_info")
        return info

    def check_generate(self, params: SamplingParams, constraint: Spec | None) -> None:
        _constraint(constraint)
        for name, said in (("logprobs", "return_logprob"), ("prompt_logprobs_from", "logprob_start_len")):
            if getattr(params, name):
                raise InputError(f"RuntimeEndpoint: {said} is not supported; ask the server itself for logprobs")

    def check_select(self, choices: Sequence[str], method: SelectMethod) -> None:
        return

    def generate(
        self, call: RemoteCall, parts: Sequence[Part], params: SamplingParams, constraint: Spec | None
    ) -> None:
        sampling: dict[str, Any] = {theirs: getattr(params, ours) for ours, theirs in _SAMPLING.items()}
        sampling |= {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)} | _constraint(constraint)
        sampling = {name: value for name, value in sampling.items() if value is not None and value != []}
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
        body = {**self._prompt(parts), "sampling_params": sampling, "stream": True}
        sent, num_tokens = "", 0
        meta: dict[str, Any] = {}
        for event in self._http.events("/generate", body, params.timeout_s, call.done):
            if "error" in event:
                raise CallFailed(f"{self.name}: {str(event['error'])[:300]}")
            text, meta = event["text"], event.get("meta_info") or {}
            fresh = int(meta.get("completion_tokens", 0)) - num_tokens
            num_tokens += max(0, fresh)
            whole = text.rstrip("\ufffd")  # a character that is still on its way
            if len(whole) > len(sent):
                call.on_text(whole[len(sent) :], max(0, fresh))
                sent = whole
        if call.done():
            return
        reason = meta.get("finish_reason") or {}
        if reason.get("type") not in ("stop", "length"):
            raise CallFailed(f"{self.name} ended the call: {reason.get('message') or reason or 'without a reason'}")
        if reason["type"] == "length" and params.complete:
            raise ConstraintFailed(f"max_tokens={params.max_tokens} ended the value, which {self.name} cannot complete")
        call.on_result(reason["type"], _usage(meta), reason.get("matched"), None)

    def select(
        self,
        call: RemoteCall,
        parts: Sequence[Part],
        choices: Sequence[str],
        method: SelectMethod,
        timeout_s: float | None,
    ) -> None:
        before = self._length(parts)
        answers = [self._http.post("/generate", self._scored(parts, choice, before), timeout_s) for choice in choices]
        entries = [_after(answer, before, choice) for answer, choice in zip(answers, choices, strict=True)]
        logprobs = [[float(logprob) for logprob, *_ in each] for each in entries]
        alone = None
        if method == "unconditional_likelihood_normalized":
            bare = [self._http.post("/generate", self._scored((), choice, 0), timeout_s) for choice in choices]
            alone = [
                [float(logprob) for logprob, *_ in _after(each, 0, choice)]
                for each, choice in zip(bare, choices, strict=True)
            ]
        tokens = [[int(token) for _, token, *_ in each] for each in entries]
        scores, best = scores_of(method, tokens, logprobs, alone)
        call.on_text(choices[best], 0)
        means = [sum(each) / len(each) for each in logprobs]
        said = {"choices": list(choices), "choice_scores": scores, "normalized_prompt_logprobs": means}
        meta = answers[best].get("meta_info") or {}
        call.on_result("stop", _usage(meta | {"completion_tokens": 0}), None, said)

    # -- prompts ----------------------------------------------------------------------------------

    def _prompt(self, parts: Sequence[Part]) -> dict[str, Any]:
        if self._own is None:
            return {"text": "".join(text for text, _ in parts)}
        return {"input_ids": self._token_ids(parts)}

    def _token_ids(self, parts: Sequence[Part]) -> list[int]:
        assert self._own is not None
        ids = self._own.encode(list(parts), at_start=True)
        bos = self._own.bos_id if self._own.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _length(self, parts: Sequence[Part]) -> int:
        """Tokens of the text so far."""
        if self._own is not None:
            return len(self._token_ids(parts))
        body = {**self._prompt(parts), "sampling_params": {"max_new_tokens": 0, "temperature": 0.0}}
        return int(self._http.post("/generate", body)["meta_info"]["prompt_tokens"])

    def _scored(self, parts: Sequence[Part], choice: str, before: int) -> dict[str, Any]:
        """A request that samples nothing and says the logprobs of the prompt's last tokens."""
        prompt = self._prompt([*parts, (choice, False)])
        if self._own is not None:
            prompt = {"input_ids": [*(self._token_ids(parts) if parts else []), *self._own.encode_plain(choice)]}
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        start = max(0, before - 1)
        return {**prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": start}


def _constraint(spec: Spec | None) -> dict[str, str]:
    match spec:
        case None:
            return {}
        case Regex(pattern):
            return {"regex": pattern}
        case JsonSchema():
            return {"json_schema": spec.text}
        case JsonObject():
            return {"json_schema": "{}" if spec.any_value else '{"type":"object"}'}
        case Choices(choices):
            return {"regex": "|".join(map(re.escape, choices))}
        case Ebnf(grammar):
            return {"ebnf": grammar}
    raise InputError(f"RuntimeEndpoint: SGLang's protocol has no form for the constraint {type(spec).__name__}")


def _after(answer: Any, before: int, choice: str) -> list[Any]:
    """The (logprob, token, ...) of the choice's tokens: those behind the first `before` tokens of the prompt."""
    meta = answer.get("meta_info") or {}
    entries = [entry for entry in meta.get("input_token_logprobs") or [] if entry[0] is not None]
    chosen = entries[-max(1, int(meta.get("prompt_tokens") or 0) - before) :]
    if not chosen:
        raise CallFailed(f"the server gave no logprobs of the choice {choice!r:.40}, so it cannot be scored")
    return chosen


def _usage(meta: dict[str, Any]) -> Usage:
    prompt, cached = int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0)
    completion = int(meta.get("completion_tokens") or 0)
    return Usage(prompt, cached, prompt - cached, 0, completion, wall_s=float(meta.get("e2e_latency") or 0.0))


def _tokenizer(model_path: str, given: str | Path | None) -> Tokenizer | None:
    path = Path(given if given is not None else model_path)
    if given is None and not path.exists():
        return None
    return load_tokenizer(path)
