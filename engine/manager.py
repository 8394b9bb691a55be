"""`ContinuousBatchingManager`: what callers hold. Submits requests to the engine thread and gives their results.

Its life is in session.py, its asyncio side in asynchronous.py. Knows nothing of what happens inside a step.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import queue
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.asynchronous import AsyncRequests
from engine.build import fit_to_device, settle
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.config_in_force import config_in_force
from engine.delivery import Receiver, ResultHandler
from engine.distributed.coordinator import Coordinator
from engine.intake import Intake, check_timeout, refused_output
from engine.loop import describe_error
from engine.memory import device_memory
from engine.ops.cpu import prebuild
from engine.outputs import GenerationOutput
from engine.request import Request
from engine.sampling.resolve import merge_generation_config
from engine.session import Sessions
from engine.waiting_room import QUEUE_TIMEOUT_S

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel


class ContinuousBatchingManager(Sessions, AsyncRequests):
    """Continuous batching of one model, driven by a background thread.

    Args:
        model: any decoder-only causal language model of transformers. It is never modified; its weights are shared.
        generation_config: defaults for every request, over the model's own.
        config: see `ContinuousBatchingConfig`.
        workload_hints: what is known of the requests to come; sizes defaults.

    Raises:
        ValueError, NotImplementedError: a setting is out of range, or the model or a setting is not supported.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        config: ContinuousBatchingConfig | None = None,
        workload_hints: WorkloadHints | None = None,
        *,
        coordinator: Coordinator | None = None,
    ) -> None:
        from engine.distributed.tensor_parallel import coordinator_for
        from engine.model.shadow import model_facts

        carrier = generation_config or getattr(model, "generation_config", None)
        self.config = config_in_force(config, carrier) or ContinuousBatchingConfig()
        merged = merge_generation_config(
            model, generation_config, drop_unsupported=self.config.drop_unsupported_processors
        )
        facts, asked = model_facts(model), self.config
        if facts.device_type == "cpu" and asked.auto_switch_to_flash:
            prebuild.start()
        coordinator = coordinator or coordinator_for(model, self.config.cpu_group_timeout)
        settings = coordinator.agree_settings(lambda: settle(model, facts, asked, workload_hints))
        if (memory := device_memory(facts.device_type, facts.device_index)) is not None:
            planned = settings  # by all processes, so that they run the same steps
            settings = coordinator.agree_settings(lambda: fit_to_device(model, facts, asked, planned, memory))
        super().__init__(model, settings, coordinator)
        # Where another process drives, names must be those that it gives.
        self._intake = Intake(settings, merged, self._delivery.knows if coordinator.is_driver else None)

    @property
    def generation_config(self) -> GenerationConfig:
        """The defaults of every request: what was given, over the model's own."""
        return self._intake.generation_config

    # Submitting

    def add_request(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        num_return_sequences: int | None = None,
        output_ids: Sequence[int] = (),
        priority: int = 0,
        timeout_s: float | None = None,
        cache_salt: str | None = None,
        result_handler: ResultHandler | None = None,
        queue_timeout: float | None = QUEUE_TIMEOUT_S,
        **sampling: Any,
    ) -> str | None:
        """Submit one request.

        Args:
            input_ids: prompt token ids, a sequence or a 1-D integer tensor.
            request_id: a name that no live request has; None makes one.
            max_new_tokens: limit of generated tokens; None takes the generation config's limit, or the context's.
            streaming: one output a token instead of one at the end.
            record_timestamps: note the time of each token in the outputs.
            eos_token_id: id or ids that end the request; negative turns it off; None takes the generation config's.
            num_return_sequences: how many times to answer, each with a seed of its own; None takes the generation
                config's. The further ones are requests named `ID__child#0`, ..., each with its own result.
            output_ids: tokens already generated elsewhere; generation goes on behind them.
            priority: lower runs first and is preempted last.
            timeout_s: seconds from now until the request must have ended, wherever it stands then; if it has not, its
                terminal output is FAILED with the reason "timeout" and what was generated. None is for ever.
            cache_salt: only requests with the same salt share cached prefixes.
            result_handler: called with every output on the event loop that runs here, instead of any queue.
            queue_timeout: seconds to wait when `max_queue_size` requests wait already; None waits as long as it takes.
            **sampling: min_new_tokens, seed, ignore_eos, stop_token_ids, logprobs, top_logprobs, raw_logprobs,
                prompt_logprobs; with `per_request_processors` also what changes how a token is chosen: do_sample,
                temperature, top_k, top_p, min_p, penalties, logit_bias, ... (`engine/sampling/arguments.py`).

        Returns:
            The request's id. None, with a logged warning, when the manager is stopping or stopped; and in a process
            that only follows the one that drives, where the driver's requests have their results too.

        Raises:
            ValueError: a value is out of range, the id is taken, or the request can never fit.
            TypeError: an unknown argument.
            queue.Full: `max_queue_size` requests wait, and none was started within `queue_timeout`.
            RuntimeError: the engine failed; the message names the cause.
        """
        if self._refuses():
            return None
        family = self._intake.family(
            request_id,
            input_ids,
            num_return_sequences=num_return_sequences,
            output_ids=output_ids,
            priority=priority,
            timeout_s=timeout_s,
            cache_salt=cache_salt,
            streaming=streaming,
            record_timestamps=record_timestamps,
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            **sampling,
        )
        receiver = None if result_handler is None else _receiver(result_handler)
        check_timeout("queue_timeout", queue_timeout)
        if self._coordinator.is_driver and self._loop.submit_all([family], receiver, queue_timeout):
            return family[0].request_id
        self._refuses()
        return None

    def add_requests(
        self,
        inputs: Sequence[Sequence[int] | torch.Tensor],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
        *,
        queue_timeout: float | None = QUEUE_TIMEOUT_S,
        **arguments: Any,
    ) -> list[str] | None:
        """Submit many requests at once: all, or none when one is refused. Arguments as for `add_request`.

        With prefix sharing they are queued sorted by their tokens, so that equal prefixes meet in the cache. With
        `max_queue_size` they are let in one by one as others start, each after `queue_timeout` at most; if one is not
        (`queue.Full`, or the manager stops), those that were let in before it are cancelled.

        Returns:
            The ids in the order of `inputs`; None, with a logged warning, when the manager is stopping or stopped.
        """
        if self._refuses():
            return None
        check_timeout("queue_timeout", queue_timeout)
        families = [
            self._intake.family(
                None,
                ids,
                streaming=streaming,
                record_timestamps=record_timestamps,
                max_new_tokens=max_new_tokens,
                eos_token_id=eos_token_id,
                **arguments,
            )
            for ids in inputs
        ]
        ids = [family[0].request_id for family in families]
        if self._loop.submit_all(self._intake.in_queue_order(families), None, queue_timeout):
            return ids
        self._refuses()
        return None

    def check_arguments(self, **arguments: Any) -> None:
        """Raise what `add_requests` would raise for these arguments, whatever the prompts."""
        self._intake.check(**arguments)

    def prepare_batch(
        self, inputs: Sequence[Sequence[int] | torch.Tensor], **arguments: Any
    ) -> tuple[list[list[Request]], dict[str, GenerationOutput | None]]:
        """Requests for those of the inputs that can be served; arguments as for `add_requests`.

        Returns:
            Those requests, each with its further sequences, in the order they should run in; and an entry for every
            sequence in the order of the inputs: None, or the FAILED output of one that was refused.
        """
        return self._intake.batch(inputs, **arguments)

    def run_batch(self, families: list[list[Request]]) -> Iterator[GenerationOutput]:
        """Submit what `prepare_batch` made, however long that takes; gives the terminal output of every sequence."""
        results: queue.SimpleQueue[GenerationOutput] = queue.SimpleQueue()
        entered = list(self._loop.feed(families, (results.put, None)))
        for request in itertools.chain(*families[len(entered) :]):
            error = RuntimeError(describe_error(self.fatal_error) or "the manager was stopped")
            yield refused_output(request.request_id, request.prompt_ids, error)
        for _ in itertools.chain(*entered):
            yield results.get()

    def cancel_request(self, request_id: str) -> None:
        """End a request; its one terminal output says CANCELLED. No effect if it is not live.

        The id of a request with several sequences ends all of them, the id of a further one that one alone.
        """
        self._loop.cancel(request_id)

    # Results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """Wait for the next output, of this request or of any.

        Args:
            timeout: seconds to wait at most; None waits until there is one, or the engine ends.

        Raises:
            KeyError: the id is unknown or its result was already delivered.
            ValueError: the timeout is no number of seconds.
        """
        check_timeout("timeout", timeout)
        self._loop.refuse_in_engine_thread("get_result")
        if request_id is not None:
            return self._delivery.take(request_id, timeout)
        return self._delivery.take_next(timeout)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Outputs as they come, until no request is outstanding; waits for the first request."""
        self._loop.refuse_in_engine_thread("iteration")
        while (output := self._delivery.take_next(until_done=True)) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """Outputs of one request, up to its terminal one. A streaming request gives one a token, each cumulative.

        Raises:
            KeyError: the id is unknown or its result was already delivered.
        """
        self._loop.refuse_in_engine_thread("request_id_iter")
        return self._delivery.iterate(request_id)

    def register_result_handler(self, request_id: str, callback: ResultHandler) -> None:
        """Have `callback` called with each output of a request, on the event loop that runs in this thread.

        Outputs that already wait are delivered first; the handler goes with the terminal output.

        Raises:
            KeyError: the id is unknown or its result was already delivered.
            TypeError: the callback is no plain function.
            RuntimeError: no event loop is running in this thread.
        """
        self._delivery.attach(request_id, _receiver(callback))

    # Inside

    def use_generation_config(self, generation_config: GenerationConfig) -> None:
        """Take the defaults of the requests to come from another generation config."""
        if self._model is None:
            raise RuntimeError("the manager was destroyed; make a new one")
        drop = self.config.drop_unsupported_processors
        merged = merge_generation_config(self._model, generation_config, drop_unsupported=drop)
        self._intake = self._intake.with_config(merged)

    def _name(self) -> str:
        return self._intake.name()


def _receiver(handler: Any) -> Receiver:
    """The handler on the event loop that runs in this thread."""
    if not callable(handler) or inspect.iscoroutinefunction(handler):
        raise TypeError(f"the result handler is {handler!r}: it must be a plain function of one output")
    try:
        return handler, asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("a result handler runs on an event loop, and none is running in this thread") from None
