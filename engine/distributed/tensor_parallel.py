"""The coordinator of processes that run one model together by tensor parallelism.

Made by the manager, called by the loop. Every process has the whole engine but a share of the weights and of the KV
cache, and takes the same steps: scheduling and sampling depend on nothing but the turns agreed on here. Rank 0 of the
group drives: it alone takes requests. Messages go over a group of their own, on the host, so that they never mix
with the model's. Knows nothing of models beyond which processes share them.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from engine.distributed.coordinator import Alone, Coordinator, Turn
from engine.distributed.sharding import tensor_parallel_mesh

if TYPE_CHECKING:
    from torch import nn

    from engine.request import Request
    from engine.settings import Settings

T = TypeVar("T")

_HEARTBEAT_S = 0.5  # how late, at most, an idle engine hears of a stop or a pause that another process asked for
_BEATS_PER_TIMEOUT = 4
_NUM_VALUES = 6  # that a turn compares
_NO_LIMIT_S = 365 * 86400.0  # torch takes None for its own default of 30 minutes


def coordinator_for(model: nn.Module, timeout_s: float | None) -> Coordinator:
    """The coordinator of the processes that share `model`, all of which must call this at the same time.

    Args:
        timeout_s: seconds that one process waits for another, above 0; None: without limit.

    Raises:
        NotImplementedError: the model is distributed in another way than by tensor parallelism.
        ValueError: the time limit is not above 0.
    """
    mesh = tensor_parallel_mesh(model)
    return Alone() if mesh is None else TensorParallel(dist.get_process_group_ranks(mesh.get_group()), timeout_s)


class TensorParallel:
    """One of several processes that take the same turns.

    A turn costs one reduction of seven integers, and a broadcast when requests have come. An error on one process
    only ends the sessions of all, as does its death. An error that all have in the same step, such as one that a
    request causes, does not: they handle it alike. Others that wait for a process inside the model's own operations
    are released when it exits, or by the time limit of the model's process group; `timeout_s` cannot reach them there.

    Args:
        ranks: the processes, as ranks of the whole job; the first one drives.
        timeout_s: seconds that one process waits for another; None: without limit.
    """

    def __init__(self, ranks: list[int], timeout_s: float | None) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(f"cpu_group_timeout is {timeout_s}: it must be above 0, or None for no limit")
        limit = timedelta(seconds=min(math.inf if timeout_s is None else timeout_s, _NO_LIMIT_S))
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._ended = ""
        self._group: dist.ProcessGroup | None = dist.new_group(
            ranks, timeout=limit, backend="gloo", use_local_synchronization=len(ranks) < dist.get_world_size()
        )
        self._rank = ranks.index(dist.get_rank())
        self.is_driver: bool = self._rank == 0
        # The others wait for the driver inside `agree`, so that a new request never waits for them.
        self.heartbeat_s: float | None = (
            min(_HEARTBEAT_S, limit.total_seconds() / _BEATS_PER_TIMEOUT) if self.is_driver else 0.0
        )

    def check(self, request: Request) -> None:
        constraint = request.params.constraint  # all else of a request is numbers and strings
        if constraint is None:
            return
        try:
            pickle.dumps(constraint)
        except Exception as error:
            raise ValueError(
                f"the constraint of request {request.request_id!r} cannot be sent to the other tensor parallel "
                f"processes: {error}"
            ) from error

    def agree(self, turn: Turn) -> Turn:
        """As `Coordinator.agree`. Items of other processes than the driver are dropped."""
        payload = pickle.dumps(turn.items) if self.is_driver and turn.items else b""
        asked = (len(payload), turn.stop, turn.pausing, turn.forget, turn.checksum, -turn.checksum)
        size, stop, pausing, forget, highest, lowest = self._maxima(*asked)
        if highest != -lowest:
            self._ended = (
                "the tensor parallel processes are no longer in step: a step failed on one of them only, whose log has "
                "the error, or they computed different tokens"
            )
            raise RuntimeError(self._ended)
        items = turn.items if self.is_driver else []
        if size:
            received = self._broadcast(payload, size, 0)
            items = items or pickle.loads(received)
        return Turn(items, stop, bool(pausing), bool(forget), turn.checksum)

    def together(self, make: Callable[[], T]) -> T:
        error: Exception | None = None
        try:
            made = make()
        except Exception as raised:
            error = raised
        try:
            self._raise_failures(self._gather(_describe(error)))
        except RuntimeError:
            if error is None:
                raise
        if error is not None:
            raise error
        return made

    def agree_settings(self, resolve: Callable[[], Settings]) -> Settings:
        try:
            settings = self.together(resolve)
        except BaseException:
            self.close()
            raise
        everyone: list[Settings] = self._gather(settings)
        values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
        sizes = [name for name, value in values.items() if type(value) is int and name != "seed"]
        return dataclasses.replace(
            everyone[0], **{name: min(getattr(each, name) for each in everyone) for name in sizes}
        )

    def leave(self, error: BaseException) -> None:
        if not self._ended:
            with suppress(RuntimeError):  # the others' answer
                self._maxima(failure=_describe(error))
        self.close()

    def close(self) -> None:
        self._ended = self._ended or "it was destroyed"
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            with suppress(ValueError):  # it went with the whole job's group
                dist.destroy_process_group(group)

    def _maxima(self, *values: int, failure: str = "") -> list[int]:
        """The greatest of each value over all processes.

        Raises:
            RuntimeError: a process failed, this one with `failure`; or is gone, or too late.
        """
        numbers = torch.tensor([bool(failure), *(values or (0,) * _NUM_VALUES)])
        self._communicate(lambda group: dist.all_reduce(numbers, dist.ReduceOp.MAX, group))
        failed, *maxima = numbers.tolist()
        if failed:
            self._raise_failures(self._gather(failure))
        return maxima

    def _raise_failures(self, failures: list[str]) -> None:
        told = [f"process {rank} of {len(failures)} failed: {text}" for rank, text in enumerate(failures) if text]
        if told:
            self._ended = f"tensor parallel {'; '.join(told)}"
            raise RuntimeError(self._ended)

    def _broadcast(self, content: bytes, size: int, source: int) -> bytes:
        """`content` of the process `source`, `size` bytes."""
        mine = source == self._rank
        data = torch.frombuffer(bytearray(content if mine else size), dtype=torch.uint8)
        self._communicate(lambda group: dist.broadcast(data, self._ranks[source], group))
        return content if mine else data.numpy().tobytes()

    def _gather(self, item: Any) -> list[Any]:
        """`item` of every process, by rank."""
        items: list[Any] = [None] * len(self._ranks)
        self._communicate(lambda group: dist.all_gather_object(items, item, group))
        return items

    def _communicate(self, operation: Callable[[dist.ProcessGroup], Any]) -> None:
        if self._ended or self._group is None:
            raise RuntimeError(f"this engine cannot be used any more: {self._ended}")
        try:
            operation(self._group)
        except Exception as error:
            limit = "no limit" if self._timeout_s is None else f"{self._timeout_s:g} s"
            self._ended = (
                f"another of the {len(self._ranks)} tensor parallel processes is gone, or was not ready within "
                f"cpu_group_timeout ({limit}); this is process {self._rank}"
            )
            raise RuntimeError(self._ended) from error


def _describe(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"
