"""Renders probe conversations with a chat template, to see what it writes around names, arguments and reasoning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plait.runtime.errors import PlaitError
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.template_work import LimitReached, limited_work

USER, TEXT = "Qzuserzq", "Qztextzq"
NAMES = ("qz_first", "qz_second")
MAX_WORK = 20_000_000  # units of all renderings of one template

ProbeCall = tuple[str, str, str | Mapping[str, Any]]  # id, name, arguments or their JSON text


class ProbeTimeout(Exception):
    """Raised when the probes of a template do too much work."""


class TemplateProbe:
    """Renders what a template writes behind a user's text.

    Raises ProbeTimeout after MAX_WORK, or where its limit ended one rendering.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._work_left = MAX_WORK

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        with_tools: bool = True,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Returns the whole rendering; None if the template refuses it."""
        known = {name: value for name, value in (variables or {}).items() if name in self._template.variable_names}
        try:
            with limited_work(self._work_left) as work:
                return self._template.render(
                    messages,
                    tools=[_tool(name) for name in NAMES] if with_tools else None,
                    add_generation_prompt=add_generation_prompt,
                    variables=known,
                )
        except PlaitError as error:
            if isinstance(error.__cause__, LimitReached):  # as the others would be
                raise ProbeTimeout from None
            return None
        finally:
            self._work_left -= work.done

    def generation_prompt(self, *, with_tools: bool = True, variables: Mapping[str, Any] | None = None) -> str | None:
        """Returns what the template writes behind a user's text before an answer."""
        user = [{"role": "user", "content": USER}]
        text = self.render(user, with_tools=with_tools, add_generation_prompt=True, variables=variables)
        return _after_user(text)

    def answer(
        self, message: Mapping[str, Any], *, with_tools: bool = True, variables: Mapping[str, Any] | None = None
    ) -> str | None:
        """Returns what the template writes behind a user's text for an assistant's message."""
        messages = [{"role": "user", "content": USER}, {"role": "assistant", **message}]
        return _after_user(self.render(messages, with_tools=with_tools, variables=variables))

    def lists_tools(self) -> bool:
        """Whether the template tells the model the tools."""
        user = [{"role": "user", "content": USER}]
        return NAMES[0] in (self.render(user) or "")

    def calls(self, calls: Sequence[ProbeCall], content: str = "") -> str | None:
        """Returns what the template writes behind a user's text for an answer with calls."""
        return self.answer({"content": content, **call_message(*calls)})


def _after_user(text: str | None) -> str | None:
    return None if text is None or USER not in text else text.partition(USER)[2]


def call_message(*calls: ProbeCall) -> dict[str, Any]:
    """Returns the part of an assistant's message that has its calls."""
    return {"tool_calls": [_call(*call) for call in calls]}


def _call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _tool(name: str) -> dict[str, Any]:
    properties = {"q": {"type": "string", "description": "a text"}}
    parameters = {"type": "object", "properties": properties, "required": ["q"]}
    return {"type": "function", "function": {"name": name, "description": "a probe", "parameters": parameters}}
