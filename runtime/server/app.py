"""The application: routers, the guard before them, and errors as OpenAI writes them.

What stands before the routes stands before the framework as well: a request to an endpoint of the table never meets it.

`create_app(backend, settings)` is all that a process, a test or another server needs. `backend.client` is read for each
request, so that a backend may put a new client in the place of one whose runtime died.

Knows: which routers there are. Must not know: what they answer, processes, sockets.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.server.app_state import AppState
from plait.runtime.server.errors import NOT_FOUND, ApiError, as_api_error
from plait.runtime.server.http import openapi, static_page
from plait.runtime.server.http.admission import AdmissionMiddleware
from plait.runtime.server.http.body_limits import BodyLimitMiddleware
from plait.runtime.server.http.error_bodies import error_body
from plait.runtime.server.http.response import ClientDisconnected, json_response
from plait.runtime.server.http.router import DirectRouter
from plait.runtime.server.in_flight import current_request
from plait.runtime.server.ops import endpoints
from plait.runtime.server.ops.request_context import RequestContextMiddleware
from plait.runtime.server.protocols.anthropic import messages
from plait.runtime.server.protocols.ollama import embed as ollama_embed
from plait.runtime.server.protocols.ollama import generate as ollama_generate
from plait.runtime.server.protocols.ollama import models as ollama_models
from plait.runtime.server.protocols.openai import chat, completions, embeddings, models, responses, tokenize
from plait.runtime.server.protocols.programs import endpoint as program_route
from plait.runtime.server.protocols.sglang import generate, server_info
from plait.runtime.server.settings import ServerSettings

ROUTERS = (
    *(endpoints.router, models.router, completions.router, chat.router, responses.router, embeddings.router),
    *(messages.router, generate.router, server_info.router, ollama_generate.router, ollama_models.router),
    *(ollama_embed.router, tokenize.router, program_route.router),
)
HANDLED_ERRORS = (ApiError, PlaitError, HTTPException, ClientDisconnected)  # raised by an endpoint, they are its answer


class Backend(Protocol):
    """A Runtime, an Engine, or what restarts one. `client` raises RuntimeGone while there is none."""

    @property
    def client(self) -> Client: ...


class Application(FastAPI):
    """FastAPI behind our own middleware: `entry_app` leads to the endpoints, and to it for the rest."""

    entry_app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.entry_app(scope, receive, send)

    async def handle_with_fastapi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The framework's own way."""
        await super().__call__(scope, receive, send)


def create_app(backend: Backend, settings: ServerSettings) -> FastAPI:
    """The ASGI application that serves `backend`."""
    app = Application(
        title="plait",
        summary="A language model behind the APIs that clients know.",
        docs_url=None,
        redoc_url=None,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
        },  # else each request has two spans
    )
    state = app.state.plait = AppState(backend, settings)
    routers = [*ROUTERS, *([static_page.router] if settings.page else [])]
    for router in routers:
        app.include_router(router)
    paths = {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
    direct = DirectRouter(app.handle_with_fastapi, routers=routers, handled_errors=HANDLED_ERRORS, on_error=_on_error)
    app.entry_app = _behind_middleware(direct, state, frozenset(path for path in paths if "{" not in path))
    for kind in HANDLED_ERRORS:
        app.add_exception_handler(kind, _on_error)
    openapi.install(app)
    return app


def _behind_middleware(app: ASGIApp, state: AppState, paths: frozenset[str]) -> ASGIApp:
    """The outermost comes last. `paths`: those of routes."""
    settings = state.settings
    app = AdmissionMiddleware(app, admission=state.admission)
    app = BodyLimitMiddleware(
        app,
        max_body_bytes=settings.max_body_bytes,
        body_timeout_s=settings.body_timeout_s,
        retry_after_s=settings.retry_after_s,
    )
    if settings.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return RequestContextMiddleware(
        app, in_flight=state.in_flight, metrics=state.metrics, paths=paths, log_prompts=settings.log_prompts
    )


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnected):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        error = ApiError(
            error.status_code, str(error.detail), type=NOT_FOUND, code=None, headers=dict(error.headers or {})
        )
    answer = as_api_error(error, retry_after_s=request.app.state.plait.settings.retry_after_s)
    record = current_request()
    if record is not None:
        record.code = record.code or answer.code
    body = error_body(request.url.path, answer, request.state.request_id)
    return json_response(body, answer.status, answer.headers)
