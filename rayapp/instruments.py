"""What a Router and an engine actor measure of themselves, recorded under the names of `telemetry.py`.

`RouterInstruments` watches generations where clients see them, `EngineInstruments` where tokens are made. Both record
through Ray, whose exporter every Prometheus can scrape, and open a span where Serve's tracing is on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from ray.util import metrics as ray_metrics

from rayapp.failures import DeadlineExceeded, EngineUnavailable, InvalidRequest, Overloaded
from rayapp.telemetry import METRICS, Metric

if TYPE_CHECKING:
    from engine.outputs import GenerationOutput

# What `reason` of convoy_requests says of a generation that did not end by itself.
_FAILURES: dict[type[BaseException], str] = {
    InvalidRequest: "refused",
    Overloaded: "overloaded",
    EngineUnavailable: "unavailable",
    DeadlineExceeded: "deadline",
}

# Serve's, whose lines carry the id of the HTTP request and whose level the configuration sets.
logger = logging.getLogger("ray.serve")


class Recorder:
    """Records values of the metrics of the table, for one model.

    Args:
        make: makes Ray's metric of a row; replaced in tests.
    """

    def __init__(self, model: str, make: Callable[[Metric], Any] | None = None) -> None:
        self._model = model
        self._made: dict[str, Any] = {}
        self._make = make or ray_metric

    def count(self, name: str, value: float = 1, **tags: str) -> None:
        """Add to a counter; adding nothing is allowed."""
        if value > 0:
            self._of(name).inc(value, self._tags(tags))

    def observe(self, name: str, value: float, **tags: str) -> None:
        """Put a value into a histogram."""
        self._of(name).observe(max(0.0, value), self._tags(tags))

    def set(self, name: str, value: float, **tags: str) -> None:
        """Set a gauge."""
        self._of(name).set(value, self._tags(tags))

    def _of(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._make(_BY_NAME[name])
        return self._made[name]

    def _tags(self, tags: Mapping[str, str]) -> dict[str, str]:
        return {"model": self._model, **tags}


_BY_NAME = {metric.name: metric for metric in METRICS}


def ray_metric(metric: Metric) -> Any:
    """A row of the table as Ray's metric; each process makes its own."""
    if metric.kind == "histogram":
        return ray_metrics.Histogram(metric.name, metric.help, list(metric.buckets), metric.tags)
    return {"counter": ray_metrics.Counter, "gauge": ray_metrics.Gauge}[metric.kind](
        metric.name, metric.help, metric.tags
    )


class RouterInstruments:
    """Of one model in one Router process."""

    def __init__(self, model: str, recorder: Recorder | None = None) -> None:
        self._model = model
        self._recorder = recorder or Recorder(model)
        self._tracer = trace.get_tracer("convoy")

    @contextmanager
    def generation(self, prompt_tokens: int) -> Iterator[GenerationWatch]:
        """Around one generation, from its arrival to its end, however it ends."""
        attributes: dict[str, str | int] = {"convoy.model": self._model, "convoy.prompt_tokens": prompt_tokens}
        span = self._tracer.start_span("convoy.generation", attributes=attributes)
        watch = GenerationWatch(self._recorder, span)
        failure = None
        try:
            yield watch
        except (GeneratorExit, asyncio.CancelledError):
            raise
        except BaseException as error:
            failure = _FAILURES.get(type(error), "error")
            span.record_exception(error)
            raise
        finally:
            watch.end(failure)


class GenerationWatch:
    """One generation as the Router sees it."""

    def __init__(self, recorder: Recorder, span: trace.Span) -> None:
        self._recorder = recorder
        self._span = span
        self._begun = time.perf_counter()
        self._first: float | None = None
        self._id = ""
        self._tokens = 0
        self._reason: str | None = None
        self._info: Mapping[str, Any] = {}

    def submitted(self, request_id: str) -> None:
        """Under this id replicas and engines know it, and log it."""
        self._id = request_id
        self._span.set_attribute("convoy.generation_id", request_id)

    def saw(self, tokens: int, reason: str | None, info: Mapping[str, Any] | None) -> None:
        """
        Args:
            tokens: that have come so far.
            reason: of its end, with the last ones.
            info: as in an `Item`.
        """
        if info is not None:
            self._moved(info.get("migrations", 0) - self._info.get("migrations", 0))
            self._info = info
        if tokens and self._first is None:
            self._first = time.perf_counter() - self._begun
            self._recorder.observe("convoy_time_to_first_token_s", self._first)
            self._span.add_event("first token")
            if (engine_s := self._info.get("engine_s")) is not None:
                self._recorder.observe("convoy_serve_overhead_s", self._first - engine_s)
        self._tokens, self._reason = tokens, reason

    def end(self, failure: str | None) -> None:
        """Without a failure and without an end of its own, its reader left or had what it wanted."""
        reason = failure or self._reason or "cancelled"
        took = time.perf_counter() - self._begun
        self._recorder.count("convoy_requests", reason=reason)
        self._recorder.observe("convoy_request_time_s", took)
        self._span.set_attributes({"convoy.finish_reason": reason, "convoy.completion_tokens": self._tokens})
        self._span.end()
        logger.info(
            f"generation {self._id or '-'} {reason}: {self._tokens} tokens in {took:.3f} s, first after "
            f"{-1 if self._first is None else self._first:.3f} s, replica {self._info.get('replica', '-')}, "
            f"migrations {self._info.get('migrations', 0)}"
        )

    def _moved(self, times: int) -> None:
        if times > 0:
            self._recorder.count("convoy_migrations", times)
            self._span.add_event("migrated", {"convoy.tokens": self._tokens})


class EngineInstruments:
    """Of the engine of one replica."""

    def __init__(self, model: str, recorder: Recorder | None = None) -> None:
        self._recorder = recorder or Recorder(model)
        self._preemptions = 0

    def ended(self, output: GenerationOutput, resumed_tokens: int) -> None:
        """Count a request that has ended; it must have recorded the times of its tokens.

        Args:
            resumed_tokens: tokens generated elsewhere that it came with.
        """
        record = self._recorder
        record.count("convoy_prompt_tokens", output.num_prompt_tokens)
        record.count("convoy_prefix_hit_tokens", output.cached_tokens)
        record.count("convoy_generation_tokens", output.num_generated_tokens - resumed_tokens)
        scheduled, _ = output.lifespan
        times = output.timestamps
        if scheduled >= 0:
            record.observe("convoy_queue_time_s", scheduled - output.created_time)
        if times:
            record.observe("convoy_prefill_time_s", times[0] - scheduled)
            record.observe("convoy_decode_time_s", times[-1] - times[0])
            if len(times) > 1:
                record.observe("convoy_inter_token_s", (times[-1] - times[0]) / (len(times) - 1))

    def level(self, stats: Mapping[str, Any]) -> None:
        """Set the gauges from the engine's `stats()`."""
        record = self._recorder
        record.set("convoy_running_requests", stats["running"])
        record.set("convoy_waiting_requests", stats["waiting"])
        record.set("convoy_kv_usage", stats.get("kv_used_blocks", 0) / max(1, stats.get("kv_total_blocks", 1)))
        preemptions = int(stats.get("preemptions", 0))
        record.count("convoy_preemptions", preemptions - self._preemptions)
        self._preemptions = preemptions
