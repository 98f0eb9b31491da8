"""The table of the request fields that this server knows and does not read, and what becomes of each field of a body.

A field is of one of three classes:

    meaning   it changes the answer: a field of the endpoint's struct, which is acted on, or a row of REFUSED (400)
    advice    a row of ADVICE: the answer is right without it; accepted, and listed in the answer's `warnings`
    unknown   any other name at the top of a body: accepted and listed too, unless it resembles a field with a meaning

Parsing (`http/json_body.py`), the OpenAPI document and the tables of docs/fields.md are made from the rows. A struct
takes part if it has a class variable `field_table`: one of ENDPOINTS, or of PARTS for an object within a body. In these
and all other objects unknown names are errors. Null is no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as types

from plait.runtime.sampling_params import NAMES, SamplingParams
from plait.runtime.server.errors import invalid, unknown_field, unsupported
from plait.runtime.server.fields.field_hints import meant_field, struct_types
from plait.runtime.server.fields.request_warnings import UNKNOWN, warn

MAX_LISTED = 20  # unknown names in the warnings of one answer
MAX_UNKNOWN = 64  # the names of a body are compared with those that are known
MAX_NAME_CHARS = 64

ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "input_tokens": "/v1/responses/input_tokens",
    "embeddings": "/v1/embeddings",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "ollama_chat": "/api/chat",
    "ollama_generate": "/api/generate",
    "ollama_embed": "/api/embed, /api/embeddings",
    "generate": "/generate",
    "tokenize": "/tokenize, /detokenize",
    "programs": "/v1/programs",
}
PARTS = {
    "stream_options": "stream_options",
    "text": "text of /v1/responses",
    "reasoning": "reasoning of /v1/responses",
    "options": "options of Ollama",
    "sampling_params": "sampling_params of /generate",
}


class Row(NamedTuple):
    """Fields of one class and reason.

    names: separated by spaces. endpoints: keys of ENDPOINTS and PARTS, separated by spaces. reason: of a refusal, "" if
    there is none to give; of advice why nothing is done, a clause. neutral: values that ask for nothing, and pass.
    details: of the error, for clients that look for them.
    """

    names: str
    endpoints: str
    reason: str = ""
    neutral: tuple[Any, ...] = ()
    details: Mapping[str, Any] | None = None

    def passes(self, value: Any) -> bool:
        """Whether a value asks for nothing. False and 0 are two values, as in JSON."""
        return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.neutral)


ALL = " ".join(ENDPOINTS)
OPENAI, CLAUDE, OLLAMA = "chat completions", "messages count_tokens", "ollama_chat ollama_generate"
GENERATING = f"{OPENAI} responses messages {OLLAMA} generate programs"

# fmt: off
REFUSED = (
    # what a request must not bring, under the names that other servers have for it
    Row("chat_template template", ALL, "a request brings no template", ("",)),
    Row("chat_template_kwargs enable_thinking", "completions embeddings ollama_embed generate", "no template is used",
        ({},)),
    Row("custom_logit_processor logits_processors logits_processor_pattern", ALL, "a request brings no code"),
    Row("prompt_embeds input_embeds", ALL, "a request brings no tensors"),
    Row("lora lora_path lora_request adapters", ALL, "an adapter is chosen by the name of the model", ("", [])),
    Row("mm_processor_kwargs kv_transfer_params bootstrap_host bootstrap_port bootstrap_room mcp_servers", ALL,
        "a request names no files and no addresses", ([], {})),
    Row("image_data video_data audio_data images", ALL, "prompts are text", ([],)),
    # what changes the answer
    Row("audio modalities", "chat", "answers are text", (["text"],)),
    Row("modalities", "generate", "answers are text", ([],)),
    Row("functions function_call", "chat", "write 'tools' and 'tool_choice'"),
    Row("moderation", "chat responses"),
    Row("web_search_options plugins documents", "chat", "nothing is searched", ([],)),
    Row("input_type prompt_name task truncate_prompt_tokens", "embeddings", "the text is embedded as it is"),
    Row("n", f"responses messages {OLLAMA}", "a request has one answer", (1,)),
    Row("background", "responses generate", "", (False,)),
    Row("access_programs background_options conversation image prompt", "responses"),
    Row("conversation prompt", "input_tokens"),
    Row("container inference_geo", "messages"),
    Row("thread", CLAUDE, "threads are not kept", (),
        {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}),
    Row("context", "ollama_generate", "write 'messages'", ([],)),
    Row("width height steps", "ollama_generate", "answers are text", (0,)),
    Row("token_ids_logprob session_params", "generate"),
    Row("return_hidden_states return_routed_experts", f"{OPENAI} generate", "", (False,)),
    Row("custom_params", "sampling_params"),
    Row("no_stop_trim", "sampling_params", "", (False,)),
    Row("tfs_z", f"{GENERATING} options", "it is no sampler here", (1,)),
    Row("mirostat top_a dry_multiplier dynatemp_range xtc_probability", f"{GENERATING} options",
        "it is no sampler here", (0,)),
    Row("penalize_newline", "options", "penalties concern all tokens", (True,)),
    Row("samplers", GENERATING, "the order of samplers is fixed"),
    Row("allowed_token_ids bad_words", OPENAI, "", ([],)),
    Row("prompt_logprobs vllm_xargs", OPENAI, "", ({},)),
    Row("truncate_prompt_tokens", OPENAI, "a prompt that does not fit is refused"),
    Row("early_stopping include_stop_str_in_output return_token_ids return_tokens return_tokens_as_token_ids "
        "use_beam_search", OPENAI, "", (False,)),
    Row("best_of", "chat", "write 'n'", (1,)),
    Row("parse_tool_calls", "chat", "calls of tools are parsed", (True,)),
    Row("length_penalty", OPENAI, "there is no beam search", (1,)),
    Row("skip_special_tokens", OPENAI, "control tokens are left out", (True,)),
    Row("separate_reasoning stream_reasoning", "chat", "reasoning is apart, and streamed", (True,)),
    Row("logits_all vocab_only embedding_only", "options", "", (False,)),
)
ADVICE = (
    Row("service_tier", "chat completions responses messages", "all requests are served alike",
        ("auto", "default", "standard", "standard_only")),
    Row("speed", CLAUDE, "all requests are served alike", ("standard",)),
    Row("metadata", OPENAI, "nothing is kept with an answer", ({},)),
    Row("store", OPENAI, "no answer is kept", (False,)),
    Row("client_metadata", "responses", "it is a label"),
    Row("user_profile_id workspace_id", CLAUDE, "it is a label"),
    Row("betas anthropic_beta anthropic_version", CLAUDE, "the API has one form here", ([],)),
    Row("context_management", f"{CLAUDE} responses", "the conversation is used as it is sent", ([], {}, {"edits": []})),
    Row("diagnostics", "messages", "none are made"),
    Row("include metadata stream " + " ".join(NAMES["responses"].values()), "input_tokens", "nothing is generated"),
    Row("max_tokens metadata stop_sequences stream temperature top_k top_p", "count_tokens", "nothing is generated"),
    Row("truncation", "responses input_tokens", "a prompt that does not fit is refused", ("disabled",)),
    Row("truncate shift", OLLAMA, "a prompt that does not fit is refused", (False,)),
    Row("max_tool_calls", "responses", "it counts hosted tools, and none run here"),
    Row("verbosity", "chat text", "the model has no setting for it", ("medium",)),
    Row("personality", "responses input_tokens", "the model has no setting for it"),
    Row("context", "reasoning", "the template decides which reasoning it renders"),
    Row("summary generate_summary", "reasoning", "reasoning is sent as it is, without a summary"),
    Row("prediction", "chat", "nothing is gained from it here"),
    Row("prompt_cache_options prompt_cache_retention cache_prompt", f"{OPENAI} responses",
        "prefixes are always cached, while there is room", ("in_memory", True)),
    Row("models provider route transforms caching", OPENAI, "no gateway is between", ([], {})),
    Row("extra_body", f"{OPENAI} responses embeddings", "its fields stand beside 'model'", ({},)),
    Row("nvext request_id reasoning_format", OPENAI, "it is another server's", ({}, "auto")),
    Row("spaces_between_special_tokens", f"{OPENAI} sampling_params", "control tokens are no text", (True, False)),
    Row("include_obfuscation", "stream_options", "nothing is obfuscated", (False,)),
    Row("continuous_usage_stats", "stream_options", "the last chunk has the usage", (False,)),
    Row("num_gpu num_thread num_batch main_gpu use_mmap use_mlock low_vram f16_kv numa", "options",
        "the server was started with its own settings", (False,)),
    Row("num_keep", "options", "a prompt that does not fit is refused"),
    Row("mirostat_eta mirostat_tau", "options", "mirostat is off"),
    Row("stream_interval", "sampling_params", "tokens are sent as they come", (1,)),
    Row("log_metrics no_logs", "generate", "the operator decides what is logged", (True, False)),
    Row("data_parallel_rank routed_dp_rank", "generate", "the server chooses the replica"),
)
# fmt: on
_DEFAULTS = {
    name: SamplingParams.__struct_defaults__[SamplingParams.__struct_fields__.index(field)]
    for names in NAMES.values()
    for field, name in names.items()
}
"""Every protocol's name of a sampling parameter -> its default, which passes where an endpoint lacks the parameter."""


