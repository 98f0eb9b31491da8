"""The client and the sessions of a backend without a model: a session stores its text, and each call ends at once.

Since a call has ended when the next instruction comes, a session knows the full prompt of each call. So calls are
answered in the order in which the program makes them, without a thread.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import tokenizers

from plait.constrained.specs import Spec
from plait.lang.backends.without_runtime import ClientWithoutRuntime, SessionWithoutRuntime, refuse_adapter
from plait.runtime.call_reports import Usage
from plait.runtime.client.call import Call, CallResult
from plait.runtime.client.client import server_info
from plait.runtime.client.session import check_fork_size
from plait.runtime.errors import Aborted, CallFailed, InputError
from plait.runtime.messages import PROTOCOL, FinishReason, SelectMethod, Status, Welcome
from plait.runtime.sampling_params import SamplingParams, check_sampling, sampling_params
from plait.runtime.tokenizer.chat_template import ChatTemplate
from plait.runtime.tokenizer.definition import AddedToken, Backends, TokenizerDefinition, unicode_to_byte
from plait.runtime.tokenizer.detokenizer import Detokenizer
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
    """The result of a call. `extra_meta`: additional meta info. The text is streamed word by word."""

    text: str
    finish_reason: FinishReason = "stop"
    matched: str | int | None = None
    usage: Usage | None = None
    token_ids: tuple[int, ...] | None = None
    extra_meta: dict[str, Any] | None = None
    lenient_constraint: Spec | None = None


class TextCall(Call):
    """A call that is answered with text."""

    def __init__(self, call_id: int, detokenizer: Detokenizer, timeout_s: float | None) -> None:
        super().__init__(call_id, detokenizer, lambda: self.on_failed(Aborted("the call was aborted")), timeout_s)

    def answer(self, outcome: Outcome, usage: Usage) -> None:
        """Ends the call with `outcome`."""
        ids = list(outcome.token_ids if outcome.token_ids is not None else range(usage.completion_tokens))
        result = CallResult(
            outcome.text,
            outcome.finish_reason,
            usage,
            outcome.matched,
            ids,
            extra_meta=outcome.extra_meta,
            lenient_constraint=outcome.lenient_constraint,
        )
        with self._changed:
            self._pieces.extend(words(outcome.text))
            self._token_ids.extend(ids)
            self._result = result
            self._notify()


class TextClient(ClientWithoutRuntime):
    """A client without a runtime. Subclasses implement `answer`, which returns the result of each call.

    has_adapters: whether calls may name one.
    """

    has_adapters = False

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
        super().__init__()
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

    def generate(self, params: SamplingParams, constraint: Spec | None = None, trailing_text: str = "") -> Call:
        """`trailing_text` is always empty, since the client does not take it."""
        check_sampling(params)
        if params.complete and constraint is None:
            raise InputError("complete needs a constraint, which defines when a value is complete")
        self._require_text("gen")
        return self._begin(Asked(self._name, self._text, params, constraint, adapter=self._adapter), params.timeout_s)

    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Call:
        if method not in get_args(SelectMethod):
            raise InputError(f"unknown select method {method!r:.80}; known are: {', '.join(get_args(SelectMethod))}")
        params = sampling_params(timeout_s=timeout_s, seed=seed)
        self._require_text("select")
        asked = Asked(self._name, self._text, params, None, tuple(choices), method, self._adapter)
        return self._begin(asked, timeout_s)

    def fork(self, size: int, adapter: str | None = None) -> list[TextSession]:
        check_fork_size(size)
        if not self._client.has_adapters:
            refuse_adapter(adapter)
        self._require_open()
        state = self._client, self._text, self._num_words_seen, self._failed
        return [TextSession(*state, self._adapter if adapter is None else adapter) for _ in range(size)]

    def _begin(self, asked: Asked, timeout_s: float | None) -> Call:
        self._name = None
        call = TextCall(self._client.next_id(), Detokenizer(self._client.tokenizer.vocabulary), timeout_s)
        try:
            self._raise_if_failed()
            outcome = self._client.answer(asked)
        except CallFailed as error:
            self._failed = self._failed or error
            call.on_failed(error)
            return call
        call.answer(outcome, outcome.usage or self._usage(asked, outcome.text))
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
