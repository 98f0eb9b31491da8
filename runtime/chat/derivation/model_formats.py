"""The formats of a model's calls and reasoning, found once for each chat template."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from plait.runtime.chat.derivation.format_probe import derive_call_format
from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT, GENERIC_FORMAT_BESIDE_JSON, exception_of
from plait.runtime.chat.derivation.reasoning_probe import derive_message_format, derive_reasoning_format
from plait.runtime.chat.derivation.template_probe import ProbeTimeout, TemplateProbe
from plait.runtime.chat.formats.call_format import CallFormat
from plait.runtime.chat.formats.reasoning_format import MessageFormat, ReasoningFormat
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.tokenizer import Tokenizer

_MAX_TEMPLATES = 64


@dataclass(frozen=True)
class ModelFormats:
    """How a model writes calls and reasoning. calls: None for the generic format. reasoning: None without reasoning.
    takes_system: the template takes a system turn. messages: None where an answer is no sequence of messages."""

    calls: CallFormat | None
    reasoning: ReasoningFormat | None
    takes_system: bool = True
    messages: MessageFormat | None = None

    def calls_beside(self, *, with_json_answer: bool) -> CallFormat:
        """Returns the format of calls. `with_json_answer`: the answer may be JSON instead, so a generic format must
        differ from JSON."""
        return self.calls or (GENERIC_FORMAT_BESIDE_JSON if with_json_answer else GENERIC_FORMAT)


PLAIN_FORMATS = ModelFormats(None, None)
_found: OrderedDict[tuple[str, str, str], ModelFormats] = OrderedDict()
_lock = threading.Lock()


def formats_of(template: ChatTemplate | None) -> ModelFormats:
    """Returns the formats of a template. The first call for a template renders it some dozen times.

    A template that cannot be rendered or takes too long has the generic format and no reasoning.
    """
    if template is None:
        return PLAIN_FORMATS
    key = template.source, template.bos_token, template.eos_token
    with _lock:
        found = _found.get(key)
    if found is None:
        found = find_formats(template)
        with _lock:
            _found[key] = found
            if len(_found) > _MAX_TEMPLATES:
                _found.popitem(last=False)
    return found


async def formats_in_thread(template: ChatTemplate | None) -> ModelFormats:
    """Returns the formats of a template without holding the event loop; `formats_of` has them at once from then on."""
    with _lock:
        is_known = template is None or (template.source, template.bos_token, template.eos_token) in _found
    return formats_of(template) if is_known else await asyncio.to_thread(formats_of, template)


def find_formats(template: ChatTemplate) -> ModelFormats:
    """Renders the probes of a template."""
    probe, exception = TemplateProbe(template), exception_of(template.source)
    calls = reasoning = messages = None
    takes_system = True
    try:
        turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
        if probe.render(turns, with_tools=False) is None:
            takes_system = probe.render(turns[1:], with_tools=False) is None  # else it takes no turn at all
        messages = derive_message_format(probe)
        if messages is not None and exception is not None:
            messages = replace(messages, texts=(*messages.texts, *exception.texts))
        if exception is None or not exception.is_shown_wrong:
            calls = derive_call_format(probe)
        if exception is not None:
            calls = calls or replace(exception.calls, is_native=probe.lists_tools())
        reasoning = derive_reasoning_format(probe, messages)
    except ProbeTimeout:
        pass  # what was found until then is kept
    if calls is not None and calls.opener.startswith(("{", "[{")) and reasoning is None:
        calls = replace(calls, is_whole_answer=True)
    if calls is not None and messages is not None:
        calls = replace(calls, is_message=True)
    return ModelFormats(calls, reasoning, takes_system, messages)


def fitted_calls(formats: ModelFormats, tokenizer: Tokenizer, *, with_json_answer: bool) -> CallFormat:
    """Returns the format of calls for a tokenizer: without a token at its end that ends the text anyway, and a generic
    format if calls begin with such a token, as GigaChat 3's do.

    with_json_answer: see `ModelFormats.calls_beside`.
    """
    ends = [tokenizer.control_texts[token] for token in tokenizer.eos_ids if tokenizer.control_texts.get(token)]
    call_format = formats.calls_beside(with_json_answer=with_json_answer)
    if any(end in call_format.begin + call_format.head for end in ends):
        return replace(formats, calls=None).calls_beside(with_json_answer=with_json_answer)
    for end in ends:
        if call_format.end.rstrip().endswith(end):
            call_format = replace(call_format, end=call_format.end.rstrip().removesuffix(end))
        elif not call_format.end and call_format.tail.rstrip().endswith(end):
            call_format = replace(call_format, tail=call_format.tail.rstrip().removesuffix(end))
    return call_format
