"""`await manager.generate(...)` and `async for output in manager.stream(...)`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
from transformers import PreTrainedModel

import engine
from engine import ContinuousBatchingManager, GenerationOutput, RequestStatus
from tests.conftest import wait_limit
from tests.harness import NO_EOS, config, core_of, running, tokens, wait_idle
from tests.models import ref


async def read(manager: ContinuousBatchingManager, seed: int, n: int) -> list[int]:
    """The tokens of a stream, each output's new ones alone."""
    found: list[int] = []
    async for output in manager.stream(tokens(seed, 8), max_new_tokens=n):
        found += output.tokens_since(len(found))
        assert output.num_generated_tokens == len(found)
    assert output.is_finished()
    return found


def test_one_request_is_awaited(tiny: PreTrainedModel) -> None:
    with running(tiny) as manager:
        output = asyncio.run(manager.generate(tokens(0, 8), "named", max_new_tokens=9))
        assert output.request_id == "named" and output.finish_reason == "length"
        assert output.generated_tokens == ref(tiny, tokens(0, 8), 9)
        with pytest.raises(KeyError):
            manager.get_result("named")


def test_a_stream_gives_an_output_a_token(tiny: PreTrainedModel) -> None:
    async def main() -> list[GenerationOutput]:
        return [output async for output in manager.stream(tokens(0, 8), max_new_tokens=12)]

    with running(tiny) as manager:
        outputs = asyncio.run(main())
    assert [output.num_generated_tokens for output in outputs] == list(range(1, 13))
    assert [output.is_finished() for output in outputs] == [False] * 11 + [True]


def test_many_event_loops_at_once(tiny: PreTrainedModel) -> None:
    async def main(first: int) -> list[list[int]]:
        assert threading.current_thread() is not threading.main_thread()
        return await asyncio.gather(*(read(manager, seed, 20) for seed in range(first, first + 5)))

    with running(tiny) as manager, ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda first: asyncio.run(main(first)), range(0, 20, 5), timeout=wait_limit(60))
        for first, streams in zip(range(0, 20, 5), found, strict=True):
            assert streams == [ref(tiny, tokens(seed, 8), 20) for seed in range(first, first + 5)]


def test_every_sequence_comes_by_the_stream(tiny: PreTrainedModel) -> None:
    async def main() -> dict[str, list[GenerationOutput]]:
        found: dict[str, list[GenerationOutput]] = {}
        async for output in manager.stream(tokens(0, 8), "x", max_new_tokens=5, num_return_sequences=3):
            found.setdefault(output.request_id, []).append(output)
        return found

    with running(tiny) as manager:
        streams = asyncio.run(main())
        assert sorted(streams) == ["x", "x__child#0", "x__child#1"]
        for stream in streams.values():
            assert [output.num_generated_tokens for output in stream] == [1, 2, 3, 4, 5]
        with pytest.raises(ValueError, match=r"num_return_sequences=1.*stream\(\)"):
            asyncio.run(manager.generate([1, 2], num_return_sequences=2))


def test_cancelling_the_task_cancels_the_request(tiny: PreTrainedModel) -> None:
    terminal: list[GenerationOutput] = []
    with running(tiny) as manager:
        publish = manager._loop._publish

        def watched(outputs: list[GenerationOutput]) -> None:
            terminal.extend(output for output in outputs if output.is_finished())
            publish(outputs)

        manager._loop._publish = watched  # type: ignore[method-assign]

        async def main() -> None:
            awaited = asyncio.create_task(manager.generate(tokens(0, 8), "awaited", max_new_tokens=200))
            streamed = asyncio.create_task(read(manager, 1, 200))
            bystander = asyncio.create_task(read(manager, 2, 40))
            while manager.stats()["running"] < 3:
                await asyncio.sleep(0)
            for task in (awaited, streamed):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await bystander == ref(tiny, tokens(2, 8), 40)

        asyncio.run(main())
        wait_idle(manager)
        statuses = {output.request_id: output.status for output in terminal}
        assert len(statuses) == len(terminal) == 3
        assert statuses.pop("awaited") == RequestStatus.CANCELLED
        assert sorted(statuses.values()) == [RequestStatus.FINISHED, RequestStatus.CANCELLED]
        assert not manager._delivery._boxes


def test_leaving_a_stream_early_cancels_the_request(tiny: PreTrainedModel) -> None:
    async def main() -> None:
        stream = cast("AsyncGenerator[GenerationOutput, None]", manager.stream(tokens(0, 8), max_new_tokens=200))
        async for output in stream:
            if output.num_generated_tokens == 3:
                break
        await stream.aclose()

    with running(tiny) as manager:
        asyncio.run(main())
        wait_idle(manager)
        assert manager.stats()["steps"] < 200


def test_a_token_costs_the_same_however_long_the_text(tiny: PreTrainedModel) -> None:
    class Counting(list):  # type: ignore[type-arg]
        copied = 0

        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            if isinstance(key, slice):
                Counting.copied += len(found)
            return found

        def __iter__(self) -> Any:
            Counting.copied += len(self)
            return super().__iter__()

    n, prompt = 200, tokens(0, 8)
    with running(tiny) as manager:
        family = manager._intake.family

        def counted(*args: Any, **kwargs: Any) -> Any:
            requests = family(*args, **kwargs)
            for request in requests:
                request.token_ids = Counting(request.token_ids)
            return requests

        manager._intake.family = counted  # type: ignore[method-assign]
        assert asyncio.run(read(manager, 0, n)) == ref(tiny, prompt, n)
    # Input of the model, hashes and the reader: each a token once.
    assert n <= Counting.copied <= 4 * (n + len(prompt))


def test_refusals_are_raised(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())
    manager.start()
    for bad, error in (({"input_ids": []}, ValueError), ({"input_ids": [1], "max_new_token": 3}, TypeError)):
        with pytest.raises(error):
            asyncio.run(manager.generate(**bad))
    manager.stop()
    for call in (manager.generate([1, 2]), read(manager, 0, 5)):
        with pytest.raises(RuntimeError, match="stopped"):
            asyncio.run(call)  # type: ignore[arg-type]
    manager.destroy()


def test_tasks_of_a_failing_engine_get_failed_outputs(tiny: PreTrainedModel) -> None:
    manager = engine.init_continuous_batching(tiny, NO_EOS, config())

    def step() -> list[GenerationOutput]:
        raise OSError("out of order")

    core_of(manager).step = step  # type: ignore[method-assign]
    manager.start()
    output = asyncio.run(asyncio.wait_for(manager.generate([1, 2, 3]), wait_limit(10)))
    assert output.status == RequestStatus.FAILED and "out of order" in (output.error or "")
    manager.join(timeout=wait_limit(10))
    with pytest.raises(RuntimeError, match="out of order"):
        asyncio.run(manager.generate([1, 2, 3]))
    manager.destroy()
