"""Reads the fields of a quantization_config. A field that nobody reads is refused, never ignored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plait.runtime.errors import CorruptModel, UnsupportedModel

_ADVICE = "use a checkpoint without it, the unquantized folder or a GGUF file"


class ConfigFields:
    """The fields of one object of a quantization_config; `where` is its path for error texts."""

    def __init__(self, fields: Any, where: str = "quantization_config") -> None:
        if not isinstance(fields, Mapping):
            raise CorruptModel(f"{where} in config.json is not an object")
        self._fields, self.where = dict(fields), where
        self._unread = set(self._fields)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field; the default also where the field is null."""
        self._unread.discard(name)
        value = self._fields.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number. Raises CorruptModel for another type, or if it is missing and has no default."""
        value = self.get(name, default)
        if type(value) is not int:
            raise CorruptModel(f"{self.where}.{name} is {value!r:.40}, not a whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A bool. Raises CorruptModel for another type."""
        value = self.get(name, default)
        if type(value) is not bool:
            raise CorruptModel(f"{self.where}.{name} is {value!r:.40}, not true or false")
        return value

    def names(self, *fields: str) -> tuple[str, ...]:
        """The texts in lists of texts, of several fields together."""
        found: list[str] = []
        for name in fields:
            value = self.get(name, [])
            if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
                raise CorruptModel(f"{self.where}.{name} is not a list of names")
            found += value
        return tuple(found)

    def choice(self, name: str, allowed: Sequence[Any], default: Any = None) -> Any:
        """A value out of `allowed`. Raises UnsupportedModel, which names the field and the allowed values."""
        value = self.get(name, default)
        if not any(type(value) is type(option) and value == option for option in allowed):
            options = ", ".join(str(option) for option in allowed)
            raise UnsupportedModel(f"{self.where}.{name} is {value!r:.60}; plait reads {options}")
        return value

    def child(self, name: str) -> ConfigFields:
        """The fields of an object."""
        return ConfigFields(self.get(name, {}), f"{self.where}.{name}")

    def skip(self, names: Iterable[str]) -> None:
        """Marks fields that say nothing about the numbers of the weights."""
        self._unread.difference_update(names)

    def require_empty(self, *names: str) -> None:
        """Raises UnsupportedModel for a field of these that has a value other than null, false and empty."""
        for name in names:
            if self.get(name):
                raise UnsupportedModel(f"{self.where}.{name} is not supported; {_ADVICE}")

    def refuse_rest(self) -> None:
        """Raises UnsupportedModel for a field that was not read and is not null."""
        for name in sorted(self._unread):
            if self._fields[name] is not None:
                raise UnsupportedModel(f"{self.where}.{name:.60} is unknown to plait; {_ADVICE}")
