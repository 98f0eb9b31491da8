"""vLLM's `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: for admin keys, and for files below `--lora-dir`."""

from __future__ import annotations

import asyncio
from pathlib import Path, PurePosixPath
from typing import Annotated

from fastapi import APIRouter, Request
from msgspec import Meta
from starlette.responses import PlainTextResponse, Response

from plait.host.background_calls import BackgroundCalls
from plait.runtime.errors import QueueTimeout
from plait.runtime.messages import MAX_NAME_CHARS
from plait.runtime.server.app_state import AppState, state_of, tenant_of
from plait.runtime.server.engines.model_names import DEFAULT_NAME
from plait.runtime.server.engines.restarting_runtime import RestartingRuntime
from plait.runtime.server.engines.served_model import ServedModel
from plait.runtime.server.errors import NOT_FOUND, ApiError, invalid
from plait.runtime.server.http.json_body import read_json
from plait.runtime.server.http.openapi import documented
from plait.runtime.server.protocols.shared import StrictStruct

router = APIRouter()

ERRORS = (400, 401, 403, 404, 415, 500, 503)
FIND_DEADLINE_S = 30.0
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(StrictStruct):
    """`lora_path`: of a folder of peft or a GGUF file, below the server's `--lora-dir`. `load_inplace`: whether another
    adapter may have the name; requests that run with that one end with it."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadAdapterRequest(StrictStruct):
    """Requests that run with the adapter end with it."""

    lora_name: Name


@router.post(
    "/v1/load_lora_adapter", **documented(LoadAdapterRequest, str, errors=(*ERRORS, 413), media_type="text/plain")
)
async def load_adapter(request: Request) -> Response:
    """Adds an adapter to the model, as a model of its own."""
    model = _changeable_model(request)
    body = await read_json(request, LoadAdapterRequest)
    if not body.lora_name.isprintable() or body.lora_name in (DEFAULT_NAME, model.name, *model.aliases):
        raise invalid("'lora_name' is not printable, or a name of the model itself", "lora_name")
    if body.lora_name in model.adapters and not body.load_inplace:
        raise invalid(f"the adapter {body.lora_name!r} has already been loaded", "lora_name", "already_loaded")
    path = await find_below(Path(model.settings.lora_dir), body.lora_path)
    await model.client.load_adapter(body.lora_name, str(path), replace=body.load_inplace)
    _keep_at_restart(model, body.lora_name, str(path))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post(
    "/v1/unload_lora_adapter", **documented(UnloadAdapterRequest, str, errors=(*ERRORS, 413), media_type="text/plain")
)
async def unload_adapter(request: Request) -> Response:
    """Removes an adapter from the models."""
    model = _changeable_model(request)
    body = await read_json(request, UnloadAdapterRequest)
    if body.lora_name not in model.adapters:
        text = f"there is no adapter {body.lora_name!r}"
        raise ApiError(404, text, type=NOT_FOUND, param="lora_name", code="adapter_not_found")
    await model.client.unload_adapter(body.lora_name)
    _keep_at_restart(model, body.lora_name, None)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _changeable_model(request: Request) -> ServedModel:
    """The model whose adapters this request may change. Raises ApiError 404 where nobody may, and 403."""
    state: AppState = state_of(request)
    model = state.only_model
    if model is None or not state.settings.lora_dir:
        text = (
            "this server loads no adapters over HTTP; one that is started with --lora-dir DIR and --admin-key NAME does"
        )
        raise ApiError(404, text, type=NOT_FOUND, code="adapters_not_allowed")
    if tenant_of(request) not in state.settings.admin_keys:
        raise ApiError(403, "this API key may not load adapters", type="permission_error", code="admin_key_needed")
    return model


async def find_below(directory: Path, name: str) -> Path:
    """`path_below` in a thread of its own: on a mount that is gone it does not end. Raises QueueTimeout then."""

    def find() -> Path | ApiError:
        try:
            return path_below(directory, name)
        except ApiError as error:
            return error

    calls, is_done, loop = BackgroundCalls[None, Path | ApiError](), asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(calls.fileno(), is_done.set)
    calls.begin(None, find)
    try:
        await asyncio.wait_for(is_done.wait(), FIND_DEADLINE_S)
        [(_, found)] = calls.collect()
    except TimeoutError:
        raise QueueTimeout(f"{name!r:.200} could not be read within {FIND_DEADLINE_S:g} s") from None
    finally:
        loop.remove_reader(calls.fileno())
        calls.close()
    if isinstance(found, ApiError):
        raise found
    return found


def path_below(directory: Path, name: str) -> Path:
    """The path of a folder or file below a directory. Raises ApiError 400, also where a link leads out of it."""
    parts = PurePosixPath(name)
    refused = invalid("'lora_path' is the path of a folder or file below the server's --lora-dir", "lora_path")
    if parts.is_absolute() or ".." in parts.parts or not parts.parts or not name.isprintable():
        raise refused
    try:
        root, path = directory.resolve(), directory / name
        if not path.exists():
            text = f"there is no {name!r:.200} below the server's --lora-dir"
            raise ApiError(404, text, type=NOT_FOUND, param="lora_path", code="adapter_not_found")
        files = [path, *path.iterdir()] if path.is_dir() else [path]
        if all(file.resolve().is_relative_to(root) for file in files):
            return path.resolve()
    except (OSError, RuntimeError):  # too long a name, a folder that may not be read, or a loop of links
        raise refused from None
    raise refused


def _keep_at_restart(model: ServedModel, name: str, path: str | None) -> None:
    if isinstance(model.backend, RestartingRuntime):
        model.backend.keep_adapter(name, path)
