"""Raw prompts: those of `/v1/completions`, `/generate`, Ollama's `raw` and `/tokenize`, which no chat template renders.

Names of control tokens in their text become control tokens, as in vLLM, SGLang, llama.cpp and Ollama: clients write the
marks of fill in the middle, and render chat templates, themselves.
"""

from __future__ import annotations

import msgspec

from plait.runtime.server.errors import unsupported
from plait.runtime.server.settings import ServerSettings


class PromptPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a prompt. `special`: false for text that is plain whatever it contains, such as a user's."""

    text: str
    special: bool = True


def parses_special(settings: ServerSettings, parse_special: bool | None = None) -> bool:
    """Whether control tokens in raw prompts are read. parse_special: of the request, None for the server's setting.

    Raises ApiError 400 for a request that wants it of a server that does not.
    """
    if parse_special and not settings.completions_special:
        raise unsupported("parse_special", "cannot be true on this server: it runs with --completions-special off")
    return settings.completions_special if parse_special is None else parse_special
