"""A serving engine from its configuration, running: the same one in an engine actor and in a benchmark's process.

Called by `engine_actor.py` and `rayapp.bench.engine_child`. Imports torch and the engine only when it is called; knows
nothing of Ray.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from rayapp.config import ModelConfig

if TYPE_CHECKING:
    from engine.manager import ContinuousBatchingManager


def load_engine(config: ModelConfig) -> tuple[ContinuousBatchingManager, str]:
    """Resolve and load the weights, size the cache, start the engine. Takes seconds to minutes.

    Returns:
        The running manager, and the dtype of the weights, such as "bfloat16".

    Raises:
        RuntimeError: the device is cuda, and there is none.
    """
    if config.device == "cpu":  # before torch is loaded, which takes as long as the compiler
        from engine.ops.cpu import prebuild

        prebuild.start()
    import torch
    from transformers.utils import logging as transformers_logging

    import engine
    from engine.config import ContinuousBatchingConfig
    from engine.model.loader import load_model
    from rayapp.models import resolve

    if config.device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"model {config.name!r} has device: cuda, but torch {torch.__version__} finds no CUDA device on this "
            "host; install a CUDA build of torch or set device: cpu"
        )
    transformers_logging.disable_progress_bar()
    # Ray sets OMP_NUM_THREADS from the actor's CPUs, which are a share for scheduling and not a number of threads.
    # The manager made in this thread hands the number to the engine's.
    torch.set_num_threads(config.threads())
    model = load_model(resolve(config.source), dtype=config.dtype, device=config.device)
    dtype = str(model.dtype).removeprefix("torch.")
    manager = engine.init_continuous_batching(
        model, continuous_batching_config=ContinuousBatchingConfig(**config.engine_fields())
    )
    manager.warmup()
    # Some 370 000 objects of torch and transformers that live as long as this process: each full collection would
    # hold every stream up for 0.2 s to look at them.
    gc.collect()
    gc.freeze()
    manager.start()
    return manager, dtype
