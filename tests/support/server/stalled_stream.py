"""A stream that waits after some events, as it does for a client that does not read."""

from __future__ import annotations

import asyncio
import threading


def stop_after(num_events: int, may_go_on: threading.Event):
    """EventStream._send_events that waits after some events, as it does for a client that does not read."""

    async def send_events(self, send, event, events) -> None:
        count = 0
        while event:
            await send({"type": "http.response.body", "body": event, "more_body": True})
            count += 1
            while count == num_events and not may_go_on.is_set():
                await asyncio.sleep(0.01)
            event = await anext(events, b"")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_events
