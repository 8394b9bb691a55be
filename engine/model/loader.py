"""Loads a causal language model from a folder of safetensors. Called by whoever owns the model: the serving actor,
benchmarks, tests. Never reaches for the network.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel


def load_model(
    path: str | Path, dtype: torch.dtype | str = "auto", device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Loads the model in the folder `path`, ready for inference.

    Args:
        path: folder with `config.json` and safetensors weights.
        dtype: dtype of the weights; "auto" takes the checkpoint's own.
        device: where the weights go.

    Raises:
        FileNotFoundError: `path` is not a folder with a `config.json`.
        OSError: there are no safetensors weights in it.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"no model in {str(folder)!r}: a folder with config.json and safetensors is needed")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    model.eval().requires_grad_(False)
    return model.to(device)  # type: ignore[arg-type]
