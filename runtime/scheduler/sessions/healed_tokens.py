"""Token healing at the start of a call: the last tokens of its prompt are removed, to be sampled again."""

from __future__ import annotations

from plait.constrained import Vocabulary
from plait.runtime.batch.healing import Healing
from plait.runtime.kv_cache.prefix_cache import PrefixCache
from plait.runtime.messages import MAX_REPLACED, Generate
from plait.runtime.scheduler.sessions.session import Session
from plait.runtime.tokenizer.token_healing import num_healed_tokens


def remove_healed_tokens(
    session: Session, message: Generate, is_default: bool, vocabulary: Vocabulary, cache: PrefixCache
) -> Healing | None:
    """Removes the last prompt tokens that will be sampled again. Returns None if there are none.

    is_default: whether a call heals that does not say it.
    """
    params = message.sampling
    is_enabled = is_default if params.token_healing is None else params.token_healing
    if not (is_enabled and message.plain_bytes and params.max_tokens):
        return None
    if params.samples_sequence or params.prompt_logprobs_from is not None:
        return None
    last: list[int] = session.seq.tokens.view()[1:][-MAX_REPLACED:].tolist()  # the first token always stays
    count = num_healed_tokens(last, vocabulary, message.plain_bytes)
    if not count:
        return None
    removed, start = last[-count:], len(session.seq) - count
    cache.truncate_idle(session.seq, start)
    return Healing(start, removed, b"".join(vocabulary.token_bytes[token] for token in removed))
