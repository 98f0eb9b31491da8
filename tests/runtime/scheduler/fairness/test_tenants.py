"""Fairness between tenants: simulations of the counters of `Fairness`."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runtime.batch.request import Request, RequestOwner
from plait.runtime.kv_cache.sequence import Sequence
from plait.runtime.scheduler import fairness

MAX_COST = 40  # tokens served at once

# How far a counter may be ahead: one service, one level within a rank, one level that a returning tenant keeps.
MAX_GAP = MAX_COST + 2 * fairness.LEVEL_TOKENS


class TenantSimulation:
    """Tenants that arrive and leave. Every service is given to the request that `Fairness` ranks first."""

    def __init__(self):
        self.fairness, self.requests, self.served = fairness.Fairness(), {}, {}

    def arrive(self, name):
        owner = RequestOwner(tenant=name, program_id=(name.encode(), 0), priority=0)
        request = Request(owner, Sequence((name, "")), 0, 0)
        request.metrics.arrival_time = 0.0
        self.fairness.add(request)
        self.requests.setdefault(name, []).append(request)
        self.served.setdefault(name, 0)

    def leave(self, name):
        self.fairness.remove(self.requests[name].pop())
        if not self.requests[name]:
            del self.requests[name]

    def serve(self, tokens):
        waiting = [request for requests in self.requests.values() for request in requests]
        request = min(waiting, key=lambda r: (self.fairness.rank(r, 0.0), r.arrival_index), default=None)
        if request is not None:
            self.fairness.charge(request, tokens, 0.0)
            self.served[request.owner.tenant] += tokens

    @property
    def counters(self):
        return [tenant.served for tenant in self.fairness._tenants.values()]


events = st.tuples(
    st.sampled_from("abcd"), st.sampled_from(["arrive", "arrive", "leave", "serve"]), st.integers(1, MAX_COST)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(events, st.integers(1, 30)), min_size=1, max_size=40))
def test_no_tenant_gets_more_service_than_one_that_always_waits(events_and_repeats):
    """The bound of the VTC paper: while tenant b has work, a tenant a gets at most a bounded number of tokens more
    than b, however often a arrives and leaves. So the counters of all tenants with work stay close together."""
    simulation, since = TenantSimulation(), {}  # the service of all tenants when the requests of one began to wait
    for (name, event, tokens), times in events_and_repeats:
        for _ in range(times):
            if event == "arrive" and len(simulation.requests.get(name, ())) < 3:
                simulation.arrive(name)
                since.setdefault(name, dict(simulation.served))
            elif event == "leave" and name in simulation.requests:
                simulation.leave(name)
                if name not in simulation.requests:
                    del since[name]
            elif event == "serve":
                simulation.serve(tokens)
            assert not simulation.counters or max(simulation.counters) - min(simulation.counters) <= MAX_GAP
            for waiting, before in since.items():
                received = simulation.served[waiting] - before[waiting]
                for other, other_served in simulation.served.items():
                    assert other_served - before.get(other, 0) <= received + 2 * MAX_GAP, (
                        f"{other} received more than {waiting}, which waited"
                    )


@given(st.lists(st.integers(1, MAX_COST), min_size=1, max_size=5))
def test_a_tenant_that_returns_for_every_call_gets_its_share(costs):
    """Its counter is kept, otherwise it would always be first, and not raised again, otherwise it never would be."""
    simulation = TenantSimulation()
    simulation.arrive("waiting")
    for number in range(1000):
        if "returning" not in simulation.requests:
            simulation.arrive("returning")
        before = simulation.served["returning"]
        simulation.serve(costs[number % len(costs)])
        if simulation.served["returning"] > before:
            simulation.leave("returning")
    assert abs(simulation.served["returning"] - simulation.served["waiting"]) <= 2 * MAX_GAP


def test_a_new_tenant_of_an_idle_runtime_has_no_credit():
    """It starts at the counter of the tenant that left last; otherwise it would be first until it caught up."""
    simulation = TenantSimulation()
    simulation.arrive("old")
    for _ in range(1000):
        simulation.serve(MAX_COST)
    simulation.leave("old")
    simulation.arrive("new")
    simulation.arrive("old")
    for _ in range(100):
        simulation.serve(MAX_COST)
    assert simulation.served["new"] <= 50 * MAX_COST + MAX_GAP


def test_the_number_of_remembered_inactive_tenants_is_bounded(monkeypatch):
    monkeypatch.setattr(fairness, "MAX_INACTIVE_TENANTS", 10)
    simulation = TenantSimulation()
    for number in range(50):
        simulation.arrive(str(number))
        simulation.serve(MAX_COST)
        simulation.leave(str(number))
    assert len(simulation.fairness._inactive_tenants) == 10 and not simulation.fairness._tenants
