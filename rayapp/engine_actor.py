"""`EngineActor`: the process that owns an engine and, on GPU, the device.

Child of one `EngineReplica`, which hands it every request; tokens are read by the replica, or by Routers directly
(`poll`). Token ids in, token ids out: it knows nothing of text, HTTP or routing. The module imports neither torch nor
the engine; `start` does, in the actor's own process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rayapp.announce import log_to_terminal
from rayapp.config import ModelConfig
from rayapp.failures import EngineUnavailable, GenerationFailed, InvalidRequest, Overloaded
from rayapp.instruments import EngineInstruments
from rayapp.loading import load_engine
from rayapp.ranks import Ranks, portable
from rayapp.scored import scored_prompt, tokens_since
from rayapp.subscription import Pace, Row, Subscription, finish_reason

if TYPE_CHECKING:
    from engine.manager import ContinuousBatchingManager
    from engine.outputs import GenerationOutput
    from engine.sampling.constraint import TokenConstraint
    from rayapp.structured import Compiler

logger = logging.getLogger(__name__)

# What an item of a stream costs over all the processes it passes (actor, replica, caller), in CPU seconds and whatever
# its size; and a batch of a subscription (actor, Router), with what each of its rows costs on its way to the client.
# Both gather tokens so long that all together take at most this share of the host's cores: with 32 streams on 2 cores
# that made 1.6 times the tokens of one item a token.
ITEM_CPU_S = 0.004
BATCH_CPU_S = 0.002
ROW_CPU_S = 0.0006
STREAMING_SHARE = 0.5
LONGEST_PAUSE_S = 0.25

WATCH_PERIOD_S = 0.05
REPORT_PERIOD_S = 1.0
LAST_WORDS_S = 2.0  # of ranks, after the engine could not be loaded here

Item = tuple[list[int], str | None, dict[str, Any] | None]


class EngineActor:
    """One model on one engine. Every method but the constructor is a coroutine, so that none waits for another."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._manager: ContinuousBatchingManager | None = None
        self._ranks: Ranks | None = None  # the others, if this one is rank 0 of several
        self._streams = 0
        self._served = 0
        self._subscriptions: dict[str, Subscription] = {}
        self._compiler: Compiler | None = None  # once a request is to follow a structure
        self._compiler_lock = threading.Lock()
        self._compiling: set[str] = set()  # requests whose structure is being compiled: the engine does not know them
        self._instruments: EngineInstruments | None = None  # once requests of callers come

    async def start(self) -> dict[str, Any]:
        """Load the weights, start the engine and run one request through it.

        Returns:
            Facts for the replica's log and for callers: version, device, threads, KV cache, limits.
        """
        log_to_terminal("rayapp", "engine")
        started = time.monotonic()
        if self._config.tensor_parallel_size > 1:
            self._ranks = Ranks(self._config)
        self._manager, self._dtype = await self._load()
        await self._warm_up()
        self._instruments = EngineInstruments(self._config.name)
        self._reporting = asyncio.get_running_loop().create_task(self._report(self._instruments))
        facts = {"load_s": round(time.monotonic() - started, 2), **self._facts()}
        for line in self._log_lines(facts):
            logger.info(line)
        return facts

    async def attend(self, request: dict[str, Any]) -> tuple[list[int], str, dict[str, Any]]:
        """Generate for one request of the wire format (see `rayapp.link`) whose `subscriber` reads along by `poll`.

        Returns:
            At the end, all token ids that were generated here, the finish reason and the info of the last item.

        Raises:
            InvalidRequest: the engine refuses the request.
            EngineUnavailable: the engine failed or is stopping.
        """
        request = await self._with_constraint(request)
        subscription = self._subscription(request["subscriber"])
        followed = subscription.follow(request["request_id"], len(request.get("output_ids", ())))
        submitted = ended = False
        self._streams += 1
        try:
            self._submit(request, followed.put)
            submitted = True
            output = await followed.ended
            ended = True
            return tokens_since(output, followed.first), finish_reason(output) or "error", self._info(output)
        finally:
            self._streams -= 1
            self._served += submitted
            subscription.leave(followed)
            if submitted and not ended:  # a cancelled wait cancels the future too, so that it would seem done
                self._engine.cancel_request(followed.request_id)

    async def poll(self, subscriber: str, reopened: bool = False) -> list[Row]:
        """The next batch of a subscriber's tokens; empty when none comes for a while. See `Subscription.next`."""
        subscription = self._subscription(subscriber)
        share = STREAMING_SHARE * (os.cpu_count() or 1)
        cost = len(self._subscriptions) * BATCH_CPU_S + self._streams * ROW_CPU_S
        return await subscription.next(min(LONGEST_PAUSE_S, cost / share), reopened=reopened)

    async def generate(self, request: dict[str, Any]) -> AsyncIterator[Item]:
        """Generate for one request of the wire format, for a caller that reads it alone.

        Yields:
            (new token ids, finish reason, info): the first token at once, later ones as many as have come. A finish
            reason on the last item only; info on the first and the last.

        Raises:
            InvalidRequest: the engine refuses the request.
            EngineUnavailable: the engine failed or is stopping.
        """
        request = await self._with_constraint(request)
        mailbox = Mailbox()
        request_id = self._submit(request, mailbox.put)
        self._streams += 1
        ended = False
        try:
            count = first = len(request.get("output_ids", ()))
            while not ended:
                output = await mailbox.next(self._pause())
                ended = output.is_finished()
                tokens = tokens_since(output, count)
                if tokens or ended:
                    yield tokens, finish_reason(output), self._info(output) if count == first or ended else None
                    count += len(tokens)
        finally:
            self._streams -= 1
            self._served += 1
            if not ended:
                self._engine.cancel_request(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request that nobody reads any more; one whose structure is still being compiled does not begin. No
        effect on one that has ended or is unknown."""
        self._compiling.discard(request_id)
        self._engine.cancel_request(request_id)

    async def health(self) -> dict[str, Any]:
        """`stats` and why the engine cannot serve, if so: `error` is None while it can."""
        return {**await self.stats(), "error": self._error()}

    async def failure(self) -> str:
        """Returns when the engine cannot serve any more, with the reason."""
        while (error := self._error()) is None:
            await asyncio.sleep(WATCH_PERIOD_S)
        return error

    async def stats(self) -> dict[str, Any]:
        """Counts of this moment: the engine's, its load, and the streams open and served here."""
        engine = self._engine
        return {**engine.stats(), **engine.load(), "streams": self._streams, "served": self._served}

    async def environment(self) -> dict[str, Any]:
        """Where this process runs, for operators and tests: pid, those of the other ranks, visible devices, threads."""
        return {
            "pid": os.getpid(),
            "ranks": [] if self._ranks is None else self._ranks.pids,
            "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
            "threads": self._engine.num_threads,
        }

    def _error(self) -> str | None:
        manager = self._engine
        if self._ranks is not None and (error := self._ranks.error) is not None:
            return error
        if manager.fatal_error is not None:
            return f"the engine failed: {type(manager.fatal_error).__name__}: {manager.fatal_error}"
        if not manager.is_running():
            return "the engine thread has ended"
        stats = manager.stats()
        # With several ranks an idle engine takes turns too, and one that is stuck shows in rank 0.
        busy = stats["running"] + stats["waiting"] or self._ranks is not None
        if busy and stats["idle_s"] > self._config.stall_timeout_s:
            return f"no step ended for {stats['idle_s']:.0f} s (stall_timeout_s: {self._config.stall_timeout_s:g})"
        return None

    async def _report(self, instruments: EngineInstruments) -> None:
        """Keeps the gauges up to date."""
        while True:
            instruments.level(self._engine.stats())
            await asyncio.sleep(REPORT_PERIOD_S)

    def _subscription(self, subscriber: str) -> Subscription:
        subscription = self._subscriptions.get(subscriber)
        if subscription is None:

            def on_silence(request_ids: list[str]) -> None:
                del self._subscriptions[subscriber]
                if request_ids:
                    logger.warning(f"{len(request_ids)} requests are aborted: their Router has not read for too long")
                for request_id in request_ids:
                    self._engine.cancel_request(request_id)

            subscription = self._subscriptions[subscriber] = Subscription(self._info, on_silence)
        return subscription

    def _pause(self) -> float:
        """Seconds between two items of one stream."""
        return min(LONGEST_PAUSE_S, self._streams * ITEM_CPU_S / (STREAMING_SHARE * (os.cpu_count() or 1)))

    @property
    def _engine(self) -> ContinuousBatchingManager:
        if self._manager is None:
            raise EngineUnavailable("the engine is not ready: its weights are still being loaded")
        return self._manager

    async def _load(self) -> tuple[ContinuousBatchingManager, str]:
        """`load_engine` in a thread of its own, for as long as the other ranks live."""
        ranks = self._ranks
        if ranks is None:
            return await asyncio.to_thread(load_engine, self._config)
        loading = asyncio.create_task(asyncio.to_thread(load_engine, self._config, ranks.place))
        while not loading.done() and ranks.error is None:
            await asyncio.wait({loading}, timeout=WATCH_PERIOD_S)
        if not loading.done():  # it waits for a rank that is gone
            raise RuntimeError(ranks.error)
        error = loading.exception()
        if error is None:
            return loading.result()
        with suppress(TimeoutError):  # it may be the consequence of what another rank is about to tell
            await asyncio.wait_for(self._rank_ended(ranks), LAST_WORDS_S)
            raise RuntimeError(f"{type(error).__name__}: {error}; {ranks.error}") from error
        raise error

    async def _rank_ended(self, ranks: Ranks) -> None:
        while ranks.error is None:
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _warm_up(self) -> None:
        """One request by the way every request goes."""
        request = {"request_id": "warm-up", "prompt_ids": [0], "output_ids": [], "sampling": {"max_new_tokens": 2}}
        async for _, reason, info in self.generate(request):
            if reason == "error":
                raise EngineUnavailable(f"the warm-up request failed: {(info or {}).get('error')}")
        self._served = 0

    async def _with_constraint(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request, with the constraint that its structure stands for.

        Raises:
            InvalidRequest: the structure cannot be kept to.
            GenerationFailed: the request was aborted meanwhile.
        """
        structure = request.get("structure")
        if structure is None:
            return request
        if self._ranks is not None:
            raise InvalidRequest("structured output is not there with tensor_parallel_size above 1")
        request_id = request["request_id"]
        self._compiling.add(request_id)
        try:
            constraint = await asyncio.to_thread(self._constraint, structure)
            if request_id not in self._compiling:
                raise GenerationFailed("the request was aborted before it began")
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        finally:
            self._compiling.discard(request_id)
        return request | {"sampling": request["sampling"] | {"constraint": constraint}}

    def _constraint(self, structure: dict[str, Any]) -> TokenConstraint:
        """Runs in a thread of its own. The compiler is kept, as are the grammars in it."""
        from rayapp.models import resolve
        from rayapp.structured import Compiler

        with self._compiler_lock:
            if self._compiler is None:
                eos = self._engine.generation_config.eos_token_id
                eos_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
                self._compiler = Compiler(resolve(self._config.source), self._engine.settings.vocab_size, eos_ids)
        return self._compiler.constraint(structure)

    def _submit(self, request: dict[str, Any], put: Callable[[GenerationOutput], None]) -> str:
        resumed = len(request.get("output_ids", ()))

        def put_and_count(output: GenerationOutput) -> None:
            if self._instruments is not None and output.is_finished():
                self._instruments.ended(output, resumed)
            put(output)

        try:
            request_id = self._engine.add_request(
                request["prompt_ids"],
                request_id=request["request_id"],
                output_ids=request.get("output_ids", ()),
                priority=request.get("priority", 0),
                timeout_s=request.get("timeout_s"),
                cache_salt=request.get("cache_salt"),
                streaming=True,
                result_handler=put_and_count,
                record_timestamps=True,
                queue_timeout=0,  # this event loop serves everyone
                **(request["sampling"] if self._ranks is None else portable(request["sampling"])),
            )
        except queue.Full as error:
            raise Overloaded(str(error)) from None
        except (ValueError, TypeError) as error:
            raise InvalidRequest(str(error)) from None
        except RuntimeError as error:
            raise EngineUnavailable(str(error)) from None
        if request_id is None:
            raise EngineUnavailable("the engine is stopping and takes no more requests")
        return request_id

    def _info(self, output: GenerationOutput) -> dict[str, Any]:
        scored = scored_prompt(output)
        return {
            **({} if scored is None else {"prompt": scored}),
            "prompt_tokens": output.num_prompt_tokens,
            "cached_tokens": output.cached_tokens,
            "engine_s": times[0] - output.created_time if (times := output.timestamps) else None,
            "error": output.error,
            "engine_failed": self._engine.fatal_error is not None,
        }

    def _facts(self) -> dict[str, Any]:
        import engine

        settings = self._engine.settings
        return {
            "version": engine.__version__,
            "model": self._config.name,
            "dtype": self._dtype,
            "device": self._config.device,
            "threads": self._engine.num_threads,
            "context_length": settings.context_length,
            "max_requests": settings.max_requests,
            "kv_tokens": settings.num_blocks * settings.page_size,
        }

    def _log_lines(self, facts: dict[str, Any]) -> list[str]:
        from engine.settings import describe

        changed = self._config.changed_fields()
        return [
            f"Convoy {facts['version']}: {facts['model']} in {facts['dtype']} on {facts['device']}, "
            f"{facts['threads']} threads, ready after {facts['load_s']} s",
            "non-default settings: " + (", ".join(f"{key}={value!r}" for key, value in changed.items()) or "none"),
            *describe(self._engine.settings),
        ]


class Mailbox:
    """The latest output of one request, on its way from the engine thread to the one coroutine that reads it."""

    def __init__(self) -> None:
        self._latest: GenerationOutput | None = None
        self._pace = Pace()

    def put(self, output: GenerationOutput) -> None:
        """Called on the event loop, by the engine's delivery."""
        self._latest = output
        self._pace.news(urgent=output.is_finished())

    async def next(self, pause: float) -> GenerationOutput:
        """The latest output, once there is a new one. The next one comes `pause` seconds later, the end at once."""
        await self._pace.wait()
        self._pace.restart(pause)
        assert self._latest is not None
        return self._latest