@cache
def rows_of(endpoint: str) -> Mapping[str, tuple[Row, bool]]:
    """Returns the fields that `endpoint` knows and does not read -> (row, whether it is advice)."""
    return {
        name: (row, rows is ADVICE)
        for rows in (ADVICE, REFUSED)
        for row in rows
        if endpoint in row.endpoints.split()
        for name in row.names.split()
    }


def read_fields(body: Any, kind: Any) -> Any:
    """Returns a decoded body of a `kind` without what the struct does not have, which becomes warnings.

    Raises ApiError 400 for a field that is refused, and with strict fields for every field that is not read.
    """
    if not isinstance(body, dict) or not hasattr(kind, "field_table"):
        return body
    kept = _read_part(body, kind, "")
    unknown = [name for name in kept if name not in kind.__struct_fields__]
    _take_unknown({name: kept[name] for name in unknown if not _asks_for_nothing(name, kept[name])}, kind)
    for name in unknown:
        del kept[name]
    leave_out_hosted_tools(kept, kind.field_table)
    return kept


def _read_part(value: Any, kind: Any, path: str) -> Any:
    """Returns an object, or a list of objects, of a `kind` without the fields of the table."""
    if isinstance(value, list):
        return [_read_part(item, kind, f"{path}[{index}]") for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    rows, parts, kept = rows_of(kind.field_table), _parts(kind), {}
    for name, item in value.items():
        if name not in rows or name in kind.__struct_fields__:
            part = parts.get(name)
            kept[name] = item if part is None else _read_part(item, part, f"{path}.{name}" if path else name)
        elif item is not None and not rows[name][0].passes(item):
            _take_row(name, *rows[name], path)
    return kept


def _take_row(name: str, row: Row, is_advice: bool, path: str) -> None:
    param = f"{path}.{name}" if path else name
    if is_advice:
        return warn(param, row.reason)
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in row.neutral)
    text = f"can only be {allowed} on this server" if allowed else "is not supported by this server"
    error = unsupported(param, f"{text}: {row.reason}" if row.reason else text)
    error.details = row.details
    raise error


