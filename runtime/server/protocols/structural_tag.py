"""SGLang's `structural_tag`: free text in which tags are followed by JSON that fits a schema, as in tool calls.

Source: SGLang's page on structured outputs (0.5), the form with `structures` and `triggers`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from plait.constrained.specs import Structural
from plait.runtime.server.errors import invalid
from plait.runtime.server.protocols.shared import StrictStruct, build_constraint


class Structure(StrictStruct):
    """After `begin` comes a JSON value that fits `schema`, then `end`."""

    begin: str
    schema: dict[str, Any]
    end: str


class StructuralTag(StrictStruct):
    """`triggers`: the texts that open a structure; on this server these are the complete `begin`s."""

    type: Literal["structural_tag"]
    structures: Annotated[list[Structure], Meta(min_length=1, max_length=128)]
    triggers: list[str]


def structural_constraint(text: str, param: str) -> Structural:
    """The constraint of a `structural_tag`, which is JSON text. Raises ApiError 400, which names `param`."""
    try:
        tag = msgspec.json.decode(text, type=StructuralTag)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"'structural_tag' must have structures and triggers: {error}"[:300], param) from None
    begins = {structure.begin for structure in tag.structures}
    if set(tag.triggers) != begins:
        raise invalid("the triggers of 'structural_tag' must be the complete 'begin's of its structures", param)
    triggers = tuple((structure.begin, structure.schema, structure.end) for structure in tag.structures)
    constraint: Structural = build_constraint(param, Structural, triggers, annotations=True)
    return constraint
