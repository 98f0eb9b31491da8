"""Builds the ASGI application: middleware, routes, and the responses to errors.

A request passes `RequestContextMiddleware` (id, log, metrics), `BodyLimitMiddleware` and `AdmissionMiddleware`. Then
`_EndpointTable` calls its endpoint directly. FastAPI itself only holds the routes, writes the OpenAPI document and
answers what is not in the table: paths with parameters, wrong methods, unknown paths. Its own routing costs as much as
all that an endpoint does, and puts three more functions between a stream's events and the socket.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.runtime.errors import PlaitError
from plait.runtime.server.app_state import AppState
from plait.runtime.server.batches.batch_service import BatchService
from plait.runtime.server.batches.directory import StateDirectory
from plait.runtime.server.batches.line_request import BackgroundMiddleware, run_line
from plait.runtime.server.engines.engine_pool import EnginePool
from plait.runtime.server.engines.served_model import Backend, ServedModel
from plait.runtime.server.errors import NOT_FOUND, ApiError, answered_error
from plait.runtime.server.http import openapi, static_page
from plait.runtime.server.http.admission import AdmissionMiddleware, BodyLimitMiddleware
from plait.runtime.server.http.error_bodies import error_body
from plait.runtime.server.http.response import ClientDisconnected, json_response
from plait.runtime.server.ops.request_context import RequestContextMiddleware
from plait.runtime.server.protocols.anthropic import endpoint as anthropic_messages
from plait.runtime.server.protocols.batches import batches, files
from plait.runtime.server.protocols.ollama import embed as ollama_embed
from plait.runtime.server.protocols.ollama import generate as ollama_generate
from plait.runtime.server.protocols.ollama import models as ollama_models
from plait.runtime.server.protocols.openai import chat, completions, embeddings, models, tokenize
from plait.runtime.server.protocols.openai.responses import endpoint as responses
from plait.runtime.server.protocols.openai.responses import stored as stored_responses
from plait.runtime.server.protocols.operations import adapters, endpoints, model_facts
from plait.runtime.server.protocols.programs import endpoint as program_route
from plait.runtime.server.protocols.sglang import generate, server_info
from plait.runtime.server.rerun import run_elsewhere
from plait.runtime.server.settings import ServerSettings

ROUTERS = (
    *(endpoints.router, model_facts.router, models.router, completions.router, chat.router, responses.router),
    *(embeddings.router, anthropic_messages.router, generate.router, server_info.router, ollama_generate.router),
    *(ollama_models.router, ollama_embed.router, tokenize.router, program_route.router, files.router, batches.router),
    *(stored_responses.router, adapters.router),
)
HANDLED_ERRORS = (ApiError, PlaitError, HTTPException, ClientDisconnected)  # answered by `_error_response`


class Application(FastAPI):
    """FastAPI behind plait's own middleware: every HTTP request enters at `entry_app`. `endpoint_paths`: those
    of `api_routes` without parameters."""

    api_routes: list[APIRoute]
    endpoint_paths: frozenset[str]
    entry_app: RequestContextMiddleware

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        handle = self.entry_app if scope["type"] == "http" else self.handle_with_fastapi
        await handle(scope, receive, send)

    async def handle_with_fastapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request with FastAPI's own middleware and routing."""
        await super().__call__(scope, receive, send)


