"""Renders a model's chat template, as a whole conversation or turn by turn.

Turn by turn means: the template's text before and after the content of one turn. It is found by rendering placeholder
contents and reading the text around them. So a program can extend a conversation without rendering it again, and the
template's text, which may contain control tokens, stays separate from all other text.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from typing import Any, Protocol

from jinja2 import Template, TemplateError, meta, nodes
from jinja2.exceptions import SecurityError

from plait.runtime.errors import InputError, UnsupportedModel
from plait.runtime.tokenizer.json_text import json_text
from plait.runtime.tokenizer.repeated_turns import MAX_LENGTH, is_checked, without_middle
from plait.runtime.tokenizer.template_sandbox import MAX_WORK, BoundedEnvironment, RaisedByTemplate, check_size
from plait.runtime.tokenizer.template_work import LimitReached, TooMuchWork, limited_work

MAX_SOURCE = 128 * 1024  # characters
MAX_TURNS = 1024
RESERVED_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")
_MAX_LAYOUTS = 64
_MAX_TURN_TEXTS = 4096
_MANY_EXCHANGES = 96  # after which a template is compared
_MAX_VARIANTS = 16
_FEW_TURNS = 16  # which no template may find too many
_TOO_MANY_TURNS = "the chat template runs too long for the {} turns of this conversation; leave out earlier turns"


class TurnShape(Protocol):
    """A turn that is more than a role and a text, in place of its role."""

    @property
    def role(self) -> str: ...
    def message(self, content: str) -> dict[str, Any]:
        """Returns the message with this content."""

    def locate(self, text: str, content: str) -> str:
        """Returns a rendering in which `content` stands for all that a program writes of the turn."""


Role = str | TurnShape
Roles = tuple[Role, ...]


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
        self._layouts: OrderedDict[tuple[Roles, date | None], str] = OrderedDict()
        self._repeated_turns: OrderedDict[tuple[Roles, Role, date | None], tuple[str, str]] = OrderedDict()
        self._turns: OrderedDict[tuple[Roles, Role, date | None], tuple[str, str]] = OrderedDict()

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
        return self._turn(roles, role)[0]

    def turn_suffix(self, roles: Sequence[Role], role: Role) -> str:
        """Returns the template's text after that content; see `turn_prefix`."""
        return self._turn(roles, role)[1]

    def _turn(self, roles: Sequence[Role], role: Role) -> tuple[str, str]:
        key = (tuple(roles), role, self._today)
        cached = self._turns.get(key)
        if cached is not None:
            return cached
        if len(key[0]) >= MAX_TURNS or not all(isinstance(getattr(one, "role", one), str) for one in (*key[0], role)):
            raise InputError(f"a conversation is up to {MAX_TURNS} turns whose roles are texts")
        with self._lock:
            self._turns[key] = texts = self._repeated(key[0], role) or self._separate(key[0], role)
            if len(self._turns) > _MAX_TURN_TEXTS:
                self._turns.popitem(last=False)
        return texts

    def _repeated(self, roles: Roles, role: Role) -> tuple[str, str] | None:
        """The text around a turn behind many others, from fewer of them; None if the template may write another."""
        shorter = without_middle(roles)
        if len(shorter) == len(roles) or not self._repeats_turns:
            return None
        key = (shorter, role, self._today)
        texts = self._repeated_turns.get(key)
        if texts is None or is_checked(len(roles)):
            texts = self._separate(roles, role)
            with suppress(InputError, UnsupportedModel):
                if texts != self._separate(shorter, role):
                    return texts
                self._repeated_turns[key] = texts
                if len(self._repeated_turns) > _MAX_TURN_TEXTS:
                    self._repeated_turns.popitem(last=False)
        return texts

    def num_rendered_turns(self, num_turns: int) -> int:
        """Returns how many turns are rendered, at most times but a few, for one behind `num_turns`."""
        return num_turns + 1 if num_turns <= MAX_LENGTH or not self._repeats_turns else MAX_LENGTH + 1

    @cached_property
    def _repeats_turns(self) -> bool:
        """Whether the text around a turn behind many others is that behind fewer of them, where users and assistants
        alternate."""
        many = ("user", "assistant") * _MANY_EXCHANGES
        try:
            return all(
                self._separate(turns, role) == self._separate(without_middle(turns), role)
                for turns, role in ((many, "user"), (many[:-1], "assistant"))
            )
        except (InputError, UnsupportedModel):
            return False

    def _separate(self, roles: Roles, role: Role) -> tuple[str, str]:
        """The text around a turn of `role` behind `roles`, from a rendering of all of them."""
        return self._separate_rewritten(roles, role) if self._rewrites_answers else self._separate_appended(roles, role)

    def _separate_appended(self, roles: Roles, role: Role) -> tuple[str, str]:
        before, after = self._layout(roles), self._layout((*roles, role))
        if not after.startswith(before):  # rendered without a comparison
            raise InputError(f"the chat template rewrites the turns before one of {_name(role)!r:.40}")
        prefix, suffix = after[len(before) :].split(_placeholder(len(roles)))
        if _name(role) == "assistant" and self.variables:
            prompt, _ = self._try_render(roles, add_generation_prompt=True)
            if prompt is not None and prompt.startswith(before + prefix):
                prefix = prompt[len(before) :]
        return prefix, suffix

    @cached_property
    def _rewrites_answers(self) -> bool:
        """Whether the text before an answer's content depends on whether another turn follows it."""
        last, _ = self._try_render(("user", "assistant"))
        earlier, _ = self._try_render(("user", "assistant", "user"))
        mark = _placeholder(1)
        if last is None or earlier is None or last.count(mark) != 1 or earlier.count(mark) != 1:
            return False
        return last.partition(mark)[0] != earlier.partition(mark)[0]

    def _separate_rewritten(self, roles: Roles, role: Role) -> tuple[str, str]:
        """The text before and after the last content, relative to the content before it, not to all earlier text."""
        after = self._text_between((*roles, role), len(roles), None)
        written = self._text_between(roles, len(roles) - 1, None) if roles else ""
        if _name(role) == "assistant":
            before = self._text_between(roles, len(roles) - 1, None, add_generation_prompt=True)
            if before == written:  # the template has no generation prompt
                before = self._text_between((*roles, role, "user"), len(roles) - 1, len(roles))
        else:
            before = self._text_between((*roles, role), len(roles) - 1, len(roles))
        if not before.startswith(written):
            raise InputError(f"the chat template rewrites the end of the turn before one of {_name(role)!r:.40}")
        return before[len(written) :], after

    def _text_between(self, roles: Roles, first: int, last: int | None, add_generation_prompt: bool = False) -> str:
        """The rendered text between the contents of turns `first` (-1: the text's beginning) and `last` (None: its
        end)."""
        text, error = self._try_render(roles, add_generation_prompt)
        marks = [_placeholder(turn) for turn in (first, last) if turn is not None and turn >= 0]
        if text is None or any(text.count(mark) != 1 for mark in marks):
            raise InputError(
                f"the chat template cannot take a turn of {_name(roles[-1]) if roles else 'assistant'!r:.40} after "
                f"{max(0, len(roles) - 1)} others: {error or 'it rewrites the content of a turn'}"
            )
        if first >= 0:
            text = text.partition(_placeholder(first))[2]
        return text if last is None else text.partition(_placeholder(last))[0]

    @property
    def _today(self) -> date | None:
        """Part of the cache key if the template writes the date, else None."""
        return date.today() if "strftime_now" in self.source or "datetime" in self.variable_names else None

    def _layout(self, roles: Roles) -> str:
        """Returns the rendered text of complete turns, with placeholders for their contents.

        A layout begins with the layout of one turn less:

        ()                 ""
        (user,)            "<s>[INST] #0# [/INST]"
        (user, assistant)  "<s>[INST] #0# [/INST] #1# </s>"
        """
        if not roles:
            return ""
        key = (roles, self._today)
        text = self._layouts.get(key)
        if text is None:  # the layout of one turn less is compared if it is known
            text = self._extend_layout(self._layouts.get((roles[:-1], key[1]), ""), roles)
            self._layouts[key] = text
            if len(self._layouts) > _MAX_LAYOUTS:
                self._layouts.popitem(last=False)
        return text

    def _extend_layout(self, before: str, roles: Roles) -> str:
        """Returns the layout of `roles`, given the layout of all turns but the last one."""
        placeholder = _placeholder(len(roles) - 1)
        text, error = self._try_render(roles)
        if text is not None and text.startswith(before) and text.count(placeholder) == 1:
            return text
        # The turn cannot be the last one. Render another turn after it; its suffix becomes part of that turn's prefix.
        for follower in ("user", "assistant"):
            longer, _ = self._try_render((*roles, follower))
            if longer is not None and longer.startswith(before) and longer.count(placeholder) == 1:
                return longer[: longer.index(placeholder) + len(placeholder)]
        # The content is not rendered, but the generation prompt tells how an assistant turn begins.
        if _name(roles[-1]) == "assistant":
            prompt, _ = self._try_render(roles[:-1], add_generation_prompt=True)
            if prompt is not None and prompt.startswith(before):
                return prompt + placeholder
        raise InputError(
            f"the chat template cannot take a turn of {_name(roles[-1])!r:.40} after {len(roles) - 1} others: "
            + (str(error) if error else "it rewrites the turns before it, or the turn's content")
        )

    def _try_render(self, roles: Roles, add_generation_prompt: bool = False) -> tuple[str | None, str]:
        """Returns (text, "") or (None, error message)."""
        contents = [_placeholder(i) for i in range(len(roles))]
        if any(content in self.source for content in contents):
            return None, "it contains plait's own placeholder"
        messages = [
            {"role": role, "content": content} if isinstance(role, str) else role.message(content)
            for role, content in zip(roles, contents, strict=True)
        ]
        try:
            text = self.render(messages, add_generation_prompt=add_generation_prompt)
        except InputError as error:
            return None, str(error)
        for role, content in zip(roles, contents, strict=True):
            text = text if isinstance(role, str) else role.locate(text, content)
        return text, ""


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


def _name(role: Role) -> str:
    return role if isinstance(role, str) else role.role


def _placeholder(turn: int) -> str:
    """Returns a content that templates do not trim, split or interpret."""
    return f"Qz{turn}turn{turn}zQ"
