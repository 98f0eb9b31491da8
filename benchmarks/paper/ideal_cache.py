"""The share of all prompts that a cache without limits would have served, computed offline from the tokens sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plait.runtime.client.call import Call
from plait.runtime.errors import CallFailed
from plait.runtime.messages import Append, Fork, Generate, Open, Select

Piece = list[int] | Call


class IdealCacheMeter:
    """Records what a client sends from now on, and assembles the whole text of every call."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._texts: dict[int, list[Piece]] = {}
        self._calls: list[tuple[Call, list[Piece]]] = []
        self._send, self._start_call = client.send, client.start_call
        client.send, client.start_call = self._watched_send, self._watched_call

    def stop(self) -> None:
        self._client.send, self._client.start_call = self._send, self._start_call

    def best_cached_tokens(self) -> int:
        """Returns, summed over all calls in order, the length of the longest prefix of the prompt that an earlier call
        (its answer included) had computed, without the last token, which must be computed for its logits."""
        known: dict[int, Any] = {}
        best = 0
        for call, before in self._calls:
            prompt = _flat(before)
            if prompt is None:
                continue
            node, depth = known, 0
            while depth < len(prompt) - 1 and prompt[depth] in node:
                node, depth = node[prompt[depth]], depth + 1
            best += depth
            node = known
            for token in prompt + _computed(call):
                node = node.setdefault(token, {})
        return best

    def _watched_send(self, request: Any) -> None:
        match request:
            case Open(session):
                self._texts[session] = []
            case Append(session, token_ids):
                self._texts[session].append(list(token_ids))
            case Fork(session, children):
                for child in children:
                    self._texts[child] = list(self._texts[session])
        self._send(request)

    def _watched_call(
        self, session: int, request: Callable[[int], Generate | Select], *rest: Any, **named: Any
    ) -> Call:
        call: Call = self._start_call(session, request, *rest, **named)
        self._calls.append((call, list(self._texts[session])))
        self._texts[session].append(call)
        return call


def _flat(pieces: list[Piece]) -> list[int] | None:
    """Returns the tokens; None if an earlier call failed, so that there is no text."""
    tokens: list[int] = []
    for piece in pieces:
        if isinstance(piece, Call):
            try:
                tokens += piece.result().token_ids
            except CallFailed:
                return None
        else:
            tokens += piece
    return tokens


def _computed(call: Call) -> list[int]:
    """Returns the answer's tokens that the model computed: the last one only if an end token was sampled after it."""
    try:
        result = call.result()
    except CallFailed:
        return []
    has_end = result.usage.completion_tokens > len(result.token_ids)
    return list(result.token_ids if has_end else result.token_ids[:-1])
