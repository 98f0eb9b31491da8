"""The way of a request to its endpoint, without the framework's: one look into a table of methods and paths.

FastAPI keeps the routes, documents them and answers what is not in the table: paths with parameters, wrong methods,
unknown paths. Its own way costs as much as all that an endpoint does, and puts three more functions between an
answer's events and the socket.

Knows: routes, which errors are answers. Must not know: what endpoints do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Awaitable[Response]]


class DirectRouter:
    """The innermost middleware. `on_error` makes an answer of an exception that is one of `handled_errors`."""

    def __init__(
        self, app: ASGIApp, routers: Iterable[APIRouter], handled_errors: tuple[type[Exception], ...], on_error: OnError
    ) -> None:
        self.app, self.handled_errors, self.on_error = app, handled_errors, on_error
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            (method, route.path): route.endpoint
            for router in routers
            for route in router.routes
            if isinstance(route, APIRoute) and "{" not in route.path
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"])) if _is_mounted_at_root(scope) else None
        if endpoint is None:
            await self.app(scope, receive, send)
            return
        request: Any = Request(scope, receive, send)
        try:
            response = await endpoint(request)
        except self.handled_errors as error:
            response = await self.on_error(request, error)
        await response(scope, receive, send)


def _is_mounted_at_root(scope: Scope) -> bool:
    """Whether the path is what clients wrote: not below another application's."""
    return scope["type"] == "http" and not scope.get("root_path")
