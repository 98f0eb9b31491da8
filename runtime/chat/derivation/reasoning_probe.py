"""Derives the marks around a model's reasoning by rendering its chat template.

A template shows them where it writes the reasoning of an earlier answer, where its generation prompt opens reasoning
or closes it at once, or where it removes reasoning from an answer's text.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from plait.runtime.chat.derivation.format_derivation import common_prefix, num_of_open_mark
from plait.runtime.chat.derivation.template_probe import NAMES, TEXT, TemplateProbe
from plait.runtime.chat.formats.reasoning_format import MessageFormat, ReasoningFormat

_THOUGHT = "Qzthoughtzq"
_FIELDS = ("reasoning_content", "reasoning", "thinking")
_SWITCHES: tuple[dict[str, bool], ...] = (
    {"enable_thinking": True, "thinking": True},
    {},
    {"enable_thinking": False, "thinking": False},
)
_MARK = re.compile(r"<[^<>]+>|\[/?[A-Z_]+\]")
_REASONING_WORD = re.compile("think|thought|reason|channel", re.IGNORECASE)
_MESSAGE_BEGIN = re.compile(r"(?:<[^<>]+>|>+)\w*$")
_COMMON_PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def derive_message_format(probe: TemplateProbe) -> MessageFormat | None:
    """Returns how messages begin; None if the template writes nothing between its generation prompt and a text.

    Raises ProbeTimeout.
    """
    prompt, answer = probe.generation_prompt(with_tools=False), probe.answer({"content": TEXT}, with_tools=False)
    before, text, _ = (answer or "").partition(TEXT)
    if prompt is None or not text or not before.startswith(prompt):
        return None
    head, begin = before[len(prompt) :], _MESSAGE_BEGIN.search(prompt)
    if begin is None or not head.strip() or re.search("think|thought|reason", head, re.IGNORECASE):
        return None
    return MessageFormat(begin[0], (head,))


def derive_reasoning_format(probe: TemplateProbe, messages: MessageFormat | None) -> ReasoningFormat | None:
    """Returns the marks of reasoning; None if the template shows none. Raises ProbeTimeout."""
    return _of_history(probe, messages) or _of_prompt(probe) or _of_removed_text(probe) or _of_instructions(probe)


def _of_history(probe: TemplateProbe, messages: MessageFormat | None) -> ReasoningFormat | None:
    """The marks around the reasoning of an answer that the template writes."""
    thinking = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": TEXT}]
    options: list[tuple[str, dict[str, Any]]] = [(field, {field: _THOUGHT, "content": TEXT}) for field in _FIELDS]
    options.append(("content", {"content": thinking}))
    for field, message in options:
        for with_tools in (False, True):  # some write it only beside tools
            text = probe.answer(message, with_tools=with_tools, variables=_SWITCHES[0])
            if text is None or _THOUGHT not in text or TEXT not in text.partition(_THOUGHT)[2]:
                continue
            before, _, after = text.partition(_THOUGHT)
            header = _header(probe, with_tools)
            begin = before[len(header) :] if before.startswith(header) else before[len(common_prefix(before, header)) :]
            if not begin.strip():  # the prompt opens it
                prompt = probe.generation_prompt(with_tools=with_tools, variables=_SWITCHES[0]) or ""
                begin = prompt[len(before) :] if prompt.startswith(before) else begin
            before_text = after.partition(TEXT)[0]
            end = _shared_end(probe, message, before_text)
            end = (end.partition(messages.begin)[0] if messages else end).strip()
            if end.startswith(("</", "[/")) and end[0] + end[2:] in before:
                begin = end[0] + end[2:]
            is_json = "thinking" in begin and "type" in begin  # the parts, not the reasoning
            if end and not is_json:
                lead, _, rest = before_text.partition(end)
                separator = messages.begin if messages else rest if rest.isspace() else ""
                return ReasoningFormat(begin if messages else begin.strip(), end, field, lead, separator)
    return None


def _shared_end(probe: TemplateProbe, message: dict[str, Any], before_text: str) -> str:
    """What closes reasoning before a text and before a call alike; that before a text if no call is written."""
    if not isinstance(message["content"], str):
        return before_text
    call = {"id": "qzid00000", "type": "function", "function": {"name": NAMES[0], "arguments": {"q": "x"}}}
    text = probe.answer({**message, "content": "", "tool_calls": [call]}, variables=_SWITCHES[0])
    after = text.partition(_THOUGHT)[2] if text is not None else ""
    if NAMES[0] not in after:
        return before_text
    shared = common_prefix(before_text, after)
    return shared[: len(shared) - num_of_open_mark(shared, after)] or before_text


def _header(probe: TemplateProbe, with_tools: bool = False) -> str:
    """What the template writes before the text of an answer without reasoning, without marks of empty reasoning."""
    answers = [probe.answer({"content": TEXT}, with_tools=with_tools, variables=switch) for switch in _SWITCHES]
    prompts = [probe.generation_prompt(with_tools=with_tools, variables=switch) for switch in _SWITCHES]
    texts = [text.partition(TEXT)[0] for text in answers if text is not None and TEXT in text]
    texts += [prompt for prompt in prompts if prompt is not None]
    shared = functools.reduce(common_prefix, texts) if texts else ""
    return shared[: len(shared) - max((num_of_open_mark(shared, text) for text in texts), default=0)]


def _of_prompt(probe: TemplateProbe) -> ReasoningFormat | None:
    """The marks with which the template opens reasoning before an answer, or opens and closes it."""
    answer = probe.answer({"content": TEXT}, with_tools=False)
    header = answer.partition(TEXT)[0] if answer is not None and TEXT in answer else ""
    prompts = [probe.generation_prompt(with_tools=False, variables=switch) or "" for switch in _SWITCHES]
    for before, text in [*((header, prompt) for prompt in prompts), (prompts[1], header)]:
        shared = common_prefix(text, before)
        added = text[len(shared) - num_of_open_mark(shared, text) :]
        marks = [mark for mark in _MARK.finditer(added) if _REASONING_WORD.search(mark[0])]
        if len(marks) == 2:
            begin, rest = added[marks[0].start() : marks[1].start()], added[marks[1].end() :]
            space = begin[len(begin.rstrip()) :]  # where the reasoning would be
            lead, separator = space[: (len(space) + 1) // 2], rest if not rest.strip() else ""
            return ReasoningFormat(begin.strip(), marks[1][0], lead=lead, separator=separator)
        if len(marks) == 1 and "/" not in marks[0][0]:
            return ReasoningFormat(marks[0][0], f"{marks[0][0][0]}/{marks[0][0][1:]}")
    return None


def _of_removed_text(probe: TemplateProbe) -> ReasoningFormat | None:
    """Common marks that the template removes from an answer's text, with the reasoning between them."""
    for begin, end in _COMMON_PAIRS:
        for content in (f"{begin}{_THOUGHT}{end}{TEXT}", f"{_THOUGHT}{end}{TEXT}"):
            turns = [("user", "u"), ("assistant", content), ("user", "v"), ("assistant", "w")]
            text = probe.render([{"role": role, "content": text} for role, text in turns], with_tools=False)
            if text is not None and TEXT in text and _THOUGHT not in text:
                return ReasoningFormat(begin, end)
    return None


def _of_instructions(probe: TemplateProbe) -> ReasoningFormat | None:
    """Common marks that the template names to the model where reasoning is wanted, and not otherwise."""
    user = [{"role": "user", "content": "u"}]
    wanted, plain = (probe.render(user, with_tools=False, variables=switch) or "" for switch in _SWITCHES[:2])
    return next((ReasoningFormat(*pair) for pair in _COMMON_PAIRS if pair[0] in wanted and pair[0] not in plain), None)
