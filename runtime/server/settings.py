"""The server's settings: one frozen struct, handed down; the command line reads its defaults here.

Knows: names, units, ranges. Must not know: what the settings are used for.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from plait.runtime.errors import InputError

BACKLOG = 2048  # connections that may wait to be taken

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Origin = Annotated[
    str, Meta(pattern=r"^(\*|https?://[A-Za-z0-9._-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:.]+\](:[0-9]{1,5})?)$")
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one HTTP server. Build it with `server_settings(...)`, which checks every field.

    port: 0 takes a free one. model_name: what clients call the model (empty: the name of its file). max_body_bytes: a
    larger request is refused before it is read. max_choices: prompts times answers of one request. retry_after_s: when
    a client that was refused for want of room may come again.

    Who may come. api_keys: name -> SHA-256 of the key, in hex; none: everybody may. open_metrics: /metrics needs none.
    cors_origins: origins whose pages may call this server from a browser ("*": all). page: serve the page at "/".
    How much. max_running: requests that the runtime works on at once; max_queue: how many more may wait;
    max_requests_per_key: how many of them may be one key's (0: no limit of its own).
    How long, in seconds. body_timeout_s: for a whole body to come. idle_timeout_s: for a connection's next request
    line and headers. write_timeout_s: for a client to take what it is sent. drain_timeout_s: for running requests to
    end once the server is told to stop. stuck_after_s: the runtime has not answered for so long: it is not healthy.
    log_prompts: the request log holds the beginning of each body.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 30000
    model_name: str = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    max_choices: Annotated[int, Meta(ge=1, le=4096)] = 128
    retry_after_s: Annotated[int, Meta(ge=1, le=3600)] = 1
    api_keys: dict[str, Digest] = {}
    open_metrics: bool = False
    cors_origins: tuple[Origin, ...] = ()
    page: bool = True
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 64
    max_queue: Annotated[int, Meta(ge=0, le=1 << 20)] = 512
    max_requests_per_key: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    body_timeout_s: Seconds = 30.0
    idle_timeout_s: Seconds = 75.0
    write_timeout_s: Seconds = 60.0
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    stuck_after_s: Seconds = 10.0
    log_prompts: bool = False


def server_settings(**settings: Any) -> ServerSettings:
    """Checked settings; InputError names the one that is unknown, of the wrong type, or out of range.

    >>> server_settings(port=0).port
    0
    """
    given = {name: value for name, value in settings.items() if value is not None}
    try:
        return msgspec.convert(given, ServerSettings)
    except msgspec.ValidationError as error:
        raise InputError(f"a server setting does not fit: {error}") from None