def create_app(
    backend: Backend | EnginePool, settings: ServerSettings, directory: StateDirectory | None = None
) -> Application:
    """Returns the ASGI application that serves `backend`, the engine of one model, or those of an `EnginePool`.

    `backend.client` is read for each request, so a backend may replace the client of a runtime that died. `directory`:
    of files and batches; None opens `settings.files_dir`. Raises InputError for one that cannot be used.
    """
    app = Application(
        title="plait",
        summary="A language model behind the APIs that clients know.",
        docs_url=None,
        redoc_url=None,
        # FastAPI's own telemetry would add a second span to each request
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    state = app.state.plait = AppState(backend, settings)
    _run_silent_calls_elsewhere(state)
    routers = [*ROUTERS, static_page.router if settings.page else static_page.no_page_router]
    for router in routers:
        app.include_router(router)
    app.api_routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    table = _EndpointTable(app.handle_with_fastapi, routers)
    app.endpoint_paths = frozenset(route.path for route in app.api_routes if "{" not in route.path)
    app.entry_app = _add_middleware(table, state, app.endpoint_paths)
    if directory is None and settings.files_dir:
        directory = StateDirectory(Path(settings.files_dir))
    if directory is not None:
        state.batches = _batch_service(app, table, state, directory)
    for error_type in HANDLED_ERRORS:
        app.add_exception_handler(error_type, _error_response)
    openapi.install(app)
    return app


def _batch_service(app: Application, table: ASGIApp, state: AppState, directory: StateDirectory) -> BatchService:
    """Returns the service whose lines pass the same middleware and endpoints as requests, except for admission."""
    lines = BackgroundMiddleware(table, state.in_flight)
    bodies = BodyLimitMiddleware(lines, state.settings)
    line_app = RequestContextMiddleware(bodies, state.settings, state.in_flight, state.metrics, app.endpoint_paths)

    async def entry(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app
        await line_app(scope, receive, send)

    return BatchService(
        directory,
        state.settings,
        ask=partial(run_line, entry),
        may_start=lambda: state.only_model is None or state.only_model.status == "loaded",
        is_draining=lambda: state.admission.is_draining or _has_ended(state),
    )


def _has_ended(state: AppState) -> bool:
    """Whether no request can be answered until another server is started: lines of batches are left to that one."""
    return state.only_model is not None and state.only_model.status == "failed"


def _run_silent_calls_elsewhere(state: AppState) -> None:
    """Moves requests away from replicas that do not answer, of all engines, also of those that are loaded later."""

    def connect(model: ServedModel) -> None:
        if model.replicated is not None:
            model.replicated.on_unresponsive = partial(run_elsewhere, state, model)

    if state.pool is not None:
        state.pool.on_load = connect
    for model in state.models:
        connect(model)


def _add_middleware(app: ASGIApp, state: AppState, paths: frozenset[str]) -> RequestContextMiddleware:
    """Wraps `app`, the innermost first. `paths`: the routes' paths without parameters."""
    settings = state.settings
    app = BodyLimitMiddleware(AdmissionMiddleware(app, admission=state.admission), settings)
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestContextMiddleware(app, settings, state.in_flight, state.metrics, paths)


class _EndpointTable:
    """Calls the endpoint of a method and path. Requests that are not in the table go to `fallback`."""

    def __init__(self, fallback: ASGIApp, routers: Iterable[APIRouter]) -> None:
        self.fallback = fallback
        self._endpoints: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
            (method, route.path): route.endpoint
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and "{" not in route.path
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]  # the HTTP server sends no body to a HEAD
        is_at_root = not scope.get("root_path")  # not mounted below another application: the path is the client's
        endpoint = self._endpoints.get((method, scope["path"])) if is_at_root else None
        if endpoint is None:
            await self.fallback(scope, receive, send)
            return
        request: Any = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except HANDLED_ERRORS as error:
            response = await _error_response(request, error)
        await response(scope, receive, send)


def _routing_error_text(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return unknown_path_text(request.url.path, request.app.endpoint_paths)
    if error.status_code == 405:
        return f"this endpoint takes {_allowed_methods(request, error)}, not {request.method}"
    return str(error.detail)


def _allowed_methods(request: Request, error: HTTPException) -> str:
    """The methods of all routes of the request's path: FastAPI names those of the first one only."""
    routes = [route for route in request.app.api_routes if route.path_regex.match(request.scope["path"])]
    methods = {method for route in routes for method in route.methods}
    return ", ".join(sorted(methods)) or (error.headers or {}).get("Allow", "another method")


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnected):
        return Response(status_code=499)  # never read: the client has gone
    if isinstance(error, HTTPException):
        text, headers = _routing_error_text(request, error), dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = _allowed_methods(request, error)
        error = ApiError(error.status_code, text, type=NOT_FOUND, code=None, headers=headers)
    api_error = answered_error(error, retry_after_s=request.app.state.plait.settings.retry_after_s)
    body = error_body(request.url.path, api_error, request.state.request_id)
    return json_response(body, api_error.status, api_error.headers)


# -- unknown paths --------------------------------------------------------------------------------
# What a 404 for a path without an endpoint says: the path, and the endpoint that was probably meant.

MAX_PATH_CHARS = 100


def unknown_path_text(path: str, known: Iterable[str]) -> str:
    """Returns the message for `path`, which is none of the endpoints `known`.

    Most wrong paths come from a base URL with or without `/v1`.
    """
    shown = path[:MAX_PATH_CHARS]
    meant = _meant(shown, sorted((other for other in known if other != "/"), key=len))
    if meant is None:
        return f"there is no endpoint {shown!r}; GET /openapi.json lists all"
    return f"there is no endpoint {shown!r}; perhaps {meant} is meant{_base_url_hint(shown, meant)}"


def _meant(path: str, known: list[str]) -> str | None:
    for end in (path, path.removeprefix("/v1")):
        for other in known:
            if end.count("/") and other in (end, f"/v1{end}"):
                return other
    return next(iter(difflib.get_close_matches(path, known, n=1, cutoff=0.8)), None)


def _base_url_hint(path: str, meant: str) -> str:
    if meant == f"/v1{path}":
        return ": let the base URL of the client end with /v1"
    if path == f"/v1{meant}":
        return ": let the base URL of the client end without /v1"
    return ""
