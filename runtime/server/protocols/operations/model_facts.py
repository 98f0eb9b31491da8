"""Facts about a model that evaluation harnesses and other clients read: `/tokenizer_info` and `/props`.

They are those of the model's files and of the server's settings, never of requests.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Literal

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from plait.runtime.server.app_state import use_model
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.http.response import json_response
from plait.runtime.tokenizer.tokenizer import Tokenizer

router = APIRouter()


class TokenizerInfo(msgspec.Struct):
    """What vLLM's endpoint of this name gives of tokenizer_config.json, as lm-evaluation-harness reads it.

    Tokens are texts, null where the model has none. model_max_length: the context length in tokens.
    """

    bos_token: str | None
    eos_token: str | None
    chat_template: str | None
    add_bos_token: bool
    model_max_length: int
    vocab_size: int
    pad_token: None = None
    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"


class GenerationSettings(msgspec.Struct):
    n_ctx: int


class Modalities(msgspec.Struct, frozen=True):
    vision: Literal[False] = False
    audio: Literal[False] = False


class Props(msgspec.Struct):
    """The properties of llama.cpp's server; `n_ctx`: the context length in tokens, `total_slots`: calls at once."""

    default_generation_settings: GenerationSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    modalities: Modalities = Modalities()


@router.get("/tokenizer_info", **documented(answer=TokenizerInfo, errors=(401, 404, 500, 503)))
async def tokenizer_info(request: Request) -> Response:
    """The tokenizer of the model called `model` in the query, or else of the first one."""
    model = await use_model(request, request.query_params.get("model"))
    tokenizer, info = model.client.tokenizer, model.client.model
    bos, eos = _bos_and_eos(tokenizer)
    limits = info.context_length, tokenizer.vocab_size
    return json_response(TokenizerInfo(bos, eos, model.template_source or None, tokenizer.add_bos, *limits))


@router.get("/props", **documented(answer=Props, errors=(401, 404, 500, 503)))
async def props(request: Request) -> Response:
    """The properties of the model called `model` in the query, or else of the first one."""
    model = await use_model(request, request.query_params.get("model"))
    info, (bos, eos) = model.client.model, _bos_and_eos(model.client.tokenizer)
    return json_response(
        Props(
            GenerationSettings(info.context_length),
            info.max_batch_rows,
            model.name,
            info.model_path,
            model.template_source,
            bos or "",
            eos or "",
            f"plait {version('plait')}",
        )
    )


def _bos_and_eos(tokenizer: Tokenizer) -> tuple[str | None, str | None]:
    """The texts of the BOS token and of the first token that ends a text."""
    names = tokenizer.control_texts
    bos = None if tokenizer.bos_id is None else names.get(tokenizer.bos_id)
    return bos, next((names[token] for token in tokenizer.eos_ids if token in names), None)
