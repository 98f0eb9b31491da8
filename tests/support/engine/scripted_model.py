"""A model that writes what a script says, behind the real scheduler, prefix cache, constraints, tokenizer and server.

Only the arithmetic is replaced: logits follow the script, and a constraint masks them like a real model's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from plait.runtime.process import builder
from plait.runtime.process.engine import Engine
from plait.runtime.sampling.sampler import Sampler
from plait.runtime.tokenizer.tokenizer import load_tokenizer

TURN = "<|im_start|>"
GENERATION_PROMPT = "assistant\n"
Script = Callable[[str], str]  # the prompt's text, without control tokens -> the answer

# In the manner of ChatML with calls as in Hermes: roles stand as given, results are in the user's turns.
TEMPLATE = r"""{%- macro turn(role, text) %}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro %}
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}Functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ turn('user', '<tool_response>\n' ~ message.content ~ '\n</tool_response>') }}
{%- elif message.tool_calls %}<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls %}{{ '\n' if message.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif not (tools and loop.first and message.role == 'system') %}{{ turn(message.role, message.content or '') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@contextlib.contextmanager
def scripted_engine(model_path: Path, script: Script, **settings: Any) -> Iterator[Engine]:
    """Runs an Engine with the tokenizer and the sizes of a model file, whose answers are the script's."""
    real = builder.make_runner

    def make_runner(config: Any, path: Path, progress: Any, before_weights: Any) -> Any:
        runner, _, _ = real(config, path, progress, before_weights)
        return ScriptedRunner(runner, path, script), Sampler(), None

    builder.make_runner = make_runner
    try:
        engine = Engine(str(model_path), **settings)
    finally:
        builder.make_runner = real
    with engine:
        yield engine


class ScriptedRunner:
    """A Runner with the sizes of `runner`. Its hidden states are the logits [n, V] themselves."""

    num_saved_reads = 0
    adapter_pool = None

    def __init__(self, runner: Any, model_path: Path, script: Script) -> None:
        self.num_pages, self.max_batch_tokens = runner.num_pages, runner.max_batch_tokens
        self.max_session_tokens, self.config = runner.max_session_tokens, runner.config
        self._script, self._tokenizer = script, load_tokenizer(model_path)
        (self._turn,) = self._tokenizer.encode([(TURN, True)])
        self._ids = {data: token for token, data in enumerate(self._tokenizer.vocabulary.token_bytes) if data}
        self._longest = max(map(len, self._ids))

    def use_device(self) -> None:
        """There is none."""

    def forward(self, batch: Any) -> Any:
        rows = [
            self._logits_after(scheduled.request.seq.tokens.view()[: end + 1].tolist())
            for scheduled in batch.rows
            for end in range(
                scheduled.start + scheduled.count - scheduled.num_logits, scheduled.start + scheduled.count
            )
        ]
        return np.stack(rows) if rows else np.empty((0, self.config.vocab_size), np.float32)

    def argmax_tokens(self, hidden: Any) -> tuple[list[float], list[int]]:
        return hidden.max(-1).tolist(), hidden.argmax(-1).tolist()

    def logits(self, hidden: Any, allowed_ids: Any) -> Any:
        for row, ids in allowed_ids.items():
            only = np.full_like(hidden[row], -np.inf)
            only[ids] = hidden[row][ids]
            hidden[row] = only
        return hidden

    def _logits_after(self, tokens: list[int]) -> Any:
        """Prefers all tokens that continue the answer, the longer the more, and the end behind it."""
        place = len(tokens) - tokens[::-1].index(self._turn) if self._turn in tokens else len(tokens)
        turn = self._tokenizer.decode(tokens[place:])
        logits = np.full(self.config.vocab_size, -1000.0, np.float32)
        if not turn.startswith(GENERATION_PROMPT):
            return logits
        rest = _rest(self._script(self._tokenizer.decode(tokens[:place])), turn.removeprefix(GENERATION_PROMPT))
        for text, preference in ((rest.lstrip(), 0), (rest, self._longest)):  # white space may be masked
            data = text.encode()
            for size in range(1, min(len(data), self._longest) + 1):
                if (token := self._ids.get(data[:size])) is not None:
                    logits[token] = 10.0 * (size + preference)
        if not rest.strip():
            logits[list(self._tokenizer.eos_ids)] = 10_000.0
        return logits


def _rest(answer: str, written: str) -> str:
    """What follows in the answer behind the text that was written, in which white space may differ."""
    place, texts = 0, iter(written)
    for char in texts:
        if not char.isspace():
            while place < len(answer) and answer[place].isspace():
                place += 1
            if answer[place : place + 1] != char:
                raise AssertionError(f"the script says {answer[place:][:80]!r} where {written[-80:]!r} was written")
            place += 1
    blank = written[len(written.rstrip()) :]
    return answer[place:].removeprefix(blank) if answer[place:].startswith(blank) else answer[place:].lstrip()
