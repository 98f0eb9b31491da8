"""Admission with several models: a queue for each, which is known when the body has named the model."""

from __future__ import annotations

import pytest

from plait.runtime.server.errors import ApiError
from plait.runtime.server.http.admission import AdmissionControl
from plait.runtime.server.http.call_queue import CallQueue
from plait.runtime.server.in_flight import InFlightRequests, RequestRecord, RequestSize
from plait.runtime.server.settings import server_settings


@pytest.fixture
def admission() -> AdmissionControl:
    """Of two models, each with one running and one waiting call."""
    settings = server_settings(max_running=1, max_queue=1)
    return AdmissionControl(settings, InFlightRequests(), [CallQueue(settings), CallQueue(settings)])


def admit(admission: AdmissionControl, model: int | None = None) -> RequestRecord:
    record = RequestRecord("POST", "/")
    admission.check_capacity("", 0)
    admission.admit(record)
    if model is not None:
        admission.enter_queue(record, admission.queues[model])
    return record


def end(admission: AdmissionControl, *records: RequestRecord) -> None:
    for record in records:
        admission.leave_queue(record)
        admission.in_flight.end(record)


def test_a_full_queue_refuses_its_model_only(admission) -> None:
    first = [admit(admission, 0), admit(admission, 0)]
    assert not admission.is_full
    refused = admit(admission)
    with pytest.raises(ApiError, match="2 calls are running or waiting") as caught:
        admission.enter_queue(refused, admission.queues[0])
    assert (caught.value.status, caught.value.code) == (503, "queue_full")
    end(admission, refused)
    second = [admit(admission, 1), admit(admission, 1)]
    assert admission.is_full
    with pytest.raises(ApiError, match="2 calls are running or waiting"):
        admission.check_capacity("", 0)  # from the headers, since every queue is full
    end(admission, first[0])
    admission.check_capacity("", 0)
    end(admission, first[1], *second)
    assert [queue.num_calls for queue in admission.queues] == [0, 0]


def test_a_request_whose_model_is_not_known_has_no_place(admission) -> None:
    records = [admit(admission) for _ in range(10)]
    admission.check_capacity("", 0)
    for _ in range(2):
        admission.enter_queue(records[0], admission.queues[1])  # once, whatever is called
    assert [queue.num_calls for queue in admission.queues] == [0, 1]
    end(admission, *records)
    assert [queue.num_calls for queue in admission.queues] == [0, 0]


def test_calls_of_a_request_count_in_its_own_queue(admission) -> None:
    other, record = admit(admission, 0), admit(admission, 1)
    record.reserve_calls(RequestSize(2))
    with pytest.raises(ApiError, match="2 calls are running or waiting"):
        admission.enter_queue(admit(admission), admission.queues[1])
    second = admit(admission, 0)
    with pytest.raises(ApiError, match="this request needs 2"):
        second.reserve_calls(RequestSize(2))
    assert [queue.num_calls for queue in admission.queues] == [2, 2]
    end(admission, other, record)
