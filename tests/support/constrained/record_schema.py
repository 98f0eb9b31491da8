"""An object schema with one required property of most kinds."""

from __future__ import annotations

RECORD = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string"},
        "age": {"type": "integer", "minimum": 18},
        "email": {"type": "string", "format": "email"},
        "born": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 2},
        "kind": {"enum": ["staff", "guest"]},
        "score": {"type": "number", "multipleOf": 0.5},
        "next": {"anyOf": [{"type": "null"}, {"type": "object", "required": ["x"], "properties": {"x": {}}}]},
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])  # type: ignore[call-overload]
