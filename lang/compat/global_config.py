"""SGLang's `global_config`, as far as it applies to plait."""

from __future__ import annotations

from typing import Any

from plait.lang.backends.default_backend import Backend, default_backend, set_default_backend
from plait.runtime.errors import InputError

_FIXED_SETTINGS = {
    "enable_precache_with_tracing": (False, "shared text is cached automatically, without an extra run of the body"),
    "enable_parallel_encoding": (True, "branches are always computed in parallel"),
    "skip_special_tokens_in_output": (True, "control tokens are never part of a text"),
    "spaces_between_special_tokens_in_out": (True, "control tokens are never part of a text"),
    "verbosity": (0, "see state.usage and state.show() for what a run did"),
}


class GlobalConfig:
    """`plait.global_config`: `default_backend` can be set. Settings that are fixed in plait accept only that value.

    >>> plait.global_config.default_backend = Runtime("model.gguf")        # doctest: +SKIP
    """

    @property
    def default_backend(self) -> Backend | None:
        return default_backend()

    @default_backend.setter
    def default_backend(self, backend: Backend | None) -> None:
        set_default_backend(backend)

    def __getattr__(self, name: str) -> Any:
        if name in _FIXED_SETTINGS:
            return _FIXED_SETTINGS[name][0]
        raise AttributeError(f"global_config has no {name!r}; pass settings to Runtime(...) and Engine(...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "default_backend":
            object.__setattr__(self, name, value)
        elif name not in _FIXED_SETTINGS:
            raise InputError(f"global_config has no {name!r}; pass settings to Runtime(...) and Engine(...)")
        elif value != _FIXED_SETTINGS[name][0]:
            raise InputError(
                f"global_config.{name} is always {_FIXED_SETTINGS[name][0]!r} here: {_FIXED_SETTINGS[name][1]}"
            )


global_config = GlobalConfig()
