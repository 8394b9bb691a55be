"""The public functions: one-call generation, managed sessions, and `install()`, which gives them the spelling of
transformers (`model.generate_batch(...)`). Everything here goes through `ContinuousBatchingManager`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine.config import ContinuousBatchingConfig, WorkloadHints
from engine.manager import ContinuousBatchingManager
from engine.outputs import GenerationOutput

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedModel


def init_continuous_batching(
    model: PreTrainedModel,
    generation_config: GenerationConfig | None = None,
    continuous_batching_config: ContinuousBatchingConfig | None = None,
    workload_hints: WorkloadHints | None = None,
) -> ContinuousBatchingManager:
    """A manager whose life you run yourself: `start`, `stop`, `destroy`.

    Args:
        model: any decoder-only causal language model of transformers; it is not modified.
        generation_config: defaults of every request, over the model's own generation config.
        continuous_batching_config: ours, or transformers' object of the same name.
        workload_hints: what is known of the requests to come.

    Raises:
        ValueError, NotImplementedError: a setting is out of range, or the model or a setting is not supported.
    """
    return ContinuousBatchingManager(model, generation_config, _own_config(continuous_batching_config), workload_hints)


class continuous_batching_context_manager:
    """A running manager for the length of a `with` block; stopped, then destroyed at its end.

    Args:
        model, generation_config, continuous_batching_config, workload_hints: as in `init_continuous_batching`.
        block, timeout: how the stop at the end waits, as in `ContinuousBatchingManager.stop`.
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
        _refuse_persistent(persistent_manager)
        self._manager = init_continuous_batching(model, generation_config, continuous_batching_config, workload_hints)
        self._block, self._timeout, self._warmup = block, timeout, warmup

    def __enter__(self) -> ContinuousBatchingManager:
        if self._warmup:
            self._manager.warmup()
        self._manager.start()
        return self._manager

    def __exit__(self, error_type: type[BaseException] | None, *rest: object) -> None:
        self._manager.stop(block=self._block, timeout=self._timeout, hard_stop=error_type is not None)
        if self._block:
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
        progress_bar: show finished requests on stderr.
        **kwargs: arguments of `ContinuousBatchingManager.add_request` that hold for every prompt, such as
            max_new_tokens or eos_token_id.

    Returns:
        One output an input, in the order of the inputs, keyed `req_0`, `req_1`, ... An input that cannot be served
        has a FAILED output that says why; the others are not affected.

    Raises:
        TypeError: an unknown argument, or `inputs` is not a collection of prompts.
        ValueError: an argument that would fail for every prompt.
    """
    _refuse_persistent(persistent_manager)
    inputs = _prompts(inputs)
    hints = WorkloadHints(
        max_prompt_length=max((len(ids) for ids in inputs), default=0),
        num_requests=len(inputs),
    )
    manager = init_continuous_batching(model, generation_config, continuous_batching_config, hints)
    manager.check_arguments(**kwargs)
    if not inputs:
        return {}
    refused = manager.add_valid_requests(inputs, record_timestamps=record_timestamps, **kwargs)
    outputs = {request_id: output for request_id, output in refused.items() if output is not None}
    if len(outputs) == len(inputs):
        return outputs
    try:
        if warmup:
            manager.warmup()
        manager.start()
        with _progress(len(inputs), len(outputs), show=progress_bar) as advance:
            for output in manager:
                outputs[output.request_id] = output
                advance()
    finally:
        manager.stop(hard_stop=True)  # nothing is pending here unless an exception came through
        manager.destroy()
    return {request_id: outputs[request_id] for request_id in refused}


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


def install() -> None:
    """Make the spelling of transformers run here: `model.generate_batch(...)`, `model.init_continuous_batching(...)`
    and `model.continuous_batching_context_manager(...)` of every transformers model, with either config class."""
    from transformers import GenerationMixin

    for name, function in _METHODS.items():
        setattr(GenerationMixin, name, function)


def uninstall() -> None:
    """Undo `install`. No effect when it was not called."""
    from transformers import GenerationMixin

    for name, function in _METHODS.items():
        if GenerationMixin.__dict__.get(name) is function:
            delattr(GenerationMixin, name)


def _open_context(model: PreTrainedModel, *args: Any, **kwargs: Any) -> continuous_batching_context_manager:
    """`continuous_batching_context_manager` as a method: a class would not be bound to the model."""
    return continuous_batching_context_manager(model, *args, **kwargs)


_METHODS: dict[str, Callable[..., Any]] = {
    "generate_batch": generate_batch,
    "init_continuous_batching": init_continuous_batching,
    "continuous_batching_context_manager": _open_context,
}


def _own_config(config: object) -> ContinuousBatchingConfig | None:
    if config is None or isinstance(config, ContinuousBatchingConfig):
        return config
    return ContinuousBatchingConfig.from_transformers(config)


def _refuse_persistent(persistent_manager: bool) -> None:
    if persistent_manager:
        raise NotImplementedError(
            "persistent_manager=True is not supported yet: keep the manager that init_continuous_batching returns"
        )


@contextmanager
def _progress(total: int, done: int, *, show: bool) -> Iterator[Callable[[], object]]:
    """A function to call once a finished request; draws a bar on stderr if asked."""
    if not show:
        yield lambda: None
        return
    from transformers.utils import logging

    with logging.tqdm(total=total, initial=done, unit="request") as bar:
        yield lambda: bar.update()
