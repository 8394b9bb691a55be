"""From a model's configuration to an engine that runs, in the process that calls it.

Called by the engine actor, and by the further ranks of a tensor parallel engine, all of which do the same here. Torch
and the engine are loaded by the call, not by the module.
"""

from __future__ import annotations

import gc
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rayapp.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from engine.manager import ContinuousBatchingManager


@dataclass(frozen=True)
class Place:
    """Which rank of a tensor parallel engine a process is, and where the ranks meet.

    Attributes:
        rank: 0 is the engine actor, which takes the requests.
        port: of `listener`.
        listener: rank 0's, from `engine.distributed.joining.listen`.
    """

    rank: int
    port: int
    listener: socket.socket | None = None


def load_engine(config: ModelConfig, place: Place | None = None) -> tuple[ContinuousBatchingManager, str]:
    """Load the weights, build the engine, warm it up and start it. Takes seconds to minutes.

    Args:
        place: of this process, if the engine has several.

    Returns:
        The manager and the dtype of the weights.

    Raises:
        FileNotFoundError, OSError: there are no such weights.
        RuntimeError: the device is not there.
        ValueError, NotImplementedError: the engine cannot run the model, or not with these settings.
        MemoryError, torch.OutOfMemoryError: it does not fit.
    """
    if place is not None:
        from engine.distributed.joining import declare

        declare(place.rank, config.tensor_parallel_size, config.device)
    if config.device == "cpu":  # before torch is loaded, which takes as long as the compiler
        from engine.ops.cpu import prebuild

        prebuild.start()
    import torch
    from transformers.utils import logging as transformers_logging

    import engine

    transformers_logging.disable_progress_bar()
    # Before the ranks connect, which is when NCCL reads what the engine's configuration sets.
    engine_config = engine.ContinuousBatchingConfig(**config.engine_fields())
    _check_devices(config)
    # Ray sets OMP_NUM_THREADS from the actor's CPUs, which are a share for scheduling and not a number of threads.
    # The manager made in this thread hands the number to the engine's.
    torch.set_num_threads(config.threads())
    model = _load_model(config, place)
    try:
        manager = engine.init_continuous_batching(model, continuous_batching_config=engine_config)
    except ValueError as error:
        if place is None:
            raise
        raise ValueError(f"with tensor_parallel_size {config.tensor_parallel_size}: {error}") from error
    manager.warmup()
    # Some 370 000 objects of torch and transformers that live as long as this process: each full collection would
    # hold every stream up for 0.2 s to look at them.
    gc.collect()
    gc.freeze()
    manager.start()
    return manager, str(model.dtype).removeprefix("torch.")


def _check_devices(config: ModelConfig) -> None:
    import torch

    if config.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"model {config.name!r} has device: cuda, but torch {torch.__version__} finds no CUDA device on this "
            "host; install a CUDA build of torch or set device: cpu"
        )
    if torch.cuda.device_count() < config.tensor_parallel_size:
        raise RuntimeError(
            f"model {config.name!r} has tensor_parallel_size: {config.tensor_parallel_size}, but its replica sees "
            f"{torch.cuda.device_count()} GPUs; leave num_gpus out, or make it as many"
        )


def _load_model(config: ModelConfig, place: Place | None) -> PreTrainedModel:
    from engine.distributed.joining import join_processes
    from engine.model.loader import load_model
    from rayapp.models import resolve

    folder = resolve(config.source)
    if place is None:
        return load_model(folder, dtype=config.dtype, device=config.device)
    size = config.tensor_parallel_size
    join_processes(place.rank, size, config.device, place.port, place.listener)
    return load_model(folder, dtype=config.dtype, device=config.device, tensor_parallel_size=size)
