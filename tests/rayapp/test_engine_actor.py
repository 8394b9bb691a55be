"""The engine actor in this process, without Ray: items, ends, cancellation, and an engine that fails."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from engine.execution.model_runner import ModelRunner
from rayapp.config import ModelConfig
from rayapp.engine_actor import EngineActor, Item, Mailbox
from rayapp.failures import EngineUnavailable, GenerationFailed, InvalidRequest
from rayapp.link import wire_request
from rayapp.migration import Migrating
from rayapp.scored import ScoredToken
from tests.conftest import wait_limit
from tests.models import ref
from tests.rayapp.conftest import tiny_model

PROMPT = [5, 6, 7, 8]

Scenario = Callable[[EngineActor], Awaitable[None]]


@pytest.fixture
def run(tiny_http_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Scenario], None]:
    """Runs a scenario with an actor that has started, and ends its engine."""

    async def life(scenario: Scenario) -> None:
        threads = torch.get_num_threads()
        actor = EngineActor(ModelConfig(**tiny_model(tiny_http_path)))
        await actor.start()
        try:
            await scenario(actor)
        finally:
            await asyncio.to_thread(actor._engine.stop, hard_stop=True)
            torch.set_num_threads(threads)

    return lambda scenario: asyncio.run(asyncio.wait_for(life(scenario), wait_limit(60)))


async def collect(actor: EngineActor, request: dict[str, Any]) -> list[Item]:
    return [item async for item in actor.generate(request)]


def tokens_of(items: list[Item]) -> list[int]:
    return [token for tokens, _, _ in items for token in tokens]


async def until_idle(actor: EngineActor) -> None:
    while (stats := await actor.stats())["running"] + stats["waiting"] + stats["streams"]:
        await asyncio.sleep(0.01)
    assert stats["kv_used_blocks"] == 0


def test_items_of_one_request(run: Callable[[Scenario], None], tiny_http: PreTrainedModel) -> None:
    async def scenario(actor: EngineActor) -> None:
        items = await collect(actor, wire_request(PROMPT, {"max_new_tokens": 20}))
        assert tokens_of(items) == ref(tiny_http, PROMPT, 20)
        assert len(items[0][0]) >= 1
        assert [reason for _, reason, _ in items] == [None] * (len(items) - 1) + ["length"]
        assert [info is not None for _, _, info in items] == [True, *[False] * (len(items) - 2), True]
        info = items[-1][2]
        assert info is not None
        assert (info["prompt_tokens"], info["error"], info["engine_failed"]) == (4, None, False)
        ended = await collect(
            actor, wire_request(PROMPT, {"max_new_tokens": 20, "stop_token_ids": [ref(tiny_http, PROMPT, 3)[-1]]})
        )
        assert (tokens_of(ended), ended[-1][1]) == (ref(tiny_http, PROMPT, 3), "stop")

    run(scenario)


def test_many_at_once_and_a_prefix_that_is_cached(run: Callable[[Scenario], None], tiny_http: PreTrainedModel) -> None:
    async def scenario(actor: EngineActor) -> None:
        prompt = list(range(100, 180))
        await collect(actor, wire_request(prompt, {"max_new_tokens": 2}))
        requests = [wire_request([*prompt, number], {"max_new_tokens": 12}) for number in range(16)]
        answers = await asyncio.gather(*(collect(actor, request) for request in requests))
        for request, items in zip(requests, answers, strict=True):
            assert tokens_of(items) == ref(tiny_http, request["prompt_ids"], 12)
            assert items[-1][2] is not None
            assert items[-1][2]["cached_tokens"] == 80
        salted = await collect(actor, wire_request(prompt, {"max_new_tokens": 2, "cache_salt": "tenant"}))
        assert salted[-1][2] is not None
        assert salted[-1][2]["cached_tokens"] == 0
        await until_idle(actor)

    run(scenario)


def test_abort_and_closed_generators_end_the_request(run: Callable[[Scenario], None]) -> None:
    async def scenario(actor: EngineActor) -> None:
        request = wire_request(PROMPT, {"max_new_tokens": 4000})
        stream = actor.generate(request)
        await anext(stream)
        await actor.abort(request["request_id"])
        reasons = [reason async for _, reason, _ in stream]
        assert reasons[-1] == "cancelled"
        await actor.abort(request["request_id"])
        await actor.abort("never seen")

        closed = actor.generate(wire_request(PROMPT, {"max_new_tokens": 4000}))
        await anext(closed)
        await closed.aclose()  # type: ignore[attr-defined]
        cancelled = asyncio.create_task(collect(actor, wire_request(PROMPT, {"max_new_tokens": 4000})))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await until_idle(actor)

    run(scenario)


def test_a_cancelled_call_ends_its_request_though_no_abort_comes(run: Callable[[Scenario], None]) -> None:
    async def scenario(actor: EngineActor) -> None:
        for way in ("attend", "generate"):
            before = (await actor.stats())["steps"]
            request = wire_request(PROMPT, {"max_new_tokens": 4000}) | {"subscriber": "reader"}
            call = asyncio.create_task(actor.attend(request) if way == "attend" else collect(actor, request))
            while (await actor.stats())["steps"] < before + 5:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until_idle(actor)
            assert (await actor.stats())["steps"] < before + 4000, way

    run(scenario)


def test_refusals_name_the_argument(run: Callable[[Scenario], None]) -> None:
    async def scenario(actor: EngineActor) -> None:
        for sampling, words in (({"top_p": 7.0, "do_sample": True}, "top_p"), ({"nonsense": 1}, "nonsense")):
            with pytest.raises(InvalidRequest, match=words):
                await collect(actor, wire_request(PROMPT, sampling))
        with pytest.raises(InvalidRequest, match="49151"):
            await collect(actor, wire_request([10**9], {}))
        request = wire_request(PROMPT, {"max_new_tokens": 4000})
        stream = actor.generate(request)
        await anext(stream)
        with pytest.raises(InvalidRequest, match="in use"):
            await collect(actor, request)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await actor.health())["error"] is None

    run(scenario)


def test_O27_a_failed_engine_tells_everyone_and_refuses(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From some step on the model raises always: who runs learns why, new requests are refused, health says it."""

    async def scenario(actor: EngineActor) -> None:
        launch, calls = ModelRunner.launch, 0

        def failing(self: ModelRunner, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls >= 5:
                raise RuntimeError("boom")
            return launch(self, *args)

        monkeypatch.setattr(ModelRunner, "launch", failing)
        monkeypatch.setattr(ModelRunner, "probe", failing)
        requests = [wire_request([number, *PROMPT], {"max_new_tokens": 100}) for number in range(3)]
        for items in await asyncio.gather(*(collect(actor, request) for request in requests)):
            assert items[-1][1] == "error"
            assert items[-1][2] is not None
            assert "boom" in items[-1][2]["error"]
        while actor._engine.is_running():
            await asyncio.sleep(0.01)
        assert "boom" in (await actor.health())["error"]
        with pytest.raises(EngineUnavailable, match="boom"):
            await collect(actor, wire_request(PROMPT, {}))

    run(scenario)


def test_a_stuck_engine_is_not_healthy(run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(actor: EngineActor) -> None:
        busy = {"running": 1, "waiting": 0, "idle_s": 121.0}
        monkeypatch.setattr(actor._engine, "stats", lambda: busy)
        assert "stall_timeout_s: 120" in (await actor.health())["error"]
        busy["running"] = 0
        assert (await actor.health())["error"] is None

    run(scenario)


def test_engine_thread_computes_with_the_configured_threads(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(actor: EngineActor) -> None:
        launch, seen = ModelRunner.launch, []

        def noting(self: ModelRunner, *args: Any) -> Any:
            seen.append(torch.get_num_threads())
            return launch(self, *args)

        torch.set_num_threads(2)
        monkeypatch.setattr(ModelRunner, "launch", noting)
        await collect(actor, wire_request(PROMPT, {"max_new_tokens": 2}))
        assert set(seen) == {1}

    run(scenario)


def test_collections_leave_the_libraries_alone(run: Callable[[Scenario], None]) -> None:
    gc.unfreeze()

    async def scenario(actor: EngineActor) -> None:
        assert gc.get_freeze_count() > 100_000
        assert gc.isenabled()

    run(scenario)
    gc.unfreeze()


def test_a_held_call_ends_with_all_tokens_and_its_batches_have_them_too(
    run: Callable[[Scenario], None], tiny_http: PreTrainedModel
) -> None:
    async def scenario(actor: EngineActor) -> None:
        prompts = [[*PROMPT, number] for number in range(6)]
        requests = [wire_request(prompt, {"max_new_tokens": 30}) | {"subscriber": "router"} for prompt in prompts]
        requests[0]["output_ids"] = ref(tiny_http, prompts[0], 30)[:10]
        held = [asyncio.create_task(actor.attend(request)) for request in requests]
        read: dict[str, list[int]] = {request["request_id"]: [] for request in requests}
        infos: dict[str, list[Any]] = {request["request_id"]: [] for request in requests}
        ended = 0
        while ended < len(requests):
            for request_id, offset, tokens, reason, info in await actor.poll("router"):
                assert offset == len(read[request_id])
                read[request_id] += tokens
                infos[request_id] += [info] if info is not None else []
                ended += reason is not None
        for prompt, request, call in zip(prompts, requests, held, strict=True):
            tokens, reason, info = await call
            expected = ref(tiny_http, prompt, 30)[len(request["output_ids"]) :]
            assert read[request["request_id"]] == tokens == expected
            assert reason == "length"
            assert infos[request["request_id"]][-1] == info
            assert len(infos[request["request_id"]]) == 2
        await until_idle(actor)
        assert (await actor.stats())["served"] == 6

    run(scenario)


def test_a_held_call_that_is_cancelled_or_whose_reader_died_is_aborted(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayapp.subscription.LEASE_S", 0.1)

    async def scenario(actor: EngineActor) -> None:
        def attend(subscriber: str) -> asyncio.Task[Any]:
            request = wire_request(PROMPT, {"max_new_tokens": 4000}) | {"subscriber": subscriber}
            return asyncio.create_task(actor.attend(request))

        left = attend("alive")
        assert await actor.poll("alive")
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        await until_idle(actor)
        assert (await actor.stats())["steps"] < 1000  # of 4000
        _, reason, _ = await attend("dead")
        assert reason == "cancelled"
        refused = wire_request(PROMPT, {"top_p": 7.0, "do_sample": True}) | {"subscriber": "alive"}
        with pytest.raises(InvalidRequest, match="top_p"):
            await actor.attend(refused)
        await until_idle(actor)
        while actor._subscriptions:
            await asyncio.sleep(0.01)

    run(scenario)


def test_an_abort_that_overtakes_the_compiler_keeps_the_request_from_beginning(
    run: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = threading.Event()
    monkeypatch.setattr(EngineActor, "_constraint", lambda *_: compiled.wait(wait_limit(30)) and None)

    async def scenario(actor: EngineActor) -> None:
        added: list[str] = []
        add = actor._engine.add_request
        monkeypatch.setattr(
            actor._engine, "add_request", lambda *a, **k: (added.append(k["request_id"]), add(*a, **k))[1]
        )
        requests = [
            wire_request(PROMPT, {"max_new_tokens": 4}) | {"structure": {"kind": "any"}, "subscriber": "router"}
            for _ in range(3)
        ]
        left, read, kept = (one["request_id"] for one in requests)
        calls = [
            asyncio.create_task(actor.attend(requests[0])),
            asyncio.create_task(collect(actor, requests[1])),
            asyncio.create_task(collect(actor, requests[2])),
        ]
        while len(actor._compiling) < 3:
            await asyncio.sleep(0.01)
        await actor.abort(left)
        await actor.abort(read)
        compiled.set()
        for call in calls[:2]:
            with pytest.raises(GenerationFailed, match="aborted before it began"):
                await call
        assert len(tokens_of(await calls[2])) == 4
        assert added == [kept] and not actor._compiling
        await until_idle(actor)

    run(scenario)


def test_deadline_and_priority_reach_the_engine(run: Callable[[Scenario], None]) -> None:
    async def scenario(actor: EngineActor) -> None:
        items = await collect(actor, wire_request(PROMPT, {"max_new_tokens": 4000, "timeout_s": 0.0}))
        assert items[-1][1] == "timeout"
        assert items[-1][2] is not None
        assert "did not end within" in items[-1][2]["error"]
        seen: list[int] = []
        scheduler = actor._engine._build().scheduler
        add = scheduler.add
        scheduler.add = lambda request: (seen.append(request.priority), add(request))[1]
        for priority in (3, -1):
            await collect(actor, wire_request(PROMPT, {"max_new_tokens": 2, "priority": priority}))
        assert seen == [3, -1]

    run(scenario)


def output(count: int, finished: bool = False) -> Any:
    return SimpleNamespace(count=count, is_finished=lambda: finished)


def test_mailbox_gathers_what_comes_during_the_pause() -> None:
    async def scenario() -> None:
        mailbox = Mailbox()
        mailbox.put(output(1))
        assert (await mailbox.next(pause=0.2)).count == 1  # the first one at once
        asked = asyncio.get_running_loop().time()
        for count in range(2, 6):
            mailbox.put(output(count))
        assert (await mailbox.next(pause=30)).count == 5
        assert asyncio.get_running_loop().time() - asked > 0.1
        mailbox.put(output(6))
        mailbox.put(output(7, finished=True))
        assert (await mailbox.next(pause=30)).count == 7  # the end does not wait

    asyncio.run(asyncio.wait_for(scenario(), wait_limit(10)))


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_scores_and_structures_survive_a_move(
    tiny_http_path: Path, smol_tokenizer: PreTrainedTokenizerFast, tmp_path: Path, cut: int
) -> None:
    """What is resumed behind some tokens has the tokens, log-probabilities and grammar of what was not."""
    folder = shutil.copytree(tiny_http_path, tmp_path / "ending")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": smol_tokenizer.eos_token_id}))
    structure = {"kind": "regex", "value": "[a-f]{6}-[0-9]{6}"}
    sampling = {
        "max_new_tokens": 40, "do_sample": True, "seed": 7, "logprobs": True, "top_logprobs": 2, "raw_logprobs": True,
        "structure": structure,
    }  # fmt: skip

    class Losing:
        """The actor, lost once behind `cut` tokens."""

        def __init__(self, actor: EngineActor, cut: int) -> None:
            self.actor, self.cut = actor, cut

        async def generate(self, request: dict[str, Any]) -> AsyncGenerator[Item, None]:
            async for tokens, reason, info in self.actor.generate(request):
                if self.cut and len(request["output_ids"]) + len(tokens) >= self.cut:
                    kept, self.cut = tokens[: self.cut - len(request["output_ids"])], 0
                    yield kept, None, info
                    raise EngineUnavailable("lost")
                request = {**request, "output_ids": [*request["output_ids"], *tokens]}
                yield tokens, reason, info

    async def answer(actor: EngineActor, cut: int) -> list[Any]:
        source = Migrating(Losing(actor, cut))
        items = [item async for item in source.generate(wire_request(PROMPT, sampling))]
        assert items[-1][2] is not None and items[-1][2]["migrations"] == bool(cut)
        tokens = [token for token in tokens_of(items) if isinstance(token, ScoredToken)]
        assert len(tokens) == len(tokens_of(items))
        return [(int(token), pytest.approx(token.logprob, abs=1e-4), [one for one, _ in token.top]) for token in tokens]

    async def life() -> None:
        actor = EngineActor(ModelConfig(**tiny_model(folder)))
        await actor.start()
        try:
            whole, moved = await answer(actor, 0), await answer(actor, cut)
        finally:
            await asyncio.to_thread(actor._engine.stop, hard_stop=True)
        assert [(token, top) for token, _, top in moved] == [(token, top) for token, _, top in whole]
        assert [one.expected for _, one, _ in moved] == [one for _, one, _ in whole]
        text = smol_tokenizer.decode([token for token, _, _ in moved], skip_special_tokens=True)
        assert re.fullmatch(structure["value"], text)

    threads = torch.get_num_threads()
    asyncio.run(asyncio.wait_for(life(), wait_limit(60)))
    torch.set_num_threads(threads)
