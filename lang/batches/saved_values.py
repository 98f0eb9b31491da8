"""Converts values of programs to JSON and back: plain data, data classes of every kind, enums, tool calls.

A class is saved by its name. It is found again among the modules that are imported already and the names that the
program's body can see. Nothing is imported, and only data classes, enums and tools are looked up, so a file cannot name
other code.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import inspect
import ipaddress
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, get_args, get_type_hints
from uuid import UUID

import msgspec

from plait.lang.html.render import ShownList
from plait.lang.meta_info import CallMeta, GenMeta, SelectMeta
from plait.lang.tools.make_tools import MAX_TOOLS, function_tool
from plait.lang.tools.tool import Tool, ToolCall

TAG = "$"
_BY_MSGSPEC: tuple[type, ...] = (datetime, date, time, timedelta, Decimal, UUID)
_BY_TEXT: tuple[type, ...] = (
    *(type(Path()), PurePosixPath, PureWindowsPath, complex, Fraction),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Network),
    *(ipaddress.IPv4Interface, ipaddress.IPv6Interface),
)
_TEXT_TYPES = {kind.__name__: kind for kind in (*_BY_MSGSPEC, *_BY_TEXT)}
_META_TYPES = {kind.__name__: kind for kind in (GenMeta, SelectMeta)}
_SEQUENCES: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class CannotSave(ValueError):
    """A value, or a class of a saved value, that has no form in a file."""


class ValueCodec:
    """`body`: the function whose globals and closure name classes and tools that no module has."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self._body = body

    def encode(self, value: Any) -> Any:
        """Returns the value as JSON data. Raises CannotSave."""
        kind = type(value)
        if value is None or kind in (str, bool, int) or (kind is float and math.isfinite(value)):
            return value
        if kind in (list, ShownList):
            return [self.encode(item) for item in value]
        if kind is dict:
            if TAG not in value and all(type(key) is str for key in value):
                return {key: self.encode(item) for key, item in value.items()}
            return {TAG: "dict", "items": [[self.encode(key), self.encode(item)] for key, item in value.items()]}
        if kind.__name__ in _SEQUENCES and kind.__module__ == "builtins":
            return {TAG: kind.__name__, "items": [self.encode(item) for item in value]}
        if kind in (float, bytes):
            return {TAG: "float", "text": repr(value)} if kind is float else _encode_bytes(value)
        if kind in _TEXT_TYPES.values():
            text = msgspec.to_builtins(value) if kind in _BY_MSGSPEC else str(value)
            return {TAG: "text", "type": kind.__name__, "text": text}
        return self._encode_object(value, kind)

    def _encode_object(self, value: Any, kind: type) -> Any:
        if isinstance(value, ToolCall):
            return self._encode_call(value)
        if isinstance(value, CallMeta):
            return {TAG: "meta info", "kind": kind.__name__, "items": self.encode(dict(value))}
        if isinstance(value, enum.Enum):
            return {TAG: "enum", "class": self._name_of(kind), "value": self.encode(value.value)}
        if not is_data_class(kind):
            raise CannotSave(f"a {kind.__name__}")
        return {TAG: "object", "class": self._name_of(kind), "fields": self.encode(fields_of(value))}

    def _encode_call(self, call: ToolCall) -> Any:
        tool, function = call.tool, call.tool.function
        saved = {TAG: "tool call", "arguments": self.encode(call.arguments)}
        if not tool.is_typed:  # its function is not needed to read the call
            schema = self.encode(dict(tool.parameters))
            return saved | {"tool": {"name": tool.name, "description": tool.description, "parameters": schema}}
        name = str(getattr(function, "__qualname__", None))
        if self._tool(name) is not function:
            raise CannotSave(f"a call of {name}, which another function of the program hides")
        return saved | {"function": name}

    def decode(self, data: Any) -> Any:
        """Returns the value of JSON data that `encode` returned. Raises CannotSave if one of its classes is gone."""
        if isinstance(data, list):
            return [self.decode(item) for item in data]
        if not isinstance(data, dict):
            return data
        match data.get(TAG):
            case None:
                return {key: self.decode(item) for key, item in data.items()}
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in data["items"]}
            case "float":
                return float(data["text"])
            case "bytes":
                return base64.b64decode(data["text"])
            case "text":
                kind = _TEXT_TYPES[data["type"]]
                return msgspec.convert(data["text"], kind) if kind in _BY_MSGSPEC else kind(data["text"])
            case "tool call":
                return self._decode_call(data)
            case "meta info":
                return _META_TYPES[data["kind"]](self.decode(data["items"]))
            case "enum":
                return self._find(data["class"], _is_enum)(self.decode(data["value"]))
            case "object":
                return _rebuilt(self._find(data["class"], is_data_class), self.decode(data["fields"]))
            case tag:
                return _SEQUENCES[tag](self.decode(item) for item in data["items"])

    def _decode_call(self, data: Any) -> ToolCall:
        arguments, saved = self.decode(data["arguments"]), data.get("tool")
        if saved is None:
            tool = function_tool("resume", self._tool(data["function"]))
        else:
            tool = Tool(saved["name"], saved["description"], self.decode(saved["parameters"]))
        return ToolCall(tool.name, arguments, tool)

    # -- names ------------------------------------------------------------------------------------

    def _name_of(self, named: Any) -> list[str]:
        """Returns the module and the qualified name of a class or function that can be found again."""
        name = [str(named.__module__), str(named.__qualname__)]
        if self._lookup(name) is not named:
            raise CannotSave(f"{named.__qualname__}, which is not a name of a module or of the program")
        return name

    def _find(self, name: list[str], is_allowed: Callable[[Any], bool]) -> Any:
        found = self._lookup(name)
        if found is None or not is_allowed(found):
            raise CannotSave(f"{name[1]} of {name[0]}, which is not there any more")
        return found

    def _tool(self, qualname: str) -> Any:
        """Returns the function of this name that the program's body can see: one that it may call itself."""
        functions = (named for named in self._visible() if inspect.isroutine(named))
        found = next((function for function in functions if function.__qualname__ == qualname), None)
        if found is None:
            raise CannotSave(f"a call of {qualname}, which is not a name of the program")
        return found

    def _lookup(self, name: list[str]) -> Any:
        module, qualname = name
        found: Any = sys.modules.get(module)
        for part in qualname.split("."):
            found = inspect.getattr_static(found, part, None)  # a module's __getattr__ may import others
        if found is not None:
            return found
        return next((named for named in self._visible() if [named.__module__, named.__qualname__] == name), None)

    def _visible(self) -> Iterator[Any]:
        """The classes and functions that the body can name, and the classes of their fields."""
        cells = getattr(self._body, "__closure__", None) or ()
        names = [*vars_of_cells(cells), *getattr(self._body, "__globals__", {}).values()]
        seen: set[int] = set()
        while names:
            named = names.pop()
            names += get_args(named)
            if isinstance(named, list | tuple) and len(named) <= MAX_TOOLS:  # a list of tools
                names += [item.function if isinstance(item, Tool) else item for item in named]
            if hasattr(named, "__qualname__") and id(named) not in seen:
                seen.add(id(named))
                names += _types_of_fields(named)
                yield named


