"""Builds the output items of a response and the stream events of each change, in OpenAI's order.

    output_item.added  content_part.added  *.delta ...  *.done  content_part.done  output_item.done

A response that is not streamed has the same items without the events.
"""

from __future__ import annotations

import secrets
from typing import Any

from plait.runtime.server.chat.parser import ParsedPart
from plait.runtime.server.protocols.shared import ContentLogprob

Event = dict[str, Any]

# kind of part -> (type of its item, type of its content part, prefix of its events)
_TEXTS = {
    "text": ("message", "output_text", "response.output_text"),
    "reasoning": ("reasoning", "reasoning_text", "response.reasoning_text"),
}


class OutputItems:
    """The items of one response. `add` and `close` return stream events; `output` has the items so far."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind = ""  # of the open item: a key of _TEXTS, "call", or empty

    def add(self, part: ParsedPart, logprobs: list[ContentLogprob] | None = None) -> list[Event]:
        """Adds a part of the answer; `logprobs` belong to a part that is text."""
        if part.kind == "call":
            return [*self.close(), self._open("call", _call(part.text))]
        if part.kind == "arguments":
            item = self.output[-1]
            item["arguments"] += part.text
            return [self._event("response.function_call_arguments.delta", delta=part.text)]
        events: list[Event] = []
        if self._kind != part.kind:
            events += self.close() + self._open_text(part.kind)
        content = self._content()
        content["text"] += part.text
        event = self._event(f"{_TEXTS[part.kind][2]}.delta", content_index=0, delta=part.text)
        if part.kind == "text":
            content["logprobs"] += logprobs or []
            event["logprobs"] = logprobs or []
        return [*events, event]

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the open item, if there is one."""
        kind, self._kind = self._kind, ""
        if not kind:
            return []
        item = self.output[-1]
        events: list[Event] = []
        if kind == "call":
            done = self._event("response.function_call_arguments.done", arguments=item["arguments"])
            events.append(done | {"name": item["name"]})
        else:
            content = self._content()
            done = self._event(f"{_TEXTS[kind][2]}.done", content_index=0, text=content["text"])
            if kind == "text":
                done["logprobs"] = content["logprobs"]
            events += [done, self._event("response.content_part.done", content_index=0, part=dict(content))]
        item["status"] = status
        output_index = len(self.output) - 1
        return [*events, {"type": "response.output_item.done", "output_index": output_index, "item": _copy(item)}]

    def _open(self, kind: str, item: dict[str, Any]) -> Event:
        self.output.append(item)
        self._kind = kind
        index = len(self.output) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": _copy(item)}

    def _open_text(self, kind: str) -> list[Event]:
        item_type, part_type, _ = _TEXTS[kind]
        item: dict[str, Any] = {"id": f"{item_type[:3]}_{secrets.token_hex(12)}", "type": item_type}
        if kind == "text":
            item |= {"role": "assistant", "status": "in_progress", "content": []}
        else:
            item |= {"summary": [], "status": "in_progress", "content": []}
        added = self._open(kind, item)
        part: dict[str, Any] = {"type": part_type, "text": ""}
        if kind == "text":
            part |= {"annotations": [], "logprobs": []}
        event = self._event("response.content_part.added", content_index=0, part=dict(part))
        item["content"] = [part]
        return [added, event]

    def _content(self) -> dict[str, Any]:
        content: dict[str, Any] = self.output[-1]["content"][0]
        return content

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **fields}


def _call(name: str) -> dict[str, Any]:
    ids = {"id": f"fc_{secrets.token_hex(12)}", "call_id": f"call_{secrets.token_hex(12)}"}
    return {"type": "function_call", "name": name, "arguments": "", "status": "in_progress", **ids}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """A copy that later parts do not change."""
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)
