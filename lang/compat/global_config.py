"""SGLang's `global_config`: what of it means something here."""

from __future__ import annotations

from typing import Any

from plait.lang.backends.default_backend import Backend, default_backend, set_default_backend
from plait.runtime.errors import InputError

_FIXED_SETTINGS = {
    "enable_precache_with_tracing": (False, "shared text is cached by itself, and a body never runs an extra time"),
    "enable_parallel_encoding": (True, "branches are always computed side by side"),
    "skip_special_tokens_in_output": (True, "a control token is never part of a text"),
    "spaces_between_special_tokens_in_out": (True, "a control token is never part of a text"),
    "verbosity": (0, "a run tells what it did in state.usage and state.show()"),
}


class GlobalConfig:
    """`plait.global_config`: `default_backend` can be set. What plait does always, or never, can only be set to that.

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
        raise AttributeError(f"global_config has no {name!r}; give settings to Runtime(...) and Engine(...)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "default_backend":
            object.__setattr__(self, name, value)
        elif name not in _FIXED_SETTINGS:
            raise InputError(f"global_config has no {name!r}; give settings to Runtime(...) and Engine(...)")
        elif value != _FIXED_SETTINGS[name][0]:
            raise InputError(
                f"global_config.{name} is always {_FIXED_SETTINGS[name][0]!r} here: {_FIXED_SETTINGS[name][1]}"
            )


global_config = GlobalConfig()
