"""`Tool`: what the model may call: its name, its description, the JSON schema of its arguments, and its function."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from plait.lang.typed.schema_rewriting import schema_for_prompt
from plait.runtime.errors import InputError
from plait.runtime.similar_names import did_you_mean

TOOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,127}")
_JSON_KEYS = ("name", "description", "parameters", "strict")


def json_arguments(text: str) -> dict[str, Any]:
    """Parses the arguments of a tool that has no types in Python: JSON data."""
    arguments: dict[str, Any] = json.loads(text)
    return arguments


@dataclass(frozen=True)
class Tool:
    """A tool described by a JSON schema. A list of tools may hold typed functions, objects of this class, and dicts in
    the format of OpenAI's API.

    - `parameters`: the JSON schema of the arguments, which are an object. Without it the tool takes no arguments.
      If it lists `properties`, arguments that it does not name are generated only if it says something about them,
      such as `additionalProperties`.
    - `function`: takes the arguments as keywords, as JSON data. It may be async. None: the program runs the call, and
      gives its result to `s.tool_result(name, value)`.
    - `strict`: unknown formats and misspelt keywords in the schema are errors. Otherwise they are annotations.
    - `read`: makes the keyword arguments from their JSON text; raises ValueError for invalid ones.

    >>> Tool("roll", "Rolls a die.", {"type": "object", "properties": {"sides": {"type": "integer"}}}).name
    'roll'
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    function: Callable[..., Any] | None = None
    _: KW_ONLY
    strict: bool = False
    read: Callable[[str], dict[str, Any]] = field(default=json_arguments, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not TOOL_NAME.fullmatch(self.name):
            raise InputError(
                f"the name of a tool must be 1 to 128 letters, digits, '_', '-', '.' or '/', not {self.name!r:.160}"
            )
        if not isinstance(self.description, str):
            raise InputError(f"tool {self.name!r}: description must be text, not {self.description!r:.80}")
        if self.function is not None and not callable(self.function):
            raise InputError(f"tool {self.name!r}: function must be callable or None, not {self.function!r:.80}")
        if not isinstance(self.strict, bool):
            raise InputError(f"tool {self.name!r}: strict must be True or False, not {self.strict!r:.80}")
        object.__setattr__(self, "parameters", _checked_parameters(self.name, self.parameters))

    @property
    def is_typed(self) -> bool:
        """Whether it was made from a typed function, so that its arguments are objects of Python types."""
        return self.read is not json_arguments

    def as_json(self) -> dict[str, Any]:
        """Returns the tool in the format of chat templates and OpenAI's API."""
        parameters = schema_for_prompt(self.parameters) if self.is_typed else self.parameters
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """The value of `gen(name, tools=...)`: the name of the tool, and its arguments as the function takes them."""

    name: str
    arguments: dict[str, Any]
    tool: Tool = field(repr=False, compare=False)


def tool_from_json(where: str, data: Mapping[str, Any]) -> Tool:
    """Returns a tool without a function from its JSON, with or without OpenAI's wrapper `{"type": "function", ...}`.

    Raises InputError, beginning with `where`, for a missing name or an unknown key.
    """
    fields = data.get("function", data) if data.get("type") == "function" else data
    if not isinstance(fields, Mapping) or (fields is not data and set(data) != {"type", "function"}):
        raise InputError(f'{where}: a tool as a dict is {{"type": "function", "function": {{...}}}}, not {data!r:.200}')
    for key in fields:
        if key not in _JSON_KEYS:
            hint = did_you_mean(str(key), _JSON_KEYS)
            raise InputError(f"{where}: a tool has no {key!r}{hint}; known are: {', '.join(_JSON_KEYS)}")
    if "name" not in fields:
        raise InputError(f"{where}: a tool needs a name, and {data!r:.200} has none")
    given = {key: value for key, value in fields.items() if value is not None}
    try:
        return Tool(**given)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _checked_parameters(name: str, parameters: object) -> dict[str, Any]:
    """Returns a copy of the schema, so that later changes by the caller have no effect."""
    if not isinstance(parameters, Mapping):
        raise InputError(f"tool {name!r}: parameters must be a JSON schema as a dict, not {parameters!r:.80}")
    if parameters.get("type") != "object":
        found = f"{parameters.get('type')!r:.80}"
        raise InputError(f'tool {name!r}: the schema of the parameters must have "type": "object", not {found}')
    try:
        copied: dict[str, Any] = json.loads(json.dumps(dict(parameters), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"tool {name!r}: the schema of the parameters is not JSON: {error}") from None
    return copied


def result_text(value: Any) -> str:
    """Returns a tool's result as the model reads it: text unchanged, anything else as JSON.

    Raises TypeError for bytes and for objects without a text, ValueError for half of a surrogate pair.
    """
    import msgspec

    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"the result is {type(value).__name__}, which the model cannot read; text or data is needed")
    if isinstance(value, str):
        value.encode()
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=_encode_unknown).decode()


def _encode_unknown(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # a Pydantic model
    text = dump(mode="json") if callable(dump) else str(value)
    if isinstance(text, str) and " at 0x" in text:
        raise TypeError(f"the result holds a value of type {type(value).__name__}, which is no text or data")
    return text
