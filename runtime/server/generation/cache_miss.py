"""Why an answer's prompt was computed and not found in the prefix cache, for requests that ask for it.

A request asks with the header `x-plait-cache-miss: 1`. The report has text of the request's own prompt only: never of
what is cached, in which other requests of the same key may have a part. Nothing of it is logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from plait.runtime.call_reports import MissReason
from plait.runtime.client.call import CallResult
from plait.runtime.client.client import Client
from plait.runtime.server.generation.logprobs import text_of_tokens
from plait.runtime.server.in_flight import current_request

HEADER = "x-plait-cache-miss"
CONTEXT_TOKENS = 8  # of the prompt, on each side of the position


class CacheMissReport(msgspec.Struct):
    """Where a prompt parted from the nearest cached prefix of its key and salt: an extension field of an answer.

    position: the number of tokens that were cached; reason: see `call_reports.CacheMiss`. before, after: the last
    tokens of this request's prompt before that position, and the first ones from it on, as text; missing in calls of
    programs.
    """

    position: int
    reason: MissReason
    before: str | UnsetType = UNSET
    after: str | UnsetType = UNSET


def is_wanted(headers: Mapping[str, str]) -> bool:
    """Whether a request asks for the report."""
    return headers.get(HEADER, "0") != "0"


def cache_miss_report(
    client: Client, result: CallResult, prompt_ids: Sequence[int] | None = None
) -> CacheMissReport | UnsetType:
    """The report of a call, whose prompt is `prompt_ids` (None: it is not known); UNSET unless its request wants it."""
    record, miss = current_request(), result.cache_miss
    if miss is None or record is None or not record.wants_cache_miss:
        return UNSET
    report = CacheMissReport(miss.position, miss.reason)
    if prompt_ids is not None:
        start, end = max(0, miss.position - CONTEXT_TOKENS), miss.position + CONTEXT_TOKENS
        report.before = text_of_tokens(client, prompt_ids[start : miss.position])
        report.after = text_of_tokens(client, prompt_ids[miss.position : end])
    return report
