"""The application: routers, the guard before them, and errors as OpenAI writes them.

`create_app(backend, settings)` is all that a process, a test or another server needs. `backend.client` is read for each
request, so that a backend may put a new client in the place of one whose runtime died.

Knows: which routers there are. Must not know: what they answer, processes, sockets.
"""

from __future__ import annotations

from typing import Protocol

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from plait.runtime.client.client import Client
from plait.runtime.errors import PlaitError
from plait.runtime.server import openapi
from plait.runtime.server.answering import ClientGone, json_answer
from plait.runtime.server.errors import NOT_FOUND, ApiError, as_api_error
from plait.runtime.server.guard import Guard
from plait.runtime.server.openai import chat, completions, embeddings, models, responses
from plait.runtime.server.settings import ServerSettings
from plait.runtime.server.state import State

ROUTERS = (models.router, completions.router, chat.router, responses.router, embeddings.router)


class Backend(Protocol):
    """A Runtime, an Engine, or what restarts one. `client` raises RuntimeGone while there is none."""

    @property
    def client(self) -> Client: ...


def create_app(backend: Backend, settings: ServerSettings) -> FastAPI:
    """The ASGI application that serves `backend`."""
    app = FastAPI(
        title="plait", summary="A language model behind the APIs that clients know.", docs_url=None, redoc_url=None
    )
    app.state.plait = State(backend, settings)
    for router in ROUTERS:
        app.include_router(router)
    app.add_middleware(Guard, max_body_bytes=settings.max_body_bytes)
    for kind in (ApiError, PlaitError, HTTPException, ClientGone):
        app.add_exception_handler(kind, _on_error)
    openapi.install(app)
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, HTTPException):
        error = ApiError(
            error.status_code, str(error.detail), type=NOT_FOUND, code=None, headers=dict(error.headers or {})
        )
    answer = as_api_error(error, retry_after_s=request.app.state.plait.settings.retry_after_s)
    return json_answer(answer.body(), answer.status, answer.headers)
