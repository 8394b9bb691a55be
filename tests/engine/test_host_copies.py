"""Blocks between device and host: what is copied, in how many launches, and what waits for what.

The two orders of a device are a fake that knows which launch is certain to run before which other one; a test fails if
two that touch the same memory are not in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine import transfers
from engine.cache.host_tier import BlockCopies
from engine.execution import kv_tensors
from engine.execution.kv_tensors import HostKV, KVTensors, allocate
from engine.execution.lanes import CudaLanes, OneLane, lanes_of
from engine.sizing import staging_blocks

STEPS, COPIES = 0, 1


class FakeLanes(TorchDispatchMode):
    """Notes every launch, in which of the two orders, and fails where the order of two that matter is left open.

    Attributes:
        launched: name of the operation and its order, of each launch.
        clocks: of each order, how far it knows both to be when it runs what is launched next.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[str, int]] = []
        self.clocks = [[0, 0], [0, 0]]
        self._lane = STEPS
        self._reads: dict[int, list[int]] = {}
        self._writes: dict[int, list[int]] = {}

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._lane = COPIES
        yield
        self._lane = STEPS

    def mark(self, *, beside: bool) -> list[int]:
        return list(self.clocks[beside])

    def wait(self, mark: list[int], *, beside: bool) -> None:
        self.clocks[beside] = [max(pair) for pair in zip(mark, self.clocks[beside], strict=True)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._launch(func, args, kwargs or {})
        return result

    def _launch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        mine, other, clock = self._lane, 1 - self._lane, self.clocks[self._lane]
        clock[mine] += 1
        self.launched.append((func.overloadpacket.__name__, mine))
        named = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(named.get(argument.name)):
                if isinstance(tensor, torch.Tensor):
                    memory = tensor.untyped_storage().data_ptr()
                    before = self._writes.setdefault(memory, [0, 0])[other]
                    if is_written:
                        before = max(before, self._reads.setdefault(memory, [0, 0])[other])
                    assert before <= clock[other], f"{func} does not wait for what uses its {argument.name} beside it"
                    (self._writes if is_written else self._reads).setdefault(memory, [0, 0])[mine] = clock[mine]


def filled(num_blocks: int, num_tensors: int = 2) -> KVTensors:
    """Every block of every tensor has a number of its own in all places."""
    kv = allocate(num_tensors, num_blocks, 2, 4, 8, torch.float32, trash=True)
    for number, tensor in enumerate([*kv.keys, *kv.values]):
        tensor.copy_(torch.arange(num_blocks + 2).view(-1, 1, 1, 1) + 1000.0 * number)
    return kv


def numbers(kv: KVTensors) -> list[list[float]]:
    """Of each tensor, what its blocks have in all places."""
    for tensor in [*kv.keys, *kv.values]:
        assert torch.equal(tensor, tensor[:, :1, :1, :1].expand_as(tensor))
    return [tensor[:, 0, 0, 0].tolist() for tensor in [*kv.keys, *kv.values]]


def with_portions(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(kv_tensors, "staging_blocks", lambda num_blocks, slots: size)


def step(lanes: FakeLanes, kv: KVTensors, blocks: list[int], value: float) -> None:
    """What a forward does: reads and overwrites blocks in the order of the steps."""
    with lanes:
        for tensor in [*kv.keys, *kv.values]:
            tensor.index_fill_(0, torch.tensor(blocks), value)


@pytest.mark.parametrize("portion", [1, 2, 5, 100])
def test_blocks_come_back_as_they_were(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In portions of any size, after their places were overwritten, while others go."""
    with_portions(monkeypatch, portion)
    kv, lanes = filled(12), FakeLanes()
    before = numbers(kv)
    host = HostKV(kv, 20, lanes)
    away, slots = [1, 4, 2, 9, 12, 7], [3, 0, 19, 7, 11, 5]
    with lanes:
        host.run(BlockCopies(to_host=list(zip(away, slots, strict=True))))
    step(lanes, kv, away, -1.0)
    back = [3, 5, 6, 8, 10, 11]
    with lanes:
        host.run(BlockCopies(to_host=[(3, 1), (5, 2)], from_host=list(zip(slots, back, strict=True))))
    step(lanes, kv, [12], -2.0)
    with lanes:
        host.run(BlockCopies(from_host=[(1, 1), (2, 2)]))
    for old, new in zip(before, numbers(kv), strict=True):
        assert [new[block] for block in back] == [old[block] for block in away]
        assert (new[1], new[2]) == (old[3], old[5])
        assert new[12] == -2 and new[4] == new[7] == new[9] == -1 and (new[0], new[13]) == (old[0], old[13])


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the bus one a block, on the device one a tensor."""
    with_portions(monkeypatch, 8)
    kv, lanes = filled(20, num_tensors=3), FakeLanes()
    host = HostKV(kv, 20, lanes)

    def count(copies: BlockCopies) -> tuple[int, int, int]:
        lanes.launched.clear()
        with lanes:
            host.run(copies)
        names = ("index_select", "index_copy_", "copy_")
        wanted = [(name, COPIES if name == "copy_" else STEPS) for name in names]
        return tuple(lanes.launched.count(each) for each in wanted)  # type: ignore[return-value]

    pairs = [(block, block - 1) for block in range(1, 17)]
    assert count(BlockCopies(to_host=pairs)) == (2 * 6, 0, 16)
    assert count(BlockCopies(from_host=[(slot, block) for block, slot in pairs])) == (0, 2 * 6, 16)


def test_a_step_does_not_wait_for_what_goes_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless more goes than there is room for beside it."""
    with_portions(monkeypatch, 2)
    kv, lanes = filled(12), FakeLanes()
    host = HostKV(kv, 20, lanes)
    with lanes:
        host.run(BlockCopies(to_host=[(block, block) for block in range(1, 5)]))
    assert lanes.clocks[STEPS][COPIES] == 0 and lanes.clocks[COPIES][COPIES] == 4
    with lanes:
        host.run(BlockCopies(to_host=[(5, 5)]))
    assert lanes.clocks[STEPS][COPIES] == 2, "for the portion whose place it takes"


def test_a_step_waits_for_what_comes_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    with_portions(monkeypatch, 2)
    kv, lanes = filled(12), FakeLanes()
    host = HostKV(kv, 20, lanes)
    with lanes:
        host.run(BlockCopies(from_host=[(1, 1), (2, 2), (3, 3)]))
    assert lanes.clocks[STEPS][COPIES] == 3


class TestTheFake:
    """It sees what is not in order."""

    @pytest.mark.parametrize("is_told", [False, True])
    @pytest.mark.parametrize("other", [lambda memory: memory.add_(1), lambda memory: memory + 1])
    def test_a_write_beside(self, is_told: bool, other: Callable[[torch.Tensor], Any]) -> None:
        memory, lanes = torch.zeros(3), FakeLanes()
        with lanes:
            other(memory)
            if is_told:
                lanes.wait(lanes.mark(beside=False), beside=True)
            with lanes.copying():
                if is_told:
                    memory.copy_(torch.ones(3))
                else:
                    with pytest.raises(AssertionError, match="does not wait"):
                        memory.copy_(torch.ones(3))

    @pytest.mark.parametrize("method", ["mark", "wait"])
    def test_without_marks_copies_are_not_in_order(self, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with_portions(monkeypatch, 1)
        kv, lanes = filled(12), FakeLanes()
        host = HostKV(kv, 20, lanes)
        if method == "wait":
            monkeypatch.setattr(lanes, "wait", lambda mark, *, beside: None)
        else:
            monkeypatch.setattr(lanes, "mark", lambda *, beside: [0, 0])
        with pytest.raises(AssertionError, match="does not wait"), lanes:
            host.run(BlockCopies(to_host=[(1, 1)]))


# On the device


def test_the_lanes_of_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are events on the stream they are for, and streams wait for them."""
    done: list[tuple[str, Any, Any]] = []

    class Event:
        def record(self, stream: Any) -> None:
            done.append(("record", stream.name, self))

    def stream(name: str) -> Any:
        return SimpleNamespace(name=name, wait_event=lambda event: done.append(("wait", name, event)))

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream("steps"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream.name)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    lanes = lanes_of(torch.device("cuda", 0))
    assert isinstance(lanes, CudaLanes) and isinstance(lanes_of(torch.device("cpu")), OneLane)
    assert lanes.copying() == "copies"  # type: ignore[comparison-overlap]
    gathered, copied = lanes.mark(beside=False), lanes.mark(beside=True)
    lanes.wait(gathered, beside=True)
    lanes.wait(copied, beside=False)
    assert done == [
        ("record", "steps", gathered),
        ("record", "copies", copied),
        ("wait", "copies", gathered),
        ("wait", "steps", copied),
    ]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes in bytes of the pinned memory that was asked for, at most 5000 together."""
    sizes: list[int] = []

    def empty(shape: tuple[int, ...], *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        tensor = torch.zeros(shape, dtype=dtype)
        if sum(sizes) + tensor.nbytes > 5000:
            raise RuntimeError("CUDA error: out of memory")
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(transfers, "torch", SimpleNamespace(empty=empty))
    monkeypatch.setattr(kv_tensors, "_PINNED_CHUNK", 2048)
    return sizes


def test_pinned_memory_comes_in_chunks(pinned: list[int]) -> None:
    """Torch rounds what is pinned up to a power of two."""
    device = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    per_chunk, chunks = kv_tensors._host_chunks((2, 10, 10), 6, device)  # type: ignore[arg-type]
    assert per_chunk == 2 and [len(chunk) for chunk in chunks] == [2, 2, 2]
    assert pinned == [1600] * 3
    with pytest.raises(MemoryError, match=r"does not give .* of pinned memory .* lower cpu_offload_space"):
        kv_tensors._host_chunks((2, 10, 10), 6, device)  # type: ignore[arg-type]


def test_slots_in_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = filled(12)
    host = HostKV(kv, 6)
    host._per_chunk, host._chunks = 2, list(host._chunks[0].split(2))
    before = numbers(kv)
    host.run(BlockCopies(to_host=[(block + 1, block) for block in range(6)]))
    host.run(BlockCopies(from_host=[(slot, slot + 7) for slot in range(6)]))
    for old, new in zip(before, numbers(kv), strict=True):
        assert new[7:13] == old[1:7]


def test_the_room_for_copies() -> None:
    assert [staging_blocks(blocks, 1000) for blocks in (1, 128, 256, 100_000)] == [1, 1, 2, 781]
    assert staging_blocks(100_000, 10) == 10
