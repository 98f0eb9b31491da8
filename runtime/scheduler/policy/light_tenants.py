"""Extra steps for the rows of tenants that hold few of them, between steps of all rows.

Beside 63 rows of another tenant, one row gets a token with each step of 64 rows, which on a CPU takes six times as long
as a step of one row. So while a tenant has much less than its part of the rows, an extra step with its decoding rows
alone follows each full step. Extra steps take at most EXTRA_SHARE of the time of full ones, and they must be cheap: a
device whose step takes as long for one row as for all has none. Nobody is far below an equal part where each of many
tenants has a row.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.runtime.batch.request import Request
from plait.runtime.scheduler.policy.fairness import Fairness

LIGHT_PART = 4  # a tenant is light if it holds at most one row in so many of its equal part
EXTRA_SHARE = 0.1  # seconds of extra steps for each second of full ones
MAX_CREDIT_S = 0.2  # what is saved up while there is no light tenant
CHEAP_PART = 3  # an extra step may take one part in so many of the full step before it
RETRY_S = 5.0  # after which the cost of an extra step is measured again


class LightTenants:
    """Decides which steps are extra ones, by how long steps took. All times are seconds of one monotonic clock."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._began: float | None = None  # the last step
        self._last_extra: float | None = None  # when the last extra step began
        self._full_s = self._extra_s = self._credit_s = 0.0  # of the last step of each kind

    def next_step(self, running: Iterable[Request], now: float) -> list[Request]:
        """The requests of the step that begins now if it is an extra one; [] if it is a full one."""
        was_extra = self._began is not None and self._began == self._last_extra
        if self._began is not None:
            self._count_time(now - self._began, was_extra)
        self._began = now
        light = [] if was_extra or not self._is_affordable(now) else self._decoding(running)
        if light:
            self._last_extra = now
        return light

    def _count_time(self, seconds: float, was_extra: bool) -> None:
        if was_extra:
            self._extra_s = seconds
            self._credit_s -= min(seconds, self._full_s)  # more is no step but a pause, such as a stopped process
        else:
            self._full_s = seconds
            self._credit_s = min(MAX_CREDIT_S, self._credit_s + EXTRA_SHARE * seconds)

    def _is_affordable(self, now: float) -> bool:
        if self._credit_s <= 0:
            return False
        if self._last_extra is None or now - self._last_extra > RETRY_S:
            return True
        return self._extra_s * CHEAP_PART <= self._full_s

    def _decoding(self, running: Iterable[Request]) -> list[Request]:
        """The requests of light tenants that need their next token."""
        rows: dict[str, list[Request]] = {}
        for request in running:
            is_background, tenant = self._fairness.queue(request)
            if not is_background:
                rows.setdefault(tenant, []).append(request)
        num_rows = sum(map(len, rows.values()))
        weights = {tenant: self._fairness.weight(tenant) for tenant in rows}
        part = num_rows / (LIGHT_PART * max(1e-9, sum(weights.values())))
        light = [request for tenant in rows if len(rows[tenant]) <= part * weights[tenant] for request in rows[tenant]]
        return [request for request in light if request.num_pending == 1 and not request.needs_probabilities]
