"""The meta-schemas of JSON Schema, drafts 4 to 2020-12: the schemas of schemas, which other schemas refer to.

metaschemas.json holds them as json-schema.org publishes them, without titles, descriptions and defaults.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin

_PREFIXES = {4: "draft-04/", 6: "draft-06/", 7: "draft-07/", 2019: "draft/2019-09/", 2020: "draft/2020-12/"}


def metaschemas_for(addresses: set[str], draft: int) -> dict[str, dict[str, Any]]:
    """Returns copies of the meta-schemas of `draft` at these addresses, and of those that they refer to.

    >>> sorted(metaschemas_for({"http://json-schema.org/draft-07/schema", "http://a.b/c"}, 7))
    ['http://json-schema.org/draft-07/schema']
    """
    texts, found = _texts(), dict[str, dict[str, Any]]()
    todo = [uri for uri in addresses if uri in texts and f"json-schema.org/{_PREFIXES[draft]}" in uri]
    while todo:
        uri = todo.pop()
        if uri not in found:
            found[uri] = json.loads(texts[uri])
            del found[uri]["$schema"]
            todo += [other for other in _referred_to(found[uri], uri) if other in texts]
    return found


@cache
def _texts() -> dict[str, str]:
    content = json.loads(Path(__file__).with_name("metaschemas.json").read_text())
    return {uri: json.dumps(schema) for uri, schema in content.items()}


def _referred_to(part: Any, base: str) -> list[str]:
    if isinstance(part, list):
        return [uri for inner in part for uri in _referred_to(inner, base)]
    if not isinstance(part, dict):
        return []
    found = [uri for inner in part.values() for uri in _referred_to(inner, base)]
    return [*found, urldefrag(urljoin(base, part["$ref"]))[0]] if isinstance(part.get("$ref"), str) else found
