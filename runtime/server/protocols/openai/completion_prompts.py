"""The prompts of `/v1/completions`: texts, token ids, or parts of a text, one prompt or several."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from plait.runtime.client.client import Client
from plait.runtime.server.errors import invalid
from plait.runtime.server.generation.logprobs import text_of_tokens
from plait.runtime.server.generation.raw_prompt import PromptPart, with_suffix
from plait.runtime.server.generation.submission import tokenize
from plait.runtime.server.protocols.shared import check_token_ids, remaining_context
from plait.runtime.tokenizer.token_healing import num_plain_bytes

Prompts = str | list[str | int | PromptPart | list[int | PromptPart]]


def num_prompts(prompts: Prompts | None) -> int:
    """Returns the number of prompts; 1 for a list of token ids or parts, and for an invalid mix of them and texts."""
    is_one = not isinstance(prompts, list) or any(isinstance(item, int | PromptPart) for item in prompts)
    return 1 if is_one else len(prompts or ())


class Prompt(NamedTuple):
    """One prompt. plain_bytes: of text at its end that token healing may take back."""

    ids: list[int]
    text: str
    plain_bytes: int


async def read_prompts(
    given: Prompts | None, client: Client, parse_special: bool, suffix: str | None = None
) -> list[Prompt]:
    """Returns the prompts. parse_special: whether control tokens in their texts are read. suffix: of each text, between
    which the answer stands. Raises ApiError 400.
    """
    prompts: Any = given
    if isinstance(prompts, str) or (prompts and any(_is_all(prompts, kind) for kind in (int, PromptPart))):
        prompts = [prompts]
    if not prompts:
        raise invalid("'prompt' must not be empty", "prompt")
    tokenized = []
    for index, prompt in enumerate(prompts):
        param = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
        if isinstance(prompt, str):
            num_bytes = 0 if suffix else len(prompt.encode(errors="replace"))
            read = Prompt(await _tokens(client, [(prompt, parse_special)], suffix), prompt, num_bytes)
        elif _is_all(prompt, PromptPart):
            parts = [(part.text, parse_special and part.special) for part in prompt]
            num_bytes = 0 if suffix else num_plain_bytes(parts)
            read = Prompt(await _tokens(client, parts, suffix), "".join(text for text, _ in parts), num_bytes)
        elif _is_all(prompt, int) and suffix:
            raise invalid("'suffix' needs a prompt of text", "suffix")
        elif _is_all(prompt, int):
            # The length is checked first, since a body may have millions of tokens.
            remaining_context(client.model.context_length, prompt, param)
            check_token_ids(prompt, client.model.vocab_size, param)
            text = text_of_tokens(client, prompt)
            read = Prompt(prompt, text, len(text.encode(errors="replace")))
            await asyncio.sleep(0)  # the work on each prompt may take milliseconds
        else:
            raise invalid("'prompt' mixes token ids with texts, parts or lists", "prompt")
        if not read.ids:
            raise invalid(f"'{param}' is empty", param)
        tokenized.append(read)
    return tokenized


async def _tokens(client: Client, parts: Sequence[tuple[str, bool]], suffix: str | None) -> list[int]:
    return await tokenize(client, with_suffix(parts, suffix, client.tokenizer.added_texts) if suffix else parts)


def _is_all(items: Any, kind: type) -> bool:
    """Whether `items` is a list of `kind` only."""
    return isinstance(items, list) and {kind}.issuperset(map(type, items))
