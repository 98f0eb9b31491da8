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
from plait.runtime.server import openapi, operations, page_files, tokens
from plait.runtime.server.admission import Admission
from plait.runtime.server.answering import ClientGone, json_answer
from plait.runtime.server.anthropic import messages
from plait.runtime.server.direct import Direct
from plait.runtime.server.error_shapes import error_body
from plait.runtime.server.errors import NOT_FOUND, ApiError, as_api_error
from plait.runtime.server.guard import Guard
from plait.runtime.server.in_flight import current
from plait.runtime.server.observing import Observer
from plait.runtime.server.ollama import embed as ollama_embed
from plait.runtime.server.ollama import generate as ollama_generate
from plait.runtime.server.ollama import models as ollama_models
from plait.runtime.server.openai import chat, completions, embeddings, models, responses
from plait.runtime.server.programs import route as program_route
from plait.runtime.server.settings import ServerSettings
from plait.runtime.server.sglang import generate, info
from plait.runtime.server.state import State

ROUTERS = (
    *(operations.router, models.router, completions.router, chat.router, responses.router, embeddings.router),
    *(messages.router, generate.router, info.router, ollama_generate.router, ollama_models.router),
    *(ollama_embed.router, tokens.router, program_route.router),
)
ANSWERED = (ApiError, PlaitError, HTTPException, ClientGone)  # raised by an endpoint, they are its answer


class Backend(Protocol):
    """A Runtime, an Engine, or what restarts one. `client` raises RuntimeGone while there is none."""

    @property
    def client(self) -> Client: ...


class Application(FastAPI):
    """FastAPI behind our own middleware: `entry` leads to the endpoints, and to it for the rest."""

    entry: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        await self.entry(scope, receive, send)

    async def frame(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    state = app.state.plait = State(backend, settings)
    routers = [*ROUTERS, *([page_files.router] if settings.page else [])]
    for router in routers:
        app.include_router(router)
    paths = {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
    direct = Direct(app.frame, routers=routers, kinds=ANSWERED, on_error=_on_error)
    app.entry = _behind_middleware(direct, state, frozenset(path for path in paths if "{" not in path))
    for kind in ANSWERED:
        app.add_exception_handler(kind, _on_error)
    openapi.install(app)
    return app


def _behind_middleware(app: ASGIApp, state: State, paths: frozenset[str]) -> ASGIApp:
    """The outermost comes last. `paths`: those of routes."""
    settings = state.settings
    app = Admission(app, gate=state.gate)
    app = Guard(
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
    return Observer(
        app, in_flight=state.in_flight, metrics=state.metrics, paths=paths, log_prompts=settings.log_prompts
    )


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        error = ApiError(
            error.status_code, str(error.detail), type=NOT_FOUND, code=None, headers=dict(error.headers or {})
        )
    answer = as_api_error(error, retry_after_s=request.app.state.plait.settings.retry_after_s)
    record = current()
    if record is not None:
        record.code = record.code or answer.code
    body = error_body(request.url.path, answer, request.state.request_id)
    return json_answer(body, answer.status, answer.headers)