def _take_unknown(fields: Mapping[str, Any], kind: Any) -> None:
    if not (names := list(fields)):
        return
    if len(names) > MAX_UNKNOWN:
        raise invalid(f"the body has more than {MAX_UNKNOWN} unknown fields", code="unknown_parameter")
    refused = (name for name, (_, is_advice) in rows_of(kind.field_table).items() if not is_advice)
    known = {*_DEFAULTS, *refused}
    for name in (name for name in names if fields[name] not in ("", [], {})):  # which name nothing
        if (hint := meant_field(kind, name[:MAX_NAME_CHARS], known)) is not None:
            raise unknown_field(name[:MAX_NAME_CHARS], hint)
    for name in names[:MAX_LISTED]:
        warn(name[:MAX_NAME_CHARS], "it is not known here", UNKNOWN)
    if len(names) > MAX_LISTED:
        text = f"it and {len(names) - MAX_LISTED - 1} further fields are not known here"
        warn(names[MAX_LISTED][:MAX_NAME_CHARS], text, UNKNOWN)


def _asks_for_nothing(name: str, value: Any) -> bool:
    return value is None or (name in _DEFAULTS and value == _DEFAULTS[name])


def with_parts(kind: Any) -> list[Any]:
    """Returns a struct that takes part in the table, and the structs of its parts; [] for another type."""
    return [kind, *_parts(kind).values()] if hasattr(kind, "field_table") else []


