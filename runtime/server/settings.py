"""The server's settings: one frozen struct, handed down; the command line reads its defaults here.

Knows: names, units, ranges. Must not know: what the settings are used for.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from plait.runtime.errors import InputError


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one HTTP server. Build it with `server_settings(...)`, which checks every field.

    port: 0 takes a free one. model_name: what clients call the model (empty: the name of its file). max_body_bytes: a
    larger request is refused before it is read. max_choices: prompts times answers of one request. retry_after_s: when
    a client that was refused for want of room may come again.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 30000
    model_name: str = ""
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    max_choices: Annotated[int, Meta(ge=1, le=4096)] = 128
    retry_after_s: Annotated[int, Meta(ge=1, le=3600)] = 1


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
