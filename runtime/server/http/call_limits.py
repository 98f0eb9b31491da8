"""The limits on the calls of one request that hold whatever else the server does."""

from __future__ import annotations

from plait.runtime.server.errors import ApiError
from plait.runtime.server.settings import ServerSettings


def check_calls_alone(
    settings: ServerSettings, num_calls: int, param: str, owner: str, capacity: int | None = None
) -> None:
    """Raises ApiError 400 if one request would have more calls at once than a key, or than the server (`capacity`)."""
    capacity = settings.max_running + settings.max_queue if capacity is None else capacity
    for largest, whose in ((settings.max_requests_per_key or num_calls, "one key"), (capacity, "this server")):
        if num_calls > largest:
            text = f"{owner} {num_calls} calls in flight at once; {whose} can have {largest}"
            raise ApiError(400, text, param=param, code="too_many_calls")
