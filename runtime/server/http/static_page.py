"""Serves the page at "/": static files of the package, with a content security policy that only allows this server.

Without the page "/" is a line of text, for agents and monitors that ask whether the server is there.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib import resources

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

router = APIRouter(include_in_schema=False)
no_page_router = APIRouter(include_in_schema=False)

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )
)
CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
PAGE_FOLDER = resources.files("plait.runtime.server") / "page"
PAGE_FILES = {
    "/" if file.name == "index.html" else f"/page/{file.name}": file.name
    for file in PAGE_FOLDER.iterdir()
    if file.name.rpartition(".")[2] in CONTENT_TYPES
}  # path -> file name


@lru_cache(maxsize=32)
def _file(name: str) -> tuple[bytes, str]:
    """The file's bytes and its ETag."""
    content = (PAGE_FOLDER / name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


async def page_file(request: Request) -> Response:
    """Serves one of the page's files."""
    name = PAGE_FILES[request.scope["path"]]
    content, etag = _file(name)
    headers = {
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": etag,
    }
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(content, 200, headers, CONTENT_TYPES[name.rpartition(".")[2]])


for _path in PAGE_FILES:
    router.add_api_route(_path, page_file, methods=["GET", "HEAD"])


@no_page_router.api_route("/", methods=["GET", "HEAD"])
async def no_page(request: Request) -> Response:
    """Says that a server without a page runs."""
    return PlainTextResponse("plait is running\n")
