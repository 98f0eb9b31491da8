"""The base of every chat API: turns go out, one assistant turn comes back, constraints are structured output.

Knows: what no chat API can do, and how its pieces become a call's text. Must not know: HTTP, or any one API.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from plait.constrained.specs import Choices, Spec
from plait.lang.backends.chat import Structured, messages_of, structured
from plait.lang.backends.remote import RemoteClient
from plait.lang.backends.session import Part, RemoteCall
from plait.runtime.errors import CallFailed, ConstraintFailed, InputError
from plait.runtime.messages import SelectMethod, Usage
from plait.runtime.sampling_params import SamplingParams

DEFAULTS = SamplingParams()
_NOWHERE = {
    "min_tokens": "min_tokens",
    "min_p": "min_p",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids",
    "stop_regex": "stop_regex",
    "logprobs": "return_logprob",
    "prompt_logprobs_from": "logprob_start_len",
}


@dataclass(frozen=True)
class Asked:
    """One assistant turn that is wanted. `form`: the structured output that it has to be."""

    messages: list[dict[str, str]]
    params: SamplingParams
    form: Structured | None
    timeout_s: float | None


@dataclass(frozen=True)
class End:
    """How a turn ended: "stop", "length", or in the service's own words where it is neither."""

    reason: str | None
    usage: Usage = field(default_factory=Usage)
    matched: str | None = None


Turn: TypeAlias = Generator[str | End, None, None]


class ChatClient(RemoteClient):
    """A service that generates whole assistant turns.

    Text inside a turn before or between gens is refused, since no such service goes on with it reliably. `select`
    becomes structured output, since no choice can be scored: `get_meta_info` says so under `method`.
    """

    refused: Mapping[str, str] = {}
    """What this service has no parameter for, beside what none has: our name -> the name that programs use."""

    @abstractmethod
    def turn(self, asked: Asked, call: RemoteCall) -> Turn:
        """The pieces of the turn's text as they come, and one End. It may stop early once `call.done()`."""

    def check_generate(self, params: SamplingParams, constraint: Spec | None) -> None:
        structured(constraint, self.name)
        for name, said in (_NOWHERE | dict(self.refused)).items():
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
        form = structured(constraint, self.name)
        text, end = "", End(None)
        with closing(self.turn(Asked(messages_of(parts, self.name), params, form, timeout_s), call)) as pieces:
            for piece in pieces:
                if isinstance(piece, End):
                    end = piece
                elif piece:
                    text += piece
                    if form is None:
                        call.on_text(piece, 1)
        if call.done():
            return
        if end.reason not in ("stop", "length"):
            raise CallFailed(f"{self.name} ended the call: {end.reason or 'the stream broke off'}")
        if form is not None:
            if end.reason == "length":
                raise ConstraintFailed(f"max_tokens={params.max_tokens} ended the value; a chat API cannot complete it")
            call.on_text(_read(form, text), end.usage.completion_tokens)
        call.on_result(end.reason, end.usage, end.matched, said)


def _read(form: Structured, text: str) -> str:
    try:
        return str(form.read(text))
    except (ValueError, KeyError, TypeError):
        raise ConstraintFailed(
            f"the model answered {text[:80]!r}, which is not of the form that was asked for"
        ) from None
