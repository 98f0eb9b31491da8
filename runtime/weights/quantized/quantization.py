"""What a quantization_config says: the format of each module, and the modules that stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from plait.runtime.weights.quantized.stored_module import ModuleFormat


class NameRule(Protocol):
    """A list of modules, and how their names are matched."""

    def match(self, module: str) -> bool:
        """Whether the list has the module."""


@dataclass(frozen=True)
class Quantization:
    """The quantization of a folder.

    `formats`: the first one whose rule matches a module is the module's; None as rule matches all. `ignored`: modules
    that are stored as floats. `description` is for `plait check`.
    """

    description: str
    formats: Sequence[tuple[NameRule | None, ModuleFormat]]
    ignored: NameRule

    def format_of(self, module: str) -> ModuleFormat | None:
        """The format of a linear layer; None if the config leaves it as it is."""
        if self.ignored.match(module):
            return None
        return next((used for rule, used in self.formats if rule is None or rule.match(module)), None)

    def any_format(self) -> Sequence[ModuleFormat]:
        """All formats."""
        return [used for _, used in self.formats]
