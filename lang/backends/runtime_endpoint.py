"""`RuntimeEndpoint(url)`: a backend for a server with SGLang's protocol, such as SGLang itself or plait."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from plait.constrained.specs import Choices, Ebnf, JsonObject, JsonSchema, Regex, Spec, Structural
from plait.lang.backends.http_client import JsonHttp, checked_extra_body, parse_error, status_error
from plait.lang.backends.remote_client import MAX_CONCURRENCY, Part, RemoteClient, RemoteModel
from plait.lang.backends.sglang_format import (
    StreamedText,
    is_structural_tag,
    json_call_of,
    logprob_fields,
    parse_logprob_entry,
    parse_logprobs,
    structural_tag,
)
from plait.lang.backends.without_runtime import CallRequest, TextCall
from plait.runtime.call_reports import Usage
from plait.runtime.errors import VALUE_DOES_NOT_FIT, CallFailed, CallRejected, ConstraintFailed, InputError
from plait.runtime.messages import SelectMethod
from plait.runtime.sampling.choice_scores import choice_probabilities, mean, score_choices
from plait.runtime.sampling_params import NAMES, SamplingParams
from plait.runtime.sampling_table import is_any_set
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.token_healing import (
    MAX_HEALED_TOKENS,
    common_prefix_length,
    heal_choices,
    num_healed_tokens,
    num_plain_bytes,
)
from plait.runtime.tokenizer.tokenizer import Tokenizer, load_tokenizer

# Not part of a request's `sampling_params`: `logprob_fields` writes the logprobs; the HTTP client has the timeout.
_NOT_SAMPLING = ("logprobs", "top_logprobs", "prompt_logprobs_from", "timeout_s")
_SAMPLING_NAMES = {field: name for field, name in NAMES["sglang"].items() if field not in _NOT_SAMPLING}
_OWN_SAMPLING = frozenset((*_SAMPLING_NAMES.values(), "n", "regex", "json_schema", "ebnf", "structural_tag"))
_OWN_FIELDS = frozenset(
    (
        *("text", "input_ids", "stream"),
        *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs"),
    )
)


class RuntimeEndpoint(RemoteClient):
    """A server with SGLang's protocol. Each call posts the whole text so far, most of which is in its prefix cache.

    `tokenizer`: a model folder or GGUF file on this machine; by default the server's `model_path`, if it exists here
    too. With a tokenizer, text is tokenized here, turns use the model's chat template, and text of a user cannot become
    a control token. Without one, plain text is sent and tokenized by the server, and turns need `chat_template`, a
    Jinja template that contains the model's control tokens.

    `extra_body`: further fields of every request to /generate, such as `{"priority": 1}`; its `sampling_params` are
    further sampling parameters of every gen.

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
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        if verify is not None:
            raise InputError(
                "RuntimeEndpoint: verify is not supported; it uses the certificates of the system (SSL_CERT_FILE)"
            )
        if chat_template_name is not None:
            raise InputError("RuntimeEndpoint: plait has no named templates; give tokenizer=... or chat_template=...")
        self._extra_body = checked_extra_body("RuntimeEndpoint: extra_body", extra_body, _OWN_FIELDS)
        self._extra_sampling = checked_extra_body(
            "RuntimeEndpoint: extra_body's sampling_params",
            self._extra_body.pop("sampling_params", None),
            _OWN_SAMPLING,
        )
        self._http = JsonHttp(base_url, {"authorization": f"Bearer {api_key}"} if api_key else {})
        self.name = f"the server at {self._http.base_url}"
        info = self._get_first("/get_model_info", "/model_info")
        if not isinstance(info, dict) or not isinstance(info.get("model_path"), str):
            raise InputError(f"{self.name} does not have SGLang's protocol: /get_model_info has no model_path")
        self._local_tokenizer = _tokenizer(info["model_path"], tokenizer)
        model = RemoteModel(info["model_path"], context_length=int(info.get("context_length") or 0))
        template = self._local_tokenizer.chat_template if self._local_tokenizer is not None else None
        if chat_template is not None:
            template = ChatTemplate(chat_template, "", "")
        super().__init__(model, template, max_concurrency)
        self._sends_deltas = self._is_incremental()

    def _get_first(self, *paths: str) -> Any:
        """Returns the JSON at the first of these paths that exists; versions of SGLang use different ones."""
        for path in paths[:-1]:
            with contextlib.suppress(CallRejected):
                return self._http.get(path)
        return self._http.get(paths[-1])

    def _is_incremental(self) -> bool:
        """Returns whether stream events contain only new text, and not the whole text so far.

        This is SGLang's option --incremental-streaming-output, formerly --stream-output, which is off by default.
        """
        try:
            settings = self.server_info()
        except CallFailed:
            return False
        return any(settings.get(name) is True for name in ("incremental_streaming_output", "stream_output"))

    def flush_cache(self) -> Any:
        return self._http.post("/flush_cache", None)

    def server_info(self) -> dict[str, Any]:
        info = self._get_first("/server_info", "/get_server_info")
        return info if isinstance(info, dict) else {}

    def check_request(self, request: CallRequest) -> None:
        tools = json_call_of(request.constraint)
        _constraint(request.constraint if tools is None else tools[1])

    def run_call(self, call: TextCall, parts: Sequence[Part], request: CallRequest) -> None:
        params, constraint, choices, method = request
        if choices is not None and method is not None:
            self._select(call, parts, choices, method, params.timeout_s)
            return
        tools = json_call_of(constraint)
        if tools is None:
            self._generate(call, parts, params, constraint)
            return
        json_call, spec = tools
        begun = isinstance(spec, JsonSchema)  # the marks around a required call are written here
        inner = TextCall(self, None)
        call.add_listener(lambda: inner.abort() if call.done() else None)
        parts = [*parts, (json_call.begin, True)] if begun else parts
        self._generate(inner, parts, params, spec)
        if call.done():
            return
        result = inner.result()
        text = f"{json_call.begin}{result.text}{json_call.end}" if begun else result.text
        call.on_text(json_call.spaced(text), num_tokens=len(result.token_ids))
        call.on_result(result.finish_reason, result.usage, result.matched, result.extra_meta)

    def _generate(self, call: TextCall, parts: Sequence[Part], params: SamplingParams, constraint: Spec | None) -> None:
        sampling = (
            self._extra_sampling
            | {name: getattr(params, field) for field, name in _SAMPLING_NAMES.items()}
            | _constraint(constraint)
        )
        if params.token_healing and not self._can_heal(parts):
            del sampling["token_healing"]
        for name in ("exact", "typical_p"):  # SGLang's own server does not know them
            if not is_any_set(params, (name,)):
                del sampling[name]
        sampling = {name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()}
        sampling = {name: value for name, value in sampling.items() if value not in (None, [], {})}
        if params.logit_bias:
            sampling["logit_bias"] = {str(token): value for token, value in params.logit_bias.items()}
        logprobs = logprob_fields(params)
        # SGLang does not define whether incremental streams have incremental logprobs, so such calls do not stream.
        stream = not (self._sends_deltas and logprobs)
        body = {**self._extra_body, **self._prompt(parts), "sampling_params": sampling, "stream": stream, **logprobs}
        meta, stop_pattern = self._stream(call, body, params)
        if call.done():
            return
        is_cut = stop_pattern is not None
        reason = {"type": "stop", "matched": stop_pattern} if is_cut else meta.get("finish_reason") or {}
        if reason.get("type") not in ("stop", "length"):
            raise CallFailed(f"{self.name} ended the call: {reason.get('message') or reason or 'without a reason'}")
        if reason["type"] == "length" and params.complete:
            raise ConstraintFailed(
                f"max_tokens={params.max_tokens} cut the value off, and {self.name} cannot complete it",
                VALUE_DOES_NOT_FIT,
            )
        extra_meta = parse_logprobs(params, meta) or {}
        extra_meta |= {name: meta[name] for name in ("particles", "weight") if isinstance(meta.get(name), dict)}
        call.on_result(reason["type"], _usage(meta), reason.get("matched"), extra_meta or None)

    def _stream(self, call: TextCall, body: dict[str, Any], params: SamplingParams) -> tuple[dict[str, Any], Any]:
        """Passes the text to `call` as it arrives. Returns the last meta info and the stop_regex that matched, if any.

        The text is cut at the match here, because SGLang's own server leaves the match in the text.
        """
        streamed, num_tokens, text = StreamedText(params.stop_regex), 0, ""
        meta: dict[str, Any] = {}
        with closing(self._events(call, body, params.timeout_s)) as events:
            for event in events:
                if "error" in event:
                    raise status_error(self.name, *parse_error(event))
                meta = event.get("meta_info") or {}
                num_new = max(0, int(meta.get("completion_tokens", 0)) - num_tokens)
                num_tokens += num_new
                text = text + event["text"] if self._sends_deltas else event["text"]
                piece = streamed.push(text, is_end=meta.get("finish_reason") is not None)
                if piece or num_new:
                    call.on_text(piece, num_tokens=num_new)
                if streamed.matched is not None:
                    break
        return meta, streamed.matched

    def _events(self, call: TextCall, body: dict[str, Any], timeout_s: float | None) -> Generator[Any, None, None]:
        if body["stream"]:
            yield from self._http.events("/generate", body, timeout_s, call.done)
        else:
            yield self._http.post("/generate", body, timeout_s)

    def _select(
        self,
        call: TextCall,
        parts: Sequence[Part],
        choices: Sequence[str],
        method: SelectMethod,
        timeout_s: float | None,
    ) -> None:
        before, answers, entries = self._score(parts, choices, timeout_s)
        logprobs = [[float(logprob) for logprob, *_ in choice_entries] for choice_entries in entries]
        tokens = [[int(token) for _, token, *_ in choice_entries] for choice_entries in entries]
        unconditional: list[list[float]] | None = None
        if method == "unconditional_likelihood_normalized":
            unconditional = self._unconditional_logprobs(parts, tokens, choices, timeout_s)
        scores = score_choices(method, logprobs, unconditional)
        best = scores.index(max(scores))
        call.on_text(choices[best], num_tokens=0)
        extra_meta = {
            "choices": list(choices),
            "choice_scores": scores,
            "choice_probabilities": choice_probabilities(logprobs, unconditional),
            "normalized_prompt_logprobs": [mean(values) for values in logprobs],
            "input_token_logprobs": [[parse_logprob_entry(entry) for entry in own] for own in entries],
        }
        if unconditional is not None:
            extra_meta["normalized_unconditional_prompt_logprobs"] = [mean(values) for values in unconditional]
            extra_meta["unconditional_token_logprobs"] = unconditional
        meta = answers[best].get("meta_info") or {}
        cached = min(before, int(meta.get("cached_tokens") or 0))
        usage = _usage(meta | {"completion_tokens": 0, "prompt_tokens": before, "cached_tokens": cached})
        call.on_result("stop", usage, None, extra_meta)

    # -- prompts ----------------------------------------------------------------------------------

    def _prompt(self, parts: Sequence[Part]) -> dict[str, Any]:
        if self._local_tokenizer is None:
            return {"text": "".join(text for text, _ in parts)}
        return {"input_ids": self._token_ids(parts)}

    def _can_heal(self, parts: Sequence[Part]) -> bool:
        """Returns whether token healing on the server would remove text of this program only.

        It must not remove text of the chat template.
        """
        num_plain = num_plain_bytes(parts)
        if self._local_tokenizer is None or not num_plain:
            return num_plain > 0
        ids, vocabulary = self._token_ids(parts)[1:][-MAX_HEALED_TOKENS:], self._local_tokenizer.vocabulary
        without_limit = sum(len(vocabulary.token_bytes[token]) for token in ids)
        return num_healed_tokens(ids, vocabulary, num_plain) == num_healed_tokens(ids, vocabulary, without_limit)

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
        """Scores the choices after the text.

        Returns the number of tokens of the text, the server's answer for each choice, and for each choice the
        (logprob, token, ...) entries of its tokens.
        """
        if self._local_tokenizer is None:
            return self._score_text("".join(text for text, _ in parts), choices, timeout_s)
        ids, num_replaced, choice_ids = heal_choices(self._local_tokenizer, parts, choices)
        ids = self._with_bos(ids[: len(ids) - num_replaced])
        answers = self._logprobs({"input_ids": [[*ids, *own_ids] for own_ids in choice_ids]}, len(ids) - 1, timeout_s)
        entries = [
            _choice_logprobs(answer, len(own_ids), choice)
            for answer, own_ids, choice in zip(answers, choice_ids, choices, strict=True)
        ]
        return len(ids), answers, entries

    def _score_text(
        self, text: str, choices: Sequence[str], timeout_s: float | None
    ) -> tuple[int, list[dict[str, Any]], list[list[Any]]]:
        """`_score` without a local tokenizer.

        The end of the text and the start of a choice may share a token ("a: " and "yes" share " yes"). So all choices
        are scored from the first token that differs, for any choice, from the tokens of the text alone.
        """
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        body = {**self._extra_body, "text": text, "sampling_params": sampling}
        meta = self._http.post("/generate", body, timeout_s)["meta_info"]
        before = int(meta["prompt_tokens"])
        prompts = [text, *(text + choice for choice in choices)]
        text_answer, *answers = self._logprobs({"text": prompts}, before - 1 - MAX_HEALED_TOKENS, timeout_s)
        text_entries, *choice_entries = [
            answer["meta_info"]["input_token_logprobs"] for answer in (text_answer, *answers)
        ]
        text_tokens, *choice_tokens = [[entry[1] for entry in own] for own in (text_entries, *choice_entries)]
        num_common = min(common_prefix_length(text_tokens, own) for own in choice_tokens)
        entries = [[entry for entry in own[num_common:] if entry[0] is not None] for own in choice_entries]
        for choice, own in zip(choices, entries, strict=True):
            _require_logprobs(own, choice)
        return before, answers, entries

    def _unconditional_logprobs(
        self, parts: Sequence[Part], tokens: list[list[int]], choices: Sequence[str], timeout_s: float | None
    ) -> list[list[float]]:
        """Returns the logprobs of the tokens of each choice, after the first token of the text alone."""
        if self._local_tokenizer is not None:
            first = self._token_ids(parts)[0]
        else:
            (answer,) = self._logprobs({"text": ["".join(text for text, _ in parts)]}, 0, timeout_s)
            first = int(answer["meta_info"]["input_token_logprobs"][0][1])
        answers = self._logprobs({"input_ids": [[first, *ids] for ids in tokens]}, 0, timeout_s)
        return [
            [float(logprob) for logprob, *_ in _choice_logprobs(answer, len(ids), choice)]
            for answer, ids, choice in zip(answers, tokens, choices, strict=True)
        ]

    def _logprobs(self, prompts: dict[str, list[Any]], start: int, timeout_s: float | None) -> list[dict[str, Any]]:
        """Computes the logprobs of a batch of prompts in one request, without sampling.

        Returns one answer per prompt, with the logprobs of its tokens from `start` on.
        """
        sampling = {"max_new_tokens": 0, "temperature": 0.0}
        fields = {"return_logprob": True, "logprob_start_len": max(0, start), "return_text_in_logprobs": True}
        body = {**self._extra_body, **prompts, "sampling_params": sampling, **fields}
        answers = self._http.post("/generate", body, timeout_s)
        (batch,) = prompts.values()
        if not isinstance(answers, list) or len(answers) != len(batch):
            raise CallFailed(f"{self.name} did not return one answer for each of {len(batch)} prompts")
        return answers


