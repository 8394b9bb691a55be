"""Loads a causal language model from a folder of safetensors. Called by whoever owns the model: the serving actor,
benchmarks, tests. Never reaches for the network.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.ops.cpu import prebuild

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def load_model(
    path: str | Path,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    tensor_parallel_size: int = 1,
) -> PreTrainedModel:
    """Loads the model in the folder `path`, ready for inference.

    Meanwhile the library that an engine on CPU will need is built in the background, if it has not been.

    Args:
        path: folder with `config.json` and safetensors weights.
        dtype: dtype of the weights; "auto" takes the checkpoint's own.
        device: where the weights go.
        tensor_parallel_size: of how many processes, which have joined and all call this, each loads its share. With
            more than one the share goes to the device that this process has joined with.

    Raises:
        FileNotFoundError: `path` is not a folder with a `config.json`.
        OSError: there are no safetensors weights in it.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model in {str(folder)!r}: a folder with config.json and safetensors is needed")
    if str(device) == "cpu":
        prebuild.start()
    with _no_garbage_collection():
        from transformers import AutoModelForCausalLM, DistributedConfig

        share = DistributedConfig(tp_size=tensor_parallel_size) if tensor_parallel_size > 1 else None
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, use_safetensors=True, distributed_config=share
        )
    model.eval().requires_grad_(False)
    return model if share is not None else model.to(device)  # type: ignore[arg-type]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Imports make hundreds of thousands of objects and no garbage; looking for some takes a third of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