def vars_of_cells(cells: Any) -> Iterator[Any]:
    """The values of closure cells; a cell may still be empty."""
    for cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            continue


def _encode_bytes(value: bytes) -> dict[str, str]:
    return {TAG: "bytes", "text": base64.b64encode(value).decode()}


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, enum.EnumMeta)


def _is_pydantic(kind: type) -> bool:
    return hasattr(kind, "__pydantic_fields_set__") or hasattr(kind, "model_fields_set")


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def is_data_class(kind: Any) -> bool:
    """Whether the class has fields that make up its values: a data class, struct, named tuple or model."""
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, msgspec.Struct)
        or _is_named_tuple(kind)
        or _is_pydantic(kind)
    )


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a value of a data class."""
    kind = type(value)
    if _is_pydantic(kind):
        state: dict[str, Any] = value.__getstate__()
        return state
    if dataclasses.is_dataclass(kind):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
    names = kind._fields if _is_named_tuple(kind) else kind.__struct_fields__
    return {name: getattr(value, name) for name in names}


def _rebuilt(kind: Any, fields: Mapping[str, Any]) -> Any:
    if _is_named_tuple(kind):
        return tuple.__new__(kind, fields.values())
    if issubclass(kind, msgspec.Struct):
        return kind(**fields)
    value = object.__new__(kind)
    if _is_pydantic(kind):
        value.__setstate__(fields)
        return value
    for name, item in fields.items():
        object.__setattr__(value, name, item)
    return value


def _types_of_fields(named: Any) -> list[Any]:
    if not is_data_class(named):
        return []
    try:
        hints = get_type_hints(named)
    except (NameError, TypeError):  # an annotation that cannot be evaluated names nothing
        return []
    return list(hints.values())
