"""The server's metrics: a request is counted when it ends, the scheduler's counters are read at each scrape.

Metrics that request routers look for have vLLM's names; all others are named plait_*. Every label has a small set of
values: known routes, statuses, fixed reasons. docs/metrics.md lists names and meanings.
"""

from __future__ import annotations

from collections.abc import Sequence

from plait.runtime.errors import VALUE_DOES_NOT_FIT
from plait.runtime.messages import Status
from plait.runtime.server.engines.replicated_runtime import ReplicaReport
from plait.runtime.server.in_flight import DRAINED, InFlightRequests, RequestRecord
from plait.runtime.server.ops.log_output import num_dropped_lines
from plait.runtime.server.ops.prometheus import Histogram, Metric, to_prometheus_text

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
ABORT_REASONS = {  # kind of a failed call -> the label of plait_aborts_total
    **{kind: kind for kind in ("deadline", "runtime_gone", "internal", "constraint", "aborted")},
    VALUE_DOES_NOT_FIT: "constraint",
}
REJECTION_REASONS = {  # error code -> the label of plait_rejections_total
    "invalid_api_key": "unauthorized",
    "cross_origin": "cross_origin",
    "host_not_allowed": "host_not_allowed",
    "draining": "draining",
    "queue_full": "queue_full",
    "overloaded": "queue_full",
    "queue_timeout": "queue_timeout",
    "rate_limit_exceeded": "key_limit",
    "body_too_large": "body_too_large",
    "body_timeout": "body_timeout",
    "runtime_gone": "runtime_gone",
}
_MODEL = ("model_name",)


