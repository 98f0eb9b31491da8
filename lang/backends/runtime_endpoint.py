"""`RuntimeEndpoint(url)`: a server that speaks SGLang's protocol, SGLang's own or plait's."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from plait.constrained.specs import Choices, Ebnf, JsonObject, JsonSchema, Regex, Spec
from plait.lang.backends.choice_scoring import score_choices
from plait.lang.backends.http_client import JsonHttp, parse_error, status_error
from plait.lang.backends.remote_client import MAX_CONCURRENCY, RemoteClient, RemoteModel
from plait.lang.backends.remote_session import Part, RemoteCall
from plait.lang.backends.sglang_format import StreamedText, logprob_fields, parse_logprob_entry, parse_logprobs
from plait.runtime.errors import CallFailed, CallRejected, ConstraintFailed, InputError
from plait.runtime.messages import SelectMethod, Usage
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.token_healing import MAX_HEALED_TOKENS, common_prefix_length, heal_choices
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
        self._http = JsonHttp(base_url, {"authorization": f"Bearer {api_key}"} if api_key else {})
        self.name = f"the server at {self._http.base_url}"
        info = self._get_first("/get_model_info", "/model_info")
        if not isinstance(info, dict) or not isinstance(info.get("model_path"), str):
            raise InputError(f"{self.name} does not speak SGLang's protocol: /get_model_info has no model_path")
        self._local_tokenizer = _tokenizer(info["model_path"], tokenizer)
        model = RemoteModel(info["model_path"], context_length=int(info.get("context_length") or 0))
        template = self._local_tokenizer.chat_template if self._local_tokenizer is not None else None
        if chat_template is not None:
            template = ChatTemplate(chat_template, "", "")
        super().__init__(model, template, max_concurrency)
        self._sends_deltas = self._is_incremental()

    def _get_first(self, *paths: str) -> Any:
        """The JSON at the first of some paths that this server's version has."""
        for path in paths[:-1]:
            with contextlib.suppress(CallRejected):
                return self._http.get(path)
        return self._http.get(paths[-1])

    def _is_incremental(self) -> bool:
        """Whether a stream's events hold what is new, not the text so far: SGLang's --incremental-streaming-output,
        which was --stream-output. A server that keeps its settings to itself is taken to have the default."""
        try:
            told = self.server_info()
        except CallFailed:
            return False
        return any(told.get(name) is True for name in ("incremental_streaming_output", "stream_output"))

    def flush_cache(self) -> Any:
        return self._http.post("/flush_cache", None)

    def server_info(self) -> dict[str, Any]:
        info = self._get_first("/server_info", "/get_server_info")
        return info if isinstance(info, dict) else {}

    def check_generate(self, params: SamplingParams, constraint: Spec | None) -> None:
        _constraint(constraint)

    def check_select(self, choices: Sequence[str], method: SelectMethod) -> None:
        return

    def generate(
        self, call: RemoteCall, parts: Sequence[Part], params: SamplingParams, constraint: Spec | None
    ) -> None:
        sampling: dict[str, Any] = {theirs: getattr(params, ours) for ours, theirs in _SAMPLING.items()}
        sampling |= {name: list(getattr(params, name)) for name in ("stop", "stop_token_ids", "stop_regex")}
        sampling |= _constraint(constraint)
        sampling = {name: value for name, value in sampling.items() if value is not None and value != []}
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
        logprobs = logprob_fields(params)
        stream = not (self._sends_deltas and logprobs)  # are they what is new, too? The whole answer leaves no doubt
        body = {**self._prompt(parts), "sampling_params": sampling, "stream": stream, **logprobs}
        meta, cut = self._stream(call, body, params)
        if call.done():
            return
        reason = {"type": "stop", "matched": cut} if cut is not None else meta.get("finish_reason") or {}
        if reason.get("type") not in ("stop", "length"):
            raise CallFailed(f"{self.name} ended the call: {reason.get('message') or reason or 'without a reason'}")
        if reason["type"] == "length" and params.complete:
            raise ConstraintFailed(f"max_tokens={params.max_tokens} ended the value, which {self.name} cannot complete")
        call.on_result(reason["type"], _usage(meta), reason.get("matched"), parse_logprobs(params, meta))

    def _stream(self, call: RemoteCall, body: dict[str, Any], params: SamplingParams) -> tuple[dict[str, Any], Any]:
        """Gives the text to `call` as it comes: the last meta info, and the pattern that cut the text here. SGLang's
        own server leaves the match of a stop_regex in the text."""
        given, num_tokens, text = StreamedText(params.stop_regex), 0, ""
        meta: dict[str, Any] = {}
        with closing(self._events(call, body, params.timeout_s)) as events:
            for event in events:
                if "error" in event:
                    raise status_error(self.name, *parse_error(event))
                meta = event.get("meta_info") or {}
                fresh = max(0, int(meta.get("completion_tokens", 0)) - num_tokens)
                num_tokens += fresh
                text = text + event["text"] if self._sends_deltas else event["text"]
                piece = given.push(text, is_end=meta.get("finish_reason") is not None)
                if piece or fresh:
                    call.on_text(piece, fresh)
                if given.matched is not None:
                    break
        return meta, given.matched

    def _events(self, call: RemoteCall, body: dict[str, Any], timeout_s: float | None) -> Generator[Any, None, None]:
        if body["stream"]:
            yield from self._http.events("/generate", body, timeout_s, call.done)
        else:
            yield self._http.post("/generate", body, timeout_s)

    def select(
        self,
        call: RemoteCall,
        parts: Sequence[Part],
        choices: Sequence[str],
        method: SelectMethod,
        timeout_s: float | None,
    ) -> None:
        before, answers, entries = self._score(parts, choices, timeout_s)
        logprobs = [[float(logprob) for logprob, *_ in each] for each in entries]
        tokens = [[int(token) for _, token, *_ in each] for each in entries]
        is_against = method == "unconditional_likelihood_normalized"
        alone = self._unconditional_logprobs(parts, tokens, choices, timeout_s) if is_against else None
        scores, best = score_choices(method, tokens, logprobs, alone)
        call.on_text(choices[best], 0)
        means = [sum(each) / len(each) for each in logprobs]
        said = {"choices": list(choices), "choice_scores": scores, "normalized_prompt_logprobs": means}
        said["input_token_logprobs"] = [[parse_logprob_entry(entry) for entry in each] for each in entries]
        if alone is not None:
            said["normalized_unconditional_prompt_logprobs"] = [sum(each) / len(each) for each in alone]
            said["unconditional_token_logprobs"] = alone
        meta = answers[best].get("meta_info") or {}
        cached = min(before, int(meta.get("cached_tokens") or 0))
        usage = _usage(meta | {"completion_tokens": 0, "prompt_tokens": before, "cached_tokens": cached})
        call.on_result("stop", usage, None, said)

    # -- prompts ----------------------------------------------------------------------------------

    def _prompt(self, parts: Sequence[Part]) -> dict[str, Any]:
        if self._local_tokenizer is None:
            return {"text": "".join(text for text, _ in parts)}
        return {"input_ids": self._token_ids(parts)}

    def _token_ids(self, parts: Sequence[Part]) -> list[int]:
        assert self._local_tokenizer is not None
        return self._with_bos(self._local_tokenizer.encode(list(parts), at_start=True))

    def _with_bos(self, ids: list[int]) -> list[int]:
        assert self._local_tokenizer is not None
        bos = self._local_tokenizer.bos_id if self._local_tokenizer.add_bos else None
        return ids if bos is None or ids[:1] == [bos] else [bos, *ids]

    def _score(
        self, parts: Sequence[Part], choices: Sequence[str], timeout_s: float | None
    ) -> tuple[int, list[dict[str, Any]], list[list[Any]]]:
        """How many tokens the text so far has; for each choice the server's answer, and the (logprob, token, ...) of
        the choice's tokens."""
        if self._local_tokenizer is None:
            return self._score_text("".join(text for text, _ in parts), choices, timeout_s)
        ids, num_replaced, behind = heal_choices(self._local_tokenizer, parts, choices)
        ids = self._with_bos(ids[: len(ids) - num_replaced])
        answers = self._logprobs({"input_ids": [[*ids, *each] for each in behind]}, len(ids) - 1, timeout_s)
        each = zip(answers, behind, choices, strict=True)
        return len(ids), answers, [_choice_logprobs(answer, len(own), choice) for answer, own, choice in each]

    def _score_text(
        self, text: str, choices: Sequence[str], timeout_s: float | None
    ) -> tuple[int, list[dict[str, Any]], list[list[Any]]]:
        """Text and choice may meet in one token ("a: " and "yes" in " yes"): all choices are scored from the first
        token on in which any of them differs from the text alone."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        meta = self._http.post("/generate", {"text": text, "sampling_params": sampling}, timeout_s)["meta_info"]
        before = int(meta["prompt_tokens"])
        prompts = [text, *(text + choice for choice in choices)]
        alone, *answers = self._logprobs({"text": prompts}, before - 1 - MAX_HEALED_TOKENS, timeout_s)
        known, *told = [answer["meta_info"]["input_token_logprobs"] for answer in (alone, *answers)]
        tokens = [[entry[1] for entry in each] for each in (known, *told)]
        num_common = min(common_prefix_length(tokens[0], each) for each in tokens[1:])
        entries = [[entry for entry in each[num_common:] if entry[0] is not None] for each in told]
        for choice, each in zip(choices, entries, strict=True):
            _require_logprobs(each, choice)
        return before, answers, entries

    def _unconditional_logprobs(
        self, parts: Sequence[Part], tokens: list[list[int]], choices: Sequence[str], timeout_s: float | None
    ) -> list[list[float]]:
        """The logprobs of the choices' tokens with nothing before them but the text's very first token."""
        if self._local_tokenizer is not None:
            first = self._token_ids(parts)[0]
        else:
            (answer,) = self._logprobs({"text": ["".join(text for text, _ in parts)]}, 0, timeout_s)
            first = int(answer["meta_info"]["input_token_logprobs"][0][1])
        answers = self._logprobs({"input_ids": [[first, *each] for each in tokens]}, 0, timeout_s)
        each = zip(answers, tokens, choices, strict=True)
        return [
            [float(logprob) for logprob, *_ in _choice_logprobs(answer, len(ids), choice)]
            for answer, ids, choice in each
        ]

    def _logprobs(self, prompts: dict[str, list[Any]], start: int, timeout_s: float | None) -> list[dict[str, Any]]:
        """One request that samples nothing, answered for each prompt."""
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        wanted = {"return_logprob": True, "logprob_start_len": max(0, start), "return_text_in_logprobs": True}
        answers = self._http.post("/generate", {**prompts, "sampling_params": sampling, **wanted}, timeout_s)
        (given,) = prompts.values()
        if not isinstance(answers, list) or len(answers) != len(given):
            raise CallFailed(f"{self.name} did not answer each of {len(given)} prompts")
        return answers


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


def _choice_logprobs(answer: Any, num_tokens: int, choice: str) -> list[Any]:
    """The (logprob, token, ...) of a choice's tokens: the last `num_tokens` of the prompt's."""
    entries = (answer.get("meta_info") or {}).get("input_token_logprobs") or []
    return _require_logprobs([entry for entry in entries[-num_tokens:] if entry[0] is not None], choice)


def _require_logprobs(entries: list[Any], choice: str) -> list[Any]:
    if not entries:
        raise CallFailed(f"the server gave no logprobs of the choice {choice!r:.40}, so it cannot be scored")
    return entries


def _usage(meta: dict[str, Any]) -> Usage:
    prompt, cached = int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0)
    completion = int(meta.get("completion_tokens") or 0)
    return Usage(prompt, cached, prompt - cached, 0, completion, wall_s=float(meta.get("e2e_latency") or 0.0))


def _tokenizer(model_path: str, given: str | Path | None) -> Tokenizer | None:
    path = Path(given if given is not None else model_path)
    if given is None and not path.exists():
        return None
    return load_tokenizer(path)
