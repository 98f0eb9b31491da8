"""A session as a client sees it: text goes in, calls come out, in program order, without waiting.

Text is kept back until a call or a fork needs it and is then tokenized once, together with its neighbours, and
never again. Only the text added since is ever sent.

Knows: text, tokenizing, and the order of instructions. Must not know: threads, sockets, or chat roles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, get_args

from plait.constrained.specs import Spec
from plait.runtime.client.call import Call, ScoredChoices
from plait.runtime.errors import InputError, UnsupportedModel
from plait.runtime.messages import (
    MAX_APPEND_TOKENS,
    MAX_CHOICES,
    MAX_FORK_CHILDREN,
    Abort,
    Append,
    Close,
    Embed,
    Fork,
    Generate,
    Select,
    SelectMethod,
)
from plait.runtime.sampling_params import SamplingParams, check_sampling, sampling_params
from plait.runtime.tokenizer.token_healing import UNKNOWN_TAIL, TextTail, heal_choices

if TYPE_CHECKING:
    from plait.runtime.client.client import Client


class Session:
    """One growing text in the scheduler.

    >>> session = client.open_session()                               # doctest: +SKIP
    >>> session.append("The capital of France is")                    # doctest: +SKIP
    >>> session.generate(sampling_params(max_tokens=4)).result().text # doctest: +SKIP
    ' Paris.'
    """

    def __init__(
        self, client: Client, session_id: int, is_empty: bool = True, num_sent: int = 0, sent: TextTail = UNKNOWN_TAIL
    ) -> None:
        self.session_id = session_id
        self._client = client
        self._parts: list[tuple[str, bool]] = []  # (text, is the chat template's own) not yet sent
        self._is_empty = is_empty  # nothing was sent: a BOS is still owed
        self._num_sent = num_sent  # tokens of the text, less what was sampled
        self._sent = sent  # how the text ends that was sent, where it ends with text of the program's
        self._closed = False

    def append(self, text: str, *, control: bool = False) -> None:
        """Adds text. `control=True` is for the chat template's own text, where control tokens are recognised."""
        self._require_open()
        if not isinstance(text, str):
            raise InputError(f"a session's text must be str, not {type(text).__name__}")
        if text:
            self._parts.append((text, control))

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        """Adds tokens as they are, control tokens too, and no BOS: for a caller who has tokenized the text itself."""
        self._flush(None)
        width = self._client.model.vocab_size
        is_wrong = not {int}.issuperset(map(type, token_ids))  # bool is another type
        if is_wrong or (token_ids and not 0 <= min(token_ids) <= max(token_ids) < width):
            raise InputError(f"token ids are integers from 0 to {width - 1}")
        self._sent = UNKNOWN_TAIL
        self._send_ids(token_ids)

    def generate(self, params: SamplingParams, constraint: Spec | None = None) -> Call:
        """Samples after the text so far. The text goes on with what was sampled.

        What a lenient constraint leaves open is checked when the result is read: `result().violation`.
        """
        self._require_lm_head()
        check_sampling(params, vocab_size=self._client.model.vocab_size)
        if constraint is not None and not isinstance(constraint, Spec):
            raise InputError(f"a constraint is a Regex, JsonSchema or other spec, not {type(constraint).__name__}")
        if params.complete and constraint is None:
            raise InputError("complete needs a constraint: only that says when a value is whole")
        self._flush("gen")
        self._sent = UNKNOWN_TAIL
        return self._client.start_call(
            self.session_id,
            lambda call: Generate(self.session_id, call, params, constraint),
            params.timeout_s,
            constraint if getattr(constraint, "lenient", False) else None,
        )

    def select(
        self,
        choices: Sequence[str],
        method: SelectMethod = "token_length_normalized",
        timeout_s: float | None = None,
    ) -> Call:
        """Scores the choices after the text so far and appends the best; `result().choice` has the scores.

        What was appended since the last call is tokenized as one with them (`plait.runtime.tokenizer.token_healing`), sent or
        not. What a call wrote is not: its tokens are not known yet, and stay as they were chosen.
        `scored_choices` of the call: the ids whose logprobs `result().choice` holds.
        """
        self._require_lm_head()
        self._check_choices(choices)
        if method not in get_args(SelectMethod):
            raise InputError(f"unknown select method {method!r:.80}; known are: {', '.join(get_args(SelectMethod))}")
        if timeout_s is not None:
            sampling_params(timeout_s=timeout_s)  # the one validator of timeouts
        self._require_open()
        made = heal_choices(self._client.tokenizer, self._parts, choices, num_sent=self._num_sent, sent=self._sent)
        token_ids, num_replaced = made.choices, made.num_replaced
        self._parts.clear()
        self._send_ids(self._prepend_bos(made.ids))
        self._require_text("select")
        self._sent = UNKNOWN_TAIL
        self._num_sent -= num_replaced  # at least so many stay, whichever choice wins
        return self._client.start_call(
            self.session_id,
            lambda call: Select(self.session_id, call, token_ids, method, timeout_s, replaced=num_replaced),
            timeout_s,
            scored_choices=ScoredChoices(tuple(choices), token_ids),
        )

    def score_tokens(self, token_ids: Sequence[int], top_logprobs: int = 0, timeout_s: float | None = None) -> Call:
        """Appends the tokens; `result().choice` has the logprob of each after what stands before it, and the likeliest
        tokens there. The text so far must not be empty."""
        self._require_lm_head()
        sampling_params(timeout_s=timeout_s, logprobs=True, top_logprobs=top_logprobs)  # the one validator
        self._flush("a score")
        self._sent = UNKNOWN_TAIL
        choices = [list(token_ids)]
        return self._client.start_call(
            self.session_id,
            lambda call: Select(self.session_id, call, choices, timeout_s=timeout_s, top_logprobs=top_logprobs),
            timeout_s,
        )

    def embed(
        self, dimensions: int | None = None, *, normalize: bool | None = None, timeout_s: float | None = None
    ) -> Call:
        """Makes one vector of the text so far, which stays as it is; `result().embedding` has it.

        `dimensions`: only so many of its first numbers (all that a model trained for it needs: Matryoshka, see
        arXiv:2205.13147). `normalize`: whether its length is then made 1; None: where the model's files say so.
        Nothing is put around the text; `client.encode_for_embedding` does that. UnsupportedModel where the files name no
        pooling.
        """
        made = self._client.model.embeddings
        if made is None:
            why = self._client.model.no_embeddings_reason
            raise UnsupportedModel(f"this model has no pooling, so it gives no embeddings: {why}")
        if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= made.size):
            raise InputError(f"dimensions must be an integer from 1 to {made.size}, not {dimensions!r:.40}")
        if normalize is not None and not isinstance(normalize, bool):
            raise InputError(f"normalize must be True, False or None, not {normalize!r:.40}")
        if timeout_s is not None:
            sampling_params(timeout_s=timeout_s)  # the one validator of timeouts
        self._flush("an embedding")
        return self._client.start_call(
            self.session_id,
            lambda call: Embed(self.session_id, call, dimensions or 0, normalize, timeout_s),
            timeout_s,
        )

    def fork(self, size: int) -> list[Session]:
        """`size` sessions that begin with this one's text as it stands here in the program."""
        check_fork_size(size)
        self._flush(None)
        children = [
            Session(self._client, self._client.next_id(), self._is_empty, self._num_sent, self._sent)
            for _ in range(size)
        ]
        self._client.send(Fork(self.session_id, [child.session_id for child in children]))
        return children

    def abort(self) -> None:
        """Ends the session and its calls at once."""
        if not self._closed:
            self._closed = True
            self._client.send_if_open(Abort(self.session_id))

    def close(self) -> None:
        """Lets the session go once its calls are done. Idempotent."""
        if not self._closed:
            self._closed = True
            self._client.send_if_open(Close(self.session_id))

    def _flush(self, needed_by: str | None) -> None:
        """Sends the text kept back. A call (not a fork) needs at least one token before it."""
        self._require_open()
        if self._parts:
            token_ids = self._client.tokenizer.encode(self._parts, at_start=self._is_empty)
            self._sent = self._sent.extend(self._parts, token_ids)
            self._parts.clear()
            self._send_ids(self._prepend_bos(token_ids))
        if needed_by:
            self._require_text(needed_by)

    def _require_text(self, needed_by: str) -> None:
        if self._is_empty:
            raise InputError(f"the prompt is empty: add text before {needed_by}")

    def _prepend_bos(self, token_ids: list[int]) -> list[int]:
        """The ids of text, the first of a session behind the tokenizer's BOS."""
        tokenizer = self._client.tokenizer
        bos = tokenizer.bos_id if self._is_empty and tokenizer.add_bos else None
        return token_ids if bos is None or token_ids[:1] in ([], [bos]) else [bos, *token_ids]

    def _send_ids(self, token_ids: Sequence[int]) -> None:
        """In pieces. Behind the piece that overflows the context nothing is sent: no call can come after it."""
        for at in range(0, len(token_ids), MAX_APPEND_TOKENS):
            if self._num_sent > self._client.model.context_length:
                return
            piece = list(token_ids[at : at + MAX_APPEND_TOKENS])
            self._client.send(Append(self.session_id, piece))
            self._num_sent += len(piece)
            self._is_empty = False

    def _check_choices(self, choices: Sequence[str]) -> None:
        if isinstance(choices, str) or not choices or len(choices) > MAX_CHOICES:
            raise InputError(f"select takes a list of 1 to {MAX_CHOICES} choices, not {choices!r:.80}")
        for choice in choices:
            if not isinstance(choice, str) or not choice:
                raise InputError(f"choices must be non-empty text, not {choice!r:.80}")
        if len(set(choices)) != len(choices):
            twice = next(c for i, c in enumerate(choices) if c in choices[:i])
            raise InputError(f"the choice {twice!r:.80} is given twice")

    def _require_lm_head(self) -> None:
        if not self._client.model.can_generate:
            raise UnsupportedModel("this model has no output head: it gives embeddings, and generates no text")

    def _require_open(self) -> None:
        if self._closed:
            raise InputError("this session is closed")


def check_fork_size(size: object) -> None:
    """Raises InputError unless `size` is a number of branches that one fork can have."""
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_FORK_CHILDREN:
        raise InputError(f"fork takes a number of branches from 1 to {MAX_FORK_CHILDREN}, not {size!r}")
