"""A session of the client: text is appended, and calls are started after it, in program order and without waiting.

Appended text is buffered until a call or a fork needs it. It is then tokenized once, as one text, and sent once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

from plait.constrained.specs import Spec
from plait.runtime.client.call import Call, ScoredChoices
from plait.runtime.errors import InputError, UnsupportedModel
from plait.runtime.messages import (
    MAX_APPEND_TOKENS,
    MAX_CHOICES,
    MAX_FORK_CHILDREN,
    MAX_REPLACED,
    Abort,
    Append,
    ClientMessage,
    Close,
    Embed,
    Fork,
    Generate,
    Select,
    SelectMethod,
    Welcome,
    trailing_text_error,
)
from plait.runtime.sampling_params import SamplingParams, check_sampling, sampling_params
from plait.runtime.similar_names import did_you_mean
from plait.runtime.tokenizer.token_healing import UNKNOWN_TAIL, TextTail, heal_choices, num_plain_bytes

if TYPE_CHECKING:
    from plait.runtime.client.client import Client


def check_adapter(name: str, model: Welcome) -> None:
    """Raises InputError for the name of an adapter that the runtime does not have; "" is the model alone."""
    if not isinstance(name, str) or (name and name not in model.adapters):
        known = ", ".join(model.adapters) or "none"
        hint = did_you_mean(str(name), model.adapters)
        raise InputError(f"there is no adapter {name!r:.100}{hint}; this runtime has {known:.500}", field="adapter")


class Session:
    """One growing text in the scheduler. Not thread-safe.

    >>> session = client.open_session()                               # doctest: +SKIP
    >>> session.append("The capital of France is")                    # doctest: +SKIP
    >>> session.generate(sampling_params(max_tokens=4)).result().text # doctest: +SKIP
    ' Paris.'
    """

    def __init__(
        self,
        client: Client,
        session_id: int,
        is_empty: bool = True,
        num_sent: int = 0,
        sent_tail: TextTail = UNKNOWN_TAIL,
        num_plain: int = 0,
    ) -> None:
        self.session_id = session_id
        self._client = client
        self._parts: list[tuple[str, bool]] = []  # not yet sent: (text, whether control tokens are recognised in it)
        self._is_empty = is_empty  # nothing was sent yet, so the BOS token comes first
        self._num_sent = num_sent  # tokens of the text, without the sampled ones
        self._sent_tail = sent_tail  # the end of the text sent; unknown after sampled tokens or `append_tokens`
        self._num_plain = num_plain  # bytes at the end of the text sent that token healing may take back
        self._closed = False
        self._calls: deque[Call] = deque()  # from the first that may still run on

    def append(self, text: str, *, control: bool = False) -> None:
        """Appends text. `control=True` is for text of the chat template, in which control tokens are recognised."""
        self._require_open()
        if not isinstance(text, str):
            raise InputError(f"a session's text must be str, not {type(text).__name__}")
        if text:
            self._parts.append((text, control))

    def append_tokens(self, token_ids: Sequence[int], plain_bytes: int = 0) -> None:
        """Appends token ids unchanged, including control tokens. Adds no BOS token.

        `plain_bytes`: how many bytes of text at their end token healing may take back, up to a control token.
        """
        self._flush(None)
        vocab_size = self._client.model.vocab_size
        has_wrong_type = not {int}.issuperset(map(type, token_ids))  # bool is wrong, too
        if has_wrong_type or (token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size):
            raise InputError(f"token ids are integers from 0 to {vocab_size - 1}")
        self._sent_tail, self._num_plain = UNKNOWN_TAIL, plain_bytes
        self._send_ids(token_ids)

    def set_next_call_name(self, name: str | None) -> None:
        """Does nothing. The sessions of `plait.testing` take the variable of the next call."""

    def generate(self, params: SamplingParams, constraint: Spec | None = None, trailing_text: str = "") -> Call:
        """Samples tokens after the text so far and appends them to it, and then `trailing_text`.

        A constrained value ends only where `trailing_text` can follow, at most 256 bytes of known text, and prefers to.
        The result and its usage are those of the value alone. With `params.exact` or `params.particles` the value does
        not depend on it.
        A lenient constraint is enforced in part; `result().violation` tells whether the text violates the rest.
        Raises InputError or UnsupportedModel before anything is sent.
        """
        self._require_lm_head()
        check_sampling(params, vocab_size=self._client.model.vocab_size)
        if constraint is not None and not isinstance(constraint, Spec):
            raise InputError(f"a constraint is a Regex, JsonSchema or other spec, not {type(constraint).__name__}")
        if params.complete and constraint is None:
            raise InputError("complete needs a constraint, which defines when a value is complete", field="complete")
        if params.samples_sequence and constraint is None:
            option = "exact" if params.exact else "particles"
            raise InputError(f"{option} needs a constraint, such as regex or json_schema", field=option)
        if params.samples_sequence and trailing_text:
            call = self.generate(params, constraint)
            self.append(trailing_text)
            return call
        if (error := trailing_text_error(trailing_text, params, constraint)) is not None:
            raise InputError(error, field="trailing_text")
        self._flush("gen")
        plain_bytes = 0 if params.token_healing is False else self._num_plain
        self._sent_tail, self._num_plain = UNKNOWN_TAIL, len(trailing_text.encode())
        self._num_sent = max(1, self._num_sent - min(plain_bytes, MAX_REPLACED))  # a lower bound
        return self._start_call(
            lambda call: Generate(self.session_id, call, params, constraint, trailing_text, plain_bytes),
            params.timeout_s,
            constraint if getattr(constraint, "lenient", False) else None,
        )

    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
        seed: int | None = None,
    ) -> Call:
        """Scores the choices after the text so far and appends the best one. `result().choice` holds the scores.

        `seed`: of the draw by the method "exact".

        Text appended since the last call is tokenized together with each choice (see `tokenizer.token_healing`), even
        if it was sent before. Tokens sampled by earlier calls are not known here and are never replaced. The call's
        `scored_choices` holds the token ids to which the logprobs of `result().choice` belong.
        """
        self._require_lm_head()
        self._check_choices(choices)
        if method not in get_args(SelectMethod):
            raise InputError(f"unknown select method {method!r:.80}; known are: {', '.join(get_args(SelectMethod))}")
        _check_timeout(timeout_s)
        self._require_open()
        healed = heal_choices(
            self._client.tokenizer, self._parts, choices, num_sent=self._num_sent, sent=self._sent_tail
        )
        token_ids, num_replaced = healed.choices, healed.num_replaced
        self._parts.clear()
        self._send_ids(self._prepend_bos(healed.ids))
        self._require_text("select")
        self._sent_tail, self._num_plain = UNKNOWN_TAIL, 0
        self._num_sent -= num_replaced  # a lower bound, whichever choice wins
        return self._start_call(
            lambda call: Select(self.session_id, call, token_ids, method, timeout_s, replaced=num_replaced, seed=seed),
            timeout_s,
            scored_choices=ScoredChoices(tuple(choices), token_ids),
        )

    def score_tokens(
        self, token_ids: Sequence[int], top_logprobs: int = 0, timeout_s: float | None = None, *, plain_bytes: int = 0
    ) -> Call:
        """Appends the tokens and scores each one after the text before it.

        `result().choice` holds their logprobs and the `top_logprobs` likeliest tokens at each position. The text so far
        must not be empty. `plain_bytes`: as in `append_tokens`.
        """
        self._require_lm_head()
        sampling_params(timeout_s=timeout_s, logprobs=True, top_logprobs=top_logprobs)  # checks both values
        self._flush("a score")
        self._sent_tail, self._num_plain = UNKNOWN_TAIL, plain_bytes
        choices = [list(token_ids)]
        return self._start_call(
            lambda call: Select(self.session_id, call, choices, timeout_s=timeout_s, top_logprobs=top_logprobs),
            timeout_s,
        )

    def embed(
        self, dimensions: int | None = None, *, normalize: bool | None = None, timeout_s: float | None = None
    ) -> Call:
        """Embeds the text so far and leaves it unchanged. `result().embedding` holds the vector.

        dimensions: keep only the first numbers of the vector, for models trained that way (Matryoshka representation
            learning, arXiv:2205.13147).
        normalize: scale the vector to unit length afterwards; None does as the model's files say.

        Adds no prompt and no special tokens; see `Client.encode_for_embedding`. Raises UnsupportedModel if the model's
        files name no pooling, InputError for a wrong argument.
        """
        info = self._client.model.embeddings
        if info is None:
            reason = self._client.model.no_embeddings_reason
            raise UnsupportedModel(f"this model defines no pooling, so it cannot compute embeddings: {reason}")
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= info.size):
            raise InputError(f"dimensions must be an integer from 1 to {info.size}, not {dimensions!r:.40}")
        if normalize is not None and not isinstance(normalize, bool):
            raise InputError(f"normalize must be True, False or None, not {normalize!r:.40}")
        _check_timeout(timeout_s)
        self._flush("an embedding")
        return self._start_call(
            lambda call: Embed(self.session_id, call, dimensions or 0, normalize, timeout_s),
            timeout_s,
        )

    def fork(self, size: int, adapter: str | None = None) -> list[Session]:
        """Opens `size` sessions that begin with the text of this one as it is now.

        adapter: the name of the one that computes them, "" for the model alone; None: this session's. With another one
        the text is computed again. Raises InputError for a name that the runtime does not have.
        """
        check_fork_size(size)
        check_adapter(adapter or "", self._client.model)
        self._flush(None)
        children = [self._fork_session(self._client.next_id()) for _ in range(size)]
        self._client.send(Fork(self.session_id, [child.session_id for child in children], adapter))
        return children

    def _fork_session(self, session_id: int) -> Session:
        return Session(
            self._client, session_id, self._is_empty, self._num_sent, self._sent_tail, num_plain=self._num_plain
        )

    def abort(self) -> None:
        """Ends the session and aborts its calls, also those that still run after `close`. Idempotent.

        Its forks go on, unless they still wait for the text of its calls.
        """
        if not self._closed or not all(call.done() for call in tuple(self._calls)):
            self._closed = True
            self._calls.clear()
            self._client.send_if_open(Abort(self.session_id))

    def close(self) -> None:
        """Ends the session when its calls are done; until then `abort` ends them. Idempotent."""
        if not self._closed:
            self._closed = True
            self._client.send_if_open(Close(self.session_id))

    def _start_call(
        self,
        request: Callable[[int], ClientMessage],
        timeout_s: float | None,
        lenient_constraint: Spec | None = None,
        scored_choices: ScoredChoices | None = None,
    ) -> Call:
        while self._calls and self._calls[0].done():
            self._calls.popleft()
        call = self._client.start_call(self.session_id, request, timeout_s, lenient_constraint, scored_choices)
        self._calls.append(call)
        return call

    def _flush(self, needed_by: str | None) -> None:
        """Tokenizes and sends the buffered text. For a call, `needed_by` names it, and the text must not be empty."""
        self._require_open()
        if self._parts:
            token_ids = self._client.tokenizer.encode(self._parts, at_start=self._is_empty)
            self._sent_tail = self._sent_tail.extend(self._parts, token_ids)
            self._num_plain = num_plain_bytes(self._parts, self._num_plain)
            self._parts.clear()
            self._send_ids(self._prepend_bos(token_ids))
        if needed_by:
            self._require_text(needed_by)

    def _require_text(self, needed_by: str) -> None:
        if self._is_empty:
            raise InputError(f"the prompt is empty: add text before {needed_by}")

    def _prepend_bos(self, token_ids: list[int]) -> list[int]:
        """Prepends the BOS token if these are the first ids of the session and the model wants it."""
        tokenizer = self._client.tokenizer
        bos = tokenizer.bos_id if self._is_empty and tokenizer.add_bos else None
        return token_ids if bos is None or token_ids[:1] in ([], [bos]) else [bos, *token_ids]

    def _send_ids(self, token_ids: Sequence[int]) -> None:
        """Sends the ids in chunks. Stops after the chunk that overflows the context, since every later call fails."""
        for start in range(0, len(token_ids), MAX_APPEND_TOKENS):
            if self._num_sent > self._client.model.context_length:
                return
            chunk = list(token_ids[start : start + MAX_APPEND_TOKENS])
            self._client.send(Append(self.session_id, chunk))
            self._num_sent += len(chunk)
            self._is_empty = False

    def _check_choices(self, choices: Sequence[str]) -> None:
        if isinstance(choices, str) or not choices or len(choices) > MAX_CHOICES:
            raise InputError(f"select takes a list of 1 to {MAX_CHOICES} choices, not {choices!r:.80}")
        for choice in choices:
            if not isinstance(choice, str) or not choice:
                raise InputError(f"choices must be non-empty text, not {choice!r:.80}")
        if len(set(choices)) != len(choices):
            duplicate = next(choice for i, choice in enumerate(choices) if choice in choices[:i])
            raise InputError(f"the choice {duplicate!r:.80} is given twice")

    def _require_lm_head(self) -> None:
        if not self._client.model.can_generate:
            raise UnsupportedModel("this model has no output head: it computes embeddings and cannot generate text")

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("this session is closed")


def _check_timeout(timeout_s: float | None) -> None:
    """Raises InputError for a wrong timeout, by the rule of the sampling parameters."""
    if timeout_s is not None:
        sampling_params(timeout_s=timeout_s)


def check_fork_size(size: object) -> None:
    """Raises InputError unless `size` is a number of branches that one fork can have."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_FORK_CHILDREN:
        raise InputError(f"fork takes a number of branches from 1 to {MAX_FORK_CHILDREN}, not {size!r}")
