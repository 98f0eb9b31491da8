"""`ChatClient`: base of the backends for chat APIs. A call sends the turns so far and receives one assistant turn."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from plait.constrained.specs import Choices, Spec, Structural
from plait.lang.backends.chat_messages import StructuredOutput, parse_messages, to_structured_output
from plait.lang.backends.remote_client import Part, RemoteClient
from plait.lang.backends.without_runtime import CallRequest, TextCall
from plait.runtime.call_reports import Usage
from plait.runtime.errors import VALUE_DOES_NOT_FIT, CallFailed, ConstraintFailed, InputError
from plait.runtime.sampling_params import NAMES, PARAMS, SamplingParams, name_in

if TYPE_CHECKING:
    from plait.runtime.chat.json_calls import ToolCalls

DEFAULTS = SamplingParams()
_WRITTEN_BY_SERVICE = ("max_tokens", "stop", "logit_bias", "timeout_s")
# handled here for every chat API; top_logprobs needs logprobs, which is refused
_HANDLED = ("timeout_s", "complete", "if_it_fits", "top_logprobs")


@dataclass(frozen=True)
class TurnRequest:
    """A request for one assistant turn. `output_format`: the structured output that it must be. `tools`: those that it
    may call. `begun`: the text that it begins with, which the service continues and does not send back."""

    messages: list[dict[str, str]]
    params: SamplingParams
    output_format: StructuredOutput | None
    tools: ToolCalls | None = None
    begun: str = ""


@dataclass(frozen=True)
class TurnEnd:
    """The end of a turn. `reason`: "stop", "length", or the service's own name for any other reason."""

    reason: str | None
    usage: Usage = field(default_factory=Usage)
    matched: str | None = None


TurnStream: TypeAlias = Generator[str | TurnEnd, None, None]


def changed_params(params: SamplingParams, protocol: str) -> dict[str, Any]:
    """Returns the parameters that differ from the defaults, under the service's names. Each service writes max_tokens,
    stop, logit_bias and the timeout in its own way, so they are left out here."""
    return {
        name: getattr(params, param)
        for param, name in NAMES[protocol].items()
        if param not in _WRITTEN_BY_SERVICE and getattr(params, param) != getattr(DEFAULTS, param)
    }


class ChatClient(RemoteClient):
    """A service that generates complete assistant turns.

    Text before or between gens inside an assistant turn is refused unless the service `continues_turns`. `select`
    becomes structured output, because choices cannot be scored; `get_meta_info` shows this under `method`.
    """

    protocol: str
    """The service's column of the table of sampling parameters (`plait.runtime.sampling_table.Param`)."""
    has_optional_tools = False
    """Whether `turn` takes `tools`."""
    continues_turns = False
    """Whether `turn` takes `begun`."""

    @abstractmethod
    def turn(self, request: TurnRequest, call: TextCall) -> TurnStream:
        """Yields the text of the turn in pieces, then one TurnEnd. May stop early once `call.done()`."""

    def check_request(self, request: CallRequest) -> None:
        if request.choices is not None:
            if request.method != "token_length_normalized":
                text = f"a chat API cannot score choices, so it has no {request.method}; leave choices_method out"
                raise InputError(text)
            return
        if not (self.has_optional_tools and _optional_tools(request.constraint)):
            to_structured_output(request.constraint, self.name)
        supported = {*NAMES[self.protocol], *_HANDLED}
        for param in PARAMS:
            if param not in supported and getattr(request.params, param) != getattr(DEFAULTS, param):
                raise InputError(f"{name_in('gen', param)} is not supported by {self.name}", field=param)

    def run_call(self, call: TextCall, parts: Sequence[Part], request: CallRequest) -> None:
        params, constraint, choices, _ = request
        extra_meta: dict[str, Any] | None = None
        if choices is not None:
            max_tokens, timeout_s = max(len(choice.encode()) for choice in choices) + 32, params.timeout_s
            params = SamplingParams(max_tokens=max_tokens, temperature=0.0, timeout_s=timeout_s)
            constraint = Choices(choices)
            extra_meta = {"choices": list(choices), "choice_scores": None, "method": "structured output"}
        turn = self._turn_request(parts, params, constraint)
        output_format = turn.output_format
        stream = output_format.stream() if output_format is not None and output_format.stream is not None else None
        text, streamed, end = "", "", TurnEnd(None)
        with closing(self.turn(turn, call)) as pieces:
            for piece in pieces:
                if isinstance(piece, TurnEnd):
                    end = piece
                elif piece:
                    text += piece
                    known = piece if output_format is None else "" if stream is None else stream.feed(piece)
                    streamed += known
                    if known:
                        call.on_text(known, num_tokens=1)
        if call.done():
            return
        if end.reason not in ("stop", "length"):
            raise CallFailed(f"{self.name} ended the call: {end.reason or 'the stream ended early'}")
        if output_format is not None:
            if end.reason == "length":
                raise ConstraintFailed(
                    f"max_tokens={params.max_tokens} cut the value off, and a chat API cannot complete it",
                    VALUE_DOES_NOT_FIT,
                )
            _finish_value(call, streamed, _read(output_format, text), end.usage.completion_tokens)
        call.on_result(end.reason, end.usage, end.matched, extra_meta)

    def _turn_request(self, parts: Sequence[Part], params: SamplingParams, constraint: Spec | None) -> TurnRequest:
        """Raises CallFailed for turns that the service does not generate."""
        messages, begun = parse_messages(parts, self.name)
        tools = _optional_tools(constraint)
        output_format = None if tools is not None else to_structured_output(constraint, self.name)
        if begun and not self.continues_turns:
            raise CallFailed(f"{self.name} cannot continue an assistant turn that begins with {begun[:40]!r}")
        if begun and (output_format is not None or tools is not None):
            raise CallFailed(
                f"a constraint is structured output for {self.name}, so it cannot continue a turn that begins with "
                f"{begun[:40]!r}"
            )
        return TurnRequest(messages, params, output_format, tools, begun)


def _optional_tools(constraint: Spec | None) -> ToolCalls | None:
    """The tools of a gen with `tool_choice="auto"`; None for any other constraint."""
    if not isinstance(constraint, Structural):
        return None
    from plait.runtime.chat.json_calls import tool_calls  # lazy: it loads the grammar libraries

    calls = tool_calls(constraint)
    return None if calls is None or calls.is_required else calls


def _finish_value(call: TextCall, streamed: str, value: str, num_tokens: int) -> None:
    """Passes on the part of a value that was not streamed. Raises ConstraintFailed if another text was streamed."""
    if not streamed:
        call.on_text(value, num_tokens=num_tokens)
        return
    with suppress(ValueError):
        if json.loads(streamed) == json.loads(value):
            return
    raise ConstraintFailed(f"the model answered {streamed[:80]!r}, which does not have the requested format")


def _read(output_format: StructuredOutput, text: str) -> str:
    try:
        return str(output_format.read(text))
    except (ValueError, KeyError, TypeError):
        raise ConstraintFailed(f"the model answered {text[:80]!r}, which does not have the requested format") from None
