"""vLLM's `structured_outputs` of completions and chat completions: one constraint on the answer.

Source: https://docs.vllm.ai/en/latest/features/structured_outputs.html (0.12).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from plait.constrained.specs import Choices, Ebnf, JsonObject, JsonSchema, Lark, Regex, Spec
from plait.runtime.server.protocols.shared import StrictStruct, build_constraint
from plait.runtime.server.protocols.structural_tag import structural_constraint


class StructuredOutputs(StrictStruct):
    """One of `json` (a schema, or its text), `regex`, `choice`, `grammar` (EBNF or Lark), `json_object`, and
    `structural_tag`. `disable_any_whitespace` is our `compact`."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_fallback: bool | None = None
    disable_additional_properties: Literal[False] | None = None


def structured_constraints(body: StructuredOutputs, *, strict_formats: bool) -> Iterator[tuple[str, Spec]]:
    """Yields the constraints and their parameters. Raises ApiError 400 for one that cannot be used."""
    path, compact = "structured_outputs", body.disable_any_whitespace
    if body.json is not None:
        options = {"annotations": True, "compact": compact, "strict_formats": strict_formats}
        yield f"{path}.json", build_constraint(f"{path}.json", JsonSchema, body.json, **options)
    if body.regex is not None:
        yield f"{path}.regex", build_constraint(f"{path}.regex", Regex, body.regex)
    if body.choice is not None:
        yield f"{path}.choice", build_constraint(f"{path}.choice", Choices, tuple(body.choice))
    if body.grammar is not None:
        kind = Ebnf if "::=" in body.grammar else Lark
        yield f"{path}.grammar", build_constraint(f"{path}.grammar", kind, body.grammar)
    if body.json_object:
        yield f"{path}.json_object", JsonObject(compact=compact)
    if body.structural_tag is not None:
        yield f"{path}.structural_tag", structural_constraint(body.structural_tag, f"{path}.structural_tag")