class Metrics:
    """All metrics of one server. With several models, those of a model have the label `model`; with replicas, those of
    a runtime have the label `replica`, which is empty for a model without replicas."""

    def __init__(self, has_replicas: bool = False, has_models: bool = False) -> None:
        model = ("model",) if has_models else ()
        own_replica = ("replica",) if has_replicas else ()
        replica = (*model, *own_replica)
        self.has_replicas, self.has_models = has_replicas, has_models
        self._add_those_of_requests(model)
        self._add_those_of_engines(model, replica, own_replica)

    def _add_those_of_requests(self, model: tuple[str, ...]) -> None:
        self.requests = Histogram(
            "plait_request_seconds",
            "From a request's headers to the end of its response.",
            SECONDS,
            ("route", "status", *model),
        )
        self.ttft = Histogram(
            "plait_time_to_first_token_seconds", "From a call's start to its first token.", SECONDS, model
        )
        self.inter_token_gaps = Histogram(
            "plait_inter_token_seconds", "Between two tokens of one call.", SHORT_SECONDS, model
        )
        self.queue = Histogram(
            "plait_queue_seconds", "From a request's arrival until its call is first scheduled.", SECONDS, model
        )
        self.compiling = Histogram(
            "plait_grammar_compile_seconds",
            "Waiting for a call's own grammar, a part of its queue time.",
            SECONDS,
            model,
        )
        self.rejections = Metric(
            "counter", "plait_rejections_total", "Requests refused before any work, and invalid ones.", ("reason",)
        )
        self.fields = Metric(
            "counter", "plait_request_fields_total", "Fields of requests that had no effect.", ("class",)
        )
        self.aborts = Metric("counter", "plait_aborts_total", "Requests that ended early.", ("reason",))
        self.cache_misses = Metric(
            "counter",
            "plait_cache_miss_tokens_total",
            "Prompt tokens that were computed, by why they were not in the prefix cache.",
            ("reason", *model),
        )
        self.in_flight = Metric("gauge", "plait_requests_in_flight", "Requests admitted and not yet answered.")
        self.waiting = Metric("gauge", "plait_requests_waiting", "Requests that wait for their turn.", model)
        self.reruns = Metric(
            "counter", "plait_reruns_total", "Requests run again: the runtime ended before they had sent anything."
        )
        self.dropped_log_lines = Metric(
            "counter", "plait_log_lines_dropped_total", "Lines of the server's log that were dropped: nobody read it."
        )

    def _add_those_of_engines(
        self, model: tuple[str, ...], replica: tuple[str, ...], own_replica: tuple[str, ...]
    ) -> None:
        self.up = Metric("gauge", "plait_runtime_up", "Whether the runtime answers: 1 or 0.", replica)
        self.restarts = Metric("counter", "plait_runtime_restarts_total", "Restarts of the runtime process.", replica)
        self.unanswered = Metric(
            "gauge",
            "plait_runtime_unanswered_seconds",
            "For how long the runtime has not answered a liveness check.",
            replica,
        )
        self.placed = Metric("counter", "plait_router_placed_total", "Sessions placed on a replica.", replica)
        self.load = Metric(
            "gauge", "plait_router_load_tokens", "Prompt tokens to compute, and four for an output token.", replica
        )
        self.spread = Metric(
            "counter",
            "plait_router_spread_total",
            "Sessions placed away from a longer prefix, whose replica was busy.",
            model,
        )
        self.pages = Metric("gauge", "plait_kv_pages", "Pages of the KV pool, one token each.", ("state", *replica))
        self.tokens = [
            (Metric("counter", f"plait_{name}_tokens_total", text, replica), field)
            for name, text, field in _TOKEN_COUNTS
        ]
        self.scheduler = [
            (Metric("counter", f"plait_{name}_total", text, replica), field) for name, text, field in _COUNTS
        ]
        self.vllm = [Metric(kind, f"vllm:{name}", text, (*_MODEL, *own_replica)) for kind, name, text in _VLLM]
        self.models = [Metric(kind, f"plait_model_{name}", text, model) for kind, name, text in _MODELS]
        self.of_engines = [self.up, self.restarts, self.unanswered, self.placed, self.load, self.spread, self.pages]
        self.of_engines += [metric for metric, _ in (*self.tokens, *self.scheduler)] + self.vllm

    def observe_request(self, record: RequestRecord) -> None:
        """Counts a request that has ended."""
        model = (record.model.last_name if record.model is not None else "",) if self.has_models else ()
        self.requests.observe(record.wall_s, record.route, str(record.status or 499), *model)
        for call, usage in () if record.is_background else record.usages():
            self.queue.observe(record.wait_s + usage.queue_s, *model)
            if call.result(0).embedding_bytes is None:  # an embedding generates no tokens
                self.ttft.observe(usage.ttft_s, *model)
            if usage.compile_s:
                self.compiling.observe(usage.compile_s, *model)
            for seconds, count in call.inter_token_gaps():
                self.inter_token_gaps.observe(seconds / count, *model, times=count)
        for kind in record.warnings.values():
            self.fields.add(1, kind)
        for call, usage in record.usages():
            if (miss := call.result(0).cache_miss) is not None and usage.computed_tokens:
                self.cache_misses.add(usage.computed_tokens, miss.reason, *model)
        self._count_failure(record)

    def _count_failure(self, record: RequestRecord) -> None:
        failure = record.failure()
        if record.code == DRAINED and record.sessions:
            self.aborts.add(1, "drain")
        elif record.client_gone and record.is_admitted:
            self.aborts.add(1, "client_gone")
        elif failure is not None and failure.kind in ABORT_REASONS:
            self.aborts.add(1, ABORT_REASONS[failure.kind])
        elif record.code in REJECTION_REASONS:
            self.rejections.add(1, REJECTION_REASONS[record.code])
        elif 400 <= record.status < 500:
            self.rejections.add(1, "invalid_request")

    def forget_engines(self) -> None:
        """Removes the values of all engines before a scrape, for one that is unloaded has none."""
        for metric in self.of_engines if self.has_models else ():
            metric.values.clear()

    def set_runtime(
        self,
        status: Status | None,
        model: str,
        restarts: int,
        unanswered_s: float | None,
        replica: str = "",
        num_waiting: int = 0,
    ) -> None:
        """Sets the metrics of a runtime. status: the scheduler's counters, None while it does not answer. unanswered_s:
        for how long it has not answered, None if that is not known. num_waiting: requests that wait in the server."""
        labels = (*self._labels(model), *((replica,) if self.has_replicas else ()))
        self.up.set(status is not None, *labels)
        self.restarts.set(restarts, *labels)
        if unanswered_s is not None:
            self.unanswered.set(unanswered_s, *labels)
        if status is not None:
            self._set_scheduler_metrics(status, model, labels, (replica,) if self.has_replicas else (), num_waiting)

    def set_replicas(self, reports: Sequence[ReplicaReport], model: str, num_spread: int) -> None:
        """Sets the metrics of all replicas and of the router."""
        self.spread.set(num_spread, *self._labels(model))
        for report in reports:
            replica = str(report.number)
            self.set_runtime(report.status, model, report.restarts, report.unanswered_s, replica)
            self.placed.set(report.placed, *self._labels(model), replica)
            self.load.set(report.load, *self._labels(model), replica)

    def set_model(self, model: str, is_loaded: bool, num_starts: int, num_failed_starts: int) -> None:
        """Sets the metrics of one of several models."""
        for metric, value in zip(self.models, (is_loaded, num_starts, num_failed_starts), strict=True):
            metric.set(value, model)

    def set_num_waiting(self, model: str, num_requests: int) -> None:
        """Sets how many requests wait for their turn with a model."""
        self.waiting.set(num_requests, *self._labels(model))

    def _labels(self, model: str) -> tuple[str, ...]:
        return (model,) if self.has_models else ()

    def scrape(self, in_flight: InFlightRequests) -> str:
        """Returns all metrics as text."""
        self.in_flight.set(in_flight.num_admitted)
        self.dropped_log_lines.set(num_dropped_lines())
        histograms = [self.requests, self.ttft, self.inter_token_gaps, self.queue, self.compiling]
        counts = [metric for metric, _ in (*self.tokens, *self.scheduler)]
        own = [self.in_flight, self.waiting, self.up, self.unanswered, self.restarts, self.reruns]
        own += [self.cache_misses, self.dropped_log_lines, self.fields, self.rejections, self.aborts, self.pages]
        own += [self.placed, self.load, self.spread] if self.has_replicas else []
        own += self.models if self.has_models else []
        return to_prometheus_text([*self.vllm, *own, *counts, *histograms])

    def _set_scheduler_metrics(
        self, status: Status, model: str, labels: tuple[str, ...], replica: tuple[str, ...], num_waiting: int
    ) -> None:
        for metric, field in (*self.tokens, *self.scheduler):
            metric.set(getattr(status, field), *labels)
        for state, count in (("free", status.free_pages), ("cached", status.cached_pages), ("held", status.used_pages)):
            self.pages.set(count, state, *labels)
        usage = status.used_pages / max(1, status.total_pages)
        generated = status.sampled_tokens + status.forced_tokens
        values = {
            "vllm:num_requests_running": status.running_calls,
            "vllm:num_requests_waiting": status.waiting_calls + num_waiting,
            "vllm:kv_cache_usage_perc": usage,
            "vllm:gpu_cache_usage_perc": usage,
            "vllm:prefix_cache_queries_total": status.prompt_tokens,
            "vllm:prefix_cache_hits_total": status.cached_tokens,
            "vllm:prompt_tokens_total": status.prompt_tokens,
            "vllm:generation_tokens_total": generated,
        }
        for metric in self.vllm:
            metric.set(values[metric.name], model, *replica)


