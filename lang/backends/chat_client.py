"""The base of every chat API: turns go out, one assistant turn comes back, constraints are structured output."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from plait.constrained.specs import Choices, Spec
from plait.lang.backends.chat_messages import StructuredOutput, parse_messages, to_structured_output
from plait.lang.backends.remote_client import RemoteClient
from plait.lang.backends.remote_session import Part, RemoteCall
from plait.runtime.errors import CallFailed, ConstraintFailed, InputError
from plait.runtime.messages import SelectMethod, Usage
from plait.runtime.sampling_params import SamplingParams

DEFAULTS = SamplingParams()
_UNSUPPORTED_EVERYWHERE = {
    "min_tokens": "min_tokens",
    "min_p": "min_p",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "logprobs": "return_logprob",
    "prompt_logprobs_from": "logprob_start_len",
}


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


class ChatClient(RemoteClient):
    """A service that generates whole assistant turns.

    Text inside a turn before or between gens is refused, since no such service goes on with it reliably. `select`
    becomes structured output, since no choice can be scored: `get_meta_info` says so under `method`.
    """

    unsupported: Mapping[str, str] = {}
    """What this service has no parameter for, beside what none has: our name -> the name that programs use."""

    @abstractmethod
    def turn(self, request: TurnRequest, call: RemoteCall) -> TurnStream:
        """The pieces of the turn's text as they come, and one End. It may stop early once `call.done()`."""

    def check_generate(self, params: SamplingParams, constraint: Spec | None) -> None:
        to_structured_output(constraint, self.name)
        for name, said in (_UNSUPPORTED_EVERYWHERE | dict(self.unsupported)).items():
            if getattr(params, name) != getattr(DEFAULTS, name):
                raise InputError(f"{said} is not supported by {self.name}")

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
