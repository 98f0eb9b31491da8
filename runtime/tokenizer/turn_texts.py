"""The text that a chat template writes before and after the content of one turn.

It is found by rendering placeholder contents and reading the text around them. So a program can extend a conversation
without rendering it again, and the template's text, which may contain control tokens, stays separate from all other
text.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date
from functools import cached_property
from typing import Any, Protocol

from plait.runtime.errors import InputError, UnsupportedModel
from plait.runtime.tokenizer.repeated_turns import MAX_LENGTH, is_checked, without_middle

MAX_TURNS = 1024
_MAX_LAYOUTS = 64
_MAX_TURN_TEXTS = 4096
_MANY_EXCHANGES = 96  # after which a template is compared
_UNFINISHED_MARK = re.compile(r"[<\[][^>\]]*\Z")


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


class TurnTexts:
    """The texts around the turns of one template. Thread-safe.

    render: renders messages, with `add_generation_prompt`. source: of the template. begins_with_prompt: an assistant
    turn begins with the generation prompt where that only adds to the turn's beginning. is_dated: the template writes
    the date.
    """

    def __init__(
        self, render: Callable[..., str], source: str, *, begins_with_prompt: bool = False, is_dated: bool = False
    ) -> None:
        self._render, self._source = render, source
        self._begins_with_prompt, self._is_dated = begins_with_prompt, is_dated
        self._lock = threading.Lock()
        self._layouts: OrderedDict[tuple[Roles, date | None], str] = OrderedDict()
        self._repeated_turns: OrderedDict[tuple[Roles, Role, date | None], tuple[str, str]] = OrderedDict()
        self._turns: OrderedDict[tuple[Roles, Role, date | None], tuple[str, str]] = OrderedDict()

    def around(self, roles: Sequence[Role], role: Role) -> tuple[str, str]:
        """Returns the text before and after the content of a `role` turn behind complete turns of `roles`.

        Raises InputError if the turns cannot be separated.
        """
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
        return self._separate_appended(roles, role) if self._appends else self._separate_rewritten(roles, role)

    def _separate_appended(self, roles: Roles, role: Role) -> tuple[str, str]:
        before, after = self._layout(roles), self._layout((*roles, role))
        if not after.startswith(before):  # rendered without a comparison
            raise InputError(f"the chat template rewrites the turns before one of {_name(role)!r:.40}")
        prefix, suffix = after[len(before) :].split(_placeholder(len(roles)))
        if _name(role) == "assistant" and self._begins_with_prompt:
            prompt, _ = self._try_render(roles, add_generation_prompt=True)
            if prompt is not None and prompt.startswith(before + prefix):
                prefix = prompt[len(before) :]
        return prefix, suffix

    @cached_property
    def _appends(self) -> bool:
        """Whether the text around an answer is the same if another turn follows it; it may then go on."""
        mark = _placeholder(1)
        last, _ = self._try_render(("user", "assistant"))
        earlier, _ = self._try_render(("user", "assistant", "user"))
        if last is None or earlier is None or last.count(mark) != 1 or earlier.count(mark) != 1:
            return True
        (before, _, after), (earlier_before, _, earlier_after) = last.partition(mark), earlier.partition(mark)
        return before == earlier_before and earlier_after.startswith(after)

    def _separate_rewritten(self, roles: Roles, role: Role) -> tuple[str, str]:
        """The text before and after the last content, relative to the content before it, not to all earlier text."""
        written = self._end_of_turn(roles) if roles else ""
        if _name(role) == "assistant":
            before = self._text_between(roles, len(roles) - 1, None, add_generation_prompt=True)
            if before == self._text_between(roles, len(roles) - 1, None):  # the template has no generation prompt
                before = self._text_between((*roles, role, "user"), len(roles) - 1, len(roles))
        else:
            try:
                before = self._text_between((*roles, role), len(roles) - 1, len(roles))
            except InputError:  # it cannot be the last turn
                before = self._text_between((*roles, role, "user"), len(roles) - 1, len(roles))
        if not before.startswith(written):
            raise InputError(f"the chat template rewrites the end of the turn before one of {_name(role)!r:.40}")
        return before[len(written) :], self._end_of_turn((*roles, role))

    def _end_of_turn(self, roles: Roles) -> str:
        """The text after the last content, without the end of the conversation, which another turn would replace; ""
        if the turn cannot be the last one. That text is then part of the next turn's beginning."""
        try:
            end = self._text_between(roles, len(roles) - 1, None)
        except InputError:
            if self._try_render((*roles, "user"))[0] is None:
                raise
            return ""
        try:
            follower = "user" if _name(roles[-1]) == "assistant" else "assistant"
            followed = self._text_between((*roles, follower), len(roles) - 1, len(roles))
        except InputError:
            return end
        if followed.startswith(end):
            return end
        common = next(n for n in range(len(end)) if not followed.startswith(end[: n + 1]))
        return _UNFINISHED_MARK.sub("", end[:common])

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
        return date.today() if self._is_dated else None

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
        if any(content in self._source for content in contents):
            return None, "it contains plait's own placeholder"
        messages = [
            {"role": role, "content": content} if isinstance(role, str) else role.message(content)
            for role, content in zip(roles, contents, strict=True)
        ]
        try:
            text = self._render(messages, add_generation_prompt=add_generation_prompt)
        except InputError as error:
            return None, str(error)
        for role, content in zip(roles, contents, strict=True):
            text = text if isinstance(role, str) else role.locate(text, content)
        return text, ""


def _name(role: Role) -> str:
    return role if isinstance(role, str) else role.role


def _placeholder(turn: int) -> str:
    """Returns a content that templates do not trim, split or interpret."""
    return f"Qz{turn}turn{turn}zQ"