_TOKEN_COUNTS = (
    ("prompt", "Prompt tokens.", "prompt_tokens"),
    ("prefix_hit", "Prompt tokens whose KV was in the prefix cache.", "cached_tokens"),
    ("computed", "Tokens computed by the model, including those computed again after preemption.", "computed_tokens"),
    ("sampled", "Tokens that were sampled.", "sampled_tokens"),
    ("forced", "Tokens that a constraint determined, which were not sampled.", "forced_tokens"),
    ("shared_kv", "Cached KV tokens that attention read once for several rows instead of once.", "shared_kv_tokens"),
    ("spared", "The former name of plait_shared_kv_tokens_total, until the next release.", "shared_kv_tokens"),
)
_COUNTS = (
    ("scheduler_steps", "Forward passes.", "steps"),
    ("retractions", "Calls that were preempted and computed again.", "retractions"),
    ("bad_frames", "Frames that could not be decoded and were dropped.", "bad_frames"),
)
_MODELS = (
    ("gauge", "loaded", "Whether the model is loaded: 1 or 0."),
    ("counter", "starts_total", "Starts of the model's engine."),
    ("counter", "failed_starts_total", "Starts of the model's engine that failed."),
)
_VLLM = (
    ("gauge", "num_requests_running", "Calls in the running batch."),
    ("gauge", "num_requests_waiting", "Calls waiting to be scheduled."),
    ("gauge", "kv_cache_usage_perc", "Share of the KV pool that running calls hold, 0 to 1."),
    ("gauge", "gpu_cache_usage_perc", "The older name of kv_cache_usage_perc."),
    ("counter", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    ("counter", "prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    ("counter", "prompt_tokens_total", "Prompt tokens."),
    ("counter", "generation_tokens_total", "Generated tokens."),
)
