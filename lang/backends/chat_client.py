"""The base of every chat API: turns go out, one assistant turn comes back, constraints are structured output.

Knows: what no chat API can do, and how its pieces become a call's text. Must not know: HTTP, or any one API.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from plait.constrained.specs import Choices, Spec
from plait.lang.backends.chat_messages import StructuredOutput, parse_messages, to_structured_output
from plait.lang.backends.remote_client import RemoteClient
from plait.lang.backends.remote_session import Part, RemoteCall
from plait.runtime.errors import CallFailed, ConstraintFailed, InputError
from plait.runtime.messages import SelectMethod, Usage
from plait.runtime.sampling_params import NAMES, PARAMS, SamplingParams, name_in

DEFAULTS = SamplingParams()
_WRITTEN_BY_SERVICE = ("max_tokens", "stop", "logit_bias", "timeout_s")
# handled here for every chat API; top_logprobs needs logprobs, which is refused
_HANDLED = ("timeout_s", "complete", "if_it_fits", "top_logprobs")


@dataclass(frozen=True)
class TurnRequest:
    """One assistant turn that is wanted. `output_format`: the structured output that it has to be."""

    messages: list[dict[str, str]]
    params: SamplingParams
    output_format: StructuredOutput | None
    timeout_s: float | None


@dataclass(frozen=True)
class TurnEnd:
    """How a turn ended: "stop", "length", or in the service's own words where it is neither."""

    reason: str | None
    usage: Usage = field(default_factory=Usage)
    matched: str | None = None


TurnStream: TypeAlias = Generator[str | TurnEnd, None, None]


def changed_params(params: SamplingParams, protocol: str) -> dict[str, Any]:
    """The parameters that are not the default, by the service's names, but for those that each service writes its own
    way: max_tokens, stop, logit_bias and the timeout."""
    return {
        name: getattr(params, param)
        for param, name in NAMES[protocol].items()
        if param not in _WRITTEN_BY_SERVICE and getattr(params, param) != getattr(DEFAULTS, param)
    }


class ChatClient(RemoteClient):
    """A service that generates whole assistant turns.

    Text inside a turn before or between gens is refused, since no such service goes on with it reliably. `select`
    becomes structured output, since no choice can be scored: `get_meta_info` says so under `method`.
    """

    protocol: str
    """The service's column of the table of sampling parameters (`plait.runtime.sampling_params.Param`)."""

    @abstractmethod
    def turn(self, request: TurnRequest, call: RemoteCall) -> TurnStream:
        """The pieces of the turn's text as they come, and one End. It may stop early once `call.done()`."""

    def check_generate(self, params: SamplingParams, constraint: Spec | None) -> None:
        to_structured_output(constraint, self.name)
        supported = {*NAMES[self.protocol], *_HANDLED}
        for param in PARAMS:
            if param not in supported and getattr(params, param) != getattr(DEFAULTS, param):
                raise InputError(f"{name_in('gen', param)} is not supported by {self.name}", field=param)

    def check_select(self, choices: Sequence[str], method: SelectMethod) -> None:
        if method != "token_length_normalized":
            raise InputError(f"a chat API scores nothing, so it has no {method}; leave choices_method out")

    def generate(
        self, call: RemoteCall, parts: Sequence[Part], params: SamplingParams, constraint: Spec | None
    ) -> None:
        self._answer(call, parts, params, constraint, None, params.timeout_s)

    def select(
        self,
        call: RemoteCall,
        parts: Sequence[Part],
        choices: Sequence[str],
        method: SelectMethod,
        timeout_s: float | None,
    ) -> None:
        params = SamplingParams(max_tokens=max(len(each.encode()) for each in choices) + 32, temperature=0.0)
        said = {"choices": list(choices), "choice_scores": None, "method": "structured output"}
        self._answer(call, parts, params, Choices(tuple(choices)), said, timeout_s)

    def _answer(
        self,
        call: RemoteCall,
        parts: Sequence[Part],
        params: SamplingParams,
        constraint: Spec | None,
        said: dict[str, Any] | None,
        timeout_s: float | None,
    ) -> None:
        output_format = to_structured_output(constraint, self.name)
        text, end = "", TurnEnd(None)
        with closing(
            self.turn(TurnRequest(parse_messages(parts, self.name), params, output_format, timeout_s), call)
        ) as pieces:
            for piece in pieces:
                if isinstance(piece, TurnEnd):
                    end = piece
                elif piece:
                    text += piece
                    if output_format is None:
                        call.on_text(piece, 1)
        if call.done():
            return
        if end.reason not in ("stop", "length"):
            raise CallFailed(f"{self.name} ended the call: {end.reason or 'the stream broke off'}")
        if output_format is not None:
            if end.reason == "length":
                raise ConstraintFailed(f"max_tokens={params.max_tokens} ended the value; a chat API cannot complete it")
            call.on_text(_read(output_format, text), end.usage.completion_tokens)
        call.on_result(end.reason, end.usage, end.matched, said)


def _read(output_format: StructuredOutput, text: str) -> str:
    try:
        return str(output_format.read(text))
    except (ValueError, KeyError, TypeError):
        raise ConstraintFailed(
            f"the model answered {text[:80]!r}, which is not of the form that was asked for"
        ) from None
