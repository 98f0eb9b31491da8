"""`/tokenize` and `/detokenize`: the tokens of a text or a conversation, and the text of tokens.

Requests and answers combine those of vLLM and SGLang: a list of prompts gives lists, one prompt gives one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Meta, UnsetType
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.server.app_state import use_model
from plait.runtime.server.chat.engine import prepare_chat
from plait.runtime.server.chat.template_settings import TemplateVariables
from plait.runtime.server.errors import invalid
from plait.runtime.server.fields.request_warnings import request_warnings
from plait.runtime.server.generation.logprobs import text_of_tokens, token_text
from plait.runtime.server.generation.raw_prompt import parses_special
from plait.runtime.server.generation.submission import TOKENIZE_IN_THREAD_CHARS, check_fits_context, prepend_bos
from plait.runtime.server.generation.threads import run_in_thread_if
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.server.protocols.openai.chat_request import (
    ChatRequest,
    CustomTool,
    FunctionTool,
    Message,
    conversation_of,
)
from plait.runtime.server.protocols.shared import StrictStruct, check_token_ids, token_lists

router = APIRouter()

MAX_PROMPTS = 1024
_FIELDS_OF_MESSAGES = (
    *("add_generation_prompt", "continue_final_message", "tools"),
    *("chat_template_kwargs", "enable_thinking"),
)
LARGE_ANSWER_TOKENS = 2000  # an answer with more is made in a thread


class TokenizeRequest(StrictStruct):
    """`prompt`, or `messages`, rendered as for a chat completion.

    `add_special_tokens`: adds the BOS token where the model has one. `parse_special`: whether names of control tokens
    in `prompt` become control tokens; by default as in a prompt of `/v1/completions`.
    """

    field_table: ClassVar[str] = "tokenize"
    model: str = "default"
    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)] | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool = True
    parse_special: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[FunctionTool | CustomTool], Meta(max_length=128)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    enable_thinking: bool | None = None


class Tokenized(msgspec.Struct, omit_defaults=True):
    """The tokens and their number; `max_model_len` is the context length in tokens."""

    tokens: Sequence[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: Sequence[str | list[str]] | None = None
    warnings: list[str] | UnsetType = UNSET


class DetokenizeRequest(StrictStruct):
    """`skip_special_tokens`: control tokens are left out of the text."""

    field_table: ClassVar[str] = "tokenize"
    tokens: list[int | list[int]]
    model: str = "default"
    skip_special_tokens: bool = True


class Detokenized(msgspec.Struct):
    """The text, under vLLM's name and under SGLang's."""

    prompt: str | list[str]
    text: str | list[str]
    warnings: list[str] | UnsetType = UNSET


@router.post("/tokenize", **documented(TokenizeRequest, Tokenized))
async def tokenize_prompt(request: Request) -> Response:
    """The token ids of a prompt or a conversation."""
    body = await read_json(request, TokenizeRequest)
    model = await use_model(request, body.model)
    client = model.client
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give 'prompt' or 'messages', and only one of them", "prompt")
    if body.messages is not None:
        found = [await _conversation(body, client)]
    else:
        for name in _FIELDS_OF_MESSAGES:
            if getattr(body, name) is not None:
                raise invalid(f"'{name}' needs 'messages'", name)
        prompts = [body.prompt] if isinstance(body.prompt, str) else list(body.prompt or ())
        parse_special = parses_special(model.settings, body.parse_special)
        found = await _prompts(prompts, body, client, parse_special)
    is_large = sum(map(len, found)) > LARGE_ANSWER_TOKENS
    return await run_in_thread_if(is_large, _tokenized, body, found, client)


def _tokenized(body: TokenizeRequest, found: list[list[int]], client: Client) -> Response:
    """The answer. Its lists are encoded one at a time, since other threads wait for the encoder."""
    encode = msgspec.json.Encoder().encode
    tokens: Any = [msgspec.Raw(encode(ids)) for ids in found]
    names: Any = None
    if body.return_token_strs:
        text_of = cache(lambda token: token_text(client, token))
        names = [msgspec.Raw(encode([text_of(token) for token in ids])) for ids in found]
    limit = client.model.context_length
    if isinstance(body.prompt, list):
        return json_response(Tokenized(tokens, [len(ids) for ids in found], limit, names, request_warnings()))
    first_names = names[0] if names else None
    return json_response(Tokenized(tokens[0], len(found[0]), limit, first_names, request_warnings()))


@router.post("/detokenize", **documented(DetokenizeRequest, Detokenized))
async def detokenize_tokens(request: Request) -> Response:
    """The text of token ids."""
    body = await read_json(request, DetokenizeRequest)
    client = (await use_model(request, body.model)).client
    lists = token_lists(body.tokens, "tokens")
    is_large = sum(map(len, lists)) > TOKENIZE_IN_THREAD_CHARS
    texts = await run_in_thread_if(is_large, _texts, client, lists, body.skip_special_tokens)
    answer = texts if lists == body.tokens else texts[0]
    return json_response(Detokenized(answer, answer, request_warnings()))


async def _conversation(body: TokenizeRequest, client: Client) -> list[int]:
    fields = {name: getattr(body, name) for name in _FIELDS_OF_MESSAGES}
    chat_request = ChatRequest(model=body.model, messages=body.messages or [], **fields)
    return list((await prepare_chat(client, conversation_of(chat_request))).prompt_ids)


async def _prompts(texts: Sequence[str], body: TokenizeRequest, client: Client, parse_special: bool) -> list[list[int]]:
    """The token ids of each text. Long texts are tokenized in a thread."""
    found = []
    is_long = sum(map(len, texts)) > TOKENIZE_IN_THREAD_CHARS
    for text in texts:
        parts = [(text, parse_special)]
        if len(text) > TOKENIZE_IN_THREAD_CHARS:
            check_fits_context(client, len(text))
        ids = await run_in_thread_if(is_long, client.tokenizer.encode, parts, at_start=True)
        found.append(prepend_bos(client, ids) if body.add_special_tokens else ids)
    return found


def _texts(client: Client, lists: Sequence[list[int]], skip_special: bool) -> list[str]:
    texts = []
    for ids in lists:
        check_token_ids(ids, client.model.vocab_size, "tokens")
        texts.append(client.tokenizer.decode(ids) if skip_special else text_of_tokens(client, ids))
    return texts
