"""The scheduler under random requests, crashes, rotten rows, cancels and few blocks.

The scripted pages check that each row attends to its own tokens only; this machine checks the rules of scheduling
at each step, and in the end that everything ended, as undisturbed, and that the pool is whole.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.cache.groups import LayerGroup
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduling.batch import ScheduledBatch
from engine.scheduling.policies import MAX_SKIPPED_STEPS
from tests.engine.scripted import Engine, reference

FAMILIES = [[0] * 40, [0, 1] * 20, [1, 2, 0, 0, 1] * 8]


class Arrival(NamedTuple):
    prompt: list[int]
    max_new_tokens: int
    generated: int
    priority: int
    salt: bytes


PROMPTS = st.builds(
    lambda family, length, tail: [*family[:length], *tail],
    st.sampled_from(FAMILIES),
    st.integers(1, 9),
    st.lists(st.integers(0, 2), max_size=3),
)
ARRIVALS = st.lists(
    st.builds(
        Arrival,
        prompt=PROMPTS,
        max_new_tokens=st.integers(1, 16),
        generated=st.sampled_from([0, 0, 0, 3]),
        priority=st.sampled_from([0, 0, 0, 1, -1]),
        salt=st.sampled_from([b"", b"", b"", b"salt"]),
    ),
    min_size=2,
    max_size=5,
)


def order(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 14),
        page_size=st.sampled_from([1, 2, 2, 4]),
        budget=st.integers(2, 24),
        max_requests=st.integers(2, 6),
        margin=st.sampled_from([0.0, 0.0, 0.0, 0.15, 0.5, 1.0]),
        sharing=st.integers(0, 9),
        policy=st.sampled_from(["fifo", "fifo", "prefill_first"]),
        overlap=st.booleans(),
        windows=st.sampled_from([[None], [None], [None], [None, 3], [None, 6, 2]]),
        host_slots=st.sampled_from([0, 0, 3, 20]),
        arrivals=ARRIVALS,
    )
    def start(
        self, num_blocks: int, page_size: int, budget: int, max_requests: int, margin: float, sharing: int,
        policy: str, overlap: bool, windows: list[int | None], host_slots: int, arrivals: list[Arrival],
    ) -> None:  # fmt: skip
        self.engine = Engine(
            (num_blocks * 3 if page_size == 1 else num_blocks) * len(windows),
            page_size,
            budget=budget,
            max_requests=min(budget, max_requests),
            margin=margin,
            sharing=sharing > 0,
            policy=policy,
            overlap=overlap,
            groups=[LayerGroup((layer,), window) for layer, window in enumerate(windows)],
            host_slots=host_slots,
        )
        self.policy = policy
        self.reserve = -(-int(margin * 100) * self.engine.cache.num_blocks // 100)
        self.requests: list[Request] = []
        self.gone: set[Request] = set()
        self.rivals: dict[Request, dict[Request, int]] = {}
        self.add(arrivals)

    # What happens to it

    @rule(arrivals=ARRIVALS)
    def add(self, arrivals: list[Arrival]) -> None:
        room = self.engine.cache.max_tokens
        for arrival in arrivals:
            prompt = arrival.prompt[:room]
            output = reference(prompt, min(arrival.generated, arrival.max_new_tokens - 1, room - len(prompt)))
            self.requests.append(
                self.engine.add(
                    prompt, arrival.max_new_tokens, output=output, priority=arrival.priority, salt=arrival.salt
                )
            )

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.complete(self.schedule())

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule()
    def crash(self) -> None:
        self.gone.update(self.engine.crash(self.schedule()))
        self.rivals.clear()

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(index=st.integers(0, 9))
    def cancel_then_crash(self, index: int) -> None:
        batch = self.schedule()
        if batch:
            request = batch.requests[index % len(batch.requests)]
            if not self.engine.scheduler.is_suspect(request):
                assert self.engine.scheduler.cancel(request.request_id) is request
                self.gone.add(request)
        self.gone.update(self.engine.crash(batch))
        self.rivals.clear()

    @precondition(lambda self: self.engine.scheduler.num_running)
    @rule(index=st.integers(0, 9))
    def rot(self, index: int) -> None:
        """A row's scores turn out to be NaN: nothing that its request has written may be hit."""
        running = [request for request in self.engine.scheduler.live() if self.engine.cache.holds(request)]
        request = running[index % len(running)]
        self.engine.fail(request)
        self.gone.add(request)

    @precondition(lambda self: self.engine.scheduler.num_running)
    @rule(index=st.integers(0, 9))
    def rot_under_many(self, index: int) -> None:
        """Blocks turn out to be rotten before anyone is known to be to blame: all that hold one begin again, alone."""
        running = [request for request in self.engine.scheduler.live() if self.engine.cache.holds(request)]
        for request in self.engine.rot(running[index % len(running)]):
            assert self.engine.scheduler.is_suspect(request)
            assert not self.engine.cache.holds(request)
        self.rivals.clear()

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(index=st.integers(0, 99))
    def cancel(self, index: int) -> None:
        live = list(self.engine.scheduler.live())
        request = live[index % len(live)]
        assert self.engine.scheduler.cancel(request.request_id) is request
        assert self.engine.scheduler.cancel(request.request_id) is None
        self.gone.add(request)

    @rule(chance=st.integers(0, 9))
    def forget_prefixes(self, chance: int) -> None:
        if chance == 0:
            self.engine.cache.reset()

    @rule(chance=st.integers(0, 4))
    def change_weights(self, chance: int) -> None:
        """Whatever was computed before is worth nothing afterwards."""
        if chance == 0:
            self.engine.land(0)
            self.engine.scheduler.preempt_all()
            self.engine.cache.reset()
            self.engine.pages.spoil_all()
            self.rivals.clear()

    # What must hold

    def schedule(self) -> ScheduledBatch:
        """The next batch, checked against what was known before it."""
        engine, scheduler = self.engine, self.engine.scheduler
        before = {
            request: (request.computed, request.num_tokens)
            for request in scheduler.live()
            if engine.cache.holds(request)
        }
        limited = {request for request in scheduler.live() if scheduler._awaits_token(request)}
        live = set(scheduler.live())
        suspects = [request for request in live if scheduler.is_suspect(request)]
        self.skipped = {request: request.skipped_steps for request in live}
        batch = engine.schedule()
        after = {request for request in scheduler.live() if engine.cache.holds(request)}
        engine.cache.check_integrity(scheduler.live())
        assert batch or batch.outgrown or engine.flights or not live, "there was work, and nothing happened"
        assert not limited & set(batch.requests), "scheduled beyond its last token"
        assert sum(batch.counts) <= scheduler.max_batch_tokens
        assert scheduler.num_running == len(after) <= scheduler.max_requests
        assert len(set(batch.requests)) == len(batch.requests)
        assert set(batch.requests) <= after
        for request in batch.outgrown:
            assert request.num_tokens > engine.cache.max_tokens
            assert request not in set(scheduler.live())
        self.check_rows(batch, before)
        if suspects:
            assert len(batch.requests) + len(batch.outgrown) == 1
            assert {*batch.requests, *batch.outgrown} <= set(suspects)
            self.rivals.clear()
        else:
            preempted = {request for request in before if request not in after and request not in batch.outgrown}
            self.check_order(batch, before, after, preempted, limited)
            self.check_preempted(preempted)
        return batch

    def check_rows(self, batch: ScheduledBatch, before: dict[Request, tuple[int, int]]) -> None:
        size = self.engine.cache.page_size
        for row, request in enumerate(batch.requests):
            start, count, table = batch.starts[row], batch.counts[row], batch.block_tables[0][batch.table_of[row]]
            assert count >= 1
            assert start + count == request.computed
            num_tokens = request.num_tokens - (row in batch.sampled)  # before the one that is now being sampled
            assert request.computed <= num_tokens
            assert (row in batch.sampled) == (request.computed == num_tokens)
            assert request.unknown <= 1 + len(self.engine.flights)
            assert np.flatnonzero(table)[-1] == (num_tokens - 1) // size
            if request in before:
                assert start == before[request][0]
                assert num_tokens == before[request][1]
            else:
                assert start % size == 0
                assert start == 0 or self.engine.cache.sharing
            expected = RequestStatus.DECODING if row in batch.sampled else RequestStatus.PREFILLING
            assert request.status is expected
            assert request.first_scheduled_time > 0
        assert batch.sampled == sorted(batch.sampled)

    def check_order(
        self, batch: ScheduledBatch, before: dict[Request, tuple[int, int]], after: set[Request],
        preempted: set[Request], limited: set[Request],
    ) -> None:  # fmt: skip
        kept = [request for request in before if request in after]
        remaining = {request: before[request][1] - before[request][0] for request in kept if request not in limited}
        for request, tokens in remaining.items():
            if tokens == 1:
                if self.policy == "fifo":
                    assert request in batch.requests, f"{request.request_id} decodes and got no token"
                assert request.skipped_steps <= MAX_SKIPPED_STEPS, f"{request.request_id} starves"
        prefilling = sorted((request for request, tokens in remaining.items() if tokens > 1), key=order)
        served = [request in batch.requests for request in prefilling]
        if self.policy == "prefill_first" and not all(served):
            decoding = [request for request in batch.requests if remaining.get(request) == 1]
            assert all(self.skipped.get(request, 0) >= MAX_SKIPPED_STEPS for request in decoding)
        assert served == sorted(served, reverse=True), "a prefill was overtaken"
        admitted = sorted(after - before.keys(), key=order)
        if preempted:
            assert kept
            assert max(map(order, kept)) < min(map(order, preempted))
            assert not admitted
        for request in self.engine.scheduler.live():
            if request not in after and admitted:
                assert order(request) > order(admitted[-1]), "a waiting request was overtaken"
        if admitted and len(after) > 1:
            assert self.engine.cache.num_free_blocks >= self.reserve

    def check_preempted(self, preempted: set[Request]) -> None:
        """Between two preemptions of one request an older one gains a token, or leaves."""
        for request in preempted:
            assert request.computed == 0
            assert request.status is RequestStatus.PENDING
            older = {other: other.num_tokens for other in self.engine.scheduler.live() if order(other) < order(request)}
            assert older, "the first in order was preempted"
            if request in self.rivals:
                assert any(older.get(other) != tokens for other, tokens in self.rivals[request].items()) or (
                    older.keys() - self.rivals[request].keys()
                )
            self.rivals[request] = older

    @invariant()
    def everyone_has_a_place(self) -> None:
        scheduler = self.engine.scheduler
        live = list(scheduler.live())
        ended = {request for request in self.requests if request.finish_reason is not None} | self.gone
        assert {request for request in self.requests if request not in ended} == set(live)
        assert scheduler.num_running + scheduler.num_waiting == len(live)
        assert scheduler.has_work == bool(live)
        self.engine.cache.check_integrity(live)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        most = 20 + sum(
            (request.num_tokens + request.params.max_new_tokens) * (2 + request.params.max_new_tokens)
            for request in self.engine.scheduler.live()
        )
        for _ in range(most):
            if not self.engine.scheduler.has_work and not self.engine.flights:
                break
            self.engine.complete(self.schedule())
        assert not self.engine.scheduler.has_work, f"not done after {most} steps"
        self.engine.cache.check_integrity([])
        assert self.engine.cache.num_free_blocks == self.engine.cache.num_blocks
        for request in self.requests:
            expected = reference(request.prompt_ids, request.params.max_new_tokens)
            assert request.output_ids == expected[: request.num_output_tokens]
            if request not in self.gone:
                assert request.finish_reason is FinishReason.LENGTH
                full = len(request.token_ids) == self.engine.cache.max_tokens + 1
                assert full or request.num_output_tokens == request.params.max_new_tokens


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
