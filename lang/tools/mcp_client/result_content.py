"""The result of an MCP tool as text, which is what the models here read."""

from __future__ import annotations

import json
from typing import Any

MAX_RESULT_CHARS = 100_000


def content_text(result: Any) -> str:
    """Returns the content of a CallToolResult as text: one line or more for each item. What is not text is named with
    its type. A result without content is its structured content as JSON. Longer texts are cut, and say so."""
    text = "\n".join(_item_text(item) for item in result.content)
    if not result.content and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    if len(text) <= MAX_RESULT_CHARS:
        return text
    return f"{text[:MAX_RESULT_CHARS]}\n[cut: {len(text) - MAX_RESULT_CHARS} more characters]"


def _item_text(item: Any) -> str:
    match item.type:
        case "text":
            return str(item.text)
        case "resource":
            return str(getattr(item.resource, "text", None) or _placeholder("resource", item.resource))
        case "resource_link":
            return f"[resource {item.name}: {item.uri}]"
    return _placeholder(item.type, item)


def _placeholder(kind: str, item: Any) -> str:
    """Returns the text that replaces data which a model of text cannot read."""
    return f"[{kind}, {item.mime_type or 'of unknown type'}, not shown]"
