"""The server's settings, as one frozen struct with checked ranges."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from plait.runtime.setting_errors import convert_settings

BACKLOG = 2048  # connections that the kernel queues until they are accepted
STUCK_AFTER_S = 600.0  # far above the longest step, see docs/records/server.md
MAX_RESTARTS = 8

Digest = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
_ORIGIN = r"^(\*|https?://[A-Za-z0-9._-]+(:[0-9]{1,5})?|https?://\[[0-9a-fA-F:.]+\](:[0-9]{1,5})?)$"
Origin = Annotated[
    str, Meta(pattern=_ORIGIN, extra_json_schema={"description": "an origin such as https://example.org, or *"})
]
_NAME = r"^(\*|[A-Za-z0-9._-]{1,253})$"
HostName = Annotated[
    str, Meta(pattern=_NAME, extra_json_schema={"description": "a DNS name without scheme and port, or *"})
]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one HTTP server. Build it with `server_settings(...)`, which checks every field.

    General. port: 0 takes a free one. model_name: the name that clients use for the model ("": its file's name).
    aliases: further names of the only model. completions_special: whether names of control tokens in raw prompts become
    control tokens. page: serve the page at "/". log_prompts: log the beginning of each request's body. strict_fields: a
    field that would only be listed in an answer's warnings is refused. untagged_tool_calls: an answer that is nothing
    but a call without marks counts as one; a request may say otherwise.
    Access. api_keys: name -> SHA-256 of the key in hex; empty: no key is needed. admin_keys: names of keys that may
    load adapters, from files below lora_dir ("": nobody may). open_metrics: /metrics needs no key.
    cors_origins: origins whose pages may call this server from a browser ("*": all). allowed_hosts: names in the Host
    header of requests without a key, beside `host`, loopback names and IP addresses ("*": all).
    Limits. max_body_bytes: larger requests are refused before they are read. max_choices: prompts times choices of one
    request. max_running: calls that the runtime runs at once. max_queue: further calls that may wait, and
    max_queue_bytes: of their bodies; both are shared by the keys. max_queue_time_s: a request that has not begun after
    this time is refused (0: no limit). key_weights: the parts of keys in what they share, 1 unless set.
    max_requests_per_key: admitted requests of one key (0: no limit); a program counts as its calls in flight.
    Files and batches. files_dir: the directory that holds them ("": none are kept). max_file_bytes: of one upload.
    max_batch_lines: of one file. max_stored_bytes_per_key, max_files_per_key: results included. max_batch_calls: calls
    of batches that are in flight at once (0: max_running).
    Stored responses. store_responses_s: for how long responses are kept in memory (0: none are). max_response_bytes: of
    all keys; max_response_bytes_per_key: of one.
    Times, in seconds. body_timeout_s: until a whole body has arrived. idle_timeout_s: between two requests of a
    connection; a request line with its headers has as long, but at most 30. write_timeout_s: until a client has read
    what was sent. drain_timeout_s: for running requests to end at shutdown. stuck_after_s: without an answer from the
    runtime until it is replaced.
    retry_after_s: the least Retry-After of a refusal for lack of capacity.
    Restarts. max_restarts: of a runtime in a row, see `RestartingRuntime`.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 30000
    model_name: str = ""
    aliases: tuple[str, ...] = ()
    completions_special: bool = True
    max_body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    max_choices: Annotated[int, Meta(ge=1, le=4096)] = 128
    retry_after_s: Annotated[int, Meta(ge=1, le=3600)] = 1
    api_keys: dict[str, Digest] = {}
    admin_keys: tuple[str, ...] = ()
    lora_dir: str = ""
    open_metrics: bool = False
    cors_origins: tuple[Origin, ...] = ()
    allowed_hosts: tuple[HostName, ...] = ()
    page: bool = True
    max_running: Annotated[int, Meta(ge=1, le=4096)] = 64
    max_queue: Annotated[int, Meta(ge=0, le=1 << 20)] = 4096
    max_queue_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 256 << 20
    max_queue_time_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    key_weights: dict[str, Annotated[float, Meta(ge=0.001, le=1000)]] = {}
    max_requests_per_key: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    files_dir: str = ""
    max_file_bytes: Annotated[int, Meta(ge=1024, le=1 << 34)] = 200 << 20
    max_batch_lines: Annotated[int, Meta(ge=1, le=1_000_000)] = 50_000
    max_stored_bytes_per_key: Annotated[int, Meta(ge=1024, le=1 << 50)] = 4 << 30
    max_files_per_key: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    max_batch_calls: Annotated[int, Meta(ge=0, le=4096)] = 0
    store_responses_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    max_response_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 256 << 20
    max_response_bytes_per_key: Annotated[int, Meta(ge=1024, le=1 << 40)] = 64 << 20
    body_timeout_s: Seconds = 30.0
    idle_timeout_s: Seconds = 75.0
    write_timeout_s: Seconds = 15.0
    drain_timeout_s: Annotated[float, Meta(ge=0, le=86_400)] = 30.0
    stuck_after_s: Seconds = STUCK_AFTER_S
    max_restarts: Annotated[int, Meta(ge=0, le=1 << 20)] = MAX_RESTARTS
    log_prompts: bool = False
    strict_fields: bool = False
    untagged_tool_calls: bool = False


def server_settings(**settings: Any) -> ServerSettings:
    """Returns checked settings; None means the default.

    Raises InputError for a setting that is unknown, of the wrong type, or out of range.

    >>> server_settings(port=0).port
    0
    """
    non_default = {name: value for name, value in settings.items() if value is not None}
    return convert_settings("server", non_default, ServerSettings, {})
