"""The formats of a model's calls and reasoning, found once for each chat template."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from plait.runtime.chat.derivation.format_derivation import KEYS, VALUES, Derivation, probe_ids
from plait.runtime.chat.derivation.format_table import GENERIC_FORMAT, GENERIC_FORMAT_BESIDE_JSON, exception_of
from plait.runtime.chat.derivation.reasoning_probe import derive_message_format, derive_reasoning_format
from plait.runtime.chat.derivation.template_probe import NAMES, ProbeCall, ProbeTimeout, TemplateProbe
from plait.runtime.chat.formats.call_format import (
    CallFormat,
    ElementArguments,
    JsonArguments,
    KeywordArguments,
    json_type,
)
from plait.runtime.chat.formats.reasoning_format import MessageFormat, ReasoningFormat
from plait.runtime.chat.parser import OutputParser
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


# -- format probe ---------------------------------------------------------------------------------
# Derives how a model writes tool calls by rendering its chat template with probe calls.
#
# The texts around the name and the arguments of one call and of two show the marks. A format is accepted only if it
# reproduces the template's text for all probe calls, and if the parser reads the calls from it.

ID_FORMS = ("", "[a-zA-Z0-9]{9}", "functions.{name}:{index}")
PROBE_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"city": "Paris"},
    {"city": "São Paulo, 東京", "unit": "C"},
    {"n": 17, "x": -2.5, "big": 12345678901234567},
    {"yes": True, "no": False},
    {"text": 'He said "hi" \\ and left'},
    {"lines": "a\nb\n\nc"},
    {"list": [1, "two", None, True], "nested": {"a": {"b": [{}]}}},
    {"empty": "", "markup": "<b>&amp;</b> {x} [y] 'z'"},
    {"nothing": None, "url": "https://example.org/?a=1&b=2#c"},
)


def derive_call_format(probe: TemplateProbe) -> CallFormat | None:
    """Returns the format of the calls that a template writes; None if it writes none, or none that can be derived.

    Raises ProbeTimeout.
    """
    for takes_text, after_text, id_form in itertools.product((False, True), (True, False), ID_FORMS):
        if takes_text and writes_objects(probe):
            return None  # in a form that is not known
        derived = Derivation(probe, takes_text, id_form, after_text).derive()
        for variant in () if derived is None else variants(derived):
            if reproduces(probe, variant):
                return variant
    return None


def writes_objects(probe: TemplateProbe) -> bool:
    """Whether the template writes arguments that are given as an object."""
    text = probe.calls([("qzid00000", NAMES[0], dict(zip(KEYS, VALUES, strict=True)))])
    return text is not None and all(value in text for value in VALUES)


def variants(derived: CallFormat) -> Iterator[CallFormat]:
    """Yields a derived format, and others that write the same for a single text argument."""
    form = derived.arguments
    if isinstance(form, JsonArguments) and not derived.takes_text:
        yield replace(derived, takes_text=True)
    yield derived
    if isinstance(form, ElementArguments):
        yield replace(derived, values_as_text=True)
        close = form.close.rstrip()
        space = form.close[len(close) :]
        form = replace(form, close=close, separator=space + form.separator)
        yield replace(derived, arguments=form, tail=space + derived.tail)


def reproduces(probe: TemplateProbe, call_format: CallFormat) -> bool:
    """Whether the format writes all probe calls as the template does, and the parser reads them."""
    singles = [[arguments] for arguments in PROBE_ARGUMENTS]
    pairs = [] if call_format.is_single else [list(PROBE_ARGUMENTS[1:3]), list(PROBE_ARGUMENTS[4:7])]
    return all(reproduces_calls(probe, call_format, case) for case in (*singles, *pairs))


def reproduces_calls(probe: TemplateProbe, call_format: CallFormat, case: list[dict[str, Any]]) -> bool:
    """Whether this holds for one answer with calls of these arguments."""
    names = [NAMES[index % 2] for index in range(len(case))]
    ids = probe_ids(call_format.id_form, names)
    given = [call_format.template_arguments(arguments) for arguments in case]
    calls: list[ProbeCall] = list(zip(ids, names, given, strict=True))
    text = probe.calls(calls)
    if text is None:
        return False
    written = written_calls(call_format, text, calls)
    if written is None:
        return False
    schema = {"properties": {key: {"type": json_type(value)} for one in case for key, value in one.items()}}
    parser = OutputParser(None, False, call_format, dict.fromkeys(names, schema))
    parts = [*parser.push(written), *parser.finish()]
    read = (
        [json.loads("".join(p.text for p in parts if p[0] == "arguments" and p.number == i)) for i in range(len(case))]
        if parser.num_calls == len(case) and not parser.is_within_arguments
        else None
    )
    return read == case and [part.text for part in parts if part.kind == "call"] == names


def written_calls(call_format: CallFormat, text: str, calls: Sequence[ProbeCall]) -> str | None:
    """Returns the calls as the format writes them if they stand so in a template's text, else None.

    The white space of indented JSON and the quotes of Python's strings may differ: the constraint allows any, and
    writes JSON's.
    """
    counts: Iterable[int | None] = range(3) if call_format.id_source == "counter" else (None,)
    for first in counts:
        numbered = [
            (call_id if first is None else str(first + index), name, arguments)
            for index, (call_id, name, arguments) in enumerate(calls)
        ]
        written = call_format.render_calls(numbered)
        if written in text:
            return written
        form = call_format.arguments
        if isinstance(form, KeywordArguments) and (
            "\\" in written or written.replace('"', "'") in text.replace('"', "'")
        ):
            return written
        if isinstance(form, JsonArguments) and form.style == "any" and _SPACE.sub("", written) in _SPACE.sub("", text):
            return written
    return None


_SPACE = re.compile(r"\s+")
