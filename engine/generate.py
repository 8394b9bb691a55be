"""The public functions: one-call generation and managed sessions, by way of `ContinuousBatchingManager`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine import persistent
from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.config_in_force import config_in_force, differing_fields
from engine.manager import ContinuousBatchingManager
from engine.outputs import GenerationOutput

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel

logger = logging.getLogger(__name__)


def init_continuous_batching(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """A manager whose life you run yourself: `start`, `stop`, `destroy`.

    It is the one that the model keeps, if there is one and it is at rest. Then the generation config, if given, counts
    for the requests to come; of the other config it keeps its own, with a warning that names what differs.

    Args:
        model: any decoder-only causal language model of transformers; it is not modified.
        generation_config: defaults of every request, over the model's own generation config.
        continuous_batching_config: ours, or transformers' object of the same name.
        workload_hints: what is known of the requests to come.

    Raises:
        ValueError, NotImplementedError: a setting is out of range, or the model or a setting is not supported.
    """
    manager = persistent.kept(model)
    if manager is None or manager.is_running() or manager.fatal_error is not None:
        return ContinuousBatchingManager(model, generation_config, continuous_batching_config, workload_hints)
    asked = config_in_force(continuous_batching_config, generation_config)
    if asked is not None and (names := differing_fields(asked, manager.config)):
        logger.warning(
            "the model's persistent manager is used again and keeps its own %s: call "
            "destroy_cached_continuous_batching_manager first to have them changed",
            ", ".join(f"{name}={getattr(manager.config, name)!r}" for name in names),
        )
    if generation_config is not None:
        manager.use_generation_config(generation_config)
    return manager


def destroy_cached_continuous_batching_manager(model: PreTrainedModel) -> None:
    """Destroy the manager that the model keeps; no effect when it keeps none."""
    manager = persistent.kept(model)
    if manager is not None:
        manager.destroy()


class continuous_batching_context_manager:
    """A running manager for the length of a `with` block; stopped at its end, and destroyed unless it is persistent.

    Args:
        model, generation_config, continuous_batching_config, workload_hints: as in `init_continuous_batching`.
        block, timeout: how the stop at the end waits, as in `ContinuousBatchingManager.stop`. A manager whose thread
            still runs afterwards is not destroyed; it ends by itself.
        persistent_manager: the model keeps the manager for its next session.
        warmup: run the model once before the first request.

    An exception in the block stops hard: requests that are still pending fail.
    """

    # No generator: dropping the context of a session that is still in use must not end that session.
    def __init__(
        self,
        model: PreTrainedModel,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: WorkloadHints | None = None,
    ) -> None:
        self._manager = init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
        self._block, self._timeout = block, timeout
        self._persistent, self._warmup = persistent_manager, warmup

    def __enter__(self) -> ContinuousBatchingManager:
        if self._warmup:
            self._manager.warmup()
        self._manager.start()
        return self._manager

    def __exit__(self, error_type: type[BaseException] | None, *rest: object) -> None:
        self._manager.stop(
            block=self._block,
            timeout=self._timeout,
            keep_for_next_session=self._persistent,
            hard_stop=error_type is not None,
        )
        if not self._persistent and not self._manager.is_running():
            self._manager.destroy()


def generate_batch(
    model: PreTrainedModel,
    inputs: Sequence[Sequence[int] | torch.Tensor],
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **kwargs: Any,
) -> dict[str, GenerationOutput]:
    """Generate for a batch of prompts and return when all are done.

    Args:
        inputs: prompts as token ids: a list of lists or of 1-D tensors, or a 2-D tensor without padding.
        progress_bar: show finished requests on stderr, unless the log level is DEBUG or lower.
        persistent_manager: the model keeps the manager, which is sized for these inputs, for its next session.
        warmup: run the model once before the first request.
        **kwargs: arguments of `ContinuousBatchingManager.add_request` that hold for every prompt, such as
            max_new_tokens, eos_token_id or num_return_sequences.

    Returns:
        One output a sequence, in the order of the inputs, keyed `req_0`, `req_1`, ... (a persistent manager goes on
        counting); the further ones of an input come behind its first as `req_0__child#0`, ... What cannot be served
        has a FAILED output that says why; the others are not affected.

    Raises:
        TypeError: an unknown argument, or `inputs` is not a collection of prompts.
        ValueError: an argument that would fail for every prompt.
    """
    inputs = _prompts(inputs)
    defaults = generation_config or getattr(model, "generation_config", None)
    hints = WorkloadHints(
        max_prompt_length=max((len(ids) for ids in inputs), default=0),
        max_generated_length=_hint("max_new_tokens", kwargs, defaults),
        num_requests=len(inputs) * max(1, _hint("num_return_sequences", kwargs, defaults)),
    )
    reusable = persistent.kept(model)
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, hints)
    manager.check_arguments(**kwargs)
    if not inputs:
        return {}
    if persistent_manager and manager is not reusable:
        logger.warning(
            "persistent_manager=True: the manager is kept for the model's next session and is sized for the %d "
            "requests of this call; for a very different load make a new one",
            hints.num_requests,
        )
    families, outputs = manager.prepare_batch(inputs, record_timestamps=record_timestamps, **kwargs)
    if not families:
        return {request_id: output for request_id, output in outputs.items() if output is not None}
    try:
        if warmup:
            manager.warmup()
        manager.start()
        done = sum(output is not None for output in outputs.values())
        with _progress(len(outputs), done, show=progress_bar) as advance:
            for output in manager.run_batch(families):
                outputs[output.request_id] = output
                advance()
    finally:
        # Nothing is pending here unless an exception came through.
        manager.stop(hard_stop=True, keep_for_next_session=persistent_manager)
        if not persistent_manager:
            manager.destroy()
    return {request_id: output for request_id, output in outputs.items() if output is not None}


def _hint(name: str, arguments: dict[str, Any], defaults: object) -> int:
    """A number that was asked for, not checked yet; 0 when there is none."""
    value = arguments.get(name) or getattr(defaults, name, None)
    return value if type(value) is int and value > 0 else 0


def _prompts(inputs: Any) -> list[Any]:
    """`inputs` as a list of prompts, each of which has a length. Raises TypeError for anything else."""
    try:
        prompts = list(inputs)
        if all(hasattr(prompt, "__len__") and getattr(prompt, "ndim", 1) > 0 for prompt in prompts):
            return prompts
        found = "a single flat prompt: put it in a list" if prompts else ""
    except TypeError:
        found = repr(inputs)[:40]
    raise TypeError(f"inputs must be a collection of prompts, each a sequence of token ids; got {found}")


@contextmanager
def _progress(total: int, done: int, *, show: bool) -> Iterator[Callable[[], object]]:
    """A function to call once a finished request; draws a bar on stderr if asked, and if no debug output runs there."""
    if not show or logger.getEffectiveLevel() <= logging.DEBUG:
        yield lambda: None
        return
    from transformers.utils import logging as transformers_logging

    with transformers_logging.tqdm(total=total, initial=done, unit="request") as bar:
        yield lambda: bar.update()
