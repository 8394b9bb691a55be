"""`Client.generate_ids` over a deployment that is not there: what ends a call that no engine ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from rayapp.client import Client
from rayapp.failures import DeadlineExceeded, Overloaded
from tests.conftest import wait_limit


class Held:
    """A call that waits for a replica until it is cancelled; `ended` is why its reader goes on at last."""

    def __init__(self, ended: Exception | None = None) -> None:
        self._cancelled = threading.Event()
        self._ended = ended
        self.calls = 0

    def remote(self, *_: Any, **__: Any) -> Held:
        self.calls += 1
        return self

    def cancel(self) -> None:
        self._cancelled.set()

    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def __iter__(self) -> Iterator[Any]:
        if self._ended is not None:
            raise self._ended
        assert self._cancelled.wait(wait_limit(10))
        raise RequestCancelledError("some-id")
        yield


def client(call: Held) -> Client:
    one = Client.__new__(Client)  # its constructor looks for a running application
    one._max_migrations = 3
    one._engines = {"m": call}
    return one


def test_a_call_that_waits_for_a_replica_ends_in_time_and_is_not_tried_again() -> None:
    call = Held()
    with pytest.raises(DeadlineExceeded, match=r"within its 0\.05 s"):
        client(call).generate_ids("m", [1, 2], timeout_s=0.05)
    assert call.calls == 1


def test_other_errors_before_the_deadline_stay_what_they_are() -> None:
    threads = threading.active_count()
    with pytest.raises(Overloaded):
        client(Held(BackPressureError(num_queued_requests=1, max_queued_requests=1))).generate_ids(
            "m", [1, 2], timeout_s=60
        )
    deadline = time.monotonic() + wait_limit(5)
    while threading.active_count() > threads:  # the timer is gone
        assert time.monotonic() < deadline
        time.sleep(0.01)