@cache
def _parts(kind: Any) -> Mapping[str, Any]:
    """Returns the fields of a struct that hold objects with rows of their own -> the struct of these."""
    info = types.type_info(kind)
    assert isinstance(info, types.StructType)
    return {
        field.encode_name: struct.cls
        for field in info.fields
        for struct in struct_types(field.type)
        if hasattr(struct.cls, "field_table")
    }


# -- hosted tools ---------------------------------------------------------------------------------
# Tools that OpenAI's and Anthropic's servers run themselves: left out of a request that has other tools to use.
#
# Without other tools, or where `tool_choice` names one of them, the answer would be another one: then they are refused
# as any type of tool that is not known.

_HOSTED = {
    "responses": r"(web_search(_preview)?|code_interpreter|image_generation|tool_search)(_\d{4}_\d\d_\d\d)?",
    "messages": r"(web_search|web_fetch|code_execution|tool_search_tool_(regex|bm25))(_\d{8})?",
}
_HOSTED |= {"count_tokens": _HOSTED["messages"], "input_tokens": _HOSTED["responses"]}


def leave_out_hosted_tools(body: dict[str, Any], endpoint: str) -> None:
    """Removes hosted tools from the lists of `body`, in place, with a warning for each. Raises ApiError 400 with strict
    fields."""
    if (pattern := _HOSTED.get(endpoint)) is None:
        return
    lists = list(_tool_lists(body))
    hosted = {
        f"{place}[{index}]": tool
        for place, holder in lists
        for index, tool in enumerate(holder["tools"])
        if re.fullmatch(pattern, _text(tool, "type"))
    }
    names = {_text(tool, key) for tool in hosted.values() for key in ("type", "name")} - {""}
    choice = body.get("tool_choice")
    allowed = choice.get("tools") if isinstance(choice, dict) else None
    chosen = [choice, *(allowed if isinstance(allowed, list) else ())]
    if len(hosted) == sum(len(holder["tools"]) for _, holder in lists):
        return
    if any(_text(tool, key) in names for tool in chosen for key in ("type", "name")):
        return
    for place, tool in hosted.items():
        warn(place, f"{_text(tool, 'type')} does not run here")
    for place, holder in lists:
        kept = [tool for index, tool in enumerate(holder["tools"]) if f"{place}[{index}]" not in hosted]
        holder["tools"] = kept


def _tool_lists(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the place of each list of tools, and the object that holds it as `tools`: the body, and items of
    `/v1/responses`."""
    items = body.get("input")
    holders = [("tools", body)]
    for index, item in enumerate(items if isinstance(items, list) else ()):
        if _text(item, "type") == "additional_tools":
            holders.append((f"input[{index}].tools", item))
    yield from ((place, holder) for place, holder in holders if isinstance(holder.get("tools"), list))


def _text(tool: Any, key: str) -> str:
    value = tool.get(key) if isinstance(tool, dict) else None
    return value if isinstance(value, str) else ""
