"""Renders a model's chat template, as a whole conversation or turn by turn (`turn_texts`)."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import date
from functools import cached_property
from typing import Any

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError

from plait.runtime.errors import InputError, UnsupportedModel
from plait.runtime.tokenizer.json_text import json_text
from plait.runtime.tokenizer.template_sandbox import MAX_WORK, BoundedEnvironment, RaisedByTemplate, check_size
from plait.runtime.tokenizer.template_work import LimitReached, TooMuchWork, limited_work
from plait.runtime.tokenizer.turn_texts import Role, TurnTexts

MAX_SOURCE = 128 * 1024  # characters
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
_MAX_VARIANTS = 16
_FEW_TURNS = 16  # which no template may find too many
_TOO_MANY_TURNS = "the chat template runs too long for the {} turns of this conversation; leave out earlier turns"


class ChatTemplate:
    """A Jinja chat template and the two tokens it may insert. Compiled at first use. Thread-safe.

    `variables`: further variables of the template that every rendering sets; see `with_variables`.

    >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    >>> template = ChatTemplate(source, bos_token="", eos_token="</s>")
    >>> template.render([{"role": "user", "content": "hi"}])
    '<user>hi</s>'
    >>> template.turn_prefix(["user"], "assistant"), template.turn_suffix(["user"], "assistant")
    ('<assistant>', '</s>')
    """

    def __init__(self, source: str, bos_token: str, eos_token: str, variables: Mapping[str, Any] | None = None) -> None:
        self.source, self.bos_token, self.eos_token = source, bos_token, eos_token
        self.variables = dict(variables or {})
        self._variants: OrderedDict[str, ChatTemplate] = OrderedDict()
        self._lock = threading.Lock()

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The template with further variables, such as `enable_thinking`, set in every rendering.

        Raises InputError for a variable that the template does not read, and for values that are not JSON.

        >>> template = ChatTemplate("{% if loud %}!{% endif %}{{ messages[0].content }}", "", "")
        >>> template.with_variables({"loud": True}).render([{"content": "hi"}])
        '!hi'
        """
        if not variables:
            return self
        self._check_variables(variables)
        try:
            key = json.dumps(variables, sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            raise InputError("chat_template_kwargs: the values must be JSON", field="chat_template_kwargs") from None
        with self._lock:
            variant = self._variants.get(key)
            if variant is None:
                values = {**self.variables, **json.loads(key)}
                variant = ChatTemplate(self.source, self.bos_token, self.eos_token, values)
                variant._compiled, variant.variable_names = self._compiled, self.variable_names
                self._variants[key] = variant
                if len(self._variants) > _MAX_VARIANTS:
                    self._variants.popitem(last=False)
        return variant

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders the conversation. `variables`: further variables of the template, such as `enable_thinking`.

        Raises InputError if the template rejects the messages or does not read one of the variables; UnsupportedModel
        if it does not compile, violates the sandbox or exceeds its limits.
        """
        self._check_variables(variables or {})
        template, more = self._compiled, {**self._named_tools(tools), **self.variables, **(variables or {})}
        try:
            with limited_work(MAX_WORK):
                _check_size(messages, tools, more)
                return template.render(
                    messages=messages,
                    tools=tools,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    bos_token=self.bos_token,
                    eos_token=self.eos_token,
                    **more,
                )
        except InputError:
            raise
        except RaisedByTemplate as error:
            raise InputError(f"the chat template refuses these messages: {error}") from error
        except (LimitReached, SecurityError, MemoryError) as error:
            if isinstance(error, TooMuchWork) and len(messages) > _FEW_TURNS:
                raise InputError(_TOO_MANY_TURNS.format(len(messages))) from error
            raise UnsupportedModel(f"the chat template was stopped: {error}"[:300]) from error
        except Exception as error:  # a template is a program and may raise anything
            raise InputError(f"the chat template cannot render these messages ({type(error).__name__})") from error

    def _named_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """The variables in which some templates read the tools, as JSON text, and the time (Firefunction 2)."""
        if not {"functions", "datetime"} <= self.variable_names:
            return {}
        functions = [tool.get("function", tool) for tool in tools or ()]
        return {"functions": json_text(functions, ensure_ascii=False), "datetime": date.today().isoformat()}

    def check(self) -> None:
        """Raises UnsupportedModel if the template does not compile."""
        assert self._compiled is not None

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in RESERVED_VARIABLES:
                raise InputError(f"chat_template_kwargs: {name!r} is set by the server", field="chat_template_kwargs")
            if name not in self.variable_names:
                known = ", ".join(sorted(self.variable_names)) or "none"
                raise InputError(
                    f"chat_template_kwargs: the chat template has no variable {name[:100]!r}; it has: {known[:300]}",
                    field="chat_template_kwargs",
                )

    @cached_property
    def variable_names(self) -> frozenset[str]:
        """The variables that the template reads, beside those that are always set; none if it does not parse."""
        environment = BoundedEnvironment()
        try:
            names = meta.find_undeclared_variables(environment.parse(self.source[:MAX_SOURCE]))
        except (TemplateError, RecursionError, MemoryError, ValueError):
            return frozenset()  # `check` and `render` report why
        return frozenset(names) - set(environment.globals) - set(RESERVED_VARIABLES)

    @cached_property
    def _compiled(self) -> Template:
        if len(self.source) > MAX_SOURCE:
            raise UnsupportedModel(f"the chat template is longer than {MAX_SOURCE} characters")
        try:
            return BoundedEnvironment().from_string(self.source)
        except TemplateError as error:
            raise UnsupportedModel(f"the chat template is not valid: {error}"[:300]) from error
        except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
            raise UnsupportedModel("the chat template is nested too deeply or is not valid") from error

    @cached_property
    def literals(self) -> frozenset[str]:
        """The string constants and plain text of the source; empty if it does not parse."""
        try:
            tree = BoundedEnvironment().parse(self.source[:MAX_SOURCE])
        except (TemplateError, RecursionError, MemoryError, ValueError):
            return frozenset()
        data = [node.data for node in tree.find_all(nodes.TemplateData)]
        return frozenset([*data, *(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))])

    def turn_prefix(self, roles: Sequence[Role], role: Role) -> str:
        """Returns the template's text before the content of a `role` turn that follows complete turns of `roles`.

        A default system turn of the template belongs to the first prefix. The concatenation of all prefixes, contents
        and suffixes equals `render` of the conversation, for contents that the template does not change.

        Two exceptions. A template that writes an answer differently once another turn follows, as Qwen3's removes its
        reasoning, does so in no earlier turn: the conversation keeps the text that was generated, and an assistant turn
        begins with the generation prompt. With `variables` an assistant turn begins with the generation prompt too if
        that only adds to the turn's beginning, such as an empty reasoning.

        Raises InputError if the turns cannot be separated: the template rejects the order of roles, or changes what it
        wrote before in another way.
        """
        return self._turn_texts.around(roles, role)[0]

    def turn_suffix(self, roles: Sequence[Role], role: Role) -> str:
        """Returns the template's text after that content; see `turn_prefix`."""
        return self._turn_texts.around(roles, role)[1]

    def num_rendered_turns(self, num_turns: int) -> int:
        """Returns how many turns are rendered, at most times but a few, for one behind `num_turns`."""
        return self._turn_texts.num_rendered_turns(num_turns)

    @cached_property
    def _turn_texts(self) -> TurnTexts:
        dated = "strftime_now" in self.source or "datetime" in self.variable_names
        return TurnTexts(self.render, self.source, begins_with_prompt=bool(self.variables), is_dated=dated)


def check_template(source: str) -> None:
    """Raises InputError if the text, which a user gave, is not a chat template."""
    try:
        ChatTemplate(source, "", "").check()
    except UnsupportedModel as error:
        raise InputError(f"chat_template: {error}") from None


def _check_size(*values: Any) -> None:
    try:
        check_size(values)
    except LimitReached as error:
        raise InputError("the messages are too long for one conversation") from error
