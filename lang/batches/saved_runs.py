"""Converts a finished run to JSON and back, with its calls, texts, turns, variables and return value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import TYPE_CHECKING, Any

import msgspec

from plait.constrained.specs import Spec
from plait.lang.batches.saved_values import CannotSave, ValueCodec
from plait.lang.core.branch import Branch
from plait.lang.core.derived.captures import CapturedText
from plait.lang.core.derived.reasoning import ReasoningPart, ReasoningTags
from plait.lang.core.results import (
    AssignedValue,
    CallSegment,
    GenResult,
    Samples,
    Segment,
    SegmentRange,
    SelectResult,
    TextSegment,
    ValueList,
)
from plait.lang.core.run import Run
from plait.lang.errors import Attempt, UnreadableValue
from plait.lang.sampling_options import Options
from plait.lang.source_location import SourceLocation
from plait.lang.states.state import ProgramState
from plait.lang.typed.value_format import ValueFormat
from plait.runtime.call_reports import ChoiceScores, TokenLogprob, Usage
from plait.runtime.client.call import Call, CallResult, ScoredChoices
from plait.runtime.client.stream import ReadPosition
from plait.runtime.errors import call_failed
from plait.runtime.portable_error import LostCause
from plait.runtime.programs.branch import Turn
from plait.runtime.tokenizer.detokenizer import Detokenizer

if TYPE_CHECKING:
    from plait.runtime.programs.backend import BackendClient


class SavedCall(Call):
    """A call that ended in an earlier process."""

    def __init__(self, client: BackendClient, data: Mapping[str, Any], codec: ValueCodec) -> None:
        choices = data["scored_choices"]
        scored = None if choices is None else ScoredChoices(tuple(choices[0]), choices[1])
        detokenizer = Detokenizer(client.tokenizer.vocabulary)  # it never gets a token
        super().__init__(client.next_id(), detokenizer, lambda: None, scored_choices=scored)
        self._token_ids = list(data["token_ids"])
        if data["failed"] is not None:
            self._error = call_failed(*data["failed"])
            return
        saved = data["result"]
        spec = None if saved["constraint"] is None else msgspec.convert(saved["constraint"], Spec)
        logprobs, choice = codec.decode(saved["logprobs"]), codec.decode(saved["choice"])
        self._pieces = [saved["text"]]
        self._result = CallResult(
            text=saved["text"],
            finish_reason=saved["finish_reason"],
            usage=msgspec.convert(saved["usage"], Usage),
            matched=saved["matched"],
            token_ids=self._token_ids,
            encoded_logprobs=None if logprobs is None else (msgspec.msgpack.encode(logprobs),),
            choice=None if choice is None else msgspec.convert(choice, ChoiceScores),
            prompt_logprobs=msgspec.convert(codec.decode(saved["prompt_logprobs"]), list[TokenLogprob] | None),
            lenient_constraint=spec,
            warnings=tuple(saved.get("warnings") or ()),
            extra_meta=codec.decode(saved["extra_meta"]),
        )


class SavedGen(GenResult):
    """A gen that ended in an earlier process. `read` returns its value, if it is typed."""

    def __init__(self, run: Run, name: str | None, call: Call, type_name: str | None, read: Callable[[], Any]) -> None:
        value_format = None if type_name is None else ValueFormat(type_name, None, lambda text: read())
        super().__init__(run, name, call, value_format)
        self._read = read

    def value(self) -> Any:
        if self.value_format is None:
            return super().value()
        self.result()  # raises the error of a failed call
        return self._read()

    def has_format(self, value_format: ValueFormat | None) -> bool:
        return (
            value_format is not None
            and self.value_format is not None
            and (value_format.type_name == self.value_format.type_name)
        )


def encode_run(state: ProgramState, codec: ValueCodec) -> dict[str, Any]:
    """Returns a finished run as JSON data. Raises CannotSave, which names the variable."""
    run, branch = state._run, state._branch
    call_segments = run.call_segments()
    saver = _Saver(codec, {id(call_segment): number for number, call_segment in enumerate(call_segments)})
    return {
        "calls": [saver.call(call_segment, run) for call_segment in call_segments],
        "lanes": run.branch_parents,
        "ended_lanes": list(run.ended_branches.items()),
        "segments": [saver.segment(segment) for segment in branch.segments],
        "turns": [list(turn[:3]) for turn in branch.turns],
        "open_turn": branch.open_turn,
        "variables": {name: saver.variable(name, segment) for name, segment in branch.variables.items()},
        "ret_value": saver.variable("the return value", AssignedValue(run.ret_value)),
    }


class _Saver:
    """`numbers`: id of a call segment -> its number in the file."""

    def __init__(self, codec: ValueCodec, numbers: Mapping[int, int]) -> None:
        self._codec, self._numbers = codec, numbers

    def variable(self, name: str, segment: Segment) -> Any:
        try:
            return self.segment(segment)
        except CannotSave as error:
            raise CannotSave(f"{name} is {error}") from None

    def segment(self, segment: Segment) -> Any:
        match segment:
            case TextSegment():
                return {"text": segment.text(), "control": segment.control}
            case CallSegment():
                return {"call": self._numbers[id(segment)]}
            case Samples():
                return {"samples": [self._numbers[id(sample)] for sample in segment.call_segments]}
            case AssignedValue():
                return {"value": self._codec.encode(segment.value())}
            case SegmentRange():
                return {"range": [self.segment(part) for part in segment.parts]}
            case ValueList():
                return {"joined": [self.segment(variable) for variable in segment.parts]}
            case ReasoningPart():
                tags = list(astuple(segment.tags))
                return {"reasoning": self.segment(segment.output), "tags": tags, "index": segment.index}
            case CapturedText():
                spec = msgspec.to_builtins(segment.spec)
                return {"captured": self.segment(segment.source), "spec": spec, "group": segment.name}
        raise CannotSave(f"a {type(segment).__name__}")

    def call(self, call_segment: CallSegment, run: Run) -> dict[str, Any]:
        call, place = call_segment.call, call_segment.place
        data: dict[str, Any] = {
            "name": call_segment.name,
            "kind": "select" if isinstance(call_segment, SelectResult) else "gen",
            "siblings": [self._numbers[id(sibling)] for sibling in call_segment.siblings],
            "lane": call_segment.branch_id,
            "place": None if place is None else [place.filename, place.lineno],
            "began_s": call_segment.began_s - run.started_s,
            "ended_s": call_segment.ended_s - run.started_s,
            "token_ids": call.read_since(ReadPosition())[0].token_ids,
            "scored_choices": None,
            "failed": None,
        }
        if call.scored_choices is not None:
            data["scored_choices"] = [call.scored_choices.choices, call.scored_choices.token_ids]
        if call.failure is not None:
            return data | {"failed": [call.failure.kind, str(call.failure)]}
        return data | {"result": self._result(call.result()), **self._typed_value(call_segment)}

    def _result(self, result: CallResult) -> dict[str, Any]:
        return {
            "text": result.text,
            "finish_reason": result.finish_reason,
            "usage": msgspec.to_builtins(result.usage),
            "matched": result.matched,
            "logprobs": self._codec.encode(msgspec.to_builtins(result.logprobs)),
            "choice": self._codec.encode(msgspec.to_builtins(result.choice)),
            "prompt_logprobs": self._codec.encode(msgspec.to_builtins(result.prompt_logprobs)),
            "constraint": msgspec.to_builtins(result.lenient_constraint),
            "warnings": list(result.warnings),
            "extra_meta": self._codec.encode(result.extra_meta),
        }

    def _typed_value(self, call_segment: CallSegment) -> dict[str, Any]:
        if not isinstance(call_segment, GenResult | SelectResult) or call_segment.value_format is None:
            return {}
        type_name = call_segment.value_format.type_name
        try:
            return {"type": type_name, "value": self._codec.encode(call_segment.value())}
        except UnreadableValue as error:
            cause = None if error.__cause__ is None else f"{type(error.__cause__).__name__}: {error.__cause__}"
            return {"type": type_name, "unreadable": [str(error), error.text, cause, error.attempts]}
        except CannotSave as error:
            raise CannotSave(f"the value of {call_segment.name} is {error}") from None


def decode_run(program: str, client: BackendClient, data: Mapping[str, Any], codec: ValueCodec) -> ProgramState:
    """Returns the state of a saved run. Raises CannotSave if a class of one of its values is gone."""
    run = Run(program, client, Options())
    branch = Branch(run)
    run.branch_parents = list(data["lanes"])
    run.ended_branches = dict(data.get("ended_lanes", ()))
    loader = _Loader(run, client, codec, data["calls"])
    branch.segments += [loader.segment(segment) for segment in data["segments"]]
    branch.turns += [Turn(*turn) for turn in data["turns"]]
    branch.open_turn = None if data["open_turn"] is None else tuple(data["open_turn"])
    branch.variables.update({name: loader.segment(segment) for name, segment in data["variables"].items()})
    run.ret_value = loader.segment(data["ret_value"]).value()
    run.end()
    return ProgramState(branch, is_external=True)


class _Loader:
    def __init__(self, run: Run, client: BackendClient, codec: ValueCodec, calls: list[Mapping[str, Any]]) -> None:
        self._run, self._client, self._codec = run, client, codec
        self._calls = [self._call(data) for data in calls]
        for call_segment, data in zip(self._calls, calls, strict=True):
            call_segment.siblings = tuple(self._calls[number] for number in data["siblings"])
            run.add(call_segment)
        run.detach([call_segment for call_segment in self._calls if call_segment.call.failure is not None])

    def _call(self, data: Mapping[str, Any]) -> CallSegment:
        call, run = SavedCall(self._client, data, self._codec), self._run
        call_segment: CallSegment
        if data["kind"] == "select":
            value = self._codec.decode(data.get("value"))
            value_format = None if "type" not in data else ValueFormat(data["type"], None, lambda text: value)
            call_segment = SelectResult(run, data["name"], call, value_format)
        else:
            call_segment = SavedGen(run, data["name"], call, data.get("type"), self._reader(data))
        call_segment.branch_id = data["lane"]
        call_segment.place = None if data["place"] is None else SourceLocation(*data["place"])
        call_segment.began_s, call_segment.ended_s = run.started_s + data["began_s"], run.started_s + data["ended_s"]
        return call_segment

    def _reader(self, data: Mapping[str, Any]) -> Callable[[], Any]:
        if "unreadable" not in data:
            value = self._codec.decode(data.get("value"))
            return lambda: value
        message, generated, cause, attempts = data["unreadable"]
        earlier = [Attempt(*attempt) for attempt in attempts]

        def fail() -> Any:
            program, name = self._run.program, data["name"]
            error = UnreadableValue(message, program=program, variable=name, generated=generated, attempts=earlier)
            error.place = None if data["place"] is None else SourceLocation(*data["place"])
            raise error from None if cause is None else LostCause(cause)

        return fail

    def segment(self, data: Mapping[str, Any]) -> Segment:
        match data:
            case {"text": text, "control": control}:
                return TextSegment(text, control)
            case {"call": number}:
                return self._calls[int(number)]
            case {"samples": numbers}:
                return Samples([sample for number in numbers if isinstance(sample := self._calls[number], GenResult)])
            case {"range": parts}:
                return SegmentRange([self.segment(part) for part in parts])
            case {"joined": variables}:
                return ValueList([self.segment(variable) for variable in variables])
            case {"reasoning": output, "tags": tags, "index": index}:
                return ReasoningPart(self.segment(output), ReasoningTags(*tags), index)
            case {"captured": source, "spec": spec, "group": group}:
                return CapturedText(self.segment(source), msgspec.convert(spec, Spec), group)
        return AssignedValue(self._codec.decode(data["value"]))
