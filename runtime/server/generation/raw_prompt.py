"""Raw prompts: those of `/v1/completions`, `/generate`, Ollama's `raw` and `/tokenize`, which no chat template renders.

Names of control tokens in their text become control tokens, as in vLLM, SGLang, llama.cpp and Ollama: clients write the
marks of fill in the middle, and render chat templates, themselves.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from plait.runtime.server.errors import unsupported
from plait.runtime.server.settings import ServerSettings

# What stands before the prefix, the suffix and the middle, in the tokenizers of models that were trained for it.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
)


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


def with_suffix(
    parts: Sequence[tuple[str, bool]], suffix: str, added_texts: Container[str]
) -> Sequence[tuple[str, bool]]:
    """Returns the parts of a prompt for the text between `parts` and `suffix`, which is plain text.

    added_texts: of the model's tokenizer. Raises ApiError 400 for a model without marks for it.

    >>> with_suffix([("a", True)], "c", {"<fim_prefix>", "<fim_suffix>", "<fim_middle>"})
    [('<fim_prefix>', True), ('a', True), ('<fim_suffix>', True), ('c', False), ('<fim_middle>', True)]
    """
    for begin, hole, end in MARKS:
        if begin in added_texts and hole in added_texts and end in added_texts:
            return [(begin, True), *parts, (hole, True), (suffix, False), (end, True)]
    raise unsupported("suffix", "is not supported by this model: its tokenizer has no marks to fill in the middle")
