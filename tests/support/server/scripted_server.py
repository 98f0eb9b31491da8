"""The HTTP application over a scripted scheduler, in this process: cheap, and what reaches the scheduler is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
from scripted_scheduler import CONTROL, ScriptedScheduler, byte_tokenizer

from plait.runtime.call_reports import Usage
from plait.runtime.client.client import Client
from plait.runtime.messages import Embed, EmbeddingInfo, Finished, Generate, Tokens
from plait.runtime.server.app import create_app
from plait.runtime.server.settings import server_settings
from plait.runtime.tokenizer.tokenizer import Tokenizer

# A template with roles, tools and reasoning.
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] or '' }}{% for c in m.tool_calls or [] %}"
    """{{ '<tool_call>{"name": "' + c.function.name + '", "arguments": ' }}{{ c.function.arguments|tojson }}"""
    "{{ '}</tool_call>' }}{% endfor %}{{ '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if tools %}{{ tools|tojson }}<tool_call>{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is false %}<think></think>{% endif %}{% endif %}"
)
VECTOR = bytes.fromhex("0000803f0000004000000040")  # float32: 1, 2, 2


class _Scheduler(ScriptedScheduler):
    """Also embeds, and ends each answer without logprobs with a control token, which has no text."""

    def _take(self, request: Any) -> None:
        if isinstance(request, Embed):
            size = 4 * (request.dimensions or 3)
            self._on_reply(Finished(request.call, "stop", Usage(prompt_tokens=2), embedding=VECTOR[:size]))
        else:
            super()._take(request)

    def _tokens(self, session: Any, request: Generate, data: Any) -> None:
        super()._tokens(session, request, data)
        if not request.sampling.logprobs:
            self._on_reply(Tokens(request.call, [CONTROL["<|im_start|>"]]))


class ScriptedServer:
    """`post` sends a request to the application; `scheduler.requests` has what it sent on."""

    def __init__(self, tokenizer: Tokenizer | None = None, **settings: Any) -> None:
        self.scheduler = _Scheduler()
        tokenizer = tokenizer or byte_tokenizer(TEMPLATE)
        size, embeddings = len(tokenizer.vocabulary), EmbeddingInfo(3, "last", False)
        self.scheduler.welcome = msgspec.structs.replace(self.scheduler.welcome, vocab_size=size, embeddings=embeddings)
        self.client = Client(self.scheduler, tokenizer)
        self.app = create_app(self, server_settings(**settings))

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
                return await http.post(path, json=body)

        return asyncio.run(send())