def _constraint(spec: Spec | None) -> dict[str, str]:
    match spec:
        case None:
            return {}
        case Regex(pattern):
            return {"regex": pattern}
        case JsonSchema():
            from plait.runtime.chat.json_calls import self_contained  # lazy: it loads the grammar libraries

            return {"json_schema": self_contained(spec)}
        case JsonObject():
            return {"json_schema": "{}" if spec.any_value else '{"type":"object"}'}
        case Choices(choices):
            return {"regex": "|".join(map(re.escape, choices))}
        case Ebnf(grammar):
            return {"ebnf": grammar}
        case Structural() if is_structural_tag(spec):
            return {"structural_tag": structural_tag(spec)}
    raise InputError(f"RuntimeEndpoint: SGLang's protocol cannot express the constraint {type(spec).__name__}")


def _choice_logprobs(answer: Any, num_tokens: int, choice: str) -> list[Any]:
    """Returns the (logprob, token, ...) entries of a choice: the last `num_tokens` of the prompt."""
    entries = (answer.get("meta_info") or {}).get("input_token_logprobs") or []
    return _require_logprobs([entry for entry in entries[-num_tokens:] if entry[0] is not None], choice)


def _require_logprobs(entries: list[Any], choice: str) -> list[Any]:
    if not entries:
        raise CallFailed(f"the server sent no logprobs for the choice {choice!r:.40}, so it cannot be scored")
    return entries


def _usage(meta: dict[str, Any]) -> Usage:
    prompt, cached = int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0)
    completion = int(meta.get("completion_tokens") or 0)
    return Usage(prompt, cached, prompt - cached, 0, completion, wall_s=float(meta.get("e2e_latency") or 0.0))


def _tokenizer(model_path: str, tokenizer_path: str | Path | None) -> Tokenizer | None:
    path = Path(tokenizer_path if tokenizer_path is not None else model_path)
    if tokenizer_path is None and not path.exists():
        return None
    return load_tokenizer(path)
