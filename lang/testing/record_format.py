"""The file format of a recording: JSON lines, one per call.

The first line describes the model. Every other line is one call, with its request and its result:

    {"name": ..., "prompt": ..., "params": {...}, "constraint": ..., "choices": ..., "method": ...,
     "text": ..., "finish_reason": ..., "matched": ..., "usage": {...}, "num_tokens": ..., "meta": {...}}

If the call failed, "failed": {"kind": ..., "text": ...} replaces the second row. `params` are the sampling parameters
that differ from the defaults; a call with an adapter has its name as "adapter". Timeouts are omitted, because the rest
of a budget differs from run to run.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from plait.lang.cluster.prefix_groups import num_common_chars
from plait.lang.testing.text_client import Asked, Outcome
from plait.runtime.call_reports import Usage
from plait.runtime.errors import CallFailed, call_failed
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.chat_template import ChatTemplate

VERSION = 1
RECORDING_START = b'{"plait_recording": '  # of any version
_DEFAULTS = msgspec.to_builtins(SamplingParams(), str_keys=True)
_CALL_FIELDS = ("name", "prompt", "params", "constraint", "choices", "method")


def header(client: Any) -> dict[str, Any]:
    """Returns the first line: the model's name, context length, chat template and control texts."""
    template: ChatTemplate | None = client.tokenizer.chat_template
    template_fields = None if template is None else [template.source, template.bos_token, template.eos_token]
    control = sorted(client.tokenizer.control_texts.values())
    name = str(client.model.model_path).rstrip("/").rpartition("/")[2]
    return {
        "plait_recording": VERSION,
        "model": name,
        "context_length": client.model.context_length,
        "chat_template": template_fields,
        "control_texts": control,
    }


def call_record(asked: Asked) -> dict[str, Any]:
    """Returns the request of a call. Equal requests have equal records."""
    params = msgspec.to_builtins(asked.params, str_keys=True)
    differing = {name: value for name, value in params.items() if value != _DEFAULTS[name] and name != "timeout_s"}
    constraint = None if asked.constraint is None else msgspec.to_builtins(asked.constraint)
    line = {"name": asked.name, "prompt": asked.prompt, "params": differing, "constraint": constraint,
            "choices": asked.choices, "method": asked.method}  # fmt: skip
    if asked.adapter:
        line["adapter"] = asked.adapter
    normalized: dict[str, Any] = json.loads(json.dumps(line))  # a file has lists in place of tuples
    return normalized


def record_key(line: dict[str, Any]) -> str:
    """Returns a key that is equal for a recorded line and for a new call with the same request."""
    return json.dumps([*(line[name] for name in _CALL_FIELDS), line.get("adapter", "")], sort_keys=True)


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """Returns the result of a call, the second row of its line."""
    return {
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "matched": outcome.matched,
        "usage": None if outcome.usage is None else msgspec.structs.asdict(outcome.usage),
        "num_tokens": outcome.num_tokens or 0,
        "meta": outcome.extra_meta,
    }


def failure_record(error: CallFailed) -> dict[str, Any]:
    """Returns the error of a call, which replaces the second row of its line."""
    return {"failed": {"kind": error.kind, "text": str(error)}}


def parse_outcome(line: dict[str, Any]) -> Outcome:
    """Returns the result of a recorded call. Raises the recorded CallFailed if it failed."""
    if "failed" in line:
        raise call_failed(line["failed"]["kind"], line["failed"]["text"])
    extra_meta = {
        name: _tuples(value) if name.endswith("logprobs") else value for name, value in (line["meta"] or {}).items()
    }
    return Outcome(
        text=line["text"],
        finish_reason=line["finish_reason"],
        matched=line["matched"],
        usage=msgspec.convert(list(line["usage"].values()), Usage) if line["usage"] else None,
        num_tokens=line["num_tokens"],
        extra_meta=extra_meta,
    )


def differences(recorded: dict[str, Any], asked: dict[str, Any]) -> list[str]:
    """Returns one phrase for each difference between a recorded request and a new one."""
    phrases = []
    if recorded["name"] != asked["name"]:
        phrases.append(f"the variable: recorded {recorded['name']!r}, now {asked['name']!r}")
    if recorded["prompt"] != asked["prompt"]:
        start = num_common_chars(recorded["prompt"], asked["prompt"])
        before = asked["prompt"][max(0, start - 30) : start]
        was, now = recorded["prompt"][start : start + 40], asked["prompt"][start : start + 40]
        phrases.append(f"the prompt, from character {start} on, after {before!r}: recorded {was!r}, now {now!r}")
    for name in sorted(set(recorded["params"]) | set(asked["params"])):
        was, now = (line["params"].get(name, _DEFAULTS.get(name)) for line in (recorded, asked))
        if was != now:
            phrases.append(f"{name}: recorded {was!r}, now {now!r}")
    for name in ("constraint", "choices", "method", "adapter"):
        was, now = recorded.get(name), asked.get(name)
        if was != now:
            phrases.append(f"{name}: recorded {was!r:.200}, now {now!r:.200}")
    return phrases


def _tuples(value: Any) -> Any:
    """Converts logprobs to what `get_meta_info` returns: a list of (logprob, token id, text), or of lists of them."""
    if isinstance(value, list) and len(value) == 3 and isinstance(value[2], str):
        return tuple(value)
    return [_tuples(item) for item in value] if isinstance(value, list) else value
