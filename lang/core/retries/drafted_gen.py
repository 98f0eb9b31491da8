"""`gen(..., draft_then_constrain=True)`: a free draft on a fork, then the constrained value, which follows the draft.

The program's text goes on with the value alone. Method: draft-conditioned constrained decoding (arXiv 2603.03305).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from plait.lang.core.results import GenResult
from plait.lang.core.retries.question import question_after
from plait.lang.core.retries.retried_call import RetriedCall
from plait.lang.core.retries.retried_gen import begin_gen_in_steps
from plait.lang.typed.value_format import RefusedValue
from plait.runtime.errors import InputError
from plait.runtime.sampling_params import MAX_TOKENS_LIMIT

if TYPE_CHECKING:
    from plait.lang.core.branch import Branch
    from plait.lang.core.expressions import Gen
    from plait.runtime.client.call import CallResult
    from plait.runtime.sampling_params import SamplingParams

DRAFT_TOKENS = 256
_INSTRUCTION = "Give this answer again in the required form, and nothing else."


class DraftedCall(RetriedCall):
    """The draft and the value as one call. Its result is that of the value; the meta info has the draft."""

    def text_so_far(self) -> str:
        """Returns the text of the value that has arrived."""
        with self._lock:
            is_draft = not self.done() and self._num_attempts < 2
        return "" if is_draft else super().text_so_far()

    def _extra_meta(self) -> dict[str, Any]:
        return {"draft": self._metas[0]["text"]}


def checked_draft_tokens(where: str, draft: object, draft_tokens: object) -> int:
    """Returns the most tokens of the draft. Raises InputError for what is not a number of tokens."""
    if draft is not None and not isinstance(draft, bool):
        raise InputError(f"{where}: draft_then_constrain must be True or False, not {draft!r:.40}")
    if not draft:
        raise InputError(f"{where}: draft_tokens needs draft_then_constrain=True")
    if draft_tokens is None:
        return DRAFT_TOKENS
    if isinstance(draft_tokens, bool) or not isinstance(draft_tokens, int) or not 1 <= draft_tokens <= MAX_TOKENS_LIMIT:
        text = f"draft_tokens must be a number of tokens from 1 to {MAX_TOKENS_LIMIT}, not {draft_tokens!r:.40}"
        raise InputError(f"{where}: {text}")
    return draft_tokens


def begin_drafted_gen(branch: Branch, gen: Gen, params: SamplingParams, is_cut_by_budget: bool) -> None:
    """Starts the draft, and appends the text of the value, which is known later, to the branch.

    Raises what a plain gen raises.
    """

    def read(call: RetriedCall, result: CallResult) -> None:
        if not call.refused:
            raise RefusedValue("it is the draft")

    steps = (_draft_params(params, gen), params)
    ask = question_after(branch, lambda _: _INSTRUCTION)
    begin_gen_in_steps(branch, gen, steps, is_cut_by_budget, (DraftedCall, GenResult), ask, read, num_drafts=1)


def _draft_params(params: SamplingParams, gen: Gen) -> SamplingParams:
    """Returns the parameters of the draft: those of the gen without what belongs to the value."""
    free = {"min_tokens": 0, "complete": False, "if_it_fits": False, "exact": False, "particles": None}
    free |= {"logprobs": False, "top_logprobs": 0, "prompt_logprobs_from": None}
    return msgspec.structs.replace(params, max_tokens=gen.draft_tokens, **free)
