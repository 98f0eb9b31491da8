"""Token healing: a token may span the border between a text and what a call writes behind it.

A gen takes back the last tokens of the text, and the scheduler samples their text again with what follows. Of a select,
the choices are tokenized together with the end of the text before them.

"It is " and "red" meet in the token " red". A model has hardly ever seen "It is", " ", "red", so with separate
tokenization the best choice can lose. Therefore the last tokens of the text are tokenized again together with each
choice. Tokens that change for any choice are replaced for all choices, so that all are compared from the same
character on. SGLang's select does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from plait.runtime.messages import MAX_REPLACED

if TYPE_CHECKING:
    from plait.constrained.tokens.vocabulary import Vocabulary
    from plait.runtime.tokenizer.tokenizer import Tokenizer

MAX_HEALED_TOKENS = MAX_REPLACED  # last tokens of a text that are tokenized again
MAX_TAIL_CHARS = 1024


class TextTail(NamedTuple):
    """The end of a text: its last ids (at most MAX_HEALED_TOKENS), and the plain text that the last of them encode.

    After sampled tokens or tokens appended as ids the end is `UNKNOWN_TAIL`.
    """

    ids: tuple[int, ...] = ()
    text: str = ""

    def extend(self, parts: Sequence[tuple[str, bool]], ids: Sequence[int]) -> TextTail:
        """Returns the tail after appending `parts`, whose ids are `ids`.

        >>> TextTail((5,), "It").extend([(" is", False)], [6])
        TextTail(ids=(5, 6), text='It is')
        """
        plain_texts = [text for text, _ in takewhile(lambda part: not part[1], reversed(parts))]
        before = [self.text] if len(plain_texts) == len(parts) else []
        plain_end = "".join([*before, *reversed(plain_texts)])
        return TextTail((*self.ids, *ids)[-MAX_HEALED_TOKENS:], plain_end[-MAX_TAIL_CHARS:])


UNKNOWN_TAIL = TextTail()


def num_plain_bytes(parts: Sequence[tuple[str, bool]], num_before: int = 0) -> int:
    """Returns how many bytes at the end of `parts` are plain text. `num_before`: those at the end of the text before.

    >>> num_plain_bytes([("<|im_start|>assistant", True), ("It is", False)])
    5
    """
    plain_texts = [text for text, _ in takewhile(lambda part: not part[1], reversed(parts))]
    num_bytes = sum(len(text.encode(errors="replace")) for text in plain_texts)
    return num_bytes + num_before if len(plain_texts) == len(parts) else num_bytes


def num_healed_tokens(token_ids: Sequence[int], vocabulary: Vocabulary, max_bytes: int) -> int:
    """Returns how many last tokens token healing takes back: the most whose text begins some longer token.

    They spell at most `max_bytes` bytes, and none of them is a control token.

    >>> num_healed_tokens(tokenizer.encode_plain("see http:"), tokenizer.vocabulary, 9)     # doctest: +SKIP
    1
    """
    text, found = b"", 0
    for count, token in enumerate(reversed(token_ids), 1):
        data = vocabulary.token_bytes[token]
        text = data + text
        if not data or len(text) > max_bytes:
            break
        if vocabulary.is_proper_prefix_of_token(text):
            found = count
    return found


class HealedChoices(NamedTuple):
    """The ids of the parts, how many last ids of the text the choices replace, and the ids of each choice.

    `ids` includes the replaced ones, so that the text is complete even if the select fails.
    """

    ids: list[int]
    num_replaced: int
    choices: list[list[int]]


def heal_choices(
    tokenizer: Tokenizer,
    parts: Sequence[tuple[str, bool]],
    choices: Sequence[str],
    *,
    num_sent: int = 0,
    sent: TextTail = UNKNOWN_TAIL,
) -> HealedChoices:
    """Tokenizes `parts` and the choices after them, with token healing at the border.

    `parts` are (text, control) as in `Tokenizer.encode`. `num_sent` tokens precede them and end with the tail `sent`;
    some of these are replaced if `parts` are too short. At least one token of the text is never replaced.

    >>> heal_choices(tokenizer, [("It is ", False)], ["red", "blue"])              # doctest: +SKIP
    HealedChoices(ids=[1589, 314, 216], num_replaced=1, choices=[[1928], [4461]])
    """
    ids = tokenizer.encode(parts, at_start=not num_sent)
    unhealed = HealedChoices(ids, 0, [tokenizer.encode_plain(choice) for choice in choices])
    tail = _tail(tokenizer, sent.extend(parts, ids))
    if not tail:
        return unhealed
    tail_ids = tokenizer.encode_plain(tail)
    joined_ids = [tokenizer.encode_plain(tail + choice) for choice in choices]
    num_common = min(common_prefix_length(tail_ids, joined) for joined in joined_ids)
    choice_ids = [joined[num_common:] for joined in joined_ids]
    num_replaced = len(tail_ids) - num_common
    if num_replaced >= num_sent + len(ids) or not all(choice_ids):
        return unhealed
    return HealedChoices(ids, num_replaced, choice_ids)


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the length of the longest common prefix.

    >>> common_prefix_length([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(one, other, strict=False)  # the lengths may differ
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _tail(tokenizer: Tokenizer, tail: TextTail) -> str:
    """Returns the text of as many last ids as are plain text and give the same ids when tokenized alone, or ""."""
    for size in range(len(tail.ids), 0, -1):
        ids = list(tail.ids[-size:])
        data = b"".join(tokenizer.vocabulary.token_bytes[token_id] for token_id in ids)
        text = data.decode(errors="replace")
        if text and tail.text.endswith(text) and tokenizer.encode_plain(text) == ids:
            return text
    return ""
