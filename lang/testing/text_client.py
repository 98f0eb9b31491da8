"""The client and the sessions of a backend without a model: a session stores its text, and each call ends at once.

Since a call has ended when the next instruction comes, a session knows the full prompt of each call. So calls are
answered in the order in which the program makes them, without a thread.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

from plait.constrained.specs import Spec
from plait.lang.backends.without_runtime import CallRequest, ClientWithoutRuntime, SessionWithoutRuntime, TextCall
from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call
from plait.runtime.client.client import server_info
from plait.runtime.errors import CallFailed, InputError
from plait.runtime.messages import PROTOCOL, FinishReason, SelectMethod, Status, Welcome
from plait.runtime.sampling_params import SamplingParams
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import AddedToken, Backends, TokenizerDefinition, unicode_to_byte
from plait.runtime.tokenizer.tokenizer import Tokenizer

_WORD = re.compile(r"\s*\S+|\s+\Z")


@dataclass(frozen=True)
class Asked:
    """One call that a program made. `prompt` is the whole text before it, chat template included. A gen has `params`
    and perhaps a `constraint`; a select has `choices` and `method`. `adapter`: what computes it, "" is the model alone.
    """

    name: str | None
    prompt: str
    params: SamplingParams
    constraint: Spec | None = None
    choices: tuple[str, ...] | None = None
    method: SelectMethod | None = None
    adapter: str = ""

    @property
    def kind(self) -> str:
        """ "gen" or "select"."""
        return "gen" if self.choices is None else "select"


@dataclass(frozen=True)
class Outcome:
    """The result of a call. `num_tokens`: if not those of the usage. `extra_meta`: additional meta info. The text is
    streamed word by word."""

    text: str
    finish_reason: FinishReason = "stop"
    matched: str | int | None = None
    usage: Usage | None = None
    num_tokens: int | None = None
    extra_meta: dict[str, Any] | None = None
    lenient_constraint: Spec | None = None


class TextClient(ClientWithoutRuntime):
    """A client without a runtime. Subclasses implement `answer`, which returns the result of each call."""

    def __init__(self, tokenizer: Tokenizer, model_path: str, context_length: int = 1 << 20) -> None:
        super().__init__(Welcome(PROTOCOL, model_path, 1 << 31, context_length, 0), tokenizer)

    @abstractmethod
    def answer(self, asked: Asked) -> Outcome:
        """Returns the result of a call. If it raises CallFailed, the call fails; any other exception is raised at the
        line of the program that made the call."""

    def open_session(self, *, program: int | None = None) -> TextSession:
        return TextSession(self)

    def status(self) -> Status:
        """Returns the counters of a runtime, all 0."""
        return Status(**dict.fromkeys(Status.__struct_fields__, 0))

    def flush_cache(self) -> Status:
        return self.status()

    def server_info(self) -> dict[str, Any]:
        return server_info(self.model, self.status())


class TextSession(SessionWithoutRuntime):
    """One growing text. `seen`: how many of its words an earlier call has read; they count as cached tokens."""

    def __init__(
        self,
        client: TextClient,
        text: str = "",
        seen: int = 0,
        failed: CallFailed | None = None,
        adapter: str = "",
    ) -> None:
        super().__init__(client)
        self._client, self._adapter = client, adapter
        self._text = text
        self._num_words_seen = seen
        self._failed = failed
        self._name: str | None = None

    def _has_prompt(self) -> bool:
        return bool(self._text)

    def set_next_call_name(self, name: str | None) -> None:
        """Sets the variable of the next call."""
        self._name = name

    def append(self, text: str, *, control: bool = False) -> None:
        self._require_open()
        if not isinstance(text, str):
            raise InputError(f"a session's text must be str, not {type(text).__name__}")
        self._text += text

    def _children(self, size: int, adapter: str | None) -> list[TextSession]:
        state = self._client, self._text, self._num_words_seen, self._failed
        return [TextSession(*state, self._adapter if adapter is None else adapter) for _ in range(size)]

    def _begin(self, request: CallRequest) -> Call:
        asked = Asked(self._name, self._text, *request, self._adapter)
        self._name = None
        call = TextCall(self._client, request.params.timeout_s)
        try:
            self._raise_if_failed()
            outcome = self._client.answer(asked)
        except CallFailed as error:
            self._failed = self._failed or error
            call.on_failed(error)
            return call
        usage = outcome.usage or self._usage(asked, outcome.text)
        num_tokens = usage.completion_tokens if outcome.num_tokens is None else outcome.num_tokens
        call.on_text(*words(outcome.text), num_tokens=num_tokens)
        reason, matched = outcome.finish_reason, outcome.matched
        call.on_result(reason, usage, matched, outcome.extra_meta, outcome.lenient_constraint)
        self._text += outcome.text
        self._num_words_seen = len(words(self._text))
        return call

    def _usage(self, asked: Asked, text: str) -> Usage:
        """Returns token counts in words. Words that an earlier call of this text has read are cached."""
        num_prompt = len(words(asked.prompt))
        cached = min(self._num_words_seen, num_prompt)
        completion = 0 if asked.choices is not None else len(words(text))
        return Usage(num_prompt, cached, num_prompt - cached, 0, completion)


def words(text: str) -> list[str]:
    """Splits `text` into words, each with the white space before it. They are the tokens of a backend without a model.

    >>> words("The sky is blue. ")
    ['The', ' sky', ' is', ' blue.', ' ']
    """
    return _WORD.findall(text)


def byte_tokenizer(template: ChatTemplate | None, control_texts: Iterable[str]) -> Tokenizer:
    """Returns a tokenizer with one token per byte and one per control text."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=unicode_to_byte(), merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    control = {text: 256 + index for index, text in enumerate(control_texts)}
    return Tokenizer(
        TokenizerDefinition(
            backends=Backends.of(backend, backend),
            prefix_after_control=False,
            added_tokens={text: AddedToken(token) for text, token in control.items()},
            control_ids=frozenset(control.values()),
            token_bytes=(*(bytes([byte]) for byte in range(256)), *[b""] * len(control)),
            eos_ids=(),
            bos_id=None,
            add_bos=False,
            chat_template=template,
        )
    )
