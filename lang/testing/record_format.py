"""The lines of a recording: what a call was asked, and what it gave, as JSON.

The first line says of which model the recording is. Every other line is one call:

    {"name": ..., "prompt": ..., "params": {...}, "constraint": ..., "choices": ..., "method": ...,
     "text": ..., "finish_reason": ..., "matched": ..., "usage": {...}, "num_tokens": ..., "meta": {...}}

or, where it failed, "failed": {"kind": ..., "text": ...} in place of the second row. `params` are those that differ
from the defaults. Deadlines are left out: what is left of a budget differs from run to run.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from plait.lang.testing.text_client import Asked, Outcome
from plait.runtime.errors import CallFailed, call_failed
from plait.runtime.messages import Usage
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.chat_template import ChatTemplate

VERSION = 1
_DEFAULTS = msgspec.to_builtins(SamplingParams(), str_keys=True)
_CALL_FIELDS = ("name", "prompt", "params", "constraint", "choices", "method")


def header(client: Any) -> dict[str, Any]:
    """The first line: the model's name and all of it that a program can see."""
    template: ChatTemplate | None = client.tokenizer.chat_template
    said = None if template is None else [template.source, template.bos_token, template.eos_token]
    control = sorted(getattr(client.tokenizer, "control_texts", {}).values())
    name = str(client.model.model_path).rstrip("/").rpartition("/")[2]
    return {
        "plait_recording": VERSION,
        "model": name,
        "context_length": client.model.context_length,
        "chat_template": said,
        "control_texts": control,
    }


def call_record(asked: Asked) -> dict[str, Any]:
    """What a call was asked; equal for calls that are asked the same."""
    params = msgspec.to_builtins(asked.params, str_keys=True)
    differing = {name: value for name, value in params.items() if value != _DEFAULTS[name] and name != "timeout_s"}
    constraint = None if asked.constraint is None else msgspec.to_builtins(asked.constraint)
    line = {"name": asked.name, "prompt": asked.prompt, "params": differing, "constraint": constraint,
            "choices": asked.choices, "method": asked.method}  # fmt: skip
    normal: dict[str, Any] = json.loads(json.dumps(line))  # tuples are lists in a file
    return normal


def record_key(line: dict[str, Any]) -> str:
    """The same for a line that was read and for a call that asks what it was asked."""
    return json.dumps([line[name] for name in _CALL_FIELDS], sort_keys=True)


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    return {
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "matched": outcome.matched,
        "usage": None if outcome.usage is None else msgspec.structs.asdict(outcome.usage),
        "num_tokens": len(outcome.token_ids or ()),
        "meta": outcome.extra_meta,
    }


def failure_record(error: CallFailed) -> dict[str, Any]:
    return {"failed": {"kind": error.kind, "text": str(error)}}


def parse_outcome(line: dict[str, Any]) -> Outcome:
    """What the call gave. Raises the CallFailed that it ended with."""
    if "failed" in line:
        raise call_failed(line["failed"]["kind"], line["failed"]["text"])
    said = {
        name: _tuples(value) if name.endswith("logprobs") else value for name, value in (line["meta"] or {}).items()
    }
    return Outcome(
        text=line["text"],
        finish_reason=line["finish_reason"],
        matched=line["matched"],
        usage=msgspec.convert(list(line["usage"].values()), Usage) if line["usage"] else None,
        token_ids=(-1,) * line["num_tokens"],
        extra_meta=said,
    )


def differences(recorded: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """What differs between a recorded call and one that is asked now, each in a few words."""
    found = []
    if recorded["name"] != asked["name"]:
        found.append(f"the variable: recorded {recorded['name']!r}, now {asked['name']!r}")
    if recorded["prompt"] != asked["prompt"]:
        at = common_prefix_length(recorded["prompt"], asked["prompt"])
        before = asked["prompt"][max(0, at - 30) : at]
        was, now = recorded["prompt"][at : at + 40], asked["prompt"][at : at + 40]
        found.append(f"the prompt, from character {at} on, behind {before!r}: recorded {was!r}, now {now!r}")
    for name in sorted(set(recorded["params"]) | set(asked["params"])):
        was, now = (each["params"].get(name, _DEFAULTS.get(name)) for each in (recorded, asked))
        if was != now:
            found.append(f"{name}: recorded {was!r}, now {now!r}")
    for name in ("constraint", "choices", "method"):
        if recorded[name] != asked[name]:
            found.append(f"{name}: recorded {recorded[name]!r:.200}, now {asked[name]!r:.200}")
    return found


def common_prefix_length(first: str, second: str) -> int:
    """How many characters both begin with."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low


def _tuples(value: Any) -> Any:
    """Logprobs as `get_meta_info` gives them: a list of (logprob, token id, text), or of lists of them."""
    if isinstance(value, list) and len(value) == 3 and isinstance(value[2], str):
        return tuple(value)
    return [_tuples(each) for each in value] if isinstance(value, list) else value
